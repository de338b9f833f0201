"""Scheduling policies by name. What a policy is made of is in `policy`, each one is in `rules/`."""

from __future__ import annotations

from collections.abc import Mapping

from maitred.config import SchedulerConfig
from maitred.core.errors import ConfigError, did_you_mean
from maitred.policy.parameters import make_policy
from maitred.policy.policy import Policy, PolicyFactory
from maitred.policy.rules.arrival import fcfs, priority
from maitred.policy.rules.deadline import edf, least_slack
from maitred.policy.rules.fair import vtc
from maitred.policy.rules.prefix import lpm
from maitred.policy.rules.quantum import mlfq, rr
from maitred.policy.rules.shortest import interactive, sjf, srpt

POLICIES: dict[str, PolicyFactory] = {
    "fcfs": fcfs,
    "priority": priority,
    "interactive": interactive,
    "sjf": sjf,
    "srpt": srpt,
    "rr": rr,
    "mlfq": mlfq,
    "edf": edf,
    "least_slack": least_slack,
    "vtc": vtc,
    "lpm": lpm,
}


def policy_for(config: SchedulerConfig, policies: Mapping[str, PolicyFactory] = POLICIES) -> Policy:
    """Make a policy, with its state. Raises ConfigError, listing the choices, for an unknown name or argument."""
    try:
        make = policies[config.policy]
    except KeyError:
        raise ConfigError(
            f"scheduler.policy is {config.policy!r}{did_you_mean(config.policy, policies)}; choose one of "
            f"{', '.join(sorted(policies))}"
        ) from None
    return make_policy(make, config)


def heeding_priority() -> list[str]:
    """Names of ours under which a request's priority may change its place."""
    return [name for name in POLICIES if policy_for(SchedulerConfig(policy=name)).heeds_priority]
