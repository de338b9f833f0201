"""Offers of a source: leases on blocks of its pool, between the engine's thread and those that read for receivers."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from maitred.core.clock import Clock, WallClock
from maitred.kv.blocks import HeldBlocks
from maitred.kv.layer_io import LayerIO
from maitred.kv.leases import Lease, LeaseBook, Readable
from maitred.kv.pieces import Offered

LEASE_S = 30.0


class Offers:
    """Offers; `offer`, `grow` and `revoke` are for the engine's thread: microseconds, but for one piece under copy.

    `find` answers a chain of hashes with a lease that it has offered; `on_end(lease, why)` is told when no thread reads
    one any more: released, expired. Both are called by threads of connections. A name is used once.
    """

    def __init__(
        self,
        io: LayerIO,
        *,
        lease_s: float = LEASE_S,
        clock: Clock | None = None,
        find: Callable[[Sequence[bytes]], Offered] = lambda hashes: Offered("", 0),
        on_end: Callable[[str, str], None] = lambda lease, why: None,
    ) -> None:
        self.epoch = secrets.randbits(63)
        """Of this life of the process; leases of another are refused."""
        self.io, self.find = io, find
        self.counts: Counter[str] = Counter()
        """Refusals by reason, and `bytes` and `pieces` that were sent; any thread may read it."""
        self._clock, self._on_end = clock or WallClock(), on_end
        self._lock = threading.Lock()
        self._book = LeaseBook(lease_s)
        self._blocks: dict[str, HeldBlocks] = {}

    def offer(self, lease: str, num_blocks: int, block_ids: Sequence[int], readable: Readable) -> None:
        """The first of `num_blocks` that there will be, in the pool, where they stay until `revoke` or `on_end`."""
        with self._lock:
            self._blocks[lease] = HeldBlocks(self.io, block_ids)
            self._book.offer(lease, num_blocks, readable, self._clock.now())

    def grow(
        self,
        lease: str,
        readable: Readable,
        more_block_ids: Sequence[int] = (),
        num_layers_written: Callable[[], int] | None = None,
    ) -> None:
        """No effect for one that is gone. Any thread asks `num_layers_written`, which while a step is under way tells
        more than `readable.num_layers`.
        """
        with self._lock:
            if (held := self._blocks.get(lease)) is not None:
                held.extend(more_block_ids)
                self._book.grow(lease, readable, self._clock.now(), num_layers_written)

    def revoke(self, lease: str) -> bool:
        """Revoke a lease, waiting for one piece at most; no thread reads its blocks then. Whether it was there."""
        with self._lock:
            self._book.end(lease)
            held = self._blocks.pop(lease, None)
        if held is not None:
            held.give_up()
        return held is not None

    def end(self, lease: str, why: str) -> None:
        """Revoke a lease and tell `on_end`; no effect for one that is gone."""
        if self.revoke(lease):
            self._on_end(lease, why)

    def has(self, lease: str) -> bool:
        """Whether the lease may be in force."""
        return lease in self._blocks

    def expire(self) -> None:
        """End what is over."""
        with self._lock:
            names = self._book.expired(self._clock.now())
        for name in names:
            self.end(name, "expired")

    def close(self) -> None:
        """Revoke everything."""
        for lease in list(self._blocks):
            self.revoke(lease)

    def renew(self, lease: str) -> Lease:
        """Raises Refusal for one that is not in force."""
        with self._lock:
            return self._book.renew(lease, self._clock.now())

    def in_force(self, lease: str) -> Lease:
        """Raises Refusal for one that is not."""
        with self._lock:
            return self._book.in_force(lease, self._clock.now())

    def held(self, lease: str) -> HeldBlocks:
        """Raises Refusal for one that is not in force."""
        with self._lock:
            self._book.in_force(lease, self._clock.now())
            return self._blocks[lease]

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number
