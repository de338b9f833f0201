"""Who is served next: the policies by name. What a policy is made of is in `policy`, each one is in `rules/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from maitred.config import SchedulerConfig
from maitred.errors import ConfigError, did_you_mean
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

IGNORE_PRIORITY = frozenset({"fcfs", "sjf", "srpt", "rr", "mlfq", "vtc", "lpm"})
AGE_BY_TOKENS = frozenset({"sjf", "srpt", "interactive", "lpm"})  # have a use for `ageing_tokens_per_s`
HEED_PRIORITY = tuple(sorted(POLICIES.keys() - IGNORE_PRIORITY))


def heeds_priority(name: str) -> bool:
    """Whether a request's priority may change its place under this policy; of one that is installed nobody knows."""
    return name not in IGNORE_PRIORITY


def policy_for(config: SchedulerConfig, policies: Mapping[str, PolicyFactory] = POLICIES) -> Policy:
    """A fresh policy, with its state if it has any. Raises ConfigError, listing the choices."""
    try:
        make = policies[config.policy]
    except KeyError:
        raise ConfigError(
            f"scheduler.policy is {config.policy!r}{did_you_mean(config.policy, policies)}; choose one of "
            f"{', '.join(sorted(policies))}"
        ) from None
    return make(replace(config, ageing_tokens_per_s=config.ageing_rate))
