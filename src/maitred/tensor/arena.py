"""Allocator of shared memory: first fit with coalescing. It decides where blocks lie, and touches no memory."""

from __future__ import annotations

from bisect import bisect, insort

ALIGNMENT = 64  # bytes: a line of the processor's cache


class Arena:
    """Blocks of one stretch of memory. First fit, so that as few pages as can be are ever touched."""

    def __init__(self, start: int, end: int) -> None:
        """Bytes from `start`, which is aligned, to `end`."""
        self._start, self._end = start, start + _down(end - start)
        self._holes = [(start, self._end)] if self._end > start else []  # ascending, and no two touch
        self._blocks: dict[int, int] = {}  # the end of each, by its start

    def __len__(self) -> int:
        """Blocks."""
        return len(self._blocks)

    def allocate(self, num_bytes: int) -> int | None:
        """Take a block and return its start; None where no hole is large enough."""
        size = _up(num_bytes)
        start = next((start for start, end in self._holes if end - start >= size), None)
        if start is not None:
            self.take(start, num_bytes)
        return start

    def take(self, start: int, num_bytes: int) -> None:
        """A block at a place that is known, which must be free."""
        end = start + _up(num_bytes)
        at = bisect(self._holes, (start, self._end)) - 1
        hole_start, hole_end = self._holes[at] if at >= 0 else (end, end)
        assert hole_start <= start < end <= hole_end, "two blocks would share memory"
        left = [(hole_start, start), (end, hole_end)]
        self._holes[at : at + 1] = [hole for hole in left if hole[0] < hole[1]]
        self._blocks[start] = end

    def free(self, start: int) -> None:
        """The block that starts there is a hole, one with those that it touches."""
        end = self._blocks.pop(start)
        at = bisect(self._holes, (start, end))
        if at < len(self._holes) and self._holes[at][0] == end:
            end = self._holes.pop(at)[1]
        if at and self._holes[at - 1][1] == start:
            start = self._holes.pop(at - 1)[0]
        insort(self._holes, (start, end))

    def check_invariants(self) -> None:
        """Blocks and holes cover all of it, once."""
        assert all(end < start for (_, end), (start, _) in zip(self._holes, self._holes[1:], strict=False))
        at = self._start
        for start, end in sorted([*self._holes, *self._blocks.items()]):
            assert start == at < end
            at = end
        assert at == self._end


def _up(num_bytes: int) -> int:
    return _down(max(1, num_bytes) + ALIGNMENT - 1)


def _down(num_bytes: int) -> int:
    return num_bytes // ALIGNMENT * ALIGNMENT
