"""The way of every request that generates, whatever its dialect: its tenant's lease, engine, last byte."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, nullcontext
from functools import partial
from typing import NamedTuple

from maitred.api.generate.dialect import Dialect, GenerationAsk, Prompt, StreamWriter, time_limits
from maitred.api.generate.generation import Generation
from maitred.api.generate.lease import HttpLease, cache_salt, leased
from maitred.api.generate.outcome import Outcome, timing_parts_ms
from maitred.api.generate.resumption import Resumption
from maitred.api.generate.telling import Teller, fingerprint_of, told_usage
from maitred.api.http.app import App
from maitred.api.http.exchange import (
    ARGUMENTS_EMPTIED,
    JSON_HEADERS,
    SCHEMA_IGNORED,
    EventStream,
    Exchange,
    Header,
    names_told,
)
from maitred.api.http.fleet_headers import KV_EXPECTED, placed_by_router, time_left
from maitred.api.http.results import Wanted
from maitred.api.ops.fleet_feed import NoteTokens
from maitred.core.errors import InvalidRequest, RequestError
from maitred.core.request import MAX_SEED, RequestSpec, Terms
from maitred.engine.intake import make_requests, random_seed
from maitred.fleet.told import SEED, TELL, StreamHead, ToldUsage, usage_header
from maitred.gate.terms import TimeLimits, cap_max_tokens

# in one answer; all are kept until it ends, some 300 bytes each, and writing so many takes 0.2 s
MAX_PROMPT_LOGPROBS = 256 * 1024
MANY_LOGPROBS = 4096  # 3 ms to write, 0.8 us each: beside the event loop


async def complete(dialect: Dialect, app: App, exchange: Exchange) -> None:
    """Decode, tokenise, generate; answer whole or as a stream."""
    await generate(app, exchange, *await _decoded(dialect, app, exchange))


async def generate(
    app: App,
    exchange: Exchange,
    ask: GenerationAsk,
    wanted: Wanted | None,
    note_tokens: NoteTokens | None,
    resumption: Resumption | None = None,
) -> None:
    """Generate and send the answer to its last byte; a `resumption` continues where another replica left off."""
    limits = time_limits(ask.limits, exchange.headers).and_also(time_left(exchange.headers))
    salt = cache_salt(app, exchange.caller, ask.cache_salt)
    new_seed = resumption.seeds() if resumption is not None else _seeds(app, exchange)
    if KV_EXPECTED in exchange.headers:
        await _expect_kv(app, exchange, ask, partial(_make_batches, app, ask, salt, limits, new_seed, note_tokens))
        return
    with _using(app, ask), leased(app, exchange.caller, ask, limits) as lease, app.kept_logprobs.answer() as keep:
        if await app.results.replay(exchange, wanted):
            _replayed(app, exchange, ask, lease)
            return
        events = EventStream(exchange, silence_s=app.config.sse_keep_alive_s) if ask.stream else None
        async with app.in_flight.watch(exchange, events), AsyncExitStack() as following:
            work = partial(_make_batches, app, ask, salt, limits, new_seed, note_tokens)
            batches = await _tokenised(app, ask, exchange.num_body_bytes, work)
            if not ask.keeps_text:
                exchange.large_bodies.release(exchange)
            shape = ask.shape_found
            if shape.ignored:
                exchange.told += ((SCHEMA_IGNORED, names_told(shape.ignored)),)
            if shape.emptied:
                exchange.told += ((ARGUMENTS_EMPTIED, names_told(shape.emptied)),)
            app.ignored_fields.heed(exchange, shape.unknown, ())
            batches = placed_by_router(exchange.headers, batches)
            batches, ended = _placed(app, lease.admit(batches), lease, resumption)
            if app.fleet.follows(exchange.headers):
                specs = itertools.chain.from_iterable(batches)
                following.enter_context(app.fleet.unfinished.following(exchange.request_id, specs, ended))
            generation = Generation(app, batches, score_only=ask.score_only, ended=ended, marks=shape.marks)
            outcome = exchange.outcome = lease.outcome = generation.outcome
            exchange.paces = [sample.pace for sample in outcome.samples]
            if events is not None:
                exchange.goes_on_elsewhere = _is_told(app, exchange)
                writer = ask.answer.stream(outcome)
                if resumption is not None:
                    await app.text.run_long(partial(resumption.replay, outcome, writer))
                await _stream(generation, events, writer, _teller(app, exchange, ask, outcome))
            else:
                await generation.gather(keep)
        usage = outcome.usage()
        exchange.is_handed_over = usage.handover not in ("", "local")
        exchange.log |= {"prompt_tokens": usage.num_prompt_tokens, "completion_tokens": usage.num_generated_tokens}
        lease.end()
        if events is None:
            takes_long, write = outcome.num_logprobs > MANY_LOGPROBS, partial(ask.answer.whole, outcome)
            whole = await app.text.run_long(write) if takes_long else write()
            headers = (*JSON_HEADERS, *_server_timing(outcome), *usage_for_router(app, exchange, told_usage(outcome)))
            await exchange.answer(whole, 200, headers)
        app.results.keep(exchange, wanted)


async def _tokenised(
    app: App, ask: GenerationAsk, num_bytes: int, work: Callable[[], list[list[RequestSpec]]]
) -> list[list[RequestSpec]]:
    if ask.is_shaped:
        return await app.text.run_shaped(work)
    return await app.text.run(num_bytes, work, may_take_long=ask.may_take_long)


async def _expect_kv(
    app: App, exchange: Exchange, ask: GenerationAsk, work: Callable[[], list[list[RequestSpec]]]
) -> None:
    """A router says that the prompts are computed elsewhere now; they are answered here when they come again."""
    batches = await _tokenised(app, ask, exchange.num_body_bytes, work)
    for first, *_ in placed_by_router(exchange.headers, batches):
        if first.kv_from:
            app.replica.expect_kv(first, first.kv_from)
    await exchange.answer_json({})


def _using(app: App, ask: GenerationAsk) -> AbstractContextManager[None]:
    """Keep the request's adapter loaded until the request has its answer."""
    return app.adapters.using(ask.adapter) if app.adapters is not None else nullcontext()


class _Decoded(NamedTuple):
    ask: GenerationAsk
    wanted: Wanted | None  # of the result cache
    note_tokens: NoteTokens | None


async def _decoded(dialect: Dialect, app: App, exchange: Exchange) -> _Decoded:
    """Decode the body. Its bytes are kept only while routers listen, and then until its prefix keys are known."""
    body = await dialect.read(exchange)
    async with exchange.turn():
        ask = dialect.decode(app, exchange, body)
        noting = app.fleet.noting(exchange.scope["path"], body, exchange.headers)
        return _Decoded(ask, _wanted(app, exchange, ask, body), noting)


def _wanted(app: App, exchange: Exchange, ask: GenerationAsk, body: bytes) -> Wanted | None:
    """What the result cache may answer; None too where a quota may cut the answer short: another time it is longer."""
    if _is_told(app, exchange):  # it keeps answers itself, without what is told beside them
        return None
    tenant, sampling = exchange.caller.tenant, ask.sampling
    limits = tenant.limits
    if sampling.max_tokens is None and (limits.tokens_per_minute, limits.token_budget) != (None, None):
        return None
    digest = ask.adapter.digest if ask.adapter is not None else ""
    revision = f"{app.model.revision}:{digest}:{tenant.default_max_tokens}"
    return app.results.wanted(exchange, body, revision=revision, temperature=sampling.temperature, seed=sampling.seed)


def _replayed(app: App, exchange: Exchange, ask: GenerationAsk, lease: HttpLease) -> None:
    """A request of its tenant's, and no tokens: nothing was computed."""
    caller = exchange.caller
    spec = RequestSpec(
        request_id=f"{next(app.request_numbers):x}.{exchange.request_id}",
        arrived_at=app.clock.now(),
        num_prompt_tokens=0,
        max_tokens=0,
        terms=Terms(tenant=caller.tenant.name, key_id=caller.key_id, priority=lease.priority),
        adapter=ask.adapter.key if ask.adapter is not None else "",
    )
    app.on_replayed(spec)


def _placed(
    app: App, batches: list[list[RequestSpec]], lease: HttpLease, resumption: Resumption | None
) -> tuple[list[list[RequestSpec]], frozenset[str]]:
    """The batches, with where each sample resumes, and the ids of samples that have ended."""
    if resumption is None:
        return batches, frozenset()
    batches = resumption.placed(batches, app.clock.now())
    for request_id in resumption.ended:
        lease.sample_ended(request_id)
    return batches, resumption.ended


def _seeds(app: App, exchange: Exchange) -> Callable[[], int]:
    """Seeds for prompts that bring none: from the router's, if it sent one, else drawn here. Raises InvalidRequest."""
    sent = exchange.headers.get(SEED)
    if sent is None or not app.fleet_token.is_shown_by(exchange.headers):
        return random_seed
    if not sent.isdigit() or len(sent) > len(str(MAX_SEED)):
        raise InvalidRequest(f"the header {SEED.decode()} must be an integer from 0 to {MAX_SEED}")
    return map(MAX_SEED.__and__, itertools.count(int(sent))).__next__


def _is_told(app: App, exchange: Exchange) -> bool:
    return TELL in exchange.headers and app.fleet_token.is_shown_by(exchange.headers)


def _teller(app: App, exchange: Exchange, ask: GenerationAsk, outcome: Outcome) -> Teller | None:
    """Reports tokens to a router that shows the fleet's token and asks for them; None for other clients."""
    if not _is_told(app, exchange):
        return None
    firsts = [batch[0] for batch in outcome.batches]
    head = StreamHead(
        id=ask.answer.id,
        created=ask.answer.created,
        fingerprint=fingerprint_of(app.model, ask.adapter),
        seeds=tuple(spec.seed for spec in firsts),
        max_tokens=tuple(spec.max_tokens for spec in firsts),
        num_prompt_tokens=sum(spec.num_prompt_tokens for spec in firsts),
    )
    return Teller(head, outcome)


async def _stream(generation: Generation, events: EventStream, writer: StreamWriter, teller: Teller | None) -> None:
    """Send what `writer` makes of every delta, then the end."""
    unfinished = generation.num_running
    last = b"" if unfinished else writer.last()
    async with aclosing(generation.deltas()) as deltas:
        async for sample, delta in deltas:
            unfinished -= delta.finish_reason is not None
            written = writer.delta(sample, delta)
            if not unfinished:
                written += writer.last()
            if teller is not None:
                num_more = 0 if unfinished else events.num_end_bytes
                written = teller.frame(sample, delta, written, num_more, is_last=not unfinished)
            if not unfinished:
                last = written  # goes out with the end of the stream, in one write
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


def usage_for_router(app: App, exchange: Exchange, usage: ToldUsage) -> tuple[Header, ...]:
    """The usage header, by which a router bills; none for other clients."""
    return (usage_header(usage),) if app.fleet_token.is_shown_by(exchange.headers) else ()


def _make_batches(
    app: App,
    ask: GenerationAsk,
    cache_salt: str,
    limits: TimeLimits,
    new_seed: Callable[[], int],
    note_tokens: NoteTokens | None,
) -> list[list[RequestSpec]]:
    """The samples of each prompt. Ids are unique even when clients repeat theirs. Raises RequestError."""
    try:
        prompts = ask.prompts()
        ask.shape_found = ask.shape()
        batches = _batches(app, ask, prompts, cache_salt, limits, new_seed)
    except RequestError as error:
        error.param = ask.field_names.get(error.param or "", error.param)
        raise
    if note_tokens is not None and prompts:  # of several the first one's keys stand for all
        note_tokens(prompts[0], batches[0][0])
    if not ask.keeps_text:
        prompts.clear()
    return [cap_max_tokens(batch, ask.default_max_tokens) for batch in batches]


def _batches(
    app: App,
    ask: GenerationAsk,
    prompts: Sequence[Prompt],
    cache_salt: str,
    limits: TimeLimits,
    new_seed: Callable[[], int],
) -> list[list[RequestSpec]]:
    now, num_tokens, prediction = app.clock.now(), 0, ask.prediction()
    terms = limits.asked(now)
    batches: list[list[RequestSpec]] = []
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
            )
        except RequestError as error:
            if error.param == "prompt" and len(prompts) > 1:
                error.param = f"prompt[{position}]"
            raise
        batches.append(batch)
        num_tokens += batch[0].num_prompt_tokens * len(batch)
        _check_prompt_logprobs(num_tokens, ask.sampling.prompt_logprobs)
    return batches


def _check_prompt_logprobs(num_tokens: int, num_top: int | None) -> None:
    """Raise InvalidRequest once `num_tokens` of prompts have more log-probabilities than one answer may hold."""
    if num_top is not None and num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{num_tokens} tokens of prompts (for every sample anew) with {num_top + 1} log-probabilities each are "
            f"{num_tokens * (num_top + 1)}; at most {MAX_PROMPT_LOGPROBS} in one answer: ask for fewer of each token, "
            "or send fewer tokens at a time",
            param="prompt_logprobs",
        )
