"""KV tiers of a running engine: what was computed is stored behind it, and fetched before it is computed again.

The engine's thread decides and reserves; two threads of its own move bytes between the pool and the tiers, a piece at a
time. Nothing waits for them but the request whose KV is on the way, and that not for longer than computing would take.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import msgspec

from maitred.clock import Clock
from maitred.engine.core import EngineCore
from maitred.kvcache.tiers import DropReason, FetchMeter, KVTier, break_even_tokens, worth_fetching
from maitred.replica import TierFigures
from maitred.request import RequestState, RequestStatus
from maitred.scheduler.reservations import GivenUp

logger = logging.getLogger(__name__)
PIECE_BYTES = 8 * 2**20  # moved at once: what giving up waits for
PATIENCE_S = 2.0  # more than a fetch should take, until its thread counts as stuck
TIMES = 2.0  # a fetch that takes so many times the foretold time is compared with computing anew
RETRIES = 4  # requests in line, whose fetch is tried again in each round
DRAIN_S = 10.0  # to store what is queued, when an engine ends
FIRST_GUESS = (0.5e9, 0.002)  # bytes/s, s; until a fetch was measured


class BlockIO(Protocol):
    """Whole blocks of the pool, from a thread beside a step that leaves them alone."""

    bytes_per_block: int

    def read(self, blocks: Sequence[int], into: memoryview) -> None: ...

    def write(self, blocks: Sequence[int], rows: memoryview) -> None: ...


class TierView(msgspec.Struct, frozen=True):
    """A tier as people look at it."""

    name: str
    num_bytes: int
    num_blocks: int
    hit_tokens: int  # fetched in place of computing
    stored_blocks: int  # written so far
    evicted_blocks: int
    dropped: dict[str, int]  # blocks by reason
    bytes_per_s: float
    latency_s: float
    break_even_tokens: int | None  # fewest that are fetched; None where computing is faster, or was not measured yet


@dataclass(slots=True, eq=False)
class _Guard:
    """Whether a thread may still touch the blocks; whoever takes them away waits for the piece under way."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False

    def end(self) -> None:
        with self.lock:
            self.is_over = True


@dataclass(slots=True, eq=False)
class _Fetch:
    request_id: str
    tier: _Tier
    salt: str
    keys: Sequence[bytes]
    blocks: Sequence[int]
    start: int  # tokens that were there
    began_at: float  # s
    most_s: float  # after which computing would have been faster
    guard: _Guard = field(default_factory=_Guard)
    num_done: int = 0  # blocks, written by the thread
    took_s: float = 0.0
    watch: threading.Timer | None = None


@dataclass(slots=True, eq=False)
class _Store:
    lease: str
    tier: _Tier
    salt: str
    keys: Sequence[bytes]
    blocks: Sequence[int]
    guard: _Guard = field(default_factory=_Guard)


@dataclass(slots=True, eq=False)
class _Tier:
    tier: KVTier
    meter: FetchMeter = field(default_factory=lambda: FetchMeter(bandwidth=FIRST_GUESS[0], latency_s=FIRST_GUESS[1]))
    hit_tokens: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)  # before they came to the tier
    is_stuck: bool = False  # a fetch of it does not end


class _Found(NamedTuple):
    request: RequestState
    tier: _Tier
    first: int  # block from which on it was asked
    num_blocks: int


class KVTiers:
    """Between an engine's core and `tiers`, the fastest first. All methods are the engine thread's."""

    def __init__(
        self,
        core: EngineCore,
        io: BlockIO,
        tiers: Sequence[KVTier],
        *,
        block_size: int,
        staging_bytes: int,
        clock: Clock,
    ) -> None:
        """`staging_bytes` bound what waits to be stored."""
        self._core, self._io, self._block_size = core, io, block_size
        self._tiers = [_Tier(tier) for tier in tiers]
        self._staging_bytes, self._clock = staging_bytes, clock
        self._requests: dict[str, RequestState] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._stores: dict[str, _Store] = {}
        self._wanting: dict[str, _Found] = {}  # for whose KV blocks lacked
        self._num_leases = 0
        self._thread = threading.current_thread()
        self._fetching, self._storing = ThreadOfJobs("maitred-kv-fetch"), ThreadOfJobs("maitred-kv-store")
        core.kv_followers.append(self)

    def __len__(self) -> int:
        """Requests whose KV is on the way."""
        return len(self._fetches)

    # -- what happens to requests

    def entered(self, request: RequestState) -> None:
        """It was added: what the prefix cache lacks is looked up, and fetched where that is faster."""
        self._requests[request.request_id] = request
        if not self._core.scheduler.kv_cache.finds_again(request):
            return
        usable = (request.num_tokens - 1) // self._block_size
        first = len(self._core.scheduler.kv_cache.find_prefix(request).blocks)
        keys = request.block_hashes[first:usable]
        for tier in self._tiers if keys else ():
            if not tier.is_stuck:
                tier.tier.look_up(keys, partial(self._tell_found, request, tier, first))

    def ended(self, request_id: str) -> None:
        """What it computed, and the prefix cache still has, is stored; its blocks may be what others lacked."""
        request = self._requests.pop(request_id, None)
        self._wanting.pop(request_id, None)
        if self._wanting:
            self._retry()
        if request is None or not request.block_hashes or not self._core.scheduler.kv_cache.finds_again(request):
            return
        for tier in self._tiers:
            self._store(request, tier)

    def clear(self) -> int:
        """Empties the tiers; how many blocks there were."""
        return sum(each.tier.clear() for each in self._tiers)

    def views(self) -> list[TierView]:
        """For people."""
        bytes_per_token = self._io.bytes_per_block / self._block_size
        prefill_s = self._core.prefill_s_per_token
        return [
            TierView(
                each.tier.name,
                each.tier.stats.num_bytes,
                each.tier.stats.num_blocks,
                each.hit_tokens,
                each.tier.stats.num_written,
                each.tier.stats.num_evicted,
                dict(self._dropped(each)),
                each.meter.bandwidth,
                each.meter.latency_s,
                None
                if prefill_s is None
                else break_even_tokens(bytes_per_token, each.meter.bandwidth, each.meter.latency_s, prefill_s),
            )
            for each in self._tiers
        ]

    def figures(self) -> tuple[TierFigures, ...]:
        """For metrics."""
        return tuple(
            TierFigures(each.tier.name, each.tier.stats.num_bytes, each.hit_tokens, dict(self._dropped(each)))
            for each in self._tiers
        )

    def close(self) -> None:
        """Stores what is queued, for a while; then the tiers are closed."""
        for fetch in self._fetches.values():
            fetch.guard.end()
            if fetch.watch is not None:
                fetch.watch.cancel()
        self._fetching.end(0.0)
        if not self._storing.end(DRAIN_S):
            for store in self._stores.values():
                store.guard.end()
        for each in self._tiers:
            each.tier.close()

    # -- fetching

    def _tell_found(self, request: RequestState, tier: _Tier, first: int, count: int) -> None:
        """In any thread; at once where it is the engine's."""
        found = _Found(request, tier, first, count)
        if count and threading.current_thread() is self._thread:
            self._begin_fetch(found)
        elif count:
            self._core.call_soon(partial(self._begin_fetch, found))

    def _retry(self) -> None:
        """For those that would start soon."""
        for request in self._core.scheduler.next_in_line(RETRIES):
            if (found := self._wanting.pop(request.request_id, None)) is not None:
                self._begin_fetch(found)

    def _begin_fetch(self, found: _Found) -> None:
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
        fetch = _Fetch(
            request.request_id,
            tier,
            request.spec.cache_salt,
            request.block_hashes[first : first + len(reserved.block_ids)],
            reserved.block_ids,
            reserved.start,
            self._clock.now(),
            max(computing_s, TIMES * meter.seconds_for(num_bytes + on_the_way)),
        )
        self._fetches[request.request_id] = fetch
        fetch.watch = threading.Timer(fetch.most_s + PATIENCE_S, self._core.call_soon, [partial(self._overdue, fetch)])
        fetch.watch.daemon = True
        fetch.watch.start()
        self._fetching.give(partial(self._fetch, fetch))

    def _overdue(self, fetch: _Fetch) -> None:
        """Its thread hangs, or those before it took too long: what came counts, and the rest is computed."""
        if self._fetches.get(fetch.request_id) is fetch:
            fetch.tier.is_stuck = True
            fetch.guard.end()
            self._settle(fetch)

    def _fetched(self, fetch: _Fetch) -> None:
        """The thread is done with it."""
        fetch.tier.is_stuck = False
        if fetch.watch is not None:
            fetch.watch.cancel()
        if self._fetches.get(fetch.request_id) is fetch:  # else it was given up, or took too long
            self._settle(fetch)

    def _settle(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.request_id]
        num_tokens = fetch.num_done * self._block_size
        fetch.tier.hit_tokens += num_tokens
        if fetch.num_done:
            fetch.tier.meter.fetched(fetch.num_done * self._io.bytes_per_block, fetch.took_s)
        self._core.kv_arrived(fetch.request_id, fetch.start + num_tokens)

    def _fetch(self, fetch: _Fetch) -> None:
        """In the thread that fetches."""
        began_at, size = self._clock.now(), self._io.bytes_per_block
        try:
            for piece in self._pieces(len(fetch.keys)):
                keys, blocks = fetch.keys[piece], fetch.blocks[piece]
                rows = memoryview(bytearray(len(keys) * size))
                count = fetch.tier.tier.read(keys, fetch.salt, rows)
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

    # -- storing

    def _store(self, request: RequestState, tier: _Tier) -> None:
        keys = request.block_hashes
        num_known = tier.tier.num_known(keys)
        tier.tier.touch(keys[:num_known])
        if num_known == len(keys) or (tier.tier.name, keys[-1]) in self._being_stored():
            return  # another sample said the same
        self._num_leases += 1
        lease = f"store-{self._num_leases}"
        blocks = self._core.hold(lease, keys)
        new = blocks[num_known:]
        waiting = sum(len(each.blocks) for each in self._stores.values())
        if new and waiting and (waiting + len(new)) * self._io.bytes_per_block > self._staging_bytes:
            tier.dropped[DropReason.LAGGED] += len(new)
            new = ()
        if not new:
            self._core.release(lease)
            return
        store = _Store(lease, tier, request.spec.cache_salt, keys[num_known : len(blocks)], new)
        self._stores[lease] = store
        self._storing.give(partial(self._copy_out, store))

    def _copy_out(self, store: _Store) -> None:
        """In the thread that stores."""
        try:
            for piece in self._pieces(len(store.keys)):
                keys, blocks = store.keys[piece], store.blocks[piece]
                rows = memoryview(bytearray(len(keys) * self._io.bytes_per_block))
                with store.guard.lock:
                    if store.guard.is_over:
                        return
                    self._io.read(blocks, rows)
                if store.tier.tier.write(keys, store.salt, rows) < len(keys):
                    return
        finally:
            self._core.call_soon(partial(self._stored, store))

    def _stored(self, store: _Store) -> None:
        if self._stores.pop(store.lease, None) is not None:  # else it was given up
            self._core.release(store.lease)

    def given_up(self, given_up: GivenUp) -> None:
        """Returns when no thread touches those blocks any more."""
        for request_id in given_up.request_ids:
            fetch = self._fetches.pop(request_id, None)
            if fetch is not None:
                fetch.guard.end()
        for lease in given_up.leases:
            store = self._stores.pop(lease, None)
            if store is not None:
                store.guard.end()
                store.tier.dropped[DropReason.LAGGED] += len(store.blocks)

    # -- small things

    def _being_stored(self) -> set[tuple[str, bytes]]:
        return {(each.tier.tier.name, each.keys[-1]) for each in self._stores.values()}

    def _pieces(self, num_blocks: int) -> Iterator[slice]:
        size = max(1, PIECE_BYTES // self._io.bytes_per_block)
        return (slice(first, first + size) for first in range(0, num_blocks, size))

    def _dropped(self, tier: _Tier) -> Mapping[str, int]:
        return {str(reason): count for reason, count in (tier.tier.stats.dropped + tier.dropped).items()}


class ThreadOfJobs:
    """A thread that does one thing after another; none is started before there is something to do."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def give(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def end(self, seconds: float) -> bool:
        """After what it was given, for which it has so long; whether all of that was done."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("KV could not be moved; it is computed")
