"""A policy's own parameters are declared by its factory, checked, defaulted, and told."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

import pytest

from maitred.config import SchedulerConfig
from maitred.core.errors import ConfigError
from maitred.policy.parameters import Range, make_policy, parameters_of
from maitred.policy.policies import POLICIES, heeding_priority, policy_for
from maitred.policy.policy import Policy, arrival_term


def tips_first(
    config: SchedulerConfig,
    *,
    tip_s: Annotated[float, Range(0.0, 600.0)] = 60.0,
    guests: int = 4,
    by: Literal["sum", "share"] = "sum",
    ageing_s: float,
) -> Policy:
    def effective_arrival(request: Any) -> float:
        return request.arrived_at + tip_s * (request.priority > 0)

    return Policy(
        source="a restaurant",
        bound="tip_s",
        order=lambda r: (effective_arrival(r), r.request_id),
        overtaken_until=effective_arrival,
        terms=arrival_term,
    )


THIRD: dict[str, Any] = {"tips_first": tips_first}


def config(**args: Any) -> SchedulerConfig:
    return SchedulerConfig(policy="tips_first", policy_args=args)


def test_a_factory_declares_its_parameters_by_keyword():
    declared = parameters_of(tips_first)
    assert list(declared) == ["tip_s", "guests", "by", "ageing_s"]
    assert [p.allowed for p in declared.values()] == [
        "from 0 to 600",
        "an integer",
        "one of sum, share",
        "from 0.001 to 1e+09",
    ]


def test_arguments_are_those_given_and_else_the_defaults_of_factory_and_config():
    made = policy_for(SchedulerConfig(policy="tips_first", ageing_s=7.0, policy_args={"tip_s": 5}), THIRD)
    assert made.arguments == {"tip_s": 5.0, "guests": 4, "by": "sum", "ageing_s": 7.0}


def test_an_argument_that_has_a_setting_of_its_own_is_the_same_spelled_otherwise():
    by_setting = policy_for(SchedulerConfig(policy="mlfq", quantum_tokens=9, ageing_s=3.0))
    by_argument = policy_for(SchedulerConfig(policy="mlfq", policy_args={"quantum_tokens": 9, "ageing_s": 3}))
    assert by_argument.arguments == by_setting.arguments == {"quantum_tokens": 9, "mlfq_levels": 6, "ageing_s": 3.0}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tips": 5.0}, r"tips_first has no argument 'tips' \(did you mean tip_s\?\); choose from tip_s, guests"),
        ({"tip_s": 601.0}, "policy argument tip_s is 601.0; it must be from 0 to 600"),
        ({"tip_s": float("nan")}, "policy argument tip_s is nan; it must be from 0 to 600"),
        ({"tip_s": "much"}, "policy argument tip_s is 'much'; it must be a number"),
        ({"tip_s": True}, "policy argument tip_s is True; it must be a number"),
        ({"guests": 1.5}, "policy argument guests is 1.5; it must be an integer"),
        ({"by": "sun"}, "policy argument by is 'sun'; choose one of sum, share"),
        ({"ageing_s": 0.0}, "policy argument ageing_s is 0.0; it must be from 0.001"),
    ],
)
def test_what_a_policy_has_no_use_for_is_refused_with_the_choices(args: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        policy_for(config(**args), THIRD)


def test_a_policy_without_parameters_says_so():
    with pytest.raises(ConfigError, match="the policy fcfs has no argument 'ageing_s'; it has none"):
        policy_for(SchedulerConfig(policy_args={"ageing_s": 1.0}))


def test_a_parameter_that_could_not_be_given_is_the_factorys_mistake():
    def odd(config: SchedulerConfig, *, tables: list[int]) -> Policy:
        raise AssertionError("is not asked")

    with pytest.raises(ConfigError, match="parameter 'tables' of the policy is declared list"):
        parameters_of(odd)


@pytest.mark.parametrize("name", POLICIES)
def test_every_parameter_of_ours_without_a_default_is_a_setting(name: str):
    settings = {field.name for field in fields(SchedulerConfig)}
    open_ones = {p.name for p in parameters_of(POLICIES[name]).values() if p.default is None}
    assert open_ones <= settings
    assert (
        make_policy(POLICIES[name], SchedulerConfig(policy=name)).arguments.keys()
        == parameters_of(POLICIES[name]).keys()
    )


def test_a_policy_says_whether_it_heeds_priority():
    assert heeding_priority() == ["priority", "interactive", "edf", "least_slack"]
    assert policy_for(config(), THIRD).heeds_priority  # of another's nobody knows better than itself
