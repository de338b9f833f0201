"""What the HTTP process keeps of each request: a mirror that outlives engines, and who may go on with the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from maitred.engine.frames import Mark
from maitred.engine.progress_streams import ProgressStream
from maitred.request import FinishReason, Request, RequestStatus, timing_of
from maitred.step import RequestProgress

SUSPECT_AFTER = 2  # engines that died by their own fault, after which those that had been there come back one by one
TRIAL_TOKENS = 16  # after so many more it was not this one, and the next may come


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request between its submission and its last progress. `request` is the edge's own, kept up to date."""

    request: Request
    stream: ProgressStream
    ending: FinishReason | None = None  # an abort is on its way, and this is its reason
    sent: bool = False  # to the present engine
    num_resumes: int = 0
    num_deaths: int = 0  # of engines that had it, and may have died of it
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

    def left(self, now: float) -> None:
        """The engine that had it died; the next one computes its prompt again. Until then it is stalled."""
        self.num_resumes += self.sent
        self.sent = False
        if self.request.first_scheduled_at is not None:
            self.request.stalled_at = now
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


def refusal(live: LiveRequest, rule: str, *, deterministic: bool, is_cause: bool) -> str | None:
    """Why a request whose engine died cannot go on with the next one; None when it can."""
    if rule == "never":
        return "requests are not resumed here (--resume never)"
    if is_cause:
        return f"{live.num_deaths} engines died while they had this request, the last of them nothing else"
    if live.request.output_token_ids and rule == "exact" and not deterministic:
        return "its executor would not go on with exactly the same tokens (see --resume)"
    return None


class CrashIsolation:
    """Finds the request that kills engines, and no other.

    Only a death by the engine's own fault is evidence (`supervisor.is_own_fault`): who sends SIGKILL blames nobody, and
    what was under way is tried again. After SUSPECT_AFTER such deaths, the requests that saw them come back one by one,
    beside all others. Who is on trial when an engine dies again comes back first and alone: nobody else is sent until
    it has TRIAL_TOKENS more tokens, which clears it, or has ended, or its engine dies once more. Then it is the cause.
    So nobody is ended for what another request did, whether that one was in the batch or came later.
    """

    def __init__(self, send: Callable[[LiveRequest], None]) -> None:
        self._send = send
        self._waiting: deque[LiveRequest] = deque()  # for their own trials
        self._held: list[LiveRequest] = []  # until the one that is tried alone has passed
        self._on_trial: LiveRequest | None = None
        self._alone: LiveRequest | None = None  # to be tried alone, or just now
        self._beside: list[LiveRequest] = []  # who was there too when it came to that
        self._passes_at = 0  # output tokens
        self._others_progress = False  # since the last cause was found, or the beginning

    def enter(self, live: LiveRequest) -> None:
        """A new request: to the engine, unless one is tried alone."""
        if self._alone is None:
            self._send(live)
        else:
            self._held.append(live)

    def begin(self, living: Iterable[LiveRequest]) -> None:
        """A new engine, and all who wait for it."""
        self._waiting.clear()
        self._held.clear()
        self._on_trial = None
        if self._alone is not None and self._alone.request.finished:
            self._alone = None
        if self._alone is None:
            self._send_all(living)
        else:
            self._held += [live for live in living if live is not self._alone]
            self._try(self._alone)

    def stepped(self, request_ids: Iterable[str]) -> None:
        """Those have news. If the one on trial has passed or ended, the next one's comes."""
        on_trial = self._on_trial
        if not self._others_progress:
            on_trial_id = on_trial.request.request_id if on_trial is not None else None
            self._others_progress = any(request_id != on_trial_id for request_id in request_ids)
        if on_trial is None or not self._passed(on_trial):
            return
        if on_trial is self._alone:  # then it was one of the others
            on_trial.num_deaths, self._alone = 0, None
            for live in self._beside:
                live.num_deaths += 1
            held, self._held, self._beside = self._held, [], []
            self._send_all(held)
        else:
            self._try_next()

    def died(self, living: Iterable[LiveRequest], *, own_fault: bool) -> LiveRequest | None:
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
        """Whether an engine has worked for anybody but the cause, since the last time this was asked; where it did not,
        it is the engine that is broken.
        """
        lived, self._others_progress = self._others_progress, False
        return lived

    def _send_all(self, living: Iterable[LiveRequest]) -> None:
        """Those above suspicion, and the first of the others."""
        for live in living:
            if live.num_deaths < SUSPECT_AFTER:
                self._send(live)
            else:
                self._waiting.append(live)
        self._try_next()

    def _try_next(self) -> None:
        self._on_trial = None
        while self._waiting and self._on_trial is None:
            live = self._waiting.popleft()
            if not live.request.finished:
                self._try(live)

    def _try(self, live: LiveRequest) -> None:
        self._on_trial, self._passes_at = live, live.request.num_output_tokens + TRIAL_TOKENS
        self._send(live)

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
