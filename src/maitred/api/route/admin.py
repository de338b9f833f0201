"""The fleet for its administrators: its replicas, and orders for them."""

from __future__ import annotations

import msgspec

from maitred.api.http.exchange import Exchange
from maitred.api.route.router import Router
from maitred.core.errors import InvalidRequest, RouteNotFound, UnsupportedParameter, did_you_mean
from maitred.fleet.choices import MAX_REQUESTS
from maitred.fleet.disagg import Role


class Named(msgspec.Struct, forbid_unknown_fields=True):
    """One replica."""

    name: str


class MaybeNamed(msgspec.Struct, forbid_unknown_fields=True):
    """One replica, or all of them, one by one."""

    name: str | None = None


class ReplicaBounds(msgspec.Struct, forbid_unknown_fields=True):
    """How many replicas there are to be."""

    min: int
    max: int


class Accepted(msgspec.Struct, frozen=True):
    """It begins; GET /admin/fleet shows how far it is."""

    status: str = "accepted"


class RoutedWorker(msgspec.Struct, frozen=True):
    """A replica whose KV others pull."""

    worker: str  # the replica's name
    role: Role
    state: str
    kv_addresses: tuple[str, ...]
    num_running: int  # as it told


class FleetRoles(msgspec.Struct, frozen=True):
    """The replicas and their roles."""

    workers: tuple[RoutedWorker, ...]


_decode_named = msgspec.json.Decoder(Named)
_decode_maybe_named = msgspec.json.Decoder(MaybeNamed)
_decode_bounds = msgspec.json.Decoder(ReplicaBounds)


async def show_fleet(router: Router, exchange: Exchange) -> None:
    await exchange.answer_json(router.fleet.core.view(router.clock.now()))


async def show_choices(router: Router, exchange: Exchange) -> None:
    """Where one of the last requests went, and why."""
    made = router.fleet.choices.of(exchange.parameter)
    if made is None:
        raise RouteNotFound(f"{exchange.parameter!r} is none of the last {MAX_REQUESTS:,} requests that were sent")
    await exchange.answer_json(made)


async def show_roles(router: Router, exchange: Exchange) -> None:
    """The replicas that hand KV over, and what each is sent first."""
    core = router.fleet.core.fleet
    found = [
        RoutedWorker(name, replica.facts.worker.role, replica.state.value, live.kv_addresses, replica.load)
        for name, live in sorted(router.fleet.replicas.items())
        if (replica := core.by_name.get(name)) is not None and replica.facts.worker is not None
    ]
    await exchange.answer_json(FleetRoles(tuple(found)))


async def drain(router: Router, exchange: Exchange) -> None:
    body = await exchange.json(_decode_named)
    router.fleet.drain(_known(router, body.name))
    await exchange.answer_json(Accepted(), 202)


async def restart(router: Router, exchange: Exchange) -> None:
    body = await exchange.json(_decode_maybe_named)
    _require_launched(router)
    router.fleet.restart(_known(router, body.name) if body.name is not None else None)
    await exchange.answer_json(Accepted(), 202)


async def scale(router: Router, exchange: Exchange) -> None:
    body = await exchange.json(_decode_bounds)
    _require_launched(router)
    if not 0 <= body.min <= body.max or not body.max:
        raise InvalidRequest(f"min is {body.min} and max {body.max}; 0 <= min <= max, and max is at least 1")
    router.fleet.scale(body.min, body.max)
    await exchange.answer_json(Accepted(), 202)


def _require_launched(router: Router) -> None:
    if router.fleet.launching is None:
        text = "the replicas of this router run elsewhere; it starts and stops only those of --replicas"
        raise UnsupportedParameter(text)


def _known(router: Router, name: str) -> str:
    names = router.fleet.core.fleet.by_name
    if name not in names:
        raise InvalidRequest(
            f"there is no replica {name!r}{did_you_mean(name, names)}; there are: {', '.join(sorted(names)) or 'none'}",
            param="name",
        )
    return name
