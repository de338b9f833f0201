"""Head: one layer beside the served model drafts from what that computed, its taps (EAGLE-3; multi-token prediction).

Slot t of its keys and values is made of the taps at position t and the token after it, so it comes one step later than
the model's own. Its layer is one more of the served pool: shared, copied and swapped blocks bring it along. Taps wait
until drafts are asked for, so that steps without drafts do nothing for them but keep them, and those that waited too
long are dropped. Slots that were not made hold old contents: drafts are guesses, which the served model checks.
Source: Li et al., EAGLE-3, 2025, arXiv:2503.01840.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from maitred.speculative.draft import ChainEnd, DraftTokens, Piece
from maitred.speculative.proposer import DraftAsk, DraftedRequest

logger = logging.getLogger(__name__)
Taps = NDArray[np.float32]
WAITING_BYTES = 64 * 2**20
"""Bytes of taps, at most."""
KEPT = 32
"""Steps without a draft, after which a request keeps the taps of so many last positions: drafts are then as often right
as with all taps, and the next trial of drafts has that much to catch up with.
"""
_LOGGED = 16
"""Steps after which their taps are dealt out to the requests together."""


class ComputedRows(NamedTuple):
    """A step: requests, the first position of each and how many, and the taps of all, one below the other."""

    requests: Sequence[DraftedRequest]
    starts: Sequence[int]
    counts: Sequence[int]
    taps: Taps  # [positions, width], not the caller's


class HeadRunner(Protocol):
    """The head's program over the served pool; `executor.native_head.NativeHeadRunner` is one."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a pass."""

    @property
    def max_rows(self) -> int:
        """Most pieces of a chain, at most `max_tokens`."""

    @property
    def max_positions(self) -> int:
        """Positions are below it."""

    def compute(self, pieces: Sequence[Piece], taps: Sequence[Taps]) -> None:
        """Slots of these tokens, each of which stands one position after its taps."""

    def chain(self, pieces: Sequence[Piece], taps: Sequence[Taps], ends: Sequence[ChainEnd]) -> list[DraftTokens]:
        """The same, then sample the token after each piece, make its slot of the head's own state, and so on."""

    def close(self) -> None: ...


@dataclass(slots=True)
class _Kept:
    """Taps of a request that wait, of positions that follow each other."""

    request: DraftedRequest
    first: int = 0
    waiting: list[Taps] = field(default_factory=list)
    num_waiting: int = 0
    num_unasked: int = 0  # steps
    is_hopeless: bool = False  # nothing can be drawn from what it says

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.first + self.num_waiting

    def add(self, start: int, taps: Taps) -> None:
        if not self.first <= start <= self.end:
            self.drop(0)
            self.first = start
        self.drop(start - self.first)  # rejected drafts
        self.waiting.append(taps)
        self.num_waiting += len(taps)
        self.num_unasked += 1
        if self.num_unasked > KEPT and self.num_waiting > 2 * KEPT:
            self.forget_old()

    def forget_old(self) -> None:
        """Forget all but the last `KEPT`, at most."""
        taps = np.concatenate(self.waiting)[-KEPT:]  # a copy of its own: what the others are views of is large
        self.first, self.waiting, self.num_waiting = self.end - len(taps), [taps.copy()], len(taps)

    def drop(self, num_kept: int) -> None:
        """Drop all but the first so many."""
        while (num_more := self.num_waiting - num_kept) > 0:
            last = self.waiting.pop()
            self.num_waiting -= len(last)
            if len(last) > num_more:
                self.waiting.append(last[:-num_more])
                self.num_waiting += len(last) - num_more

    def take(self) -> tuple[int, Taps]:
        """Position of the first, and all taps; of which the last waits on, since its state is wanted again."""
        first, taps = self.first, self.waiting[0] if len(self.waiting) == 1 else np.concatenate(self.waiting)
        self.first, self.waiting, self.num_waiting = self.end - 1, [taps[-1:].copy()], 1
        self.num_unasked = 0
        return first, taps


class _Job(NamedTuple):
    place: int  # among the asks
    ask: DraftAsk
    kept: _Kept
    num_drafts: int


class Head:
    """Proposes what a head samples with the request's own settings and random numbers (`proposer.Proposer`)."""

    name = "mtp"

    def __init__(self, runner: HeadRunner, *, tap_width: int) -> None:
        self._runner = runner
        self._log: list[ComputedRows] = []
        self._num_logged = 0  # positions
        self._kept: dict[str, _Kept] = {}
        self._most_waiting = max(WAITING_BYTES // (4 * tap_width), runner.max_tokens)
        self._is_told = False  # that there are faults; the first one is

    def computed(self, step: ComputedRows) -> None:
        """Told of each step."""
        self._log.append(step)
        self._num_logged += len(step.taps)
        if len(self._log) >= _LOGGED or self._num_logged > self._most_waiting:
            self._deal()

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        self._deal()
        found: list[Sequence[int]] = [()] * len(asks)
        jobs = [job for place, ask in enumerate(asks) if (job := self._job(place, ask)) is not None]
        if sum(job.kept.num_waiting for job in jobs) > self._runner.max_tokens:
            self._make([job.kept for job in jobs])
        most = self._runner.max_rows
        for first in range(0, len(jobs), most):
            some = jobs[first : first + most]
            for job, made in zip(some, self._chain(some), strict=True):
                found[job.place] = made.tokens
                self._note(job, made)
        return found

    def forget(self, request_id: str) -> None:
        self._deal()
        self._kept.pop(request_id, None)

    def close(self) -> None:
        self._log.clear()
        self._kept.clear()
        self._runner.close()

    def _job(self, place: int, ask: DraftAsk) -> _Job | None:
        """Return the job; None where the taps of the last position are missing, or the head's context ends."""
        request = ask.request
        kept, num_tokens = self._kept.get(request.request_id), len(request.tokens.array)
        num_drafts = min(ask.num_drafts, self._runner.max_positions - num_tokens + 1)
        if kept is None or kept.is_hopeless or num_drafts < 1 or not kept.first < num_tokens - 1 <= kept.end:
            return None
        kept.drop(num_tokens - 1 - kept.first)  # rejected drafts; each needs the token after it, besides
        return _Job(place, ask, kept, num_drafts)

    def _chain(self, jobs: Sequence[_Job]) -> list[DraftTokens]:
        pieces, taps = [], []
        for job in jobs:
            first, rows = job.kept.take()
            pieces.append(_piece(job.kept.request, first, len(rows)))
            taps.append(rows)
        ends = [ChainEnd(job.num_drafts, job.ask.request.sampler) for job in jobs]
        return self._runner.chain(pieces, taps, ends)

    def _make(self, waiting: Sequence[_Kept]) -> None:
        """Slots of all that waits, as many tokens a pass as there is room for."""
        pieces: list[Piece] = []
        taps: list[Taps] = []
        room = self._runner.max_tokens
        for kept in waiting:
            first, rows = kept.take()
            while len(rows):
                if room == 0:
                    self._runner.compute(pieces, taps)
                    pieces, taps, room = [], [], self._runner.max_tokens
                count = min(room, len(rows))
                pieces.append(_piece(kept.request, first, count))
                taps.append(rows[:count])
                first, rows, room = first + count, rows[count:], room - count
        if pieces:
            self._runner.compute(pieces, taps)

    def _deal(self) -> None:
        """Give each request the taps of the steps that were logged."""
        for step in self._log:
            first = 0
            for request, start, count in zip(step.requests, step.starts, step.counts, strict=True):
                kept = self._kept.get(request.request_id)
                if kept is None or kept.request is not request:  # it comes back as another
                    kept = self._kept[request.request_id] = _Kept(request)
                kept.add(start, step.taps[first : first + count])
                first += count
        if self._log:
            self._log.clear()
            self._num_logged = 0
            self._drop_old()

    def _drop_old(self) -> None:
        """Drop the oldest taps until the waiting ones are within their bound."""
        num_waiting = sum(kept.num_waiting for kept in self._kept.values())
        for kept in self._kept.values():
            if num_waiting <= self._most_waiting:
                return
            num_waiting -= kept.num_waiting - min(kept.num_waiting, KEPT)
            kept.forget_old()

    def _note(self, job: _Job, made: DraftTokens) -> None:
        if made.fault is None or made.tokens:
            return
        job.kept.is_hopeless = True
        level = logging.DEBUG if self._is_told else logging.WARNING
        logger.log(level, "no drafts for request %s: the head's %s", job.ask.request.request_id, made.fault)
        self._is_told = True


def _piece(request: DraftedRequest, first: int, count: int) -> Piece:
    return Piece(request.tokens.array[first + 1 : first + 1 + count], first, request.blocks.array)
