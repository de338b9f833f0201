"""Host block pool: which host blocks hold the KV of preempted requests; the memory itself is the executor's."""

from __future__ import annotations

from collections.abc import Sequence


class HostPool:
    """Blocks on the host, each with one owner. A block given back in a step is handed out from the next step on: within
    a step, all copies to the host come before those from it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # the last is handed out next
        self._leaving: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks. The caller has checked `num_free`."""
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> None:
        self._leaving += blocks

    def begin_step(self) -> None:
        if self._leaving:
            self._free += reversed(self._leaving)
            self._leaving = []

    def check_invariants(self, held: Sequence[int]) -> None:
        """Asserts that `held`, by all owners, and what is free are all there is."""
        assert sorted([*held, *self._free, *self._leaving]) == list(range(self.num_blocks))
