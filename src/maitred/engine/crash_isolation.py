"""Crash isolation: which request kills engines, and which may go on with the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from maitred.engine.live_requests import Live

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

    def __init__(self, send: Callable[[Live], None]) -> None:
        self._send = send
        self._waiting: deque[Live] = deque()  # for their own trials
        self._held: list[Live] = []  # until the one that is tried alone has passed
        self._on_trial: Live | None = None
        self._alone: Live | None = None  # to be tried alone, or just now
        self._beside: list[Live] = []  # requests that were there too when it came to that
        self._passes_at = 0  # output tokens
        self._others_progress = False  # since the last cause was found, or the beginning

    def enter(self, live: Live) -> None:
        """A new request, or another engine's: to the engine, unless one is tried alone; a suspect in its turn."""
        if self._alone is not None:
            self._held.append(live)
        elif live.num_deaths < SUSPECT_AFTER:
            self._send(live)
        else:
            self._waiting.append(live)
            if self._on_trial is None:
                self._try_next()

    def is_suspect(self, live: Live) -> bool:
        """Whether the request is to be tried, beside the others or alone."""
        return live.num_deaths >= SUSPECT_AFTER or live is self._alone

    def begin(self, living: Iterable[Live]) -> None:
        """Send the living requests to a new engine, as far as trials allow."""
        self._waiting.clear()
        self._held.clear()
        self._on_trial = None
        if self._alone is not None and self._alone.finish_reason is not None:
            self._alone = None
        if self._alone is None:
            self._send_all(living)
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
        if on_trial is self._alone:  # then it was one of the others
            on_trial.num_deaths, self._alone = 0, None
            for live in self._beside:
                live.num_deaths += 1
            held, self._held, self._beside = self._held, [], []
            self._send_all(held)
        else:
            self._try_next()

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

    def _send_all(self, living: Iterable[Live]) -> None:
        """Send the requests above suspicion that have not ended meanwhile, and the first of the others."""
        for live in living:
            if live.finish_reason is not None:
                continue
            if live.num_deaths < SUSPECT_AFTER:
                self._send(live)
            else:
                self._waiting.append(live)
        self._try_next()

    def _try_next(self) -> None:
        self._on_trial = None
        while self._waiting and self._on_trial is None:
            live = self._waiting.popleft()
            if live.finish_reason is None:
                self._try(live)

    def _try(self, live: Live) -> None:
        self._on_trial, self._passes_at = live, live.num_output_tokens + TRIAL_TOKENS
        self._send(live)

    def _passed(self, live: Live) -> bool:
        return live.finish_reason is not None or live.num_output_tokens >= self._passes_at
