"""The way that both completion routes go once their bodies are understood: the tenant's lease, engine, last byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from maitred.api.dialects.openai.requests import note_usage, server_timing
from maitred.api.dialects.openai.sampling import wanted_usage
from maitred.api.dialects.openai.schemas import GenerationFields
from maitred.api.generate.generation import Generation
from maitred.api.generate.lease import cache_salt, leased
from maitred.api.generate.time_limits import time_limits
from maitred.api.http.edge import Edge, RequestOptions
from maitred.api.http.exchange import Exchange
from maitred.api.http.sse import EventStream
from maitred.request import RequestSpec


class Answer(Protocol):
    """Writes what came out, as the route's clients read it."""

    def whole(self, generation: Generation) -> msgspec.Struct: ...

    async def stream(self, generation: Generation, events: EventStream, *, usage: bool, continuous: bool) -> None: ...


async def complete(
    edge: Edge,
    exchange: Exchange,
    body: GenerationFields,
    answer: Answer,
    make_batches: Callable[[RequestOptions], list[list[RequestSpec]]],
    *,
    num_samples: int,
    score_only: bool = False,
) -> None:
    """Generate, and answer whole or as a stream. `make_batches` renders and tokenises, in a thread: the samples of each
    prompt, `num_samples` in all. It keeps no text but what is echoed.
    """
    usage, continuous = wanted_usage(body)
    limits = time_limits(body, exchange.headers)
    with leased(edge, exchange, body, num_samples, limits) as lease, edge.kept_logprobs.answer() as keep:
        options = RequestOptions(
            cache_salt=cache_salt(edge, exchange.caller, body),
            limits=limits,
            note_tokens=edge.fleet.noting(exchange.take_sent(), exchange.headers),
        )
        events = EventStream(exchange, silence_s=edge.config.sse_keep_alive_s) if body.stream else None
        async with edge.watch(exchange, events):
            batches = await edge.in_thread(exchange, make_batches, options)
            if not body.echo:
                exchange.large_bodies.release(exchange)
            batches = lease.admit(batches)
            generation = exchange.generation = lease.generation = Generation(edge, batches, score_only=score_only)
            if events is not None:
                await answer.stream(generation, events, usage=usage, continuous=continuous)
            else:
                await generation.gather(keep)
        note_usage(exchange, generation)
        lease.end()
        if events is None:
            whole = await edge.written(generation.num_logprobs, partial(answer.whole, generation))
            await exchange.answer_json(whole, headers=server_timing(generation))
