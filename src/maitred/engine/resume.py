"""What the HTTP process keeps of each request: a mirror that outlives engines, and who may go on with the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from maitred.engine.async_engine import ProgressStream
from maitred.engine.frames import Mark
from maitred.request import FinishReason, Request, RequestStatus, timing_of
from maitred.step import RequestProgress

MAX_RESUMES = 3  # after which a request that sees its engine die again is taken for the cause
SUSPECT_AFTER = 2  # resumes, after which requests come back one by one
TRIAL_TOKENS = 16  # after so many more it was not this one, and the next may come


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request between its submission and its last progress. `request` is the edge's own, kept up to date."""

    request: Request
    stream: ProgressStream
    ending: FinishReason | None = None  # an abort is on its way, and this is its reason
    sent: bool = False  # to the present engine
    num_resumes: int = 0
    num_prompt_logprobs: int = 0  # positions delivered
    num_repeated: int = 0  # prompt positions that the present engine reported again

    def take(self, progress: RequestProgress, now: float) -> RequestProgress:
        """Bring the mirror up to date; what of `progress` is news to the edge."""
        request = self.request
        if progress.new_token_ids:
            request.output_token_ids.extend(progress.new_token_ids)
            request.last_token_at = now
        if progress.finish_reason is not None:
            end(request, progress, now)
        return self._without_repeats(progress) if progress.prompt_logprobs is not None else progress

    def mark(self, mark: Mark) -> None:
        request = self.request
        request.num_cached_tokens = mark.num_cached_tokens
        request.num_preemptions = mark.num_preemptions
        request.first_scheduled_at, request.first_token_at = mark.first_scheduled_at, mark.first_token_at
        request.num_charged_prompt_tokens = mark.num_charged_prompt_tokens  # last: the ledger reads what it stands for

    def left(self, now: float, *, blamed: bool) -> None:
        """The engine that had it died; the next one computes its prompt again. Until then it is stalled."""
        self.sent = False
        if self.request.first_scheduled_at is not None:
            self.request.stalled_at = now
        self.num_resumes += blamed
        self.num_repeated = 0

    def ended(self, reason: FinishReason, now: float, error: str | None = None) -> RequestProgress:
        """Its last progress, when there is no engine to make one."""
        progress = RequestProgress(
            self.request.request_id,
            finish_reason=reason,
            error=error,
            num_cached_tokens=self.request.num_cached_tokens,
            timing=timing_of(self.request, now),
        )
        end(self.request, progress, now)
        return progress

    def _without_repeats(self, progress: RequestProgress) -> RequestProgress:
        """An engine reports each prompt position once and in order; a second engine begins again."""
        told = progress.prompt_logprobs or ()
        first = self.num_repeated
        self.num_repeated += len(told)
        news = told[max(0, self.num_prompt_logprobs - first) :]
        self.num_prompt_logprobs += len(news)
        return progress._replace(prompt_logprobs=news or None)


def end(request: Request, progress: RequestProgress, now: float) -> None:
    """The mirror has ended. `finished_at` comes last: a ledger that sees it finds everything else in place."""
    request.finish_reason, request.stop_reason = progress.finish_reason, progress.stop_reason
    request.error = progress.error
    request.status = RequestStatus.FINISHED
    request.finished_at = now


def refusal(live: LiveRequest, rule: str, *, deterministic: bool, blamed: bool) -> str | None:
    """Why a request whose engine died cannot go on with the next one; None when it can."""
    if rule == "never":
        return "requests are not resumed here (--resume never)"
    if blamed and live.num_resumes >= MAX_RESUMES:
        return f"{live.num_resumes + 1} engines died while they had this request"
    if live.request.output_token_ids and rule == "exact" and not deterministic:
        return "its executor would not go on with exactly the same tokens (see --resume)"
    return None


class Trials:
    """When engines die again and again, one of their requests may be the cause. Those that saw it come back one by one:
    the one on trial takes the blame for the next death, so in the end the culprit ends alone.
    """

    def __init__(self, send: Callable[[LiveRequest], None]) -> None:
        self._send = send
        self._waiting: deque[LiveRequest] = deque()
        self._on_trial: LiveRequest | None = None
        self._passes_at = 0  # output tokens

    def begin(self, living: Iterable[LiveRequest]) -> None:
        """A new engine: it gets those above suspicion, and the first of the others."""
        self._waiting.clear()
        self._on_trial = None
        for live in living:
            if live.num_resumes < SUSPECT_AFTER:
                self._send(live)
            else:
                self._waiting.append(live)
        self.go_on()

    def go_on(self) -> None:
        """After a step: if the one on trial has passed or ended, the next one's comes."""
        if self._on_trial is not None and not self._passed(self._on_trial):
            return
        self._on_trial = None
        while self._waiting and self._on_trial is None:
            live = self._waiting.popleft()
            if not live.request.finished:
                self._on_trial = live
                self._passes_at = live.request.num_output_tokens + TRIAL_TOKENS
                self._send(live)

    def is_blamed(self, live: LiveRequest) -> bool:
        """The engine died: does it count against this request?"""
        return live.sent and self._on_trial in (None, live)

    def _passed(self, live: LiveRequest) -> bool:
        return live.request.finished or live.request.num_output_tokens >= self._passes_at


@dataclass(slots=True)
class Totals:
    """Counters that must equal the ledger's sums, counted from the same frames over all engines."""

    num_prompt_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_generated_tokens: int = 0
    num_resumed: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def count(self, progress: Iterable[RequestProgress]) -> None:
        for item in progress:
            self.num_generated_tokens += len(item.new_token_ids)
            if item.finish_reason is not None:
                self.num_finished[item.finish_reason] += 1

    def charge(self, request: Request, mark: Mark) -> None:
        """`mark` is about to be taken in by `request`."""
        if mark.num_charged_prompt_tokens and not request.num_charged_prompt_tokens:
            self.num_prompt_tokens += mark.num_charged_prompt_tokens
            self.num_prefix_hit_tokens += mark.num_cached_tokens
