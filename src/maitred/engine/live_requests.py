"""Live requests, as a client keeps them: their streams, what the ledger needs, how they go on with another engine, and
the isolation of one that kills engines.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar
from weakref import WeakSet

from msgspec.structs import replace

from maitred.core.errors import EngineDead, MaitredError, ReadTooSlowly
from maitred.core.request import NO_CHARGES, Charges, FinishReason, RequestSpec, RequestState, ResumePoint
from maitred.core.step import RequestProgress, TokenLogprobs
from maitred.core.tensor_request import InferRequest, InferResponse
from maitred.engine.frames import Infer
from maitred.scheduler.timing import timing_of


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request between its submission and its last progress. It outlives engines."""

    spec: RequestSpec
    stream: ProgressStream
    output_token_ids: list[int] = field(default_factory=list)
    charges: Charges = NO_CHARGES
    finish_reason: FinishReason | None = None  # written last: a ledger that sees it finds everything else in place
    last_token_at: float | None = None  # s
    stalled_at: float | None = None  # s, since when no engine has it that had been in a step
    stalled_prefill_s: float = 0.0
    stalled_decode_s: float = 0.0
    ending: FinishReason | None = None  # an abort is on its way, and this is its reason
    sent: bool = False  # to the present engine
    num_resumes: int = 0
    num_deaths: int = 0  # of engines that had it, and may have died of it
    num_prompt_logprobs: int = 0  # positions delivered
    kv_from: tuple[str, ...] = ()  # where the next engine finds its KV
    num_repeated: int = 0  # prompt positions that the present engine reported again

    def __post_init__(self) -> None:
        point = self.spec.resumed
        if point is not None:  # another server began it
            self.output_token_ids = list(point.output_token_ids)
            self.charges, self.last_token_at = point.charges, point.last_token_at
        self.kv_from = self.kv_from or self.spec.kv_from

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def num_output_tokens(self) -> int:
        """Made here; those that it came with were counted where they were made."""
        point = self.spec.resumed
        return len(self.output_token_ids) - (len(point.output_token_ids) if point is not None else 0)

    def fail(self, error: MaitredError) -> None:
        self.stream.fail(error)

    def take(self, progress: RequestProgress, now: float) -> RequestProgress:
        """Note progress; returns what of it is news to the request's listener."""
        if progress.new_token_ids:
            self.output_token_ids.extend(progress.new_token_ids)
            self.last_token_at = now
        if progress.charges is not None:
            self.charges = progress.charges
        self.finish_reason = progress.finish_reason
        return self._without_repeats(progress) if progress.prompt_logprobs is not None else progress

    def left(self, now: float) -> None:
        """The engine that had it died; the next one computes its prompt again. Until then it is stalled."""
        self.num_resumes += self.sent
        self.sent = False
        if self.charges.first_scheduled_at is not None:
            self.stalled_at = now
        self.num_repeated = 0

    def moved(self, now: float) -> None:
        """Note the move from an engine that lives on to another one."""
        self.sent, self.stalled_at, self.num_repeated = False, now, 0

    def resume(self, now: float) -> RequestSpec:
        """The request for the next engine: what was asked, and how far it had come."""
        if self.stalled_at is not None:
            stalled_s, self.stalled_at = now - self.stalled_at, None
            if self.charges.first_token_at is None:
                self.stalled_prefill_s += stalled_s
            else:
                self.stalled_decode_s += stalled_s
        return self._as_it_stands()

    def as_it_waits(self, predicted_output_tokens: float | None = None) -> RequestState:
        """The request's state while no engine has it."""
        state = RequestState(self._as_it_stands())
        state.predicted_output_tokens = predicted_output_tokens
        return state

    def ended(self, reason: FinishReason, now: float, error: str | None = None) -> RequestProgress:
        """Last progress of the request, when there is no engine to make one."""
        self.finish_reason = reason
        charges = self.charges._replace(num_generated_tokens=len(self.output_token_ids))
        timing = timing_of(self.as_it_waits(), now)
        return RequestProgress(self.request_id, finish_reason=reason, error=error, charges=charges, timing=timing)

    def _as_it_stands(self) -> RequestSpec:
        if self.charges is NO_CHARGES and not self.output_token_ids:
            return replace(self.spec, kv_from=self.kv_from) if self.kv_from else self.spec
        point = ResumePoint(
            output_token_ids=list(self.output_token_ids),
            charges=self.charges,
            last_token_at=self.last_token_at,
            stalled_at=self.stalled_at,
            stalled_prefill_s=self.stalled_prefill_s,
            stalled_decode_s=self.stalled_decode_s,
        )
        return replace(self.spec, resumed=point, kv_from=self.kv_from)

    def _without_repeats(self, progress: RequestProgress) -> RequestProgress:
        """An engine reports each prompt position once and in order; a second engine begins again."""
        told = progress.prompt_logprobs or ()
        first = self.num_repeated
        self.num_repeated += len(told)
        news = told[max(0, self.num_prompt_logprobs - first) :]
        self.num_prompt_logprobs += len(news)
        return progress._replace(prompt_logprobs=news or None)


@dataclass(slots=True, eq=False)
class LiveTensor:
    """One request to a tensor model between its submission and its answer. It outlives engines, and has no tokens."""

    spec: InferRequest
    answer: asyncio.Future[InferResponse]
    charges: Charges = NO_CHARGES
    finish_reason: FinishReason | None = None  # written last
    frame: Infer | None = None  # as it crosses, once it was sent to any engine
    ending: FinishReason | None = None  # an abort is on its way; its end comes with what its batch took
    sent: bool = False  # to the present engine
    num_deaths: int = 0  # of engines that had it, and may have died of it

    output_token_ids: ClassVar[tuple[int, ...]] = ()
    num_output_tokens: ClassVar[int] = 0

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    def fail(self, error: MaitredError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def left(self, now: float) -> None:
        """The engine that had it died; the next one begins it anew."""
        self.sent = False

    def ended(self, reason: FinishReason, now: float, error: str | None = None) -> RequestProgress:
        """Last progress of the request."""
        self.finish_reason = reason
        return RequestProgress(self.request_id, finish_reason=reason, error=error, charges=self.charges)


Live = LiveRequest | LiveTensor
L = TypeVar("L", bound=Live)


def may_enter(
    living: Iterable[L], present: Container[str], death: EngineDead | None, on_admitted: Callable[[L], None] | None
) -> bool:
    """Whether these requests may enter, which `on_admitted` is told; else they fail with `death`. Raises ValueError for
    an id that is present.
    """
    for live in living:
        if death is not None:
            live.fail(death)
        elif live.request_id in present:
            raise ValueError(f"request id {live.request_id!r} is already running")
        elif on_admitted is not None:
            on_admitted(live)
    return death is None


# ---- crash isolation: the request that kills engines, and those that may go on


SUSPECT_AFTER = 2  # engines that died by their own fault, after which those that had been there come back one by one
TRIAL_TOKENS = 16  # after so many more it was not this one, and the next may come


def refusal(live: Live, rule: str, *, deterministic: bool, is_cause: bool) -> str | None:
    """Why a request whose engine died cannot go on with the next one; None when it can."""
    if rule == "never":
        return "requests are not resumed here (--resume never)"
    if is_cause:
        return f"{live.num_deaths} engines died while they had this request, the last of them nothing else"
    if live.output_token_ids and rule == "exact" and not deterministic:
        return "its executor would not go on with exactly the same tokens (see --resume)"
    return None


def refusal_of_foreign(rule: str, *, deterministic: bool, same_numbers: bool) -> str | None:
    """Why a stream that another server began cannot go on here; None when it can."""
    if rule == "never":
        return "requests are not resumed here (--resume never)"
    if rule == "exact" and not same_numbers:
        return "another model, or other numerics, made its first tokens (see --resume)"
    if rule == "exact" and not deterministic:
        return "this executor would not go on with exactly the same tokens (see --resume)"
    return None


class CrashIsolation:
    """Finds the request that kills engines, and no other.

    Only a death by the engine's own fault is evidence (`restarts.is_own_fault`): a SIGKILL from outside blames no
    request, and what was under way is tried again. After SUSPECT_AFTER such deaths, the requests that saw them come
    back one by one, beside all others. The request on trial when an engine dies again comes back first and alone: no
    other is sent until it has TRIAL_TOKENS more tokens, which clears it, or has ended, or its engine dies once more.
    Then it is the cause. So no request is ended for what another did, in its batch or later.
    """

    def __init__(self, send: Callable[[Sequence[Live]], None]) -> None:
        self._send = send
        self._waiting: deque[Live] = deque()  # for their own trials
        self._held: list[Live] = []  # until the one that is tried alone has passed
        self._on_trial: Live | None = None
        self._alone: Live | None = None  # to be tried alone, or just now
        self._beside: list[Live] = []  # requests that were there too when it came to that
        self._passes_at = 0  # output tokens
        self._others_progress = False  # since the last cause was found, or the beginning

    def enter(self, living: Sequence[Live]) -> None:
        """Requests, new or of another engine: to this one, unless one is tried alone; suspects in their turns."""
        if self._alone is not None:
            self._held += living
            return
        left = [live for live in living if live.finish_reason is None]
        self._send([live for live in left if live.num_deaths < SUSPECT_AFTER])
        self._waiting += [live for live in left if live.num_deaths >= SUSPECT_AFTER]
        if self._on_trial is None:
            self._try_next()

    def is_suspect(self, live: Live) -> bool:
        """Whether the request is to be tried, beside the others or alone."""
        return live.num_deaths >= SUSPECT_AFTER or live is self._alone

    def begin(self, living: Sequence[Live]) -> None:
        """Send the living requests to a new engine, as far as trials allow."""
        self._waiting.clear()
        self._held.clear()
        self._on_trial = None
        if self._alone is not None and self._alone.finish_reason is not None:
            self._alone = None
        if self._alone is None:
            self.enter(living)
        else:
            self._held += [live for live in living if live is not self._alone]
            self._try(self._alone)

    def stepped(self, request_ids: Iterable[str]) -> None:
        """These requests have news. If the one on trial has passed or ended, the next one's trial comes."""
        on_trial = self._on_trial
        if not self._others_progress:
            on_trial_id = on_trial.request_id if on_trial is not None else None
            self._others_progress = any(request_id != on_trial_id for request_id in request_ids)
        if on_trial is None or not self._passed(on_trial):
            return
        self._on_trial = None
        if on_trial is self._alone:  # then it was one of the others
            on_trial.num_deaths, self._alone = 0, None
            for live in self._beside:
                live.num_deaths += 1
        held, self._held, self._beside = self._held, [], []
        self.enter(held)

    def died(self, living: Iterable[Live], *, own_fault: bool) -> Live | None:
        """The engine did; the request that was the cause, if that is certain now."""
        if not own_fault:
            return None
        if self._on_trial is None:
            for live in living:
                live.num_deaths += live.sent
            return None
        self._on_trial.num_deaths += 1
        if self._on_trial is not self._alone:
            self._alone = self._on_trial
            self._beside = [live for live in living if live.sent and live is not self._alone]
            return None
        self._alone, self._beside = None, []
        return self._on_trial

    def others_live(self) -> bool:
        """Whether an engine has worked for a request besides the cause, since this was last asked; where it did not,
        the engine itself is broken.
        """
        lived, self._others_progress = self._others_progress, False
        return lived

    def _try_next(self) -> None:
        while self._waiting and self._on_trial is None:
            live = self._waiting.popleft()
            if live.finish_reason is None:
                self._try(live)

    def _try(self, live: Live) -> None:
        self._on_trial, self._passes_at = live, live.num_output_tokens + TRIAL_TOKENS
        self._send([live])

    def _passed(self, live: Live) -> bool:
        return live.finish_reason is not None or live.num_output_tokens >= self._passes_at


# ---- progress streams, bounded in bytes


MAX_UNREAD_BYTES = 4 * 2**20  # kept for a consumer that does not take them: 14,000 tokens, or 2,000 with 20 logprobs
MAX_UNREAD_BYTES_IN_ALL = 256 * 2**20  # of one engine; then, streams that fall behind by UNREAD_MARK more are ended
UNREAD_MARK = 64 * 1024  # a stream that is read steadily is never so far behind
# What progress takes in memory, within a tenth: a token, a position's log-probabilities, and each of them.
PROGRESS_BYTES, TOKEN_BYTES, POSITION_BYTES, LOGPROB_BYTES = 256, 40, 256, 72


class Aborting(Protocol):
    """Abort, as a stream needs it of its feeder."""

    def abort(self, request_id: str) -> None: ...


class ProgressStream:
    """The progress of one request, for one asyncio consumer; also an asynchronous iterator.

    The engine waits for no consumer: what is not taken is kept, up to a bound, and then the request ends.
    """

    __slots__ = (
        "__weakref__",
        "_engine",
        "_error",
        "_everybody",
        "_items",
        "_loop",
        "_request_id",
        "_waiter",
        "closed",
        "num_unread_bytes",
    )

    def __init__(
        self,
        engine: Aborting,
        request_id: str,
        loop: asyncio.AbstractEventLoop,
        everybody: WeakSet[ProgressStream],  # all streams of the engine; this one joins
    ) -> None:
        self._engine = engine
        self._request_id = request_id
        self._loop = loop
        self._items: deque[tuple[RequestProgress, int]] = deque()  # and its bytes
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._everybody = everybody
        self.closed = False  # its last progress was put, or its consumer went away
        self.num_unread_bytes = 0
        everybody.add(self)

    def put(self, progress: RequestProgress) -> None:
        if self._error is not None:
            return
        behind, size = self.num_unread_bytes, num_bytes(progress)
        self._items.append((progress, size))
        self.num_unread_bytes += size
        self.closed = self.closed or progress.finish_reason is not None
        passed_a_mark = self.num_unread_bytes // UNREAD_MARK > behind // UNREAD_MARK
        if passed_a_mark and behind >= UNREAD_MARK and not self.closed and self._is_too_much(behind):
            self._items.clear()
            self.num_unread_bytes = 0
            self._engine.abort(self._request_id)
            self.fail(ReadTooSlowly(f"the client is {behind // 1024} KiB of tokens behind; the request was ended"))
        self._wake()

    def _is_too_much(self, behind: int) -> bool:
        if behind > MAX_UNREAD_BYTES:
            return True
        return sum(stream.num_unread_bytes for stream in self._everybody) > MAX_UNREAD_BYTES_IN_ALL

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[RequestProgress]:
        return self

    async def __anext__(self) -> RequestProgress:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self.closed:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        progress, size = self._items.popleft()
        self.num_unread_bytes -= size
        return progress

    async def aclose(self) -> None:
        """Give up listening; an unfinished request is aborted."""
        if not self.closed:
            self.closed = True
            self._engine.abort(self._request_id)


def streams_of(
    engine: Aborting, samples: Iterable[RequestSpec], everybody: WeakSet[ProgressStream]
) -> list[ProgressStream]:
    """A stream of `engine` for each sample, for a consumer on the running loop."""
    loop = asyncio.get_running_loop()
    return [ProgressStream(engine, each.request_id, loop, everybody) for each in samples]


def num_bytes(progress: RequestProgress) -> int:
    """Roughly what it takes in memory."""
    size = PROGRESS_BYTES + TOKEN_BYTES * len(progress.new_token_ids) + len(progress.vector)
    return size + logprob_bytes(progress.logprobs or ()) + logprob_bytes(progress.prompt_logprobs or ())


def logprob_bytes(positions: Iterable[TokenLogprobs]) -> int:
    """Roughly what they take in memory."""
    return sum(POSITION_BYTES + LOGPROB_BYTES * len(position.token_ids) for position in positions)
