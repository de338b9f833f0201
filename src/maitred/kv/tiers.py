"""KV tiers: where blocks outlive the pool (disk, Redis), what each must offer, whether to fetch or to compute, and the
blocks that can be found in pool and tiers.

A tier stores the bytes of whole blocks under their chain hashes. What it gives back was verified to the last bit;
whatever goes wrong is a miss, counted by its reason, and is computed again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from itertools import chain

from maitred.kv.manager import KVCacheManager
from maitred.kv.prefix_cache import Changes

MAX_HELD = 2**18  # blocks told of that were there before changes were wanted


class DropReason(StrEnum):
    """Why a block is not in a tier, or no longer: the `reason` of `maitred_kv_dropped_total`."""

    TORN = "torn"  # cut short: its writer was killed, or the file was
    DAMAGED = "damaged"  # its bytes are not those that were written
    FOREIGN = "foreign"  # another model, dtype, executor or layout
    OLDER = "older"  # an earlier layout of our files
    NO_SPACE = "no_space"  # the disk or the server is full
    READ_ONLY = "read_only"  # the folder may not be written
    FAILED = "failed"  # any other error of the device
    UNREACHABLE = "unreachable"  # the server does not answer
    LAGGED = "lagged"  # came faster than it could be stored


@dataclass(slots=True)
class TierStats:
    """Figures of a tier. Written by the tier, under its lock; others read."""

    num_blocks: int = 0  # held now
    num_bytes: int = 0  # held now, on the medium
    num_hits: int = 0  # blocks read and verified
    num_misses: int = 0  # blocks asked for and not given
    num_written: int = 0  # blocks
    num_evicted: int = 0  # blocks that went for newer ones
    dropped: Counter[DropReason] = field(default_factory=Counter)  # blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFingerprint:
    """Facts that decide the bytes of a block besides its tokens and their salt: unlike blocks are never mixed."""

    revision: str  # of the model
    weight_dtype: str
    kv_dtype: str
    executor: str
    instruction_set: str  # empty where the executor has none to choose
    block_layout: str  # cells, block size, layers, heads, head size
    rope: str  # and the context setting where positions depend on it

    def digest(self) -> str:
        """64 hex digits."""
        return sha256(repr(self).encode()).hexdigest()


class KVTier:
    """Storage of KV blocks. Keys are the 32-byte chain hashes; a row is one block's `bytes_per_block`. Where a block
    has rows by group of layers (`kv.pages`), each has a key of its own (`row_key`).

    All methods may be called from any thread. `read`, `write` and `clear` do I/O in the caller's thread, which is not
    the engine's. Nothing raises for a fault of the medium: that is a miss, or a block not stored, and is counted.
    """

    name: str
    bytes_per_block: int
    stats: TierStats
    has_index = True
    """`num_known` knows of all blocks; else only `read` tells, in one round trip."""
    changes: Changes[bytes] | None = None
    """Keys gained and lost, for the choice of an engine; None while changes are not told."""

    @property
    def hindrance(self) -> str | None:
        """Why nothing can be stored and found now; asks, which may take a second."""
        return None

    def tell_changes(self, wanted: bool) -> None:
        """Begin or end telling changes; the newest present keys first, MAX_HELD at most. Without an index, none."""

    def take_changes(self, most: int) -> tuple[list[bytes], list[bytes]]:
        """Return the changes as `Changes.take` does."""
        return self.changes.take(most) if self.changes is not None else ([], [])

    def num_known(self, keys: Sequence[bytes]) -> int:
        """Return how many from the front are there, by an index in memory, without I/O. Reading may find fewer."""
        raise NotImplementedError

    def read(self, keys: Sequence[bytes], into: memoryview) -> int:
        """Verified blocks into consecutive rows of `into`; how many from the front. Rows after those hold anything."""
        raise NotImplementedError

    def write(self, keys: Sequence[bytes], rows: memoryview) -> int:
        """Stores consecutive rows that are not there yet; how many from the front are there now."""
        raise NotImplementedError

    def touch(self, keys: Sequence[bytes]) -> None:
        """Keep blocks that were of use elsewhere (in the pool), where the tier orders them itself."""

    def clear(self) -> int:
        """Deletes all blocks; how many there were."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives files and connections back. Everything after it finds and stores nothing."""


_OF_A_GROUP = bytes(6)


def row_key(digest: bytes, group: int) -> bytes:
    """Key of a block's row of one group; the first has the block's hash."""
    return digest[:24] + _OF_A_GROUP + group.to_bytes(2) if group else digest


# ---- fetch or compute


def worth_fetching(
    num_bytes: float, num_tokens: int, bandwidth: float, latency_s: float, prefill_s_per_token: float
) -> bool:
    """Fetching so many bytes (bytes/s, and s before the first of them) takes less time than computing the tokens."""
    return num_bytes / bandwidth + latency_s < num_tokens * prefill_s_per_token


def break_even_tokens(
    bytes_per_token: float, bandwidth: float, latency_s: float, prefill_s_per_token: float | None
) -> int | None:
    """The fewest tokens that `worth_fetching` fetches; None where computing is always faster, or was not measured."""
    if prefill_s_per_token is None:
        return None
    gain_s = prefill_s_per_token - bytes_per_token / bandwidth  # of each token
    return math.floor(latency_s / gain_s) + 1 if gain_s > 0 else None


_TIMES = 2.0  # a fetch that takes so many times the foretold time is compared with computing anew


def most_seconds(foretold_s: float, computing_s: float) -> float:
    """Time after which a fetch is abandoned, because computing would have been faster."""
    return max(computing_s, _TIMES * foretold_s)


_HALVES_AFTER = 16  # fetches
_LEAST_SPREAD = 0.1  # of sizes, as a part of their mean: below it they tell nothing of the latency
_MOST_LATENCY = 0.9  # of the mean time


class FetchMeter:
    """Smoothed bandwidth and latency of a tier or a link: the line through the newest fetches, by least squares.

    It goes through their mean, so a fetch of the usual size is foretold as it was measured, whatever the two terms are.
    """

    def __init__(self, *, bandwidth: float, latency_s: float) -> None:
        """Starts from guesses, which the first fetches replace."""
        self.bandwidth, self.latency_s = bandwidth, latency_s  # bytes/s, s
        self.num_fetches = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # sums, of which the older count less

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """A fetch of so many bytes took so long."""
        self.num_fetches += 1
        self._add(float(num_bytes), max(seconds, 1e-9))
        mean_bytes, mean_s = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_bytes**2
        if spread > (_LEAST_SPREAD * mean_bytes) ** 2:
            slope = (self._xy / self._weight - mean_bytes * mean_s) / spread
            self.latency_s = mean_s - slope * mean_bytes
        self.latency_s = min(max(self.latency_s, 0.0), _MOST_LATENCY * mean_s)
        self.bandwidth = max(mean_bytes, 1.0) / (mean_s - self.latency_s)

    def seconds_for(self, num_bytes: float) -> float:
        """Return how long a fetch would take."""
        return num_bytes / self.bandwidth + self.latency_s

    def _add(self, num_bytes: float, seconds: float) -> None:
        keep = 0.5 ** (1 / _HALVES_AFTER)
        self._weight = self._weight * keep + 1.0
        self._x = self._x * keep + num_bytes
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + num_bytes**2
        self._xy = self._xy * keep + num_bytes * seconds


class FindableBlocks:
    """Changes of findable blocks, for the choice of an engine: a block in both places is told once. For one thread."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._tiers: list[KVTier] = []
        self._sources: list[KVCacheManager | KVTier] = [kv_cache]
        self._told: set[bytes] = set()

    def __len__(self) -> int:
        """Hashes that may be news."""
        return sum(len(source.changes or ()) for source in self._sources)

    def add(self, tier: KVTier) -> None:
        """Add a source before changes are told."""
        self._tiers.append(tier)
        self._sources.append(tier)

    def tell_changes(self, wanted: bool) -> None:
        """Begin or end telling changes. The blocks that can be found now are told first."""
        self._told.clear()
        for source in self._sources:
            source.tell_changes(wanted)

    def take(self, most: int) -> tuple[list[bytes], list[bytes]]:
        """Return the changes as `Changes.take` does."""
        changed: list[bytes] = []
        for source in self._sources:
            changed += chain(*source.take_changes(most - len(changed)))
        there = {digest: self._is_there(digest) for digest in changed if digest[24:30] != _OF_A_GROUP}
        stored = [digest for digest, is_there in there.items() if is_there and digest not in self._told]
        removed = [digest for digest, is_there in there.items() if not is_there and digest in self._told]
        self._told.update(stored)
        self._told.difference_update(removed)
        return stored, removed

    def _is_there(self, digest: bytes) -> bool:
        """Now, whatever was noted; what changes after this is noted anew. In a tier that would tell when it goes."""
        tiers = (tier for tier in self._tiers if tier.changes is not None)
        return self._kv_cache.has_block(digest) or any(tier.num_known([digest]) for tier in tiers)
