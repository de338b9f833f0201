"""Routes for watching: the live view as an event stream, and the table of what is loaded."""

from __future__ import annotations

import time
from contextlib import aclosing, suppress

import msgspec

from maitred.api.http.edge import Edge
from maitred.api.http.errors import ClientGone
from maitred.api.http.exchange import Exchange
from maitred.api.http.sse import EventStream

RECHECK_S = 10.0  # a key that was revoked sees no more after this
WATCHING = "watch the engine"  # what it takes an administrator for


class LoadedModel(msgspec.Struct, frozen=True):
    """One model in memory; null is what the server does not know."""

    id: str
    aliases: tuple[str, ...]
    root: str
    since: int  # unix s
    max_model_len: int  # tokens
    architecture: str | None = None
    num_parameters: int | None = None
    executor: str | None = None
    device: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    isa: str | None = None


class LoadedModels(msgspec.Struct, frozen=True):
    models: tuple[LoadedModel, ...]


async def watch_live(edge: Edge, exchange: Exchange) -> None:
    """Frames of the live view until the client leaves or the server goes."""
    events = EventStream(exchange, silence_s=edge.config.sse_keep_alive_s)
    checked_at = time.monotonic()
    with suppress(ClientGone):  # watching ends by leaving, and cancels nothing
        async with edge.watch(exchange, events), aclosing(edge.live.frames()) as frames:
            async for frame in frames:
                await events.write(frame)
                if time.monotonic() - checked_at > RECHECK_S:
                    checked_at = time.monotonic()
                    _check_again(edge, exchange)
        await events.done()


async def loaded_models(edge: Edge, exchange: Exchange) -> None:
    """What is in memory, how it is held, and since when."""
    model, held = edge.model, edge.model.footprint
    known = {} if held is None else {name: getattr(held, name) for name in held.__dataclass_fields__}
    row = LoadedModel(
        id=model.names[0],
        aliases=model.names[1:],
        root=model.root or model.names[0],
        since=model.created,
        max_model_len=model.max_model_len,
        **known,
    )
    await exchange.answer_json(LoadedModels((row,)))


def _check_again(edge: Edge, exchange: Exchange) -> None:
    """Raises InvalidApiKey or PermissionDenied when the key means less than it did."""
    caller = edge.authenticator.check(exchange.headers.get(b"authorization"))
    caller.require_admin(WATCHING)
