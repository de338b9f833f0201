"""Every policy passes the kit, and the kit fails those that break a promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.config import SchedulerConfig
from maitred.core.request import RequestState
from maitred.core.step import SchedulerOutput
from maitred.policy.parameters import make_policy
from maitred.policy.policies import POLICIES, VirtualTokenCounters, vtc
from maitred.policy.policy import GroupRule, Policy, PolicyFactory, Rank, UsedQuanta, arrival_term, by_arrival
from maitred.testing.conformance import (
    CHECKS,
    STEP_PROPERTIES,
    PolicyFault,
    check_busy_lane,
    check_determinism,
    check_endless_load,
    check_fair_share,
    check_lanes,
    check_policy,
    check_statement,
    check_steps,
    check_swap,
)
from maitred.testing.conformance_world import Moment, Scenario, World, answer, scenario_of
from tests.scheduler.checking import CheckingExecutor


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Anything `scenario_of` may give and more; shrinks to few requests and little room."""
    block_size, longest = draw(st.integers(1, 4)), draw(st.integers(2, 24))
    return Scenario(
        seed=draw(st.integers(0, 2**32)),
        num_requests=draw(st.integers(1, 30)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 24)),
        num_blocks=-(-2 * longest // block_size) + draw(st.integers(0, 40)),
        block_size=block_size,
        num_tenants=draw(st.integers(1, 4)),
        num_priorities=draw(st.integers(1, 4)),
        longest_prompt=longest,
        longest_output=draw(st.integers(1, longest)),
        arrivals_percent=draw(st.integers(15, 85)),
        aborts_percent=draw(st.sampled_from([0, 5])),
        enable_prefix_caching=draw(st.booleans()),
        kv_percent=draw(st.sampled_from([0, 60])),
    )


def for_every_policy(max_examples: int) -> Callable[[Any], Any]:
    def decorate(test: Any) -> Any:
        test = settings(max_examples=max_examples, deadline=None)(given(scenario=scenarios())(test))
        return pytest.mark.parametrize("name", POLICIES)(test)

    return decorate


@for_every_policy(8)
def test_every_property_holds_in_every_step(name: str, scenario: Scenario):
    executor = CheckingExecutor(scenario.block_size)
    check_steps(POLICIES[name], scenario, executor.execute, bring=executor.bring)


@for_every_policy(4)
def test_two_runs_make_equal_plans(name: str, scenario: Scenario):
    check_determinism(POLICIES[name], scenario)


@for_every_policy(4)
def test_a_swap_of_policy_costs_nobody_the_age_it_has(name: str, scenario: Scenario):
    check_swap(POLICIES[name], scenario)


@for_every_policy(4)
def test_chats_and_batches_of_several_lanes_keep_all_of_it_under_one_policy(name: str, scenario: Scenario):
    check_lanes(POLICIES[name], scenario)


@for_every_policy(3)
def test_in_a_lane_that_is_never_empty_nobody_starves_and_tenants_share(name: str, scenario: Scenario):
    check_busy_lane(POLICIES[name], scenario)


@for_every_policy(3)
def test_nobody_starves_under_an_endless_load(name: str, scenario: Scenario):
    check_endless_load(POLICIES[name], scenario)


@for_every_policy(3)
def test_it_states_source_bound_and_terms(name: str, scenario: Scenario):
    check_statement(POLICIES[name], scenario)


@settings(max_examples=8, deadline=None)
@given(scenario=scenarios())
def test_the_service_gap_of_two_backlogged_tenants_stays_within_the_papers_bound(scenario: Scenario):
    assert check_fair_share(vtc, replace(scenario, longest_prompt=12, longest_output=8)) <= 1.0


def test_the_papers_bound_is_not_far_from_what_is_seen():
    """Else it would prove nothing: the largest drift is a good part of it."""
    assert max(check_fair_share(vtc, scenario_of(seed)) for seed in range(5)) > 0.2


@pytest.mark.parametrize("name", POLICIES)
def test_the_whole_kit_in_one_call(name: str):
    check_policy(POLICIES[name], range(1))


def test_the_worlds_reach_what_they_are_to_watch(monkeypatch: pytest.MonkeyPatch):
    """Preemptions, quanta, prefix hits and aborts happen, for policies of unlike kinds."""
    num_given_up = 0
    for name in ("fcfs", "priority", "mlfq", "vtc"):
        make = POLICIES[name]
        quanta: list[str] = []

        def note_quanta(moment: Moment, ended: list[str] = quanta) -> None:
            before, now = moment.quanta_before, moment.world.num_quanta
            ended += [r.request_id for r in moment.preempted if now(r) > before[r.request_id]]

        monkeypatch.setitem(STEP_PROPERTIES, "quanta", note_quanta)
        worlds = [check_steps(make, scenario_of(seed), answer, ["quanta"]) for seed in range(60)]
        stats = [world.scheduler.stats for world in worlds]
        assert sum(s.num_preemptions for s in stats) >= 5, name
        assert (
            sum(r.spec.sample_index > 0 and r.num_output_tokens > 0 for w in worlds for r in w.requests.values()) > 50
        )
        assert sum(s.num_prefix_hit_tokens for s in stats) > 100
        assert sum(w.num_arrived for w in worlds) > 20
        num_given_up += sum(w.num_given_up for w in worlds)
        assert (len(quanta) > 50) == (worlds[0].policy.quantum_end is not None)
    assert num_given_up >= 5


# -- Policies that break a promise. A check that cannot fail is none.


def stated(**parts: Any) -> Policy:
    ours = {"source": "a test", "bound": "as fcfs", "order": by_arrival, "terms": arrival_term}
    return Policy(**{**ours, "overtaken_until": lambda r: r.arrived_at, **parts})


def signed(order: Callable[[RequestState], float]) -> dict[str, Any]:
    return {"order": lambda r: (order(r), *by_arrival(r)), "terms": lambda r: {"it": order(r)}}


def last_come_first_served(config: SchedulerConfig) -> Policy:
    return stated(**signed(lambda r: -r.arrived_at))


def strict_priority(config: SchedulerConfig) -> Policy:
    return stated(**signed(lambda r: float(r.priority)), overtaken_until=lambda r: r.arrived_at + 20.0)


def honest_strict_priority(config: SchedulerConfig) -> Policy:
    return stated(**signed(lambda r: float(r.priority)), overtaken_until=lambda r: inf)


def trusting_shortest_first(config: SchedulerConfig) -> Policy:
    """Believes the predictor, whose error has no limit, and states the bound that would hold if it were right."""
    return stated(
        **signed(lambda r: r.arrived_at + (r.predicted_output_tokens or 0.0)),
        overtaken_until=lambda r: r.arrived_at + r.max_tokens,
    )


_calls = [0]  # of the policy below; each check begins with none, whatever ran before it


def with_global_state(config: SchedulerConfig) -> Policy:
    def order(request: RequestState) -> float:
        _calls[0] += 1
        return float(_calls[0] * 7919 % 13)

    return stated(**signed(order), overtaken_until=lambda r: r.arrived_at + 1e6)


def with_levels_of_its_own(config: SchedulerConfig) -> Policy:
    """Remembers in itself, not in `quanta`, what a request has used: a swap forgets it."""
    asked: Counter[str] = Counter()

    def order(request: RequestState) -> tuple[Any, ...]:
        asked[request.request_id] += 1
        return (request.arrived_at + 50.0 * asked[request.request_id], request.request_id)

    return stated(
        order=order,
        terms=lambda r: {"it": r.arrived_at + 50.0 * (asked[r.request_id] + 1)},
        overtaken_until=lambda r: r.arrived_at + 1e6,
        quantum_end=lambda r: max(r.num_computed_tokens, r.num_prompt_tokens) + 3,
    )


def out_of_turn(config: SchedulerConfig) -> Policy:
    """Puts out those that are before it in the order."""
    return stated(
        outranks=lambda waiting, running: waiting.priority < running.priority,
        overtaken_until=lambda r: r.arrived_at + 1e6,
    )


def nothing_is_ever_done(config: SchedulerConfig) -> Policy:
    quanta: dict[str, UsedQuanta] = {}
    return stated(
        **signed(lambda r: quanta[r.request_id].ended_at if r.request_id in quanta else r.arrived_at),
        quanta=quanta,
        quantum_end=lambda r: 0,
        overtaken_until=lambda r: r.arrived_at + 1e6,
    )


class SinkingLevels(GroupRule):
    """A preempted request sinks, though its quantum has not ended."""

    def group_of(self, request: RequestState) -> str:
        return str(min(request.num_preemptions, 3))

    def rank(self, group: str) -> Rank:
        return (float(group),)


def punishing(config: SchedulerConfig) -> Policy:
    return stated(groups=SinkingLevels(), max_service_gap=lambda *_: 1e9)


class ForOutputsOnly(VirtualTokenCounters):
    def on_started(self, request: RequestState) -> None:
        self._leave(request)


class TiesByName(VirtualTokenCounters):
    def rank(self, group: str) -> Rank:
        return super().rank(group)[:1]


def with_counters(make_rule: Callable[[float], VirtualTokenCounters], stating: bool = True) -> PolicyFactory:
    def make(config: SchedulerConfig) -> Policy:
        policy = replace(make_policy(vtc, config), groups=make_rule(config.output_token_weight))
        return policy if stating else replace(policy, max_service_gap=None)

    return make


def mumbling(config: SchedulerConfig) -> Policy:
    return stated(terms=lambda r: {"arrived_at_s": r.arrived_at, "surprise_s": 1.0})


BROKEN: list[Any] = [  # tuple[PolicyFactory, str, str]
    (last_come_first_served, "steps", "starvation bound"),
    (last_come_first_served, "endless load", "starvation bound"),
    (honest_strict_priority, "steps", "starvation bound"),
    (trusting_shortest_first, "steps", "starvation bound"),
    (with_global_state, "determinism", "determinism"),
    (with_levels_of_its_own, "swap", "swap"),
    (out_of_turn, "steps", "no inversion"),
    pytest.param(nothing_is_ever_done, "steps", "conservation", marks=pytest.mark.soak),  # it takes all its steps
    (punishing, "steps", "a preempted request keeps its place"),
    (with_counters(ForOutputsOnly), "fair share", "fair share"),
    (with_counters(VirtualTokenCounters, stating=False), "fair share", "fair share"),
    (with_counters(TiesByName), "endless load", "starvation bound"),
    (mumbling, "statement", "statement"),
    (last_come_first_served, "busy lane", "starvation bound"),
    (with_counters(ForOutputsOnly), "busy lane", "fair share"),
    (with_global_state, "lanes", "lanes"),
]


@pytest.mark.parametrize(("make", "check", "broken"), BROKEN, ids=lambda v: getattr(v, "__name__", None))
def test_the_kit_catches_a_policy_that_breaks_a_promise(make: PolicyFactory, check: str, broken: str):
    fault = first_fault(make, check)
    assert fault is not None
    assert fault.property == broken
    with pytest.raises(PolicyFault, match=broken):  # and again from its scenario alone
        checked(make, check, fault.scenario)


def checked(make: PolicyFactory, check: str, scenario: Scenario) -> None:
    _calls[0] = 0
    CHECKS[check](make, scenario, answer)


def first_fault(make: PolicyFactory, check: str) -> PolicyFault | None:
    for seed in range(100):
        try:
            checked(make, check, scenario_of(seed))
        except PolicyFault as fault:
            return fault
    return None


def test_a_fault_is_one_line_with_the_seed():
    with pytest.raises(
        PolicyFault, match=r"^starvation bound: seed \d+, step \d+: r\d+, arrived at \d+.0, starts before"
    ):
        check_policy(last_come_first_served, range(50))


# -- What no policy can break, a scheduler could: the watchers see that too.


def world_with_waiting() -> World:
    world = World(POLICIES["fcfs"], Scenario(num_requests=9, max_num_seqs=2, arrivals_percent=85, aborts_percent=0))
    for _ in range(9):
        world.add(world.make_request(prompt=4, max_tokens=4))
    return world


def lose_a_request(world: World) -> None:
    admit_nobody(world)
    world.scheduler.order.queue.remove(world.scheduler.waiting[-1].request_id)


def admit_nobody(world: World) -> None:
    """While it plans, the queue seems empty."""
    schedule, order = world.scheduler.schedule, world.scheduler.order

    def blind(now: float) -> SchedulerOutput:
        seen, order.head = order.head, lambda: None  # type: ignore[method-assign]
        try:
            return schedule(now)
        finally:
            order.head = seen  # type: ignore[method-assign]

    world.scheduler.schedule = blind  # type: ignore[method-assign]


def lose_a_block(world: World) -> None:
    world.kv_cache._pool.take(1)


def remember_the_dead(world: World) -> None:
    world.scheduler.order.keys["gone"] = ()


def never_clear_up(world: World) -> None:
    queue = world.scheduler.order.queue
    queue._num_entries += 1000
    queue._compact = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("sabotage", "broken"),
    [
        (lose_a_request, "conservation"),
        (admit_nobody, "work conservation"),
        (lose_a_block, "no block leak"),
        (remember_the_dead, "bounded queue"),
        (never_clear_up, "bounded queue"),
    ],
)
def test_a_scheduler_that_is_broken_is_seen(sabotage: Callable[[World], None], broken: str):
    world = world_with_waiting()
    assert [name for name, watch in STEP_PROPERTIES.items() if watch(world.step())] == []
    world = world_with_waiting()
    sabotage(world)
    assert STEP_PROPERTIES[broken](world.step()) is not None
