"""`maitred fleet restart`: launched replicas are replaced one by one, the new one first."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.cli.fleet.asking import RouterOptions, order


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOptions:
    """The replica"""

    name: str | None = option(None, metavar="NAME")
    """As maitred fleet status names it; None is all, one after the other."""


def _run(options: Options) -> int:
    name = options[RestartOptions].name
    body = {} if name is None else {"name": name}
    done = f"{name or 'every replica in turn'} is replaced, the new one first"
    return order(options[RouterOptions], "/admin/fleet/restart", body, done)


COMMAND = Command(
    path="fleet restart",
    summary="Replace the replicas that a router launched, one by one and the new one first; no request is lost.",
    run=_run,
    parts=(RestartOptions, RouterOptions),
    positional="name",
    examples=("maitred fleet restart", "maitred fleet restart replica-1"),
)
