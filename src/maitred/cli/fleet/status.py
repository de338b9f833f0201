"""`maitred fleet status`: the replicas of a fleet, and the requests that wait for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maitred.cli.command import Command, Options
from maitred.cli.fleet.asking import RouterOptions, get
from maitred.core.errors import ServerError

if TYPE_CHECKING:
    from maitred.fleet.view import FleetView, ReplicaView

HEADINGS = ("NAME", "STATE", "IN FLIGHT", "KEYS", "TIER", "MODELS", "PID", "URL")


def _run(options: Options) -> int:
    asked = options[RouterOptions]
    answer = get(asked, "/admin/fleet")
    if asked.json:
        print(answer.decode())
        return 0
    print("\n".join(lines(read_fleet(answer))))
    return 0


def read_fleet(answer: bytes) -> FleetView:
    """Parse an answer of GET /admin/fleet. Raises ServerError."""
    import msgspec

    from maitred.fleet.view import FleetView

    try:
        return msgspec.json.decode(answer, type=FleetView)
    except msgspec.MsgspecError as error:
        raise ServerError(f"/admin/fleet is answered in a form unknown here: {error}") from None


def lines(fleet: FleetView) -> list[str]:
    """The whole, a line per replica, and what is wrong with any."""
    from maitred.cli.console import inert
    from maitred.cli.ps import table

    num_ready = sum(replica.state == "ready" for replica in fleet.replicas)
    held = f"{fleet.held:,} held" + (f", the oldest for {fleet.oldest_held_s:.1f} s" if fleet.held else "")
    wanted = f" of {fleet.target} wanted" if fleet.target else ""
    errors = [f"{inert(r.name)}: {inert(r.error)}" for r in fleet.replicas if r.error]
    return [
        f"{num_ready} ready{wanted}; {held}",
        *table([HEADINGS, *(row(replica) for replica in fleet.replicas)]),
        *errors,
    ]


def row(replica: ReplicaView) -> tuple[str, ...]:
    from maitred.cli.console import inert

    return (
        inert(replica.name),
        replica.state + (" (foreign)" if replica.kind == "foreign" else ""),
        f"{replica.in_flight:,} of {replica.slots:,}",
        f"{replica.prefix_keys:,}",
        inert(replica.tier) or "-",
        inert(", ".join(replica.models)) or "-",
        str(replica.pid or "-"),
        inert(replica.url) or "-",
    )


COMMAND = Command(
    path="fleet status",
    summary="List the replicas behind a router: state, load, models; and how many requests are held.",
    run=_run,
    parts=(RouterOptions,),
    positional="url",
    examples=("maitred fleet status", "maitred fleet status --url http://10.0.0.5:8000 --json"),
)
