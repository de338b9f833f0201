"""Pace of a lane: how fast requests come, how long batches take, and how long a batch is to wait for more."""

from __future__ import annotations

from math import exp
from typing import NamedTuple

RATE_S = 5.0  # that the rate of rows is taken over, about; for people to look at
REMEMBERED = 64.0  # batches, or arrivals, that count
UTILISATION = 0.8  # a batch waits until it is so large that its instance would be busy no more than this


class BatchWait(NamedTuple):
    """Wait for so many rows, or so long (s), whichever is first."""

    num_rows: int
    at_most_s: float


class LanePace:
    """Batch times are fitted by a line, seconds = fixed + per_row * rows, with weights that fade."""

    __slots__ = ("_count", "_gap_s", "_last_at", "_recent", "_rows", "_rows_s", "_seconds", "_squares")

    def __init__(self) -> None:
        self._last_at: float | None = None  # s, of the last arrival
        self._gap_s: float | None = None  # from a row to the next
        self._recent = (0.0, 0.0)  # rows that ran, the older the less they count; and as of when (s)
        self._count = self._rows = self._squares = self._seconds = self._rows_s = 0.0  # sums over batches

    def came(self, num_rows: int, now: float) -> None:
        last, self._last_at = self._last_at, now
        if last is None:
            return
        gap_s = max(0.0, now - last) / num_rows
        self._gap_s = gap_s if self._gap_s is None else self._gap_s + (gap_s - self._gap_s) / REMEMBERED

    def ran(self, num_rows: int, seconds: float, now: float) -> None:
        self._recent = (self._recent_rows(now) + num_rows, now)
        keep = 1.0 - 1.0 / REMEMBERED
        self._count = keep * self._count + 1.0
        self._rows = keep * self._rows + num_rows
        self._squares = keep * self._squares + num_rows * num_rows
        self._seconds = keep * self._seconds + seconds
        self._rows_s = keep * self._rows_s + num_rows * seconds

    def rows_per_s(self, now: float) -> float:
        """Return the rows a second of the last RATE_S, about."""
        return self._recent_rows(now) / RATE_S

    def _recent_rows(self, now: float) -> float:
        num_rows, at = self._recent
        return num_rows * exp(min(0.0, at - now) / RATE_S) if num_rows else 0.0

    def seconds(self, num_rows: int) -> float:
        """Return the seconds that a batch is expected to take; 0 until one was seen."""
        fixed_s, row_s = self._line()
        return fixed_s + row_s * num_rows

    def wait(self, max_rows: int) -> BatchWait:
        """Return the wait for the smallest batch that keeps its instance below UTILISATION at the present rate of rows,
        and no longer than such rows take to come, or than the batch takes. At a calm pace that is one row, without a
        wait.
        """
        gap_s, (fixed_s, row_s) = self._gap_s, self._line()
        if not gap_s or not self._count:
            return BatchWait(1, 0.0)
        spare_s = UTILISATION * gap_s - row_s  # that each row leaves for the fixed part
        num_rows = max_rows if spare_s * max_rows <= fixed_s else max(1, -int(-fixed_s // spare_s))
        at_most_s = min((num_rows - 1) * gap_s, fixed_s + row_s * num_rows)
        return BatchWait(num_rows, at_most_s)

    def _line(self) -> tuple[float, float]:
        """(fixed, per row) in s, neither below 0."""
        if not self._count:
            return 0.0, 0.0
        spread = self._count * self._squares - self._rows * self._rows
        if spread <= 1e-9 * self._squares * self._count:  # batches of one size tell nothing of the others
            return 0.0, self._seconds / self._rows
        row_s = (self._count * self._rows_s - self._rows * self._seconds) / spread
        row_s = min(max(row_s, 0.0), self._seconds / self._rows)
        return (self._seconds - row_s * self._rows) / self._count, row_s
