"""Routes for watching: the live view as an event stream, and the table of what is loaded."""

from __future__ import annotations

import time
from contextlib import aclosing, suppress

import msgspec

from maitred.api.http.app import App
from maitred.api.http.auth import authorization
from maitred.api.http.errors import ClientGone
from maitred.api.http.exchange import EventStream, Exchange
from maitred.api.ops.live_feed import LiveFeed

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
    proposer: str | None = None  # drafts tokens for the model to verify; empty where there is none
    tool_format: str | None = None  # how it writes calls of tools, by name; none where that is not known
    reasoning_format: str | None = None  # and thoughts
    # of one of several models
    state: str = "ready"  # unloaded, loading, ready or unloading
    memory_bytes: int | None = None  # weights, KV and buffers, loaded or not
    pinned: bool = False
    in_flight: int = 0
    waiting: int = 0
    expires_at: float | None = None  # unix s, when it is put out for want of requests; null is not for that
    error: str | None = None  # why it could not be loaded the last time


class TensorModelState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version of a tensor model, or a folder of which no version is known."""

    name: str
    version: int | None = None
    state: str = ""  # as Triton calls it; none of a model that was never loaded
    reason: str = ""


class LoadedModels(msgspec.Struct, frozen=True):
    models: tuple[LoadedModel, ...]
    tensor_models: tuple[TensorModelState, ...] = ()
    memory_bytes: int | None = None  # that several models share


class WatchLive:
    """Frames of the live view until the client leaves or the server goes."""

    def __init__(self) -> None:
        self._feed: LiveFeed | None = None  # from the first watcher on

    async def __call__(self, app: App, exchange: Exchange) -> None:
        if self._feed is None:
            name, latencies = app.model.name, app.observer.latencies
            self._feed = LiveFeed(
                app.replica, latencies, name, is_over=lambda: app.in_flight.draining or app.fleet.is_replaced
            )
        events = EventStream(exchange, silence_s=app.config.sse_keep_alive_s)
        checked_at = time.monotonic()
        with suppress(ClientGone):  # watching ends by leaving, and cancels nothing
            async with app.in_flight.watch(exchange, events), aclosing(self._feed.frames()) as frames:
                async for frame in frames:
                    await events.write(frame)
                    if time.monotonic() - checked_at > RECHECK_S:
                        checked_at = time.monotonic()
                        _check_again(app, exchange)
            await events.done()


async def loaded_models(app: App, exchange: Exchange) -> None:
    """What is in memory, how it is held, and since when."""
    model, held = app.model, app.model.footprint
    tensor_models = tuple(
        TensorModelState(each.name, each.version, each.state.value if each.state is not None else "", each.reason)
        for each in (app.tensors.index() if app.tensors is not None else ())
    )
    if not model.names:
        await exchange.answer_json(LoadedModels((), tensor_models))
        return
    known = {} if held is None else {name: getattr(held, name) for name in held.__dataclass_fields__}
    format = await app.text.run(0, lambda: model.answer_format)
    row = LoadedModel(
        id=model.name,
        aliases=model.names[1:],
        root=model.root or model.name,
        since=model.created,
        max_model_len=model.max_model_len,
        tool_format=format.name,
        reasoning_format=format.reasoning_name,
        **known,
    )
    await exchange.answer_json(LoadedModels((row,), tensor_models))


def _check_again(app: App, exchange: Exchange) -> None:
    """Raises InvalidApiKey or PermissionDenied when the key means less than it did."""
    caller = app.authenticator.check(authorization(exchange.headers))
    caller.require_admin(WATCHING)
