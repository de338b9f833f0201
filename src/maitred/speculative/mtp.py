"""Head: one layer beside the served model drafts from what that computed, its taps (EAGLE-3; multi-token prediction).

Slot t of its keys and values is made of the taps at position t and the token after it, so it comes one step later than
the model's own. Its layer is one more of the served pool: shared, copied and swapped blocks bring it along. Prompts are
taken in as they are computed; of output the taps wait until drafts are asked for, or until there are many of them, so
that a step without drafts does nothing for them but keep them. Slots that nobody made hold what they held: drafts are
guesses, which the served model checks.
Source: Li et al., EAGLE-3, 2025, arXiv:2503.01840.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from maitred.speculative.draft import ChainEnd, DraftTokens, Piece
from maitred.speculative.proposer import DraftAsk, DraftedRequest

logger = logging.getLogger(__name__)
Taps = NDArray[np.float32]
FLUSHED_TOGETHER = 16
"""Positions: a request whose so many last ones are known gets their slots made, asked for or not."""


class Computed(NamedTuple):
    """Positions of a request that a step computed, and its taps [of them, width], which are the caller's."""

    request: DraftedRequest
    start: int
    taps: Taps


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
    """Taps of a request that wait, of positions that follow each other; the last ones that are known."""

    first: int
    waiting: list[Taps] = field(default_factory=list)
    num_waiting: int = 0
    num_made: int = 0  # of the first of them, slots are made: the last one's state is wanted again
    is_hopeless: bool = False  # nothing can be drawn from what it says

    def add(self, start: int, taps: Taps) -> None:
        if start != self.first + self.num_waiting:  # resumed elsewhere
            self.first, self.num_waiting, self.num_made = start, 0, 0
            self.waiting.clear()
        self.waiting.append(taps)
        self.num_waiting += len(taps)

    @property
    def last(self) -> int:
        """Position."""
        return self.first + self.num_waiting - 1

    def take(self) -> tuple[int, Taps]:
        """Position of the first, and all taps; of which the last waits on, with its slot made."""
        first, taps = self.first, self.waiting[0] if len(self.waiting) == 1 else np.concatenate(self.waiting)
        self.first, self.waiting, self.num_waiting, self.num_made = self.last, [taps[-1:].copy()], 1, 1
        return first, taps


class _Job(NamedTuple):
    place: int  # among the asks
    ask: DraftAsk
    kept: _Kept
    num_drafts: int


class Head:
    """Proposes what a head samples with the request's own settings and random numbers (`proposer.Proposer`)."""

    name = "mtp"

    def __init__(self, runner: HeadRunner) -> None:
        self._runner = runner
        self._kept: dict[str, _Kept] = {}
        self._is_told = False  # that there are faults; the first one is

    def computed(self, rows: Iterable[Computed]) -> None:
        """Told of each step when its tokens are sampled: positions whose next token is known."""
        many = []
        for row in rows:
            kept = self._kept.get(row.request.request_id)
            if kept is None:
                kept = self._kept[row.request.request_id] = _Kept(row.start)
            kept.add(row.start, row.taps)
            if kept.num_waiting - kept.num_made >= FLUSHED_TOGETHER:
                many.append((row.request, kept))
        self._make(many)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        found: list[Sequence[int]] = [()] * len(asks)
        jobs = [job for place, ask in enumerate(asks) if (job := self._job(place, ask)) is not None]
        if sum(job.kept.num_waiting for job in jobs) > self._runner.max_tokens:
            self._make([(job.ask.request, job.kept) for job in jobs])
        most = self._runner.max_rows
        for first in range(0, len(jobs), most):
            some = jobs[first : first + most]
            for job, made in zip(some, self._chain(some), strict=True):
                found[job.place] = made.tokens
                self._note(job, made)
        return found

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def close(self) -> None:
        self._kept.clear()
        self._runner.close()

    def _job(self, place: int, ask: DraftAsk) -> _Job | None:
        """None where the taps of the last position are missing, or the head's context ends."""
        request = ask.request
        kept, num_tokens = self._kept.get(request.request_id), len(request.tokens.array)
        num_drafts = min(ask.num_drafts, self._runner.max_positions - num_tokens + 1)
        if kept is None or kept.is_hopeless or kept.last != num_tokens - 2 or num_drafts < 1:
            return None
        return _Job(place, ask, kept, num_drafts)

    def _chain(self, jobs: Sequence[_Job]) -> list[DraftTokens]:
        pieces, taps = [], []
        for job in jobs:
            first, rows = job.kept.take()
            pieces.append(_piece(job.ask.request, first, len(rows)))
            taps.append(rows)
        ends = [ChainEnd(job.num_drafts, job.ask.request.sampler) for job in jobs]
        return self._runner.chain(pieces, taps, ends)

    def _make(self, waiting: Sequence[tuple[DraftedRequest, _Kept]]) -> None:
        """Slots of all that waits, as many tokens a pass as there is room for."""
        pieces: list[Piece] = []
        taps: list[Taps] = []
        room = self._runner.max_tokens
        for request, kept in waiting:
            first, rows = kept.take()
            while len(rows):
                if room == 0:
                    self._runner.compute(pieces, taps)
                    pieces, taps, room = [], [], self._runner.max_tokens
                count = min(room, len(rows))
                pieces.append(_piece(request, first, count))
                taps.append(rows[:count])
                first, rows, room = first + count, rows[count:], room - count
        if pieces:
            self._runner.compute(pieces, taps)

    def _note(self, job: _Job, made: DraftTokens) -> None:
        if made.fault is None or made.tokens:
            return
        job.kept.is_hopeless = True
        level = logging.DEBUG if self._is_told else logging.WARNING
        logger.log(level, "no drafts for request %s: the head's %s", job.ask.request.request_id, made.fault)
        self._is_told = True


def _piece(request: DraftedRequest, first: int, count: int) -> Piece:
    return Piece(request.tokens.array[first + 1 : first + 1 + count], first, request.blocks.array)
