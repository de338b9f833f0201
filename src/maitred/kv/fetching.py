"""KV on its way into an engine's pool, from tiers that keep blocks and from peers: one `Fetch`, and its threads.

The engine's thread decides, reserves and settles; other threads bring bytes, a piece at a time. Nothing waits for them
but the request whose KV is on the way, and that not for longer than computing would take. What does not come is
computed.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from maitred.core.replica import TierView
from maitred.core.request import RequestState
from maitred.kv.layout import Guard
from maitred.kv.leases import Refusal
from maitred.kv.manager import PoolRow
from maitred.kv.tiers import FetchMeter, TierStats, break_even_tokens, most_seconds, worth_fetching
from maitred.scheduler.engine_core import EngineCore

logger = logging.getLogger(__name__)
STORING_NICENESS = 10  # steps go first on a busy machine
NUM_PULLS = 8  # pulls at a time: one of a prompt that is being computed takes as long as that


class KVThread:
    """A thread that does its jobs in order; it is started with the first."""

    def __init__(self, name: str, *, niceness: int = 0) -> None:
        """`niceness` as the system's: how much others of this process go before it."""
        self._name, self._niceness = name, niceness
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._num_given = self._num_done = 0

    @property
    def num_jobs(self) -> int:
        """Jobs in line and under way."""
        return self._num_given - self._num_done

    def give(self, job: Callable[[], None]) -> None:
        with self._starting:
            self._num_given += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def end(self, seconds: float) -> bool:
        """End the thread after its queued jobs, waiting at most `seconds`; whether all were done."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._niceness:
            niceness = os.getpriority(os.PRIO_PROCESS, 0) + self._niceness
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("KV could not be moved; it is computed")
            self._num_done += 1


class KVThreads:
    """The threads that move one engine's KV: one reads tiers, so that a disk is measured as it is read; one copies out
    of the pool and one stores what was copied; pulls share the others.
    """

    def __init__(self) -> None:
        self.fetch = KVThread("maitred-kv-fetch")
        self.copy = KVThread("maitred-kv-copy", niceness=STORING_NICENESS)
        self.store = KVThread("maitred-kv-store", niceness=STORING_NICENESS)
        self.pulls = [KVThread("maitred-kv-pull") for _ in range(NUM_PULLS)]


@dataclass(slots=True, eq=False)
class FetchSource:
    """Where KV is fetched from: a tier, or an engine's peers."""

    name: str
    meter: FetchMeter
    patience_s: float  # more than a fetch should take, until its thread counts as stuck
    hit_tokens: int = 0
    is_stuck: bool = False  # a fetch of it does not end

    def view(
        self,
        stats: TierStats,
        dropped: Mapping[str, int],
        *,
        num_waiting: int = 0,
        bytes_per_token: float,
        prefill_s: float | None,
    ) -> TierView:
        """The source as people look at it; `num_waiting` blocks are to be stored there."""
        bandwidth, latency_s = self.meter.bandwidth, self.meter.latency_s
        return TierView(
            self.name,
            stats.num_bytes,
            stats.num_blocks,
            self.hit_tokens,
            stats.num_written,
            num_waiting,
            stats.num_evicted,
            dict(dropped),
            bandwidth,
            latency_s,
            break_even_tokens(bytes_per_token, bandwidth, latency_s, prefill_s),
        )


@dataclass(slots=True, eq=False)
class Fetch:
    """KV on the way into rows of blocks that are reserved for a request."""

    request: RequestState
    source: FetchSource
    keys: Sequence[bytes]  # of the prefix up to the last of the blocks
    first: int  # block; the blocks before are there
    rows: Sequence[PoolRow]
    guard: Guard
    began_at: float  # s
    most_s: float = math.inf  # after which computing would have been faster
    # written by its thread, with the guard held
    num_done: int = 0  # blocks
    num_bytes: int = 0
    took_s: float = 0.0
    # by the engine's thread
    is_late: bool = False  # abandoned, while its thread goes on
    watch: threading.Timer | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.keys) - self.first

    def end(self) -> None:
        """End the fetch; no thread writes its blocks after this returns."""
        self.guard.give_up()
        if self.watch is not None:
            self.watch.cancel()


class Fetches:
    """Fetches of one engine that share its threads and a way. All methods are the engine thread's."""

    def __init__(
        self,
        core: EngineCore,
        *,
        block_size: int,
        bytes_per_row: int,
        on_come: Callable[[Fetch], None] = lambda fetch: None,
        on_settled: Callable[[Fetch, int, int], None] = lambda fetch, num_blocks, num_tokens: None,
    ) -> None:
        """`on_come` is told what a fetch brought, also where its blocks were given up; `on_settled` that no more comes:
        how many blocks count, and how many tokens need not be computed.
        """
        self._core, self.block_size, self.bytes_per_row = core, block_size, bytes_per_row
        self._on_come, self._on_settled = on_come, on_settled
        self._fetches: dict[str, Fetch] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def get(self, request_id: str) -> Fetch | None:
        return self._fetches.get(request_id)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of KV a token, of a prompt of some thousand."""
        num_tokens = 256 * self.block_size
        return self._core.scheduler.kv_cache.num_rows(0, num_tokens) * self.bytes_per_row / num_tokens

    def pays(self, source: FetchSource, num_blocks: int, num_rows: int) -> bool:
        """Whether so many blocks more, behind those on the way, would be here before they were computed."""
        prefill_s, meter = self._core.prefill_s_per_token, source.meter
        num_bytes = (num_rows + self._num_rows()) * self.bytes_per_row
        return prefill_s is None or worth_fetching(
            num_bytes, num_blocks * self.block_size, meter.bandwidth, meter.latency_s, prefill_s
        )

    def watch(self, fetch: Fetch) -> None:
        """Abandon the fetch when it takes longer than computing would, and its source's patience."""
        num_rows = len(fetch.rows) + self._num_rows(fetch)
        foretold_s = fetch.source.meter.seconds_for(num_rows * self.bytes_per_row)
        computing_s = fetch.num_blocks * self.block_size * (self._core.prefill_s_per_token or 0.0)
        fetch.most_s = most_seconds(foretold_s, computing_s)
        overdue = partial(self._overdue, fetch)
        fetch.watch = threading.Timer(fetch.most_s + fetch.source.patience_s, self._core.call_soon, [overdue])
        fetch.watch.daemon = True
        fetch.watch.start()

    def begin(self, fetch: Fetch, thread: KVThread, bring: Callable[[], None]) -> None:
        """Let a thread bring the fetch; whatever comes of it, the engine's thread is told."""
        self._fetches[fetch.request.request_id] = fetch
        thread.give(partial(self._bring, fetch, bring))

    def _num_rows(self, but: Fetch | None = None) -> int:
        """Rows that are on the way."""
        return sum(len(each.rows) for each in self._fetches.values() if each is not but)

    def given_up(self, request_ids: Sequence[str]) -> None:
        """Stop the fetches of these requests; no thread touches the blocks after this returns."""
        for request_id in request_ids:
            fetch = self._fetches.pop(request_id, None)
            if fetch is not None:
                fetch.end()
                self._on_settled(fetch, 0, 0)
                if fetch.request.spec.kv_only:  # else it would be computed
                    self._core.call_soon(partial(self._core.abort, request_id))

    def close(self) -> None:
        for fetch in self._fetches.values():
            fetch.end()

    def _bring(self, fetch: Fetch, bring: Callable[[], None]) -> None:
        try:
            if not fetch.is_late:
                bring()
        except Refusal:
            pass  # its blocks were given up
        finally:
            self._core.call_soon(partial(self._ended, fetch))

    def _ended(self, fetch: Fetch) -> None:
        """Take in what a thread brought, or tried to."""
        fetch.source.is_stuck = False
        if not fetch.is_late:
            self._on_come(fetch)
            self._settle(fetch)

    def _overdue(self, fetch: Fetch) -> None:
        """End a fetch whose thread hangs, or waited too long behind others. What came counts; the rest is computed."""
        if self._fetches.get(fetch.request.request_id) is fetch:
            fetch.is_late = fetch.source.is_stuck = True
            fetch.end()
            self._on_come(fetch)
            self._settle(fetch)

    def _settle(self, fetch: Fetch) -> None:
        request_id, num_done = fetch.request.request_id, fetch.num_done
        if self._fetches.get(request_id) is not fetch:
            return  # its blocks were given up
        del self._fetches[request_id]
        fetch.end()
        num_tokens = num_done * self.block_size
        if not self._core.kv_arrived(request_id, fetch.first * self.block_size + num_tokens):
            num_tokens = 0
        fetch.source.hit_tokens += num_tokens
        if fetch.request.spec.kv_only:
            self._core.abort(request_id)  # no client is told: it has done what it was here for
        self._on_settled(fetch, num_done, num_tokens)
