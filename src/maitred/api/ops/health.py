"""Is it there, is it welcome to ask, and can it still decode: three questions with three answers."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec

from maitred.api.http.app import App
from maitred.api.http.exchange import Exchange
from maitred.core.clock import Clock
from maitred.core.errors import EngineDead, GenerationFailed, Unavailable
from maitred.core.request import FinishReason, SamplingParams, Terms
from maitred.engine.intake import ServedModel, make_pooled, make_requests
from maitred.engine.replica import Replica
from maitred.gate.gate import Ask, Gate
from maitred.tenancy.caller import anybody
from maitred.tenancy.tenant import LEAST_URGENT


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
    if state.lacking:
        raise Unavailable(state.lacking)
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


class DecodeProbe:
    """One token through the whole engine, shared by all questions at the same time: a flood of them costs the engine
    one token at a time. Touched by the event loop alone.
    """

    def __init__(self, replica: Replica, model: ServedModel, clock: Clock, gate: Gate, *, timeout_s: float) -> None:
        self._replica, self._model, self._clock, self._gate = replica, model, clock, gate
        self._timeout_s = timeout_s
        self._under_way: asyncio.Task[float] | None = None
        self._numbers = itertools.count()

    async def seconds(self) -> float:
        """Time that one token of the least urgent request took, queue included.

        Raises EngineDead, Overloaded when the gate lets no request of that class in, Unavailable when it took too long,
        and GenerationFailed.
        """
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.create_task(self._decode())
        return await asyncio.shield(self._under_way)

    async def _decode(self) -> float:
        began_at, pooling = self._clock.now(), self._model.pooling
        of_request: dict[str, Any] = {
            "request_id": f"health-decode-{next(self._numbers)}",
            "now": began_at,
            "terms": Terms(priority=LEAST_URGENT),
        }
        if pooling is not None and not pooling.generates:
            request = make_pooled(self._model, [0], pooling.task, **of_request)
        else:
            sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            (request,) = make_requests(self._model, [0], sampling, **of_request)
        lease = self._gate.enter(anybody(), Ask(num_samples=0, priority=LEAST_URGENT), began_at)
        self._gate.admit(lease, [request], began_at)  # its terms are not used: the request has a limit of its own
        try:
            async with asyncio.timeout(self._timeout_s):
                async for progress in self._replica.submit(request)[0]:
                    if progress.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
                        return self._clock.now() - began_at
                    if progress.finish_reason is FinishReason.ABORT:
                        raise Unavailable("the engine was told to end its requests before it sleeps")
                    if progress.finish_reason is not None:
                        raise GenerationFailed(progress.error or f"it ended with {progress.finish_reason.value}")
        except TimeoutError:
            raise Unavailable(f"no token in {self._timeout_s:g} s") from None
        finally:
            self._replica.abort(request.request_id)  # ignored when it has ended
            lease.end(1)
        raise EngineDead("the engine gave no token and no reason")
