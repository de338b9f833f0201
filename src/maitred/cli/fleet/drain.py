"""`maitred fleet drain`: a replica gets nothing new, finishes what it has, and moves the rest at the deadline."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.cli.fleet.asking import RouterOptions, order


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOptions:
    """The replica"""

    name: str = option(metavar="NAME")
    """As maitred fleet status names it."""


def _run(options: Options) -> int:
    name = options[DrainOptions].name
    return order(options[RouterOptions], "/admin/fleet/drain", {"name": name}, f"{name} drains")


COMMAND = Command(
    path="fleet drain",
    summary="Send a replica nothing new: who has no token moves at once, the others finish there, or move in time.",
    run=_run,
    parts=(DrainOptions, RouterOptions),
    positional="name",
    examples=("maitred fleet drain replica-1",),
)
