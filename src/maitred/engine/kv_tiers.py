"""KV tiers of a running engine: what was computed is stored behind it, and fetched before it is computed again.

The engine's thread decides and reserves; threads of its own move bytes between the pool and the tiers, a piece at a
time: one fetches, one copies out of the pool, one stores what was copied. Nothing waits for them but the request whose
KV is on the way, and that not for longer than computing would take.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from maitred.core.clock import Clock
from maitred.core.replica import KVFigures, TierFigures, TierView
from maitred.core.request import RequestState, RequestStatus
from maitred.kv.layout import BlockIO
from maitred.kv.threads import Guard, ThreadOfJobs
from maitred.kv.tiers import DropReason, FetchMeter, KVTier, break_even_tokens, most_seconds, worth_fetching
from maitred.scheduler.engine_core import EngineCore, StepListener
from maitred.scheduler.reservations import GivenUp

FIRST_GUESS = (0.5e9, 0.002)  # bytes/s, s; until a fetch was measured

PIECE_BYTES = 8 * 2**20  # moved at once: what giving up waits for
PATIENCE_S = 5.0  # more than a fetch should take, until its thread counts as stuck
ASK_TIMES = 10.0  # a prompt's computing over a tier's latency, from which on one is asked that has no index here
STORING_NICENESS = 10  # steps go first on a busy machine
RETRIES = 4  # requests in line, whose fetch is tried again in each round
DRAIN_S = 2.0  # to store what is queued, when an engine ends; its supervisor waits little longer


class KVTiers(StepListener):
    """Between an engine's core and `tiers`, the fastest first. All methods are the engine thread's."""

    def __init__(
        self,
        io: BlockIO,
        tiers: Sequence[KVTier],
        *,
        block_size: int,
        staging_bytes: int,
        clock: Clock,
    ) -> None:
        """`staging_bytes` bound what was copied and waits to be stored, and what waits to be copied."""
        self._io, self._block_size = io, block_size
        self._tiers = [TierAtWork(tier) for tier in tiers]
        self._staging_bytes, self._clock = staging_bytes, clock
        self._requests: dict[str, RequestState] = {}
        self._fetches: dict[str, Fetch] = {}
        self._stores: dict[str, StoreJob] = {}
        self._wanting: dict[str, FoundBlocks] = {}  # for whose KV blocks lacked
        self._num_leases = 0
        self._thread = threading.current_thread()
        self._landed = memoryview(b"")
        self._piece_bytes = min(PIECE_BYTES, staging_bytes)
        self._used: deque[memoryview] = deque(maxlen=2)
        self._room = threading.Semaphore(staging_bytes // self._piece_bytes)  # pieces
        self._fetching, self._copying = (
            ThreadOfJobs("maitred-kv-fetch"),
            ThreadOfJobs("maitred-kv-copy", niceness=STORING_NICENESS),
        )
        self._storing = ThreadOfJobs("maitred-kv-store", niceness=STORING_NICENESS)

    def begin(self, core: EngineCore) -> None:
        self._core = core
        core.measure_prefill()
        for each in self._tiers:
            core.findable.add(each.tier)

    def __len__(self) -> int:
        """Requests whose KV is on the way."""
        return len(self._fetches)

    # -- what happens to requests

    def added(self, request: RequestState, now: float) -> None:
        """Look up the blocks that the prefix cache lacks for a new request, and fetch them where that is faster."""
        self._requests[request.request_id] = request
        if not self._core.scheduler.kv_cache.finds_again(request):
            return
        usable = (request.num_tokens - 1) // self._block_size
        first = len(self._core.scheduler.kv_cache.find_prefix(request).blocks)
        keys = request.block_hashes[first:usable]
        for tier in self._tiers if keys else ():
            if tier.is_stuck:
                continue
            if tier.tier.has_index:
                tier.tier.look_up(keys, partial(self._tell_found, request, tier, first))
            elif self._may_ask(tier, len(keys)):
                self._begin_fetch(FoundBlocks(request, tier, first, len(keys)))

    def ended(self, request_id: str) -> None:
        """Store what a request computed and the prefix cache still has; its blocks may be what others lacked."""
        request = self._requests.pop(request_id, None)
        self._wanting.pop(request_id, None)
        if self._wanting:
            self._retry()
        if request is None or not request.block_hashes or not self._core.scheduler.kv_cache.finds_again(request):
            return
        for tier in self._tiers:
            self._store(request, tier)

    def knows(self, key: bytes) -> bool:
        """Whether a request that has nothing but hashes would find this block."""
        usable = (each.tier for each in self._tiers if each.tier.has_index)
        return any(tier.num_known([key]) for tier in usable)

    def clear_tiers(self, done: Callable[[int], None]) -> bool:
        """Empties the tiers behind what is being stored; `done` is told, here, how many blocks there were."""

        def empty() -> None:
            count = sum(each.tier.clear() for each in self._tiers)
            self._core.call_soon(partial(done, count))

        self._copying.give(partial(self._storing.give, empty))
        return True

    def tier_views(self) -> Sequence[TierView]:
        """The tiers' views, for people."""
        bytes_per_token = self._io.bytes_per_block / self._block_size
        prefill_s = self._core.prefill_s_per_token
        return [
            TierView(
                each.tier.name,
                each.tier.stats.num_bytes,
                each.tier.stats.num_blocks,
                each.hit_tokens,
                each.tier.stats.num_written,
                self._num_waiting(each),
                each.tier.stats.num_evicted,
                dict(self._dropped(each)),
                each.meter.bandwidth,
                each.meter.latency_s,
                break_even_tokens(bytes_per_token, each.meter.bandwidth, each.meter.latency_s, prefill_s),
            )
            for each in self._tiers
        ]

    def figures(self) -> Mapping[str, KVFigures]:
        """Figures for metrics, by tier."""
        by_tier = {
            each.tier.name: TierFigures(each.tier.stats.num_bytes, each.hit_tokens, dict(self._dropped(each)))
            for each in self._tiers
        }
        return {"kv_tiers": KVFigures(by_tier)}

    def close(self) -> None:
        """Stores what is queued, for a while; then the tiers are closed, but for one whose writing does not end."""
        until = self._clock.now() + DRAIN_S
        for fetch in self._fetches.values():
            fetch.end()
        self._fetching.end(0.0)
        is_done = all(worker.end(until - self._clock.now()) for worker in (self._copying, self._storing))
        for store in self._stores.values():
            store.guard.end()
        for each in self._tiers if is_done else ():
            each.tier.close()

    # -- fetching

    def _may_ask(self, tier: TierAtWork, num_blocks: int) -> bool:
        """Whether a prompt may wait for a tier that perhaps has nothing of it: little beside computing it."""
        prefill_s = self._core.prefill_s_per_token
        return prefill_s is None or num_blocks * self._block_size * prefill_s > ASK_TIMES * tier.meter.latency_s

    def _tell_found(self, request: RequestState, tier: TierAtWork, first: int, count: int) -> None:
        """Begin to fetch found blocks; from any thread, at once in the engine's."""
        found = FoundBlocks(request, tier, first, count)
        if count and threading.current_thread() is self._thread:
            self._begin_fetch(found)
        elif count:
            self._core.call_soon(partial(self._begin_fetch, found))

    def _retry(self) -> None:
        """Try fetches again for requests that would start soon."""
        for request in self._core.scheduler.next_in_line(RETRIES):
            if (found := self._wanting.pop(request.request_id, None)) is not None:
                self._begin_fetch(found)

    def _begin_fetch(self, found: FoundBlocks) -> None:
        request, tier = found.request, found.tier
        if request.status is not RequestStatus.WAITING or request.request_id not in self._requests or tier.is_stuck:
            return
        num_bytes = found.num_blocks * self._io.bytes_per_block
        on_the_way = sum(len(each.keys) for each in self._fetches.values()) * self._io.bytes_per_block
        meter, prefill_s = tier.meter, self._core.prefill_s_per_token
        if prefill_s is not None and not worth_fetching(
            num_bytes + on_the_way, found.num_blocks * self._block_size, meter.bandwidth, meter.latency_s, prefill_s
        ):
            return
        reserved = self._core.reserve(request.request_id, (found.first + found.num_blocks) * self._block_size)
        if reserved is None:
            if request.status is RequestStatus.WAITING:
                self._wanting[request.request_id] = found
            return
        first = reserved.start // self._block_size
        computing_s = (reserved.end - reserved.start) * prefill_s if prefill_s is not None else 0.0
        fetch = Fetch(
            request.request_id,
            tier,
            request.block_hashes[first : first + len(reserved.block_ids)],
            reserved.block_ids,
            reserved.start,
            self._clock.now(),
            most_seconds(meter.seconds_for(num_bytes + on_the_way), computing_s),
        )
        self._fetches[request.request_id] = fetch
        fetch.watch = threading.Timer(fetch.most_s + PATIENCE_S, self._core.call_soon, [partial(self._overdue, fetch)])
        fetch.watch.daemon = True
        fetch.watch.start()
        self._fetching.give(partial(self._fetch, fetch))

    def _overdue(self, fetch: Fetch) -> None:
        """End a fetch whose thread hangs, or waited too long for others: what came counts, and the rest is computed."""
        if self._fetches.get(fetch.request_id) is fetch:
            fetch.tier.is_stuck = True
            self._settle(fetch)

    def _fetched(self, fetch: Fetch) -> None:
        """The thread is done with it."""
        fetch.tier.is_stuck = False
        if self._fetches.get(fetch.request_id) is fetch:  # else it was given up, or took too long
            self._settle(fetch)

    def _settle(self, fetch: Fetch) -> None:
        del self._fetches[fetch.request_id]
        fetch.end()
        num_tokens = fetch.num_done * self._block_size
        if fetch.num_done:
            fetch.tier.meter.fetched(fetch.num_done * self._io.bytes_per_block, fetch.took_s)
        if self._core.kv_arrived(fetch.request_id, fetch.start + num_tokens):
            fetch.tier.hit_tokens += num_tokens
        if self._is_load(fetch.request_id):
            self._core.abort(fetch.request_id)  # no client is told: it has done what it was here for

    def _fetch(self, fetch: Fetch) -> None:
        """Copy blocks into the pool; runs in the thread that fetches."""
        began_at, size = self._clock.now(), self._io.bytes_per_block
        try:
            for piece in self._pieces(len(fetch.keys)):
                keys, blocks = fetch.keys[piece], fetch.blocks[piece]
                rows = self._landing(len(keys) * size)
                count = fetch.tier.tier.read(keys, rows)
                with fetch.guard.lock:
                    if fetch.guard.is_over:
                        return
                    self._io.write(blocks[:count], rows[: count * size])
                    fetch.num_done += count
                    fetch.took_s = self._clock.now() - began_at
                if count < len(keys) or self._clock.now() - fetch.began_at > fetch.most_s:
                    return
        finally:
            self._core.call_soon(partial(self._fetched, fetch))

    def _landing(self, num_bytes: int) -> memoryview:
        """Memory that the fetching thread keeps, so that no piece lands in untouched pages."""
        if len(self._landed) < num_bytes:
            self._landed = memoryview(bytearray(num_bytes))
        return self._landed[:num_bytes]

    # -- storing

    def _store(self, request: RequestState, tier: TierAtWork) -> None:
        keys = request.block_hashes
        num_known = tier.tier.num_known(keys)
        tier.tier.touch(keys[:num_known])
        while num_known < len(keys) and keys[num_known] in tier.on_the_way:
            num_known += 1  # another sample said the same
        if num_known == len(keys):
            return
        self._num_leases += 1
        lease = f"store-{self._num_leases}"
        blocks = self._core.hold(lease, keys)
        if len(blocks) <= num_known or self._lags(tier, len(blocks) - num_known):
            self._core.release(lease)
            return
        keys = keys[num_known : len(blocks)]
        store = self._stores[lease] = StoreJob(lease, tier, keys, blocks[num_known:])
        tier.on_the_way.update(keys)
        self._copying.give(partial(self._copy_out, store))

    def evicted(self, blocks: Mapping[bytes, int]) -> None:
        """Copy blocks that preempted requests computed and no tier has: nothing else keeps them. What other requests
        computed was stored when they ended.
        """
        for tier in self._tiers:
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
                tier.dropped[DropReason.LAGGED] += len(keys) - piece.start
                return
            self._num_leases += 1
            store = StoreJob(f"evicted-{self._num_leases}", tier, keys[piece], blocks[piece])
            self._stores[store.lease] = store
            tier.on_the_way.update(store.keys)
            rows = self._copied_rows(store, store.blocks)
            assert rows is not None, "nobody else has it yet"
            self._storing.give(partial(self._write, store, store.keys, rows))
            self._storing.give(partial(self._core.call_soon, partial(self._stored, store)))

    def _lags(self, tier: TierAtWork, num_blocks: int) -> bool:
        """Whether so many more blocks are too much beside those that wait: then they are dropped."""
        waiting = sum(map(self._num_waiting, self._tiers))
        if not waiting or (waiting + num_blocks) * self._io.bytes_per_block <= self._staging_bytes:
            return False
        tier.dropped[DropReason.LAGGED] += num_blocks
        return True

    def _copy_out(self, store: StoreJob) -> None:
        """Copy blocks out of the pool; runs in the thread that copies."""
        try:
            for piece in self._pieces(len(store.keys)):
                self._room.acquire()
                rows = self._copied_rows(store, store.blocks[piece])
                if rows is None:
                    self._room.release()
                    return
                self._storing.give(partial(self._write, store, store.keys[piece], rows))
        finally:
            self._core.call_soon(partial(self._core.release, store.lease))
            self._storing.give(partial(self._core.call_soon, partial(self._stored, store)))

    def _copied_rows(self, store: StoreJob, blocks: Sequence[int]) -> memoryview | None:
        """None when they were given up."""
        rows = self._piece_of(len(blocks) * self._io.bytes_per_block)
        with store.guard.lock:
            if store.guard.is_over:
                return None
            self._io.read(blocks, rows)
            store.num_copied += len(blocks)
        return rows

    def _write(self, store: StoreJob, keys: Sequence[bytes], rows: memoryview) -> None:
        """Write copied rows to a tier; runs in the thread that stores."""
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

    def given_up(self, given_up: GivenUp) -> None:
        """Returns when no thread touches those blocks any more."""
        for request_id in given_up.request_ids:
            fetch = self._fetches.pop(request_id, None)
            if fetch is not None:
                fetch.end()
                if self._is_load(request_id):  # else it would be computed
                    self._core.call_soon(partial(self._core.abort, request_id))
        for lease in given_up.leases:
            store = self._stores.get(lease)
            if store is not None:
                store.guard.end()
                store.tier.dropped[DropReason.LAGGED] += len(store.blocks) - store.num_copied

    # -- small things

    def _is_load(self, request_id: str) -> bool:
        """Whether this request brings blocks into the pool for another engine, which pulls them from there."""
        request = self._requests.get(request_id)
        return request is not None and request.spec.kv_only and not request.spec.kv_from

    def _pieces(self, num_blocks: int) -> Iterator[slice]:
        size = max(1, self._piece_bytes // self._io.bytes_per_block)
        return (slice(first, first + size) for first in range(0, num_blocks, size))

    def _num_waiting(self, tier: TierAtWork) -> int:
        """Blocks that are to be stored there."""
        return sum(len(each.blocks) for each in self._stores.values() if each.tier is tier)

    def _dropped(self, tier: TierAtWork) -> Mapping[str, int]:
        dropped = tier.tier.stats.dropped.copy() + tier.dropped  # a copy, since other threads count, too
        return {str(reason): count for reason, count in dropped.items()}


@dataclass(slots=True, eq=False)
class Fetch:
    request_id: str
    tier: TierAtWork
    keys: Sequence[bytes]
    blocks: Sequence[int]
    start: int  # tokens that were there
    began_at: float  # s
    most_s: float  # after which computing would have been faster
    guard: Guard = field(default_factory=Guard)
    num_done: int = 0  # blocks, written by the thread
    took_s: float = 0.0
    watch: threading.Timer | None = None

    def end(self) -> None:
        """End the fetch; its thread writes no more."""
        self.guard.end()
        if self.watch is not None:
            self.watch.cancel()


@dataclass(slots=True, eq=False)
class StoreJob:
    lease: str
    tier: TierAtWork
    keys: Sequence[bytes]
    blocks: Sequence[int]
    guard: Guard = field(default_factory=Guard)
    num_copied: int = 0  # blocks, by the thread
    has_failed: bool = False  # what follows a block that is not stored is not found


@dataclass(slots=True, eq=False)
class TierAtWork:
    tier: KVTier
    meter: FetchMeter = field(default_factory=lambda: FetchMeter(bandwidth=FIRST_GUESS[0], latency_s=FIRST_GUESS[1]))
    hit_tokens: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)  # before they came to the tier
    on_the_way: set[bytes] = field(default_factory=set)  # keys of blocks that it will have, unless something fails
    is_stuck: bool = False  # a fetch of it does not end


class FoundBlocks(NamedTuple):
    request: RequestState
    tier: TierAtWork
    first: int  # block from which on it was asked
    num_blocks: int
