"""The way of every request that generates, whatever its dialect: terms, lease, tokens, admission, stream, answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing
from functools import partial

from maitred.api.generate.dialect import LIMIT_HEADERS, Dialect, GenerationAsk, Prompt, StreamWriter, time_limits
from maitred.api.generate.generation import Generation
from maitred.api.generate.lease import HttpLease, cache_salt, leased
from maitred.api.generate.outcome import Outcome, timing_parts_ms
from maitred.api.generate.ways import Batches, Way, ways_of
from maitred.api.http.app import App
from maitred.api.http.errors import renamed
from maitred.api.http.exchange import ARGUMENTS_EMPTIED, JSON_HEADERS, SCHEMA_IGNORED, EventStream, Exchange
from maitred.core.errors import InvalidRequest, RequestError
from maitred.engine.intake import make_requests, random_seed
from maitred.gate.gate import NO_LIMITS, TimeLimits, cap_max_tokens
from maitred.text.shape import Shape

# in one answer; all are kept until it ends, some 300 bytes each, and writing so many takes 0.2 s
MAX_PROMPT_LOGPROBS = 256 * 1024
MANY_LOGPROBS = 4096  # 3 ms to write, 0.8 us each: beside the event loop


async def complete(dialect: Dialect, app: App, exchange: Exchange) -> None:
    """Decode, tokenise, generate; answer whole or as a stream."""
    await generate(app, exchange, *await _decoded(dialect, app, exchange, await dialect.read(exchange)))


async def complete_body(dialect: Dialect, app: App, exchange: Exchange, body: bytes) -> None:
    """Answer a body that was read, as `complete`."""
    await generate(app, exchange, *await _decoded(dialect, app, exchange, body))


async def _decoded(dialect: Dialect, app: App, exchange: Exchange, body: bytes) -> tuple[GenerationAsk, Sequence[Way]]:
    """What is asked. The body's bytes are not kept, but by ways that need them."""
    async with exchange.turn():
        ask = dialect.decode(app, exchange, body)
        return ask, ways_of(app, exchange, ask, body)


async def generate(app: App, exchange: Exchange, ask: GenerationAsk, ways: Sequence[Way]) -> None:
    """Generate and send the answer to its last byte; `ways` are the features that the request takes."""
    limits = _limits(exchange, ask, ways)
    tokenise = partial(_tokenised, app, exchange, ask, limits, ways)
    for way in ways:
        if await way.instead(tokenise):
            return
    with ExitStack() as held:
        if ask.adapter is not None and app.adapters is not None:  # it stays loaded until the request has its answer
            held.enter_context(app.adapters.using(ask.adapter))
        lease = held.enter_context(leased(app, exchange.caller, ask, limits))
        for way in ways:
            if await way.replayed(lease):
                return
        keep = held.enter_context(app.kept_logprobs.answer()) if ask.keeps_logprobs else None
        events = EventStream(exchange, silence_s=app.config.sse_keep_alive_s) if ask.stream else None
        async with app.in_flight.watch(exchange, events), AsyncExitStack() as running:
            batches = await tokenise()
            _tell_shape(app, exchange, ask.shape_found)
            batches = _admitted(batches, lease, ways, running)
            marks = ask.shape_found.marks
            generation = Generation(app, batches, score_only=ask.score_only, ended=lease.ended, marks=marks)
            outcome = exchange.outcome = lease.outcome = generation.outcome
            exchange.paces = [sample.pace for sample in outcome.samples]
            if events is None:
                await generation.gather(keep)
            else:
                writer = ask.answer.stream(outcome)
                for way in ways:
                    writer = await way.begun(generation, writer, events)
                await _stream(generation, events, writer)
        usage = outcome.usage()
        exchange.is_handed_over = usage.handover not in ("", "local")
        exchange.log |= {"prompt_tokens": usage.num_prompt_tokens, "completion_tokens": usage.num_generated_tokens}
        lease.end()
        if events is None:
            takes_long, write = outcome.num_logprobs > MANY_LOGPROBS, partial(ask.answer.whole, outcome)
            whole = await app.text.run_long(write) if takes_long else write()
            told = (header for way in ways for header in way.headers(outcome))
            await exchange.answer(whole, 200, (*JSON_HEADERS, *_server_timing(outcome), *told))
        for way in ways:
            way.ended()


def _limits(exchange: Exchange, ask: GenerationAsk, ways: Sequence[Way]) -> TimeLimits:
    """Time limits that the request names, and its ways'. Raises InvalidRequest."""
    limits = NO_LIMITS
    if ask.limits is not None or not LIMIT_HEADERS.isdisjoint(exchange.headers):
        limits = time_limits(ask.limits, exchange.headers)
    for way in ways:
        limits = limits.and_also(way.limits())
    return limits


async def _tokenised(
    app: App, exchange: Exchange, ask: GenerationAsk, limits: TimeLimits, ways: Sequence[Way]
) -> Batches:
    """The samples of each prompt, made in a thread where that takes long. Raises RequestError."""
    salt = cache_salt(app, exchange.caller, ask.cache_salt)
    new_seed = next((seeds for way in ways if (seeds := way.seeds()) is not None), random_seed)
    work = partial(_make_batches, app, ask, salt, limits, new_seed, ways)
    if ask.is_shaped:
        batches = await app.text.run_shaped(work)
    else:
        batches = await app.text.run(exchange.num_body_bytes, work, may_take_long=ask.may_take_long)
    if not ask.keeps_text and exchange.is_large:
        exchange.large_bodies.release(exchange)
    return batches


def _admitted(batches: Batches, lease: HttpLease, ways: Sequence[Way], running: AsyncExitStack) -> Batches:
    """The samples of each prompt in the gate's queue, to be submitted now. Raises as `Gate.admit`."""
    for way in ways:
        batches = way.placed(batches)
    batches = lease.admit(batches)
    for way in ways:
        batches = way.admitted(batches, lease)
    for way in ways:
        running.enter_context(way.running(batches, lease))
    return batches


def _tell_shape(app: App, exchange: Exchange, shape: Shape) -> None:
    """Tell what of schemas and calls was left out. Raises InvalidRequest where the server is strict."""
    exchange.tell(SCHEMA_IGNORED, shape.ignored)
    if shape.emptied or shape.unknown:
        names = exchange.field_names()
        emptied = [re.sub(r"\[(\d+)\]", r".\1", renamed(name, names)) for name in shape.emptied]
        exchange.tell(ARGUMENTS_EMPTIED, emptied)
        app.ignored_fields.heed(exchange, [renamed(name, names) for name in shape.unknown], ())


async def _stream(generation: Generation, events: EventStream, writer: StreamWriter) -> None:
    """Send what `writer` makes of every delta, then the end."""
    unfinished = generation.num_running
    last = b"" if unfinished else writer.last()
    async with aclosing(generation.deltas()) as deltas:
        async for sample, delta in deltas:
            unfinished -= delta.finish_reason is not None
            written = writer.delta(sample, delta)
            if not unfinished:
                last = written + writer.last()  # goes out with the end of the stream, in one write
            elif written:
                await events.write(written)
    await events.done(last)


def _server_timing(outcome: Outcome) -> tuple[tuple[bytes, bytes], ...]:
    """The header `Server-Timing` (W3C), which browsers and proxies show: where the time in the engine went."""
    timing = outcome.timing()
    if timing is None:
        return ()
    parts = ", ".join(f"{name};dur={ms:g}" for name, ms in timing_parts_ms(timing).items())
    return ((b"server-timing", parts.encode()),)


def _make_batches(
    app: App, ask: GenerationAsk, cache_salt: str, limits: TimeLimits, new_seed: Callable[[], int], ways: Sequence[Way]
) -> Batches:
    """The samples of each prompt. Ids are unique even when clients repeat theirs. Raises RequestError."""
    app.model.check_generates()
    prompts = ask.prompts()
    ask.shape_found = ask.shape()
    batches = _batches(app, ask, prompts, cache_salt, limits, new_seed)
    for way in ways if prompts else ():
        way.tokenised(prompts[0], batches[0][0])
    if not ask.keeps_text:
        prompts.clear()
    if ask.default_max_tokens is None:
        return batches
    return [cap_max_tokens(batch, ask.default_max_tokens) for batch in batches]


def _batches(
    app: App,
    ask: GenerationAsk,
    prompts: Sequence[Prompt],
    cache_salt: str,
    limits: TimeLimits,
    new_seed: Callable[[], int],
) -> Batches:
    now, num_tokens, prediction = app.clock.now(), 0, ask.prediction() if ask.prediction is not None else ""
    terms = limits.asked(now)
    batches: Batches = []
    for position, prompt in enumerate(prompts):
        try:
            batch = make_requests(
                app.model,
                prompt,
                ask.sampling,
                request_id=f"{next(app.request_numbers):x}.{ask.id}",
                now=now,
                cache_salt=cache_salt,
                terms=terms,
                add_special_tokens=ask.add_special_tokens,
                new_seed=new_seed,
                grammar=ask.shape_found.grammar,
                thinking=ask.shape_found.thinking,
                prediction=prediction,
                adapter=ask.adapter,
                cuts_max_tokens=ask.cuts_max_tokens,
            )
        except RequestError as error:
            if error.param == "prompt" and len(prompts) > 1:
                error.param = f"prompt[{position}]"
            raise
        batches.append(batch)
        num_tokens += batch[0].num_prompt_tokens * len(batch)
        if ask.sampling.prompt_logprobs is not None:
            _check_prompt_logprobs(num_tokens, ask.sampling.prompt_logprobs)
    return batches


def _check_prompt_logprobs(num_tokens: int, num_top: int) -> None:
    """Raise InvalidRequest once `num_tokens` of prompts have more log-probabilities than one answer may hold."""
    if num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{num_tokens} tokens of prompts (for every sample anew) with {num_top + 1} log-probabilities each are "
            f"{num_tokens * (num_top + 1)}; at most {MAX_PROMPT_LOGPROBS} in one answer: ask for fewer of each token, "
            "or send fewer tokens at a time",
            param="prompt_logprobs",
        )
