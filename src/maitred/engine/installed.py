"""Policies that other packages bring: entry points of the group `maitred.policies`, each a PolicyFactory.

[project.entry-points."maitred.policies"]
tips_first = "my_package.policies:tips_first"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from maitred.config import SchedulerConfig
from maitred.core.errors import ConfigError
from maitred.policy.policies import POLICIES, policy_for
from maitred.policy.policy import Policy, PolicyFactory

GROUP = "maitred.policies"


def installed_policies(points: Iterable[EntryPoint] | None = None) -> Mapping[str, PolicyFactory]:
    """Ours and the installed ones, by name. Raises ConfigError for a name given twice, or one that does not load."""
    policies = dict(POLICIES)
    found = entry_points(group=GROUP) if points is None else points
    for point in sorted(found, key=lambda point: (point.name, point.value)):
        if point.name in policies:
            owner = "maitred's own" if point.name in POLICIES else "another installed one"
            raise ConfigError(
                f"the policy {point.name!r} of {_owner(point)} has the name of {owner}; remove one of them"
            )
        policies[point.name] = _load(point)
    return policies


def policy_of(config: SchedulerConfig) -> Policy:
    """The policy as an engine would make it, to ask what it says of itself. Raises ConfigError when there is no such
    policy, or no such argument of it.
    """
    return policy_for(config, POLICIES if config.policy in POLICIES else installed_policies())


def _load(point: EntryPoint) -> PolicyFactory:
    try:
        make = point.load()
    except Exception as error:  # whatever a foreign module may raise
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"the policy {point.name!r} of {_owner(point)} does not load ({cause}); mend or remove that package"
        ) from error
    if not callable(make):
        raise ConfigError(
            f"the policy {point.name!r} of {_owner(point)} is a {type(make).__name__}; it must be a function from "
            "SchedulerConfig to Policy"
        )
    factory: PolicyFactory = make
    return factory


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
