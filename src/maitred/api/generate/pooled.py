"""The way of requests whose answers are numbers: a lease of the gate, the engine's queue, and a vector of each text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from maitred.api.generate.generation import failure_of
from maitred.api.generate.lease import admitted, cache_salt, enter
from maitred.api.http.app import App
from maitred.api.http.exchange import Exchange, Header
from maitred.core.errors import RequestError
from maitred.core.request import Charges, FinishReason, RequestSpec
from maitred.core.step import RequestProgress
from maitred.engine.intake import make_pooled
from maitred.fleet.told import ToldUsage, usage_header
from maitred.gate.gate import Ask, Lease, TimeLimits

if TYPE_CHECKING:
    from maitred.engine.vectors import MakeRequest, PooledRequests  # which need numpy

T = TypeVar("T")


class Pooled(NamedTuple, Generic[T]):
    """Answers of requests that pool."""

    made: Callable[[], T]  # of their answers
    num_bytes: int  # of these
    num_tokens: int
    headers: tuple[Header, ...]  # what a router wants to hear


async def pooled(
    app: App,
    exchange: Exchange,
    ask: Callable[[MakeRequest], PooledRequests[T]],
    *,
    num_texts: int,
    priority: int | None,
    limits: TimeLimits,
    name: str,
) -> Pooled[T]:
    """Have `ask` make requests, in a thread, and answer them: those of one call share steps with all others.

    Raises RequestError, as `Gate.enter` and `Gate.admit`, and as a generation that fails. `name` is what `ask` calls a
    text that it cannot take.
    """
    salt = cache_salt(app, exchange.caller, "")

    def make(*of_request: object, **options: object) -> RequestSpec:
        return make_pooled(
            app.model,
            *of_request,  # type: ignore[arg-type]
            request_id=f"{next(app.request_numbers):x}.pool",
            now=app.clock.now(),
            terms=limits.asked(app.clock.now()),
            cache_salt=salt,
            **options,  # type: ignore[arg-type]
        )

    def asked() -> PooledRequests[T]:
        try:
            return ask(make)
        except RequestError as error:
            error.param = name if error.param == "prompt" else error.param
            raise

    with app.in_flight.answering():
        lease = enter(app, exchange.caller, Ask(num_samples=num_texts, priority=priority, limits=limits))
        charges: list[Charges] = []
        try:
            async with app.in_flight.watch(exchange):
                wanted = await app.text.run(exchange.num_body_bytes, asked)
                answers = await _answered(app, lease, wanted.requests, charges)
        finally:
            num_used = sum(each.num_prompt_tokens for each in charges)
            lease.end(num_used)
            if not exchange.caller.is_anybody:
                app.observer.metrics.tenants.left(exchange.caller.quota, num_used, 0)
    num_tokens = sum(request.num_prompt_tokens for request in wanted.requests)
    exchange.log |= {"model": app.model.name, "prompts": len(answers), "prompt_tokens": num_tokens}
    compute_us, num_cached = (sum(each.compute_us for each in charges), sum(each.num_cached_tokens for each in charges))
    told = usage_header(ToldUsage(num_tokens, num_cached, 0, compute_us))
    headers = (told,) if exchange.from_router else ()
    return Pooled(lambda: wanted.finished(answers), sum(map(len, answers)), num_tokens, headers)


async def _answered(app: App, lease: Lease, requests: Sequence[RequestSpec], charges: list[Charges]) -> list[bytes]:
    """Submit all, then wait for one after the other; the first failure gives the others up."""
    specs, answers = admitted(app, lease, requests), []
    async with AsyncExitStack() as running:
        streams = [app.replica.submit(spec)[0] for spec in specs]
        for stream in streams:
            running.push_async_callback(stream.aclose)  # type: ignore[attr-defined]
        for stream in streams:
            last = RequestProgress("")
            async for last in stream:
                if last.charges is not None and last.finish_reason is not None:
                    charges.append(last.charges)
            if last.finish_reason is not FinishReason.STOP:
                raise failure_of(app, last)
            answers.append(last.vector)
    return answers
