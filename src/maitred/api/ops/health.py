"""Is it there, is it welcome to ask, and can it still decode: three questions with three answers."""

from __future__ import annotations

import msgspec

from maitred.api.http.app import App
from maitred.api.http.exchange import Exchange
from maitred.api.ops.decode_probe import DecodeProbe
from maitred.errors import EngineDead, Unavailable


class DecodeHealth(msgspec.Struct, frozen=True):
    """One token came, after so many seconds; `asleep` asked for none, for that would wake the engine."""

    seconds: float
    status: str = "ok"


async def health(app: App, exchange: Exchange) -> None:
    """200 and empty while the engine lives: its process is there, beats, and is not stuck in a step.

    Before the first one has loaded too: nothing is wrong then, and what hinders its loading ends the server. Reads
    what is known already, so a busy engine is never taken for dead.
    """
    state = app.replica.state()
    if not state.alive and not (state.loading and state.error is None):
        raise EngineDead(state.error or "the engine stopped; restart the server")
    await exchange.answer(b"", 200, ())


async def ready(app: App, exchange: Exchange) -> None:
    """200 and empty while new requests are welcome: the engine has loaded, and the server is not about to end."""
    if app.in_flight.draining:
        raise Unavailable("the server is shutting down; send requests elsewhere")
    state = app.replica.state()
    if state.loading:
        raise Unavailable(f"the engine is loading: {state.error}" if state.error else "the engine is loading")
    if not app.ready:
        raise Unavailable(state.error or "the server is not ready for requests")
    await exchange.answer(b"", 200, ())


class Decode:
    """200 when one token came through the scheduler, as the least urgent request there is; 503 when it did not.

    It waits behind everybody, so under load it says how long the least urgent wait: a reason to alert, not to restart.
    """

    def __init__(self) -> None:
        self._probe: DecodeProbe | None = None  # from the first question on

    async def __call__(self, app: App, exchange: Exchange) -> None:
        if app.replica.state().asleep:
            await exchange.answer_json(DecodeHealth(0.0, "asleep"))
            return
        if self._probe is None:
            timeout_s = app.config.decode_timeout_s
            self._probe = DecodeProbe(app.replica, app.model, app.clock, app.gate, timeout_s=timeout_s)
        await exchange.answer_json(DecodeHealth(await self._probe.seconds()))
