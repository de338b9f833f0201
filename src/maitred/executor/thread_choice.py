"""Thread count of the next step: that with which steps like it are fastest, found by trials now and then.

Threads meet hundreds of times in a step. One whose processor has other work keeps the rest waiting for a time slice
each time, so on a busy machine two threads can be slower than one. Only step times are known here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

LOST_S, WON_S = 0.03, 0.1  # of a trial's steps: several time slices of another process; more to be believed
WON_STEPS = 4
LOST = 1.25  # a trial ends as soon as its steps take so many times what steps like them take
WON = 0.95  # another number is taken where they take less than this
LIKE_STEPS, MAX_UNLIKE_STEPS = 3, 16
MAX_RECENT = 64  # steps with the present number
SILENCE_S = 1.0  # what came before it tells nothing of the machine now
FIRST_WAIT_S = 0.25  # of steps
WAITS, MAX_DOUBLINGS = 4, 4  # 64 trials' time between two: where a trial takes twice the time, it costs under 1%


class ThreadedShape(NamedTuple):
    """Steps of one shape take about the same time with one number of threads."""

    tokens: int  # in eighths of an octave
    rows: int  # in quarters


@dataclass(slots=True)
class _Trial:
    num_threads: int
    num_steps: int = 0
    num_unlike: int = 0
    spent_s: float = 0.0
    took_s: float = 0.0  # by steps whose like is known
    usual_s: float = 0.0  # what these take with the present number


class ThreadChoice:
    """Decides by measured steps, given one after the other; needs no clock.

    A trial takes another number for some steps. Its first step is not counted: threads awake and move then. A number
    that was just taken is tried against others soon, and each time that it stays the wait for the next trial doubles.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._present = self._told = most
        self._recent: deque[tuple[ThreadedShape, float]] = deque(maxlen=MAX_RECENT)  # steps with the present number
        self._trial: _Trial | None = None
        self._wait_s, self._waited_s = FIRST_WAIT_S, 0.0  # of steps
        self._num_stayed = 0
        self._ended_at = 0.0

    @property
    def num_threads(self) -> int:
        """Return the number of threads for the next step."""
        return self._trial.num_threads if self._trial is not None else self._present

    def took(self, num_tokens: int, num_rows: int, began_at: float, ended_at: float) -> int | None:
        """Takes in a step with `num_threads`; another number when it has proven itself, for people to be told."""
        if self._most == 1:
            return None
        if began_at > self._ended_at + SILENCE_S:
            self._recent.clear()
            self._trial = None
        self._ended_at = ended_at
        shape, seconds = ThreadedShape(round(8 * log2(num_tokens)), round(4 * log2(num_rows))), ended_at - began_at
        if self._trial is not None:
            return self._tried(self._trial, shape, seconds)
        self._recent.append((shape, seconds))
        self._waited_s += seconds
        if self._waited_s >= self._wait_s and self._usual_s(shape) is not None:
            others = other_numbers(self._present, self._most)
            self._trial = _Trial(others[self._num_stayed % len(others)])
        return None

    def _tried(self, trial: _Trial, shape: ThreadedShape, seconds: float) -> int | None:
        trial.spent_s += seconds
        trial.num_steps += 1
        if trial.num_steps == 1:
            return None
        usual_s = self._usual_s(shape)
        if usual_s is None:
            trial.num_unlike += 1
        else:
            trial.took_s += seconds
            trial.usual_s += usual_s
        num_like = trial.num_steps - 1 - trial.num_unlike
        lost = trial.took_s >= max(LOST_S, LOST * trial.usual_s)
        if lost or trial.num_unlike == MAX_UNLIKE_STEPS or (trial.took_s >= WON_S and num_like >= WON_STEPS):
            return self._end(trial, won=num_like >= WON_STEPS and trial.took_s < WON * trial.usual_s)
        return None

    def _end(self, trial: _Trial, *, won: bool) -> int | None:
        self._trial, self._waited_s = None, 0.0
        if won:
            self._present, self._num_stayed = trial.num_threads, 0
            self._recent.clear()
        else:
            self._num_stayed += 1
        self._wait_s = max(FIRST_WAIT_S, WAITS * trial.spent_s * 2 ** min(self._num_stayed, MAX_DOUBLINGS))
        if won or self._present == self._told:
            return None
        self._told = self._present
        return self._present

    def _usual_s(self, shape: ThreadedShape) -> float | None:
        """Mean, since a stall in one of ten steps is what counts; None where too few are known."""
        like = [seconds for other, seconds in self._recent if other == shape]
        return sum(like) / len(like) if len(like) >= LIKE_STEPS else None


def other_numbers(present: int, most: int) -> list[int]:
    """Return the numbers to be tried in turn: one thread more or less, half of them, all."""
    return sorted({n for n in (present - 1, present // 2, present + 1, most) if 1 <= n <= most} - {present})
