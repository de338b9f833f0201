"""Routes for whoever runs the server: KV that outlives requests and restarts, by tier."""

from __future__ import annotations

import msgspec

from maitred.api.http.app import App
from maitred.api.http.exchange import Exchange
from maitred.replica import TierView


class Tiers(msgspec.Struct, frozen=True):
    """The fastest first; none where nothing outlives a request."""

    tiers: tuple[TierView, ...]


class Cleared(msgspec.Struct, frozen=True):
    """How many blocks there were."""

    num_blocks: int


async def show(app: App, exchange: Exchange) -> None:
    """Bytes, hits, drops by reason, and from how many tokens on fetching is faster than computing."""
    await exchange.answer_json(Tiers(await app.replica.kv_tiers()))


async def clear(app: App, exchange: Exchange) -> None:
    """Empties the tiers; answers when they are empty. What is in the engine's memory stays."""
    await exchange.answer_json(Cleared(await app.replica.clear_kv()))
