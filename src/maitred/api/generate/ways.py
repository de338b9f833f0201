"""Ways: what features do in a request that generates. A request takes those that it or its server asks for."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain

import msgspec

from maitred.api.generate.dialect import GenerationAsk, Prompt, StreamWriter
from maitred.api.generate.generation import Generation
from maitred.api.generate.lease import HttpLease
from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.http.app import App
from maitred.api.http.exchange import EventStream, Exchange, Header
from maitred.api.http.fleet_headers import KV_EXPECTED, PROMPT_ONLY, placed_by_router, time_left
from maitred.api.http.results import WantedAnswer
from maitred.api.ops.fleet_feed import identity
from maitred.core.errors import InvalidRequest
from maitred.core.request import MAX_SEED, Charges, RequestSpec, ResumePoint, Terms
from maitred.core.step import RequestProgress, TokenLogprobs
from maitred.engine.intake import ServedModel
from maitred.engine.model_facts import AdapterFacts
from maitred.engine.output import SampleText, TextDelta
from maitred.fleet.told import (
    SEED,
    TELL,
    ResumeRequest,
    StreamHead,
    ToldSample,
    ToldUsage,
    frame,
    head_line,
    usage_header,
)
from maitred.gate.gate import NO_LIMITS, TimeLimits
from maitred.storage.capture import Capture

Batches = list[list[RequestSpec]]
Tokenise = Callable[[], Awaitable[Batches]]


class Way:
    """A feature's part in one request that generates: nothing, unless it says so. Hooks stand in the order of their
    calls.
    """

    def limits(self) -> TimeLimits:
        """Time limits besides the client's own."""
        return NO_LIMITS

    def seeds(self) -> Callable[[], int] | None:
        """The seeds of prompts that bring none; None draws them."""
        return None

    async def instead(self, tokenise: Tokenise) -> bool:
        """Answer the request before it takes a lease; whether it has its answer."""
        return False

    async def replayed(self, lease: HttpLease) -> bool:
        """Answer the request without an engine; whether it has its answer."""
        return False

    def tokenised(self, prompt: Prompt, spec: RequestSpec) -> None:
        """Take the first prompt and its first sample; called in a thread."""

    def placed(self, batches: Batches) -> Batches:
        """The samples of each prompt, before they are admitted."""
        return batches

    def admitted(self, batches: Batches, lease: HttpLease) -> Batches:
        """The same, when they are admitted."""
        return batches

    def running(self, batches: Batches, lease: HttpLease) -> AbstractContextManager[None]:
        """Around all that is left."""
        return nullcontext()

    async def begun(self, generation: Generation, writer: StreamWriter, events: EventStream) -> StreamWriter:
        """The writer of the stream that begins."""
        return writer

    def headers(self, outcome: Outcome) -> tuple[Header, ...]:
        """Headers of an answer that is no stream."""
        return ()

    def ended(self) -> None:
        """The last byte of a complete answer was sent."""


def ways_of(app: App, exchange: Exchange, ask: GenerationAsk, body: bytes) -> list[Way]:
    """Ways that a request takes; a plain one, to a server without these features, takes none."""
    ways: list[Way] = []
    if app.fleet.is_on:
        ways.append(Noted(app, exchange, exchange.scope["path"], body))
    if app.results.is_on and (wanted := _wanted(app, exchange, ask, body)) is not None:
        ways.append(Cached(app, exchange, ask, wanted))
    if exchange.from_router:
        ways.append(FromRouter(app, exchange, ask))
    if app.capture is not None and _is_captured(exchange, ask):
        ways.append(Capturing(app.capture, exchange, ask.adapter.name if ask.adapter is not None else app.model.name))
    return ways


# -- prefixes that routers are told of


class Noted(Way):
    """A body that is kept until it is known which blocks its prefix keys end in; for routers that listen."""

    def __init__(self, app: App, exchange: Exchange, path: str, body: bytes) -> None:
        self._note = app.fleet.noting(path, body, exchange.headers if exchange.from_router else {})

    def tokenised(self, prompt: Prompt, spec: RequestSpec) -> None:
        self._note(prompt, spec)


# -- the result cache


class Cached(Way):
    """An answer that the result cache may have, or keep."""

    def __init__(self, app: App, exchange: Exchange, ask: GenerationAsk, wanted: WantedAnswer) -> None:
        self._app, self._exchange, self._ask, self._wanted = app, exchange, ask, wanted

    async def replayed(self, lease: HttpLease) -> bool:
        app, exchange, adapter = self._app, self._exchange, self._ask.adapter
        if not await app.results.replay(exchange, self._wanted):
            return False
        caller = exchange.caller
        app.on_replayed(  # a request of its tenant's, and no tokens: nothing was computed
            RequestSpec(
                request_id=f"{next(app.request_numbers):x}.{exchange.request_id}",
                arrived_at=app.clock.now(),
                num_prompt_tokens=0,
                max_tokens=0,
                terms=Terms(tenant=caller.tenant.name, key_id=caller.key_id, priority=lease.priority),
                adapter=adapter.key if adapter is not None else "",
            )
        )
        return True

    def ended(self) -> None:
        self._app.results.keep(self._exchange, self._wanted)


def _wanted(app: App, exchange: Exchange, ask: GenerationAsk, body: bytes) -> WantedAnswer | None:
    """What the result cache may answer; None too where a quota may cut the answer short: another time it is longer."""
    if exchange.from_router and TELL in exchange.headers:  # it keeps answers itself, without what is told beside them
        return None
    tenant, sampling = exchange.caller.tenant, ask.sampling
    limits = tenant.limits
    if sampling.max_tokens is None and (limits.tokens_per_minute, limits.token_budget) != (None, None):
        return None
    digest = ask.adapter.digest if ask.adapter is not None else ""
    revision = f"{app.model.revision}:{digest}:{tenant.default_max_tokens}"
    return app.results.wanted(exchange, body, revision=revision, temperature=sampling.temperature, seed=sampling.seed)


# -- captured traffic


def _is_captured(exchange: Exchange, ask: GenerationAsk) -> bool:
    shows_answer = not ask.score_only and PROMPT_ONLY not in exchange.headers
    return shows_answer and exchange.caller.tenant.lets_capture(ask.store)


class Capturing(Way):
    """A complete answer whose tokens are kept to learn from."""

    def __init__(self, capture: Capture, exchange: Exchange, model: str) -> None:
        self._capture, self._exchange, self._model = capture, exchange, model

    async def begun(self, generation: Generation, writer: StreamWriter, events: EventStream) -> StreamWriter:
        return KeepingStream(writer, lambda sample, delta: sample.token_ids.extend(delta.token_ids))

    def ended(self) -> None:
        assert self._exchange.outcome is not None
        for sample in self._exchange.outcome.samples:
            tenant, prompt = self._exchange.caller.tenant.name, sample.request.prompt_token_ids
            self._capture.note(tenant, self._model, prompt, sample.token_ids)


class KeepingStream:
    """A stream of which samples `keep` a part, as of a whole answer."""

    def __init__(self, writer: StreamWriter, keep: Callable[[Sample, TextDelta], None]) -> None:
        self._writer, self._keep, self.last = writer, keep, writer.last

    def delta(self, sample: Sample, delta: TextDelta) -> bytes:
        self._keep(sample, delta)
        return self._writer.delta(sample, delta)


# -- a router in front


class FromRouter(Way):
    """A request of a router that shows the fleet's token: limits, seeds and KV are the router's, and tokens and usage
    are told to it.
    """

    def __init__(self, app: App, exchange: Exchange, ask: GenerationAsk) -> None:
        self._app, self._exchange, self._ask, self._headers = app, exchange, ask, exchange.headers

    def limits(self) -> TimeLimits:
        return time_left(self._headers)

    def seeds(self) -> Callable[[], int] | None:
        """Raises InvalidRequest."""
        sent = self._headers.get(SEED)
        if sent is None:
            return None
        if not sent.isdigit() or len(sent) > len(str(MAX_SEED)):
            raise InvalidRequest(f"the header {SEED.decode()} must be an integer from 0 to {MAX_SEED}")
        return map(MAX_SEED.__and__, itertools.count(int(sent))).__next__

    async def instead(self, tokenise: Tokenise) -> bool:
        """Prompts that are computed elsewhere now are answered here when they come again."""
        if KV_EXPECTED not in self._headers:
            return False
        for first, *_ in self.placed(await tokenise()):
            if first.kv_from:
                self._app.replica.expect_kv(first, first.kv_from)
        await self._exchange.answer_json({})
        return True

    def placed(self, batches: Batches) -> Batches:
        return placed_by_router(self._headers, batches)

    def running(self, batches: Batches, lease: HttpLease) -> AbstractContextManager[None]:
        if not self._app.fleet.is_on:
            return nullcontext()
        specs = chain.from_iterable(batches)
        return self._app.fleet.unfinished.following(self._exchange.request_id, specs, lease.ended)

    async def begun(self, generation: Generation, writer: StreamWriter, events: EventStream) -> StreamWriter:
        if TELL not in self._headers:
            return writer
        self._exchange.goes_on_elsewhere = True
        ask, firsts = self._ask, [batch[0] for batch in generation.outcome.batches]
        head = StreamHead(
            id=ask.answer.id,
            created=ask.answer.created,
            fingerprint=fingerprint_of(self._app.model, ask.adapter),
            seeds=tuple(spec.seed for spec in firsts),
            max_tokens=tuple(spec.max_tokens for spec in firsts),
            num_prompt_tokens=sum(spec.num_prompt_tokens for spec in firsts),
        )
        return ToldStream(head, generation, writer, events.num_end_bytes)

    def headers(self, outcome: Outcome) -> tuple[Header, ...]:
        return (usage_header(told_usage(outcome)),)


def fingerprint_of(model: ServedModel, adapter: AdapterFacts | None = None) -> str:
    """Names all that tokens depend on besides the request: equal fingerprints give equal tokens."""
    told = identity(model).fingerprint
    own = model.revision if told is None else " ".join(msgspec.structs.astuple(told))
    return own if adapter is None else f"{own} {adapter.digest}"


def told_usage(outcome: Outcome) -> ToldUsage:
    """Usage by the engine's counters, by which a router bills."""
    num_prompt, num_output = outcome.num_tokens_used()
    used = outcome.usage()
    return ToldUsage(num_prompt, used.num_cached_tokens, num_output, used.compute_us)


class ToldStream:
    """A stream in frames, each with the tokens of its text, so that another replica can go on with it."""

    def __init__(self, head: StreamHead, generation: Generation, writer: StreamWriter, num_end_bytes: int) -> None:
        self._first = head_line(head)  # goes out with the first frame
        self._outcome = outcome = generation.outcome
        self._writer, self._num_end_bytes = writer, num_end_bytes
        self._num_running = generation.num_running
        self._is_over = False
        self._begun = [sample.num_tokens > 0 for sample in outcome.samples]
        # Of samples of which the client has nothing yet (an echo may wait for its log-probabilities): another replica
        # would begin them anew, and their seed gives the same tokens.
        self._untold: dict[int, ToldSample] = {}

    def delta(self, sample: Sample, delta: TextDelta) -> bytes:
        written = self._writer.delta(sample, delta)
        self._num_running -= delta.finish_reason is not None
        if self._num_running:
            return self._frame(sample, delta, written, 0, is_last=False)
        self._is_over = True
        return self._frame(sample, delta, written + self._writer.last(), self._num_end_bytes, is_last=True)

    def last(self) -> bytes:
        return b"" if self._is_over else self._writer.last()

    def _frame(self, sample: Sample, delta: TextDelta, written: bytes, num_more: int, *, is_last: bool) -> bytes:
        """Frame of the bytes `written` for `delta` and their tokens; `num_more` bytes that follow belong to it too."""
        told = self._told(sample, delta)
        if not written and not self._begun[sample.index]:
            self._untold[sample.index] = told
            return b""
        self._begun[sample.index] = True
        samples = [told]
        if self._untold:
            samples = [*self._released(sample, delta), told]
        if not written and not told.token_ids and not told.ended:
            return b""
        first, self._first = self._first, b""
        return first + frame(samples, written, num_more, told_usage(self._outcome) if is_last else None)

    def _told(self, sample: Sample, delta: TextDelta) -> ToldSample:
        token_ids = list(delta.token_ids)
        before = self._untold.pop(sample.index, None) if self._untold else None
        if before is not None:
            token_ids = before.token_ids + token_ids
        told = ToldSample(sample.index, token_ids, delta.finish_reason is not None)
        if delta.charges is not None:
            told.num_cached_tokens = delta.charges.num_cached_tokens
        elif before is not None:
            told.num_cached_tokens = before.num_cached_tokens
        return told

    def _released(self, sample: Sample, delta: TextDelta) -> list[ToldSample]:
        """Siblings whose text went out with this delta, because the prompt that they waited for is known now."""
        if not delta.prompt_logprobs:
            return []
        indices = [s.index for s in self._outcome.siblings(sample) if s.index in self._untold]
        for index in indices:
            self._begun[index] = True
        return [self._untold.pop(index) for index in indices]


# -- a stream that another replica began


class Resumed(Way):
    """A stream that another replica began: by a router's record of it, checked against the request that it claims to
    continue, it is replayed silently, and goes on from exactly there.
    """

    def __init__(self, app: App, asked: ResumeRequest, ask: GenerationAsk) -> None:
        """Raises InvalidRequest for what cannot be of this request."""
        self._app, self._asked, self._ask, self._model = app, asked, ask, app.model
        self._told = _by_index(asked.samples)
        _check(asked, ask, self._told, self._model.vocab_size)
        ask.id = ask.answer.id = asked.head.id
        ask.answer.created = asked.head.created

    def seeds(self) -> Callable[[], int]:
        """The seeds that the samples were drawn with, prompt by prompt."""
        return iter(self._asked.head.seeds).__next__

    def admitted(self, batches: Batches, lease: HttpLease) -> Batches:
        """The samples as they stand. Raises InvalidRequest."""
        num_each, now = len(batches[0]), self._app.clock.now()
        placed = [
            [self._placed(spec, number * num_each + spec.sample_index, now) for spec in batch]
            for number, batch in enumerate(batches)
        ]
        specs = list(chain.from_iterable(placed))
        lease.have_ended(specs[index].request_id for index, told in self._told.items() if told.ended)
        return placed

    async def begun(self, generation: Generation, writer: StreamWriter, events: EventStream) -> StreamWriter:
        await self._app.text.run_long(partial(self._replay_all, generation.outcome, writer))
        return writer

    def _replay_all(self, outcome: Outcome, writer: StreamWriter) -> None:
        """Bring outcome and writer to where the client is; what is written on the way it has already."""
        for index, told in self._told.items():
            sample = outcome.samples[index]
            spec, position = sample.request, outcome.prompt_index(sample)
            if spec.sampling.prompt_logprobs is not None:  # they come again, for those that have not begun
                outcome.prompt_logprobs[position] = [_unknown(token) for token in spec.prompt_token_ids[1:]]
            if spec.resumed is not None:
                self._replay(outcome, sample, spec.resumed, writer, ended=told.ended)
            outcome.prompt_logprobs[position] = []

    def _replay(
        self, outcome: Outcome, sample: Sample, point: ResumePoint, writer: StreamWriter, *, ended: bool
    ) -> None:
        sample.num_tokens = outcome.num_tokens_seen[sample.index] = len(point.output_token_ids)
        outcome.charges[sample.index] = point.charges
        if ended:
            return
        fresh = msgspec.structs.replace(sample.request, resumed=None)
        delta = SampleText(self._model.tokenizer, fresh, self._ask.shape_found.marks).push(
            replayed(fresh, point.output_token_ids)
        )
        if delta.finish_reason is not None:
            raise InvalidRequest(
                f"the tokens of sample {sample.index} hold a stop string, so it had ended", param="samples"
            )
        writer.delta(sample, delta)

    def _placed(self, spec: RequestSpec, index: int, now: float) -> RequestSpec:
        asked, told = self._asked, self._told.get(index)
        num_each = spec.sampling.n
        max_tokens = min(asked.head.max_tokens[index // num_each], self._model.max_model_len - spec.num_prompt_tokens)
        began_at = now - asked.age_s
        if told is None:
            return msgspec.structs.replace(spec, max_tokens=max_tokens, arrived_at=began_at)
        if len(told.token_ids) >= max_tokens and not told.ended:
            text = f"sample {index} has {len(told.token_ids)} tokens of at most {max_tokens}, so it had ended"
            raise InvalidRequest(text, param="samples")
        charges = Charges(
            num_cached_tokens=told.num_cached_tokens or 0,  # its prompt was counted where it began
            num_generated_tokens=len(told.token_ids),
            first_scheduled_at=began_at,
            first_token_at=began_at + asked.ttft_s,
        )
        point = ResumePoint(output_token_ids=told.token_ids, charges=charges, last_token_at=now, stalled_at=now)
        return msgspec.structs.replace(spec, max_tokens=max_tokens, arrived_at=began_at, resumed=point)


def replayed(spec: RequestSpec, token_ids: Sequence[int]) -> RequestProgress:
    """Tokens that the client has the text of, as if they came now; of their log-probabilities nothing is read."""
    logprobs = None if spec.sampling.logprobs is None else tuple(map(_unknown, token_ids))
    return RequestProgress(spec.request_id, tuple(token_ids), logprobs)


def _unknown(token_id: int) -> TokenLogprobs:
    return TokenLogprobs((token_id,), (0.0,), (1,))


def _by_index(samples: Sequence[ToldSample]) -> dict[int, ToldSample]:
    told = {sample.index: sample for sample in samples if sample.token_ids or sample.ended}
    if len({sample.index for sample in samples}) < len(samples):
        raise InvalidRequest("a sample is told of twice", param="samples")
    return told


def _check(asked: ResumeRequest, ask: GenerationAsk, told: dict[int, ToldSample], vocab_size: int) -> None:
    if not ask.stream:
        raise InvalidRequest("only streams are resumed; ask for a whole answer again, with its seed", param="body")
    head = asked.head
    if not len(head.seeds) == len(head.max_tokens) == ask.num_prompts:
        raise InvalidRequest(
            f"head has {len(head.seeds)} seeds and {len(head.max_tokens)} max_tokens for {ask.num_prompts} prompts",
            param="head",
        )
    if not (0 <= asked.ttft_s <= asked.age_s):
        raise InvalidRequest(f"ttft_s is {asked.ttft_s}, age_s {asked.age_s}; 0 <= ttft_s <= age_s", param="age_s")
    for sample in told.values():
        if not 0 <= sample.index < ask.num_samples:
            raise InvalidRequest(f"there is no sample {sample.index} of {ask.num_samples}", param="samples")
        if not all(0 <= token < vocab_size for token in sample.token_ids):
            raise InvalidRequest(
                f"sample {sample.index} has a token that is none of the {vocab_size} there are", param="samples"
            )
