"""Routes for whoever runs the server: KV that outlives requests and restarts, by tier."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from maitred.api.http.app import App
from maitred.api.http.exchange import Exchange
from maitred.errors import RouteNotFound
from maitred.replica import TierView


@runtime_checkable
class HasTiers(Protocol):
    """What these routes need of a replica; `EngineClient` has it."""

    async def kv_tiers(self) -> tuple[TierView, ...]: ...

    async def clear_kv(self) -> int: ...


class Tiers(msgspec.Struct, frozen=True):
    """The fastest first; none where nothing outlives a request."""

    tiers: tuple[TierView, ...]


class Cleared(msgspec.Struct, frozen=True):
    """How many blocks there were."""

    num_blocks: int


async def show(app: App, exchange: Exchange) -> None:
    """Bytes, hits, drops by reason, and from how many tokens on fetching is faster than computing."""
    await exchange.answer_json(Tiers(await _tiered(app).kv_tiers()))


async def clear(app: App, exchange: Exchange) -> None:
    """Empties the tiers; answers when they are empty. What is in the engine's memory stays."""
    await exchange.answer_json(Cleared(await _tiered(app).clear_kv()))


def _tiered(app: App) -> HasTiers:
    if not isinstance(app.replica, HasTiers):
        raise RouteNotFound("this server has no engine of its own with KV tiers; ask the servers behind it")
    return app.replica
