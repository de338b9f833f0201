"""KV host tier: blocks in host memory, for an engine whose KV pool lies on a device; gone with its process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np

from maitred.core.errors import ConfigError, OutOfMemory
from maitred.kv.prefix_cache import Changes
from maitred.kv.tiers import MAX_HELD, KVTier, TierStats


def open_kv_host(max_bytes: int, bytes_per_block: int) -> KVHost:
    """Raises ConfigError for a bound below one block, OutOfMemory when the memory is refused."""
    if max_bytes < bytes_per_block:
        raise ConfigError(f"--kv-host-bytes is {max_bytes}, and one block takes {bytes_per_block}; give that or more")
    try:
        return KVHost(max_bytes // bytes_per_block, bytes_per_block)
    except MemoryError:
        raise OutOfMemory(f"--kv-host-bytes: {max_bytes} bytes of host memory could not be had; ask for less") from None


class KVHost(KVTier):
    """What was used longest ago goes first. Keys are salted, so that tenants never meet."""

    name = "host"

    def __init__(self, num_rows: int, bytes_per_block: int) -> None:
        self.bytes_per_block, self.stats = bytes_per_block, TierStats()
        self._rows = np.zeros((num_rows, bytes_per_block), np.uint8)
        self._places: OrderedDict[bytes, int] = OrderedDict()  # the newest last
        self._free = list(range(num_rows - 1, -1, -1))
        self._lock = threading.Lock()  # held over the copy of one block

    def tell_changes(self, wanted: bool) -> None:
        with self._lock:
            self.changes = Changes(islice(reversed(self._places), MAX_HELD)) if wanted else None

    def take_changes(self, most: int) -> tuple[list[bytes], list[bytes]]:
        with self._lock:
            return super().take_changes(most)

    def num_known(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._places), len(keys))

    def read(self, keys: Sequence[bytes], into: memoryview) -> int:
        size, num_read = self.bytes_per_block, 0
        for key in keys:
            with self._lock:
                place = self._places.get(key)
                if place is None:
                    break
                into[num_read * size : (num_read + 1) * size] = self._rows[place].data
                self._places.move_to_end(key)
            num_read += 1
        with self._lock:
            self.stats.num_hits += num_read
            self.stats.num_misses += len(keys) - num_read
        return num_read

    def write(self, keys: Sequence[bytes], rows: memoryview) -> int:
        for key, row in zip(keys, np.frombuffer(rows, np.uint8).reshape(len(keys), -1), strict=True):
            with self._lock:
                if key not in self._places and self._rows.size:
                    self._rows[(place := self._freed())] = row
                    self._places[key] = place
                    self._note(key)
        return self.num_known(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                if key in self._places:
                    self._places.move_to_end(key)

    def clear(self) -> int:
        with self._lock:
            count = len(self._places)
            for key in list(self._places):
                self._drop(key)
        return count

    def close(self) -> None:
        self.clear()
        with self._lock:
            self._rows, self._free = self._rows[:0], []

    # -- only while the lock is held

    def _freed(self) -> int:
        if not self._free:
            self._drop(next(iter(self._places)))
            self.stats.num_evicted += 1
        return self._free.pop()

    def _drop(self, key: bytes) -> None:
        self._free.append(self._places.pop(key))
        if self.changes is not None:
            self.changes.removed(key)
        self._sum_up()

    def _note(self, key: bytes) -> None:
        self.stats.num_written += 1
        if self.changes is not None:
            self.changes.stored(key)
        self._sum_up()

    def _sum_up(self) -> None:
        self.stats.num_blocks = len(self._places)
        self.stats.num_bytes = len(self._places) * self.bytes_per_block
