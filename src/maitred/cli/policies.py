"""`maitred policies`: which there are, where each comes from, what it promises; and the kit that holds it to that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

from maitred.cli.command import Command, Options
from maitred.cli.console import note
from maitred.cli.flags import UsageError, option
from maitred.config import POLICY_NAMES, PolicyArg, SchedulerConfig
from maitred.core.errors import did_you_mean

if TYPE_CHECKING:
    from maitred.policy.policy import PolicyFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesOptions:
    """What to do with them."""

    check: str | None = option(None, metavar="NAME", choices=("all", *POLICY_NAMES))
    """Run the conformance kit on this policy, ours or an installed one; all runs it on each."""
    worlds: int = 200
    """Random worlds that the kit runs a policy in."""


def _run(options: Options) -> int:
    from maitred.engine.installed import installed_policies

    policies, wanted = installed_policies(), options[PoliciesOptions].check
    if wanted is None:
        print(_table(policies))
        return 0
    if wanted != "all" and wanted not in policies:
        choices = ", ".join(["all", *policies])
        raise UsageError(f"--check is {wanted!r}{did_you_mean(wanted, list(policies))}; choose one of {choices}")
    for name in policies if wanted == "all" else [wanted]:
        _check(name, policies[name], options[PoliciesOptions].worlds)
    return 0


def _table(policies: Mapping[str, PolicyFactory]) -> str:
    from maitred.policy.parameters import make_policy, parameters_of

    blocks = []
    for name, make in policies.items():
        policy, parameters = make_policy(make, SchedulerConfig(policy=name)), parameters_of(make)
        summary = (make.__doc__ or "").strip().partition("\n")[0]
        heeded = "heeded" if policy.heeds_priority else "not heeded"
        lines = [summary, f"source: {policy.source}", f"bound: {policy.bound}", f"priority: {heeded}"]
        lines += [
            f"--policy-arg {name}={_default(name, value)} ({parameters[name].allowed})"
            for name, value in policy.arguments.items()
        ]
        indented = (fill(line, 110, initial_indent="  ", subsequent_indent="    ") for line in lines if line)
        blocks.append("\n".join([name, *indented]))
    return "\n\n".join(blocks)


def _default(argument: str, value: PolicyArg) -> str:
    """The value when the argument is not given."""
    if getattr(SchedulerConfig(), argument, value) is None:
        return "unset"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check(name: str, make: PolicyFactory, num_worlds: int) -> None:
    """Raises PolicyFault, which names the property and the seed."""
    from maitred.testing.conformance import CHECKS, PolicyFault
    from maitred.testing.conformance_fleet import FLEET_CHECKS
    from maitred.testing.conformance_world import scenario_of

    for check, run in {**CHECKS, **FLEET_CHECKS}.items():
        for seed in range(num_worlds):
            try:
                run(make, scenario_of(seed))
            except PolicyFault:
                note(f"{name}: {check} fails")
                raise
        print(f"{name}: {check} holds in {num_worlds} worlds", flush=True)


COMMAND = Command(
    path="policies",
    summary="List the scheduling policies, or check that one keeps its promises.",
    run=_run,
    parts=(PoliciesOptions,),
    positional="check",
    examples=("maitred policies", "maitred policies --check vtc", "maitred policies --check all --worlds 20"),
)
