"""Block pools: reference counts of KV blocks and the order in which free ones are handed out; and blocks on the host.

Blocks are numbered 0 .. num_blocks - 1; the memory itself is the executor's.
Source: PagedAttention, Kwon et al. 2023, arXiv:2309.06180, section 4.2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence


class BlockPool:
    """Reference counts of all blocks, and the free blocks as a queue: the first is handed out next.

    `kept` names the blocks whose contents can still be found by prefix. Such a block, once free, goes to the end of the
    queue (least recently used is evicted first); a block that can no longer be found goes to the front.
    """

    def __init__(self, num_blocks: int, kept: Container[int] = ()) -> None:
        self.ref_counts = [0] * num_blocks  # read by the manager's hot paths; written here only
        self._kept = kept
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self.ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks held by at least one request."""
        return len(self.ref_counts) - len(self._free)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Free blocks in the order in which they will be handed out."""
        return tuple(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, held once each. The caller has checked `num_free`."""
        free, ref_counts = self._free, self.ref_counts
        taken = [free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            ref_counts[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Add a holder of a block that is in use, or is free but still has its contents."""
        if self.ref_counts[block] == 0:
            del self._free[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Remove one holder; the last one puts the block among the free."""
        remaining = self.ref_counts[block] - 1
        assert remaining >= 0, f"block {block} released more often than it was held"
        self.ref_counts[block] = remaining
        if remaining == 0:
            self._free[block] = None
            if block not in self._kept:
                self._free.move_to_end(block, last=False)

    def check_invariants(self) -> None:
        """Assert that a block is free exactly when it has no holder."""
        assert all(count >= 0 for count in self.ref_counts)
        unheld = {block for block, count in enumerate(self.ref_counts) if count == 0}
        assert unheld == set(self._free), f"lost or doubly owned blocks: {unheld ^ set(self._free)}"


class HostBlockPool:
    """Blocks on the host with the KV of preempted requests, each with one owner. A block given back in a step is handed
    out from the next step on: within a step, all copies to the host come before those from it.
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
