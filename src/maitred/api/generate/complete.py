"""The way of every request that generates, whatever its dialect: its tenant's lease, engine, last byte."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial

from maitred.api.generate.batches import make_batches
from maitred.api.generate.dialect import Dialect, GenerationAsk, StreamWriter
from maitred.api.generate.generation import Generation, timing_parts_ms
from maitred.api.generate.lease import cache_salt, leased
from maitred.api.generate.time_limits import time_limits
from maitred.api.http.edge import Edge
from maitred.api.http.exchange import JSON_HEADERS, Exchange
from maitred.api.http.sse import EventStream


async def complete(dialect: Dialect, edge: Edge, exchange: Exchange) -> None:
    """Decode, tokenise, generate; answer whole or as a stream."""
    ask = await _decoded(dialect, edge, exchange)
    limits, salt = time_limits(ask.limits, exchange.headers), cache_salt(edge, exchange.caller, ask.cache_salt)
    with leased(edge, exchange.caller, ask, limits) as lease, edge.kept_logprobs.answer() as keep:
        events = EventStream(exchange, silence_s=edge.config.sse_keep_alive_s) if ask.stream else None
        async with edge.watch(exchange, events):
            work = partial(make_batches, edge, ask, salt, limits)
            batches = await edge.text_work(exchange, work, may_take_long=ask.may_take_long)
            if not ask.keeps_text:
                exchange.large_bodies.release(exchange)
            batches = lease.admit(batches)
            generation = exchange.generation = lease.generation = Generation(edge, batches, score_only=ask.score_only)
            if events is not None:
                await _stream(generation, events, ask.answer.stream(generation))
            else:
                await generation.gather(keep)
        usage = generation.usage()
        exchange.log |= {"prompt_tokens": usage.num_prompt_tokens, "completion_tokens": usage.num_generated_tokens}
        lease.end()
        if events is None:
            whole = await edge.written(generation.num_logprobs, partial(ask.answer.whole, generation))
            await exchange.answer(whole, 200, (*JSON_HEADERS, *_server_timing(generation)))


async def _decoded(dialect: Dialect, edge: Edge, exchange: Exchange) -> GenerationAsk:
    """Nobody keeps the body as it was sent."""
    body = await exchange.json_body()
    async with exchange.turn():
        return dialect.decode(edge, exchange, body)


async def _stream(generation: Generation, events: EventStream, writer: StreamWriter) -> None:
    """Send what `writer` makes of every delta, then the end."""
    unfinished, last = len(generation.samples), b""
    async with aclosing(generation.deltas()) as deltas:
        async for sample, delta in deltas:
            unfinished -= delta.finish_reason is not None
            written = writer.delta(sample, delta)
            if not unfinished:
                last += written  # goes out with what follows, in one write
            elif written:
                await events.write(written)
    await events.done(last + writer.last())


def _server_timing(generation: Generation) -> tuple[tuple[bytes, bytes], ...]:
    """The header `Server-Timing` (W3C), which browsers and proxies show: where the time in the engine went."""
    timing = generation.timing()
    if timing is None:
        return ()
    parts = ", ".join(f"{name};dur={ms:g}" for name, ms in timing_parts_ms(timing).items())
    return ((b"server-timing", parts.encode()),)
