"""KV tiers of a running engine: what was computed is stored behind it, and fetched before it is computed again.

One thread fetches, one copies out of the pool, one stores what was copied: what hangs in a tier holds no block.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from maitred.config import TiersConfig
from maitred.core.clock import Clock
from maitred.core.errors import ConfigError
from maitred.core.replica import KVFigures, TierFigures, TierView
from maitred.core.request import RequestState, RequestStatus
from maitred.kv.disk import open_kv_disk
from maitred.kv.fetching import Fetch, Fetches, FetchSource, KVThreads
from maitred.kv.host import open_kv_host
from maitred.kv.layout import BlockIO, Guard
from maitred.kv.leases import Refusal
from maitred.kv.redis import open_kv_redis
from maitred.kv.tiers import DropReason, FetchMeter, KVTier, row_key
from maitred.scheduler.engine_core import EngineCore, StepListener
from maitred.scheduler.reservations import GivenUp

FIRST_GUESS = (0.5e9, 0.002)  # bytes/s, s; until a fetch was measured
PIECE_BYTES = 8 * 2**20  # moved at once: what giving up waits for
PATIENCE_S = 5.0  # more than a fetch should take, until its thread counts as stuck
ASK_TIMES = 10.0  # a prompt's computing over a tier's latency, from which on one is asked that has no index here
RETRIES = 4  # requests in line, whose fetch is tried again in each round
DRAIN_S = 2.0  # to store what is queued, when an engine ends; its supervisor waits little longer


class TierAtWork(FetchSource):
    """A tier beside an engine."""

    def __init__(self, tier: KVTier) -> None:
        super().__init__(tier.name, FetchMeter(bandwidth=FIRST_GUESS[0], latency_s=FIRST_GUESS[1]), PATIENCE_S)
        self.tier = tier
        self.lost: Counter[DropReason] = Counter()  # blocks, before they came to the tier
        self.on_the_way: set[bytes] = set()  # keys of blocks that it will have, unless something fails

    @property
    def dropped(self) -> dict[str, int]:
        dropped = self.tier.stats.dropped.copy() + self.lost  # a copy, since other threads count, too
        return {str(reason): count for reason, count in dropped.items()}


class FoundBlocks(NamedTuple):
    request: RequestState
    tier: TierAtWork
    first: int  # block from which on it was asked
    num_blocks: int


@dataclass(slots=True, eq=False)
class StoreJob:
    lease: str
    tier: TierAtWork
    keys: Sequence[bytes]
    rows: Sequence[int]  # of the pool
    guard: Guard = field(default_factory=Guard)
    num_copied: int = 0  # rows, by the thread
    has_failed: bool = False  # what follows a block that is not stored is not found


class KVTiers(StepListener):
    """Between an engine's core and `tiers`, the fastest first. All methods are the engine thread's."""

    def __init__(
        self,
        io: BlockIO,
        tiers: Sequence[KVTier],
        *,
        block_size: int,
        staging_bytes: int,
        threads: KVThreads,
        clock: Clock,
    ) -> None:
        """`staging_bytes` bound what was copied and waits to be stored, and what waits to be copied."""
        self._io, self._block_size, self._threads, self._clock = io, block_size, threads, clock
        self._tiers = [TierAtWork(tier) for tier in tiers]
        self._staging_bytes = staging_bytes
        self._requests: dict[str, RequestState] = {}
        self._stores: dict[str, StoreJob] = {}
        self._wanting: dict[str, FoundBlocks] = {}  # requests that lacked blocks for their KV
        self._num_leases = 0
        self._thread = threading.current_thread()
        self._landed = memoryview(b"")
        self._piece_bytes = min(PIECE_BYTES, staging_bytes)
        self._used: deque[memoryview] = deque(maxlen=2)
        self._room = threading.Semaphore(staging_bytes // self._piece_bytes)  # pieces

    def begin(self, core: EngineCore) -> None:
        self._core, self._kv = core, core.scheduler.kv_cache
        self._has_windows = len(self._kv.kinds) > 1
        core.measure_prefill()
        self.fetches = Fetches(
            core, block_size=self._block_size, bytes_per_row=self._io.bytes_per_block, on_come=self._came
        )
        for each in self._tiers:
            core.findable.add(each.tier)

    # -- what happens to requests

    def added(self, request: RequestState, now: float) -> None:
        """Look up the blocks that the prefix cache lacks for a new request, and fetch them where that is faster."""
        self._requests[request.request_id] = request
        if not self._kv.finds_again(request):
            return
        usable = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        first = len(self._kv.find_prefix(request).blocks)
        for tier in self._tiers if first < usable else ():
            num_blocks = self._num_found(tier.tier, request, first, usable) if tier.tier.has_index else usable - first
            if num_blocks > 0 and (tier.tier.has_index or self._may_ask(tier, num_blocks)):
                self._begin_fetch(FoundBlocks(request, tier, first, num_blocks))

    def ended(self, request_id: str) -> None:
        """Store what a request computed and the prefix cache still has; its blocks may be what others lacked."""
        request = self._requests.pop(request_id, None)
        self._wanting.pop(request_id, None)
        if self._wanting:
            self._retry()
        if request is None or not request.block_hashes or not self._kv.finds_again(request):
            return
        for tier in self._tiers:
            ends = {len(keys := request.block_hashes)}
            if self._has_windows:  # those of the same prompt, and of one that begins as far as this one was known
                ends |= {(request.num_prompt_tokens - 1) // self._block_size, tier.tier.num_known(keys)}
            for end in sorted(ends, reverse=True):
                self._store(keys[:end], tier)

    def given_up(self, given_up: GivenUp) -> None:
        """Stop fetches and stores; no thread touches those blocks after this returns."""
        self.fetches.given_up(given_up.request_ids)
        for lease in given_up.leases:
            store = self._stores.get(lease)
            if store is not None:
                store.guard.give_up()
                store.tier.lost[DropReason.LAGGED] += len(store.rows) - store.num_copied

    def knows(self, key: bytes) -> bool:
        """Whether a request that has nothing but hashes would find this block."""
        usable = (each.tier for each in self._tiers if each.tier.has_index)
        return any(tier.num_known([key]) for tier in usable)

    def clear_tiers(self, done: Callable[[int], None]) -> bool:
        """Empties the tiers behind what is being stored; `done` is told, here, how many blocks there were."""

        def empty() -> None:
            count = sum(each.tier.clear() for each in self._tiers)
            self._core.call_soon(partial(done, count))

        self._threads.copy.give(partial(self._threads.store.give, empty))
        return True

    def tier_views(self) -> Sequence[TierView]:
        bytes_per_token, prefill_s = self.fetches.bytes_per_token, self._core.prefill_s_per_token
        return [
            each.view(
                each.tier.stats,
                each.dropped,
                num_waiting=self._num_waiting(each),
                bytes_per_token=bytes_per_token,
                prefill_s=prefill_s,
            )
            for each in self._tiers
        ]

    def figures(self) -> Mapping[str, KVFigures]:
        """Figures for metrics, by tier."""
        by_tier = {
            each.name: TierFigures(each.tier.stats.num_bytes, each.hit_tokens, each.dropped) for each in self._tiers
        }
        return {"kv_tiers": KVFigures(by_tier)}

    def close(self) -> None:
        """Store what is queued, for a while; then close the tiers, unless writing does not end."""
        until = self._clock.now() + DRAIN_S
        self.fetches.close()
        self._threads.fetch.end(0.0)
        is_done = all(thread.end(until - self._clock.now()) for thread in (self._threads.copy, self._threads.store))
        for store in self._stores.values():
            store.guard.give_up()
        for each in self._tiers if is_done else ():
            each.tier.close()

    # -- fetching

    def _may_ask(self, tier: TierAtWork, num_blocks: int) -> bool:
        """Whether a prompt may wait for a tier that perhaps has nothing of it: little beside computing it."""
        prefill_s = self._core.prefill_s_per_token
        return prefill_s is None or num_blocks * self._block_size * prefill_s > ASK_TIMES * tier.meter.latency_s

    def _num_found(self, tier: KVTier, request: RequestState, first: int, usable: int) -> int:
        """Blocks from the `first` on, after which a request can go on with what the tier has besides."""
        keys, kinds = request.block_hashes, self._kv.kinds

        def has(kind: int, index: int) -> bool:
            return index < first or all(tier.num_known([row_key(keys[index], group)]) for group in kinds[kind])

        num_blocks = first + tier.num_known(keys[first:usable]) if kinds[0] else usable
        return self._kv.num_usable(num_blocks, has) - first

    def _retry(self) -> None:
        """Try fetches again for requests that would start soon."""
        for request in self._core.scheduler.next_in_line(RETRIES):
            if (found := self._wanting.pop(request.request_id, None)) is not None:
                self._begin_fetch(found)

    def _begin_fetch(self, found: FoundBlocks) -> None:
        request, tier = found.request, found.tier
        if request.status is not RequestStatus.WAITING or request.request_id not in self._requests or tier.is_stuck:
            return
        end = (found.first + found.num_blocks) * self._block_size
        if not self.fetches.pays(tier, found.num_blocks, self._kv.num_rows(found.first, end)):
            return
        reserved = self._core.reserve(request.request_id, end)
        if reserved is None:
            if request.status is RequestStatus.WAITING:
                self._wanting[request.request_id] = found
            return
        first = reserved.start // self._block_size
        keys = request.block_hashes[: first + len(reserved.block_ids)]
        rows = self._kv.rows(request.block_table, first, reserved.end)
        fetch = Fetch(request, tier, keys, first, rows, Guard(), self._clock.now())
        self.fetches.watch(fetch)
        self.fetches.begin(fetch, self._threads.fetch, partial(self._fetch, fetch, tier.tier))

    def _fetch(self, fetch: Fetch, tier: KVTier) -> None:
        """Copy rows into the pool, in the fetching thread. No part of them counts where layers have windows. Raises
        Refusal when they were given up.
        """
        began_at, size = self._clock.now(), self._io.bytes_per_block
        keys = [row_key(fetch.keys[row.place], row.group) for row in fetch.rows]
        for piece in self._pieces(len(keys)):
            num_rows = len(keys[piece])
            rows = self._landing(num_rows * size)
            count = tier.read(keys[piece], rows)
            with fetch.guard:
                self._io.write([row.number for row in fetch.rows[piece][:count]], rows[: count * size])
                fetch.num_bytes += count * size
                if not self._has_windows:
                    fetch.num_done += count
                elif piece.start + count == len(keys):
                    fetch.num_done = fetch.num_blocks
                fetch.took_s = self._clock.now() - began_at
            if count < num_rows or self._clock.now() - fetch.began_at > fetch.most_s:
                return

    def _came(self, fetch: Fetch) -> None:
        if fetch.num_bytes:
            fetch.source.meter.fetched(fetch.num_bytes, fetch.took_s)

    def _landing(self, num_bytes: int) -> memoryview:
        """Memory that the fetching thread keeps, so that no piece lands in untouched pages."""
        if len(self._landed) < num_bytes:
            self._landed = memoryview(bytearray(num_bytes))
        return self._landed[:num_bytes]

    # -- storing

    def _store(self, keys: Sequence[bytes], tier: TierAtWork) -> None:
        """Store what a request goes on with after these blocks, as far as the pool has it and the tier has not."""
        num_known = tier.tier.num_known(keys)
        tier.tier.touch(keys[:num_known])
        while num_known < len(keys) and keys[num_known] in tier.on_the_way:
            num_known += 1  # another sample said the same
        if num_known == len(keys) and not self._has_windows:
            return
        self._num_leases += 1
        lease = f"store-{self._num_leases}"
        blocks = self._core.hold(lease, keys)
        rows = {
            key: row.number
            for row in self._kv.rows(blocks, 0 if self._has_windows else num_known, len(blocks) * self._block_size)
            if not tier.tier.num_known([key := row_key(keys[row.place], row.group)]) and key not in tier.on_the_way
        }
        if not rows or self._lags(tier, len(rows)):
            self._core.release(lease)
            return
        store = self._begin_store(lease, tier, list(rows), list(rows.values()))
        self._threads.copy.give(partial(self._copy_out, store))

    def _begin_store(self, lease: str, tier: TierAtWork, keys: Sequence[bytes], rows: Sequence[int]) -> StoreJob:
        store = self._stores[lease] = StoreJob(lease, tier, keys, rows)
        tier.on_the_way.update(keys)
        return store

    def evicted(self, blocks: Mapping[bytes, int]) -> None:
        """Copy blocks that preempted requests computed and no tier has: nothing else keeps them. What other requests
        computed was stored when they ended. Where layers have windows, pages are gone one by one, and it is computed.
        """
        for tier in self._tiers if not self._has_windows else ():
            lost = {key for key in blocks if key not in tier.on_the_way and not tier.tier.num_known([key])}
            for request in self._requests.values() if lost else ():
                if request.num_preemptions and request.status is RequestStatus.WAITING:
                    keys = [key for key in request.block_hashes if key in lost]
                    lost.difference_update(keys)
                    self._store_evicted(tier, keys, [blocks[key] for key in keys])

    def _store_evicted(self, tier: TierAtWork, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Piece by piece, while there is room to wait in; the step waits for copying alone."""
        for piece in self._pieces(len(keys)):
            if not self._room.acquire(blocking=False):
                tier.lost[DropReason.LAGGED] += len(keys) - piece.start
                return
            self._num_leases += 1
            store = self._begin_store(f"evicted-{self._num_leases}", tier, keys[piece], blocks[piece])
            rows = self._copied_rows(store, store.rows)
            self._threads.store.give(partial(self._write, store, store.keys, rows))
            self._threads.store.give(partial(self._core.call_soon, partial(self._stored, store)))

    def _lags(self, tier: TierAtWork, num_rows: int) -> bool:
        """Whether so many more rows are too much beside those that wait: then they are dropped."""
        waiting = sum(map(self._num_waiting, self._tiers))
        if not waiting or (waiting + num_rows) * self._io.bytes_per_block <= self._staging_bytes:
            return False
        tier.lost[DropReason.LAGGED] += num_rows
        return True

    def _copy_out(self, store: StoreJob) -> None:
        """Copy blocks out of the pool, in the copying thread, until they are given up."""
        try:
            for piece in self._pieces(len(store.keys)):
                self._room.acquire()
                try:
                    rows = self._copied_rows(store, store.rows[piece])
                except Refusal:
                    self._room.release()
                    return
                self._threads.store.give(partial(self._write, store, store.keys[piece], rows))
        finally:
            self._core.call_soon(partial(self._core.release, store.lease))
            self._threads.store.give(partial(self._core.call_soon, partial(self._stored, store)))

    def _copied_rows(self, store: StoreJob, numbers: Sequence[int]) -> memoryview:
        """Raises Refusal when they were given up."""
        rows = self._piece_of(len(numbers) * self._io.bytes_per_block)
        with store.guard:
            self._io.read(numbers, rows)
            store.num_copied += len(numbers)
        return rows

    def _write(self, store: StoreJob, keys: Sequence[bytes], rows: memoryview) -> None:
        """Write copied rows to a tier, in the storing thread."""
        try:
            if not store.has_failed:
                store.has_failed = True
                store.has_failed = store.tier.tier.write(keys, rows) < len(keys)
        finally:
            self._used.append(rows)
            self._room.release()

    def _piece_of(self, num_bytes: int) -> memoryview:
        """Memory of a stored piece, if there is one: untouched memory costs more than the copy."""
        try:
            rows = self._used.pop()
        except IndexError:
            rows = memoryview(b"")
        return rows[:num_bytes] if len(rows) >= num_bytes else memoryview(bytearray(num_bytes))

    def _stored(self, store: StoreJob) -> None:
        """End a store, of which as much is in the tier as came to be."""
        del self._stores[store.lease]
        store.tier.on_the_way.difference_update(store.keys)

    def _pieces(self, num_blocks: int) -> Iterator[slice]:
        size = max(1, self._piece_bytes // self._io.bytes_per_block)
        return (slice(first, first + size) for first in range(0, num_blocks, size))

    def _num_waiting(self, tier: TierAtWork) -> int:
        """Rows that are to be stored there."""
        return sum(len(each.rows) for each in self._stores.values() if each.tier is tier)


def open_tiers(config: TiersConfig, bytes_per_block: int, fingerprint: str) -> list[KVTier]:
    """Open the tiers that were asked for, the fastest first. Raises ConfigError."""
    found: list[KVTier] = []
    num_bytes, url = bytes_per_block, config.kv_redis
    if config.kv_staging_bytes < num_bytes:
        raise ConfigError(
            f"kv_staging_bytes is {config.kv_staging_bytes}, and a block takes {num_bytes}; give that or more"
        )
    if config.kv_host_bytes:
        found.append(open_kv_host(config.kv_host_bytes, num_bytes))
    if config.kv_disk is not None:
        most = config.kv_disk_max_bytes
        found.append(open_kv_disk(config.kv_disk, max_bytes=most, bytes_per_block=num_bytes, fingerprint=fingerprint))
    if url is not None:
        most = config.kv_redis_max_block_bytes
        found.append(open_kv_redis(url, max_block_bytes=most, bytes_per_block=num_bytes, fingerprint=fingerprint))
    return found
