"""`maitred fleet`: lists the replicas behind a router, drains and restarts them, and sets how many it launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.config.bounds import Bounds
from maitred.core.errors import ServerError

if TYPE_CHECKING:
    from maitred.fleet.core import FleetView, ReplicaView

HEADINGS = ("NAME", "STATE", "IN FLIGHT", "KEYS", "TIER", "MODELS", "PID", "URL")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """The router"""

    url: str = option("http://127.0.0.1:8000", metavar="URL")
    """Where maitred route listens."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """An administrator's key, where the router has keys."""
    json: bool = False
    """Print the router's answer as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOptions:
    """The replica"""

    name: str = option(metavar="NAME")
    """As maitred fleet status names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOptions:
    """The replica"""

    name: str | None = option(None, metavar="NAME")
    """As maitred fleet status names it; None is all, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """How many"""

    replicas: str = option(metavar="N|MIN:MAX")
    """So many replicas, or from MIN to MAX as there is need; MIN 0 lets the last one stop."""

    def __post_init__(self) -> None:
        Bounds.parse(self.replicas)


def _status(options: Options) -> int:
    answer = ask_router(options[RouterOptions], "/admin/fleet")
    print(answer.decode() if options[RouterOptions].json else "\n".join(lines(read_fleet(answer))))
    return 0


def _drain(options: Options) -> int:
    name = options[DrainOptions].name
    return _order(options, "drain", {"name": name}, f"{name} drains")


def _restart(options: Options) -> int:
    name = options[RestartOptions].name
    done = f"{name or 'every replica in turn'} is replaced, the new one first"
    return _order(options, "restart", {} if name is None else {"name": name}, done)


def _scale(options: Options) -> int:
    low, high = Bounds.parse(options[ScaleOptions].replicas)
    done = f"{low} replicas" if low == high else f"from {low} to {high} replicas"
    return _order(options, "scale", {"min": low, "max": high}, done)


def _order(options: Options, what: str, body: object, done: str) -> int:
    """Tell the router to do something, and the user that it begins."""
    import msgspec

    router = options[RouterOptions]
    answer = ask_router(router, f"/admin/fleet/{what}", msgspec.json.encode(body))
    print(answer.decode() if router.json else f"{done}; maitred fleet status shows how far it is")
    return 0


def ask_router(router: RouterOptions, path: str, body: bytes | None = None) -> bytes:
    """GET the path, or POST the body to it. Raises Refused, Unreachable."""
    import asyncio

    from maitred.cli.endpoint import HttpEndpoint

    async def asked() -> bytes:
        async with HttpEndpoint(router.url, api_key=router.api_key, timeout_s=30.0) as endpoint:
            return await endpoint.whole(path, body, hint="; is it maitred route that listens there?")

    return asyncio.run(asked())


def read_fleet(answer: bytes) -> FleetView:
    """Parse an answer of GET /admin/fleet. Raises ServerError."""
    import msgspec

    from maitred.fleet.core import FleetView

    try:
        return msgspec.json.decode(answer, type=FleetView)
    except msgspec.MsgspecError as error:
        raise ServerError(f"/admin/fleet is answered in a form unknown here: {error}") from None


def lines(fleet: FleetView) -> list[str]:
    """The whole, a line per replica, and what is wrong with any."""
    from maitred.cli.console import columns, inert

    num_ready = sum(replica.state == "ready" for replica in fleet.replicas)
    held = f"{fleet.held:,} held" + (f", the oldest for {fleet.oldest_held_s:.1f} s" if fleet.held else "")
    wanted = f" of {fleet.target} wanted" if fleet.target else ""
    errors = [f"{inert(r.name)}: {inert(r.error)}" for r in fleet.replicas if r.error]
    return [
        f"{num_ready} ready{wanted}; {held}",
        *columns([HEADINGS, *(_row(replica) for replica in fleet.replicas)]),
        *errors,
    ]


def _row(replica: ReplicaView) -> tuple[str, ...]:
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


STATUS = Command(
    path="fleet status",
    summary="List the replicas behind a router: state, load, models; and how many requests are held.",
    run=_status,
    parts=(RouterOptions,),
    positional="url",
    examples=("maitred fleet status", "maitred fleet status --url http://10.0.0.5:8000 --json"),
)
DRAIN = Command(
    path="fleet drain",
    summary="Send a replica nothing new: who has no token moves at once, the others finish there, or move in time.",
    run=_drain,
    parts=(DrainOptions, RouterOptions),
    positional="name",
    examples=("maitred fleet drain replica-1",),
)
RESTART = Command(
    path="fleet restart",
    summary="Replace the replicas that a router launched, one by one and the new one first; no request is lost.",
    run=_restart,
    parts=(RestartOptions, RouterOptions),
    positional="name",
    examples=("maitred fleet restart", "maitred fleet restart replica-1"),
)
SCALE = Command(
    path="fleet scale",
    summary="Set how many replicas a router launches, or between how many.",
    run=_scale,
    parts=(ScaleOptions, RouterOptions),
    positional="replicas",
    examples=("maitred fleet scale 4", "maitred fleet scale 0:8"),
)
