"""KV of other engines: pulled for requests that name its source, and given to engines that ask for it by its hashes.

A peer is a source of fetches, as a tier is. It is named by the request, tried by its sender's choice and not by the
meter, and may still be computing what it is asked for; what comes of it is a hand-over's outcome.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from maitred.core.clock import Clock
from maitred.core.cost_model import CostModel, SwapCosts
from maitred.core.replica import HandoverCounts, TierView
from maitred.core.request import RequestState, RequestStatus
from maitred.kv.fetching import Fetch, Fetches, FetchSource, KVThread, KVThreads
from maitred.kv.giving import TIMEOUT_S, GivenKV, IsOneRun, PeerConfig
from maitred.kv.layout import HeldBlocks, LayerIO
from maitred.kv.leases import Refusal
from maitred.kv.pages import first_seen
from maitred.kv.prefix_cache import hash_blocks, known_tokens, root_hash
from maitred.kv.puller import Pulled, Puller, connect_any
from maitred.kv.tiers import FetchMeter, TierStats
from maitred.kv.wire import Offered
from maitred.scheduler.engine_core import EngineCore, StepListener
from maitred.scheduler.reservations import GivenUp

logger = logging.getLogger(__name__)
CLOSE_S = 0.2  # that a thread may take to end, until it is left to the end of the process
MAX_ARRIVED = 4096  # prompts whose KV came before the request that goes on with it
PATIENCE_S = 2 * TIMEOUT_S  # more than a pull should take: of a silent peer it hears before
ASK_AGAIN_S = (0.02, 0.05, 0.1, 0.2, 0.4)
FIRST_GUESS = (1e9, 0.01)  # bytes/s, s; until a pull was measured

NOTHING = Pulled(0, 0)

Addresses = tuple[str, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class _Pull(Fetch):
    guard: HeldBlocks
    thread: KVThread
    is_brought: bool  # the blocks before it came by a pull that expected the request
    transport: str = ""  # once it is connected
    pulled: Pulled = NOTHING
    offered: int = 0  # blocks, where it is other windows that are seen after these


class KVPeers(StepListener):
    """One engine's end of all transfers. All methods are the engine thread's. `gives` is a listener too, the first."""

    def __init__(
        self,
        io: LayerIO,
        config: PeerConfig,
        *,
        knows: Callable[[bytes], bool] = lambda key: False,
        block_size: int,
        threads: KVThreads,
        clock: Clock,
        is_one_run: IsOneRun,
    ) -> None:
        """`is_one_run` is the executor's; `knows` tells whether a tier has a block that the pool has not."""
        self._io, self._config, self._block_size, self._clock = io, config, block_size, clock
        self.num_layers = io.num_layers
        self.counts = HandoverCounts()
        self._step_costs: CostModel | None = None
        self._source = FetchSource("peer", FetchMeter(bandwidth=FIRST_GUESS[0], latency_s=FIRST_GUESS[1]), PATIENCE_S)
        self._threads = threads.pulls
        self._pullers: dict[tuple[KVThread, Addresses], Puller] = {}  # connections, each for one thread
        self._refused: set[Addresses] = set()  # peers whose first contact was logged; written by pulling threads
        self._silent_at: dict[Addresses, float] = {}  # s, when a peer was found to say nothing; likewise
        self._here: dict[str, RequestState] = {}
        self._along: dict[str, float] = {}  # requests that wait for what another one pulls -> s, since when
        self._arrived: dict[bytes, bool] = {}  # hashes of the last blocks that expecting pulls brought
        here = self._here.values()
        self.gives = GivenKV(io, config, here, knows=knows, block_size=block_size, clock=clock, is_one_run=is_one_run)

    def begin(self, core: EngineCore) -> None:
        self._core, self._kv = core, core.scheduler.kv_cache
        core.measure_prefill()
        self._pulls = Fetches(
            core,
            block_size=self._block_size,
            bytes_per_row=self._io.num_layers * self._io.layout.layer_bytes // core.scheduler.kv_cache.pages_per_block,
            on_come=self._came,
            on_settled=self._settled,
        )

    def measured(self, costs: SwapCosts | CostModel, now: float) -> None:
        if isinstance(costs, CostModel):
            self._step_costs = costs

    def figures(self) -> Mapping[str, Any]:
        return {"handovers": HandoverCounts() + self.counts, "step_costs": self._step_costs}

    def tier_views(self) -> Sequence[TierView]:
        """Pulls, as a tier that has nothing of its own."""
        per_token, prefill_s = self._pulls.bytes_per_token, self._core.prefill_s_per_token
        dropped = self.counts.dropped
        return (self._source.view(TierStats(), dropped, bytes_per_token=per_token, prefill_s=prefill_s),)

    # -- requests

    def added(self, request: RequestState, now: float) -> None:
        """Begin a pull for a request that names its source, if there are blocks to bring KV into."""
        self._here[request.request_id] = request
        if not request.spec.kv_from:
            request.handover = "local" if request.spec.resumed is None else "recomputed"
        elif request.status is RequestStatus.WAITING_FOR_KV:  # with another sample
            self._along[request.request_id] = self._clock.now()
        else:
            self._begin(request)

    def _begin(self, request: RequestState, num_tokens: int | None = None) -> None:
        reserved = self._core.reserve(request.request_id, num_tokens or request.num_tokens)
        if reserved is None:
            return self._goes_without(request)
        first = reserved.start // self._block_size
        thread = min(self._threads, key=lambda thread: thread.num_jobs)
        pull = _Pull(
            request=request,
            source=self._source,
            keys=request.block_hashes[: reserved.end // self._block_size],
            first=first,
            rows=self._kv.rows(request.block_table, first, reserved.end),
            guard=HeldBlocks(self._io, self._kv.places(request.block_table, first, reserved.end), first=first),
            began_at=self._clock.now(),
            thread=thread,
            is_brought=self._was_brought(request, first),
        )
        if not request.spec.kv_only:
            self._watch(pull)
        return self._pulls.begin(pull, thread, partial(self._pull, pull))

    def _goes_without(self, request: RequestState) -> None:
        """Note a request that pulls nothing: its KV is here, or on its way to another request, or has no room."""
        if request.status is RequestStatus.WAITING_FOR_KV:
            self._along[request.request_id] = self._clock.now()
            expected = self._pulls.get(self._core.scheduler.waits_along(request.request_id) or "")
            if expected is not None and expected.watch is None:  # all of it is computed
                self._watch(expected)
        elif request.spec.kv_only:
            self._core.call_soon(partial(self._core.abort, request.request_id))
        else:
            outcome = self._without_pull(request)
            if outcome == "moved" and request.spec.sample_index == 0:
                self.counts.waited(0.0)  # its KV was here first
            self._handed_over(request, outcome)

    def ended(self, request_id: str) -> None:
        """Forget an ended request; for one that waits for KV, `given_up` is called."""
        self._here.pop(request_id, None)
        self._along.pop(request_id, None)
        self.gives.without(request_id)

    def given_up(self, given_up: GivenUp) -> None:
        """Stop pulls of these requests; no thread touches the blocks after this returns."""
        self._pulls.given_up(given_up.request_ids)

    def close(self) -> None:
        self._pulls.close()
        for puller in list(self._pullers.values()):
            puller.abort()
        done = {thread for thread in self._threads if thread.end(CLOSE_S)}
        for (thread, _), puller in list(self._pullers.items()):
            if thread in done:
                puller.close()

    def _watch(self, pull: Fetch) -> None:
        """Nothing is abandoned until computing was measured, nor what is being computed."""
        if self._core.prefill_s_per_token is not None:
            self._pulls.watch(pull)

    def _without_pull(self, request: RequestState) -> str:
        hit = self._core.scheduler.kv_cache.find_prefix(request)
        if self._was_brought(request, len(hit.blocks)):
            return "moved"
        return "recomputed" if request.num_tokens - hit.num_tokens > self._block_size else "local"

    def _was_brought(self, request: RequestState, num_blocks: int) -> bool:
        """Whether a pull that expected the request brought its first `num_blocks`. Says so once."""
        return num_blocks > 0 and self._arrived.pop(request.block_hashes[num_blocks - 1], False)

    # -- taking, in the thread that pulls

    def _pull(self, pull: _Pull) -> None:
        peer = tuple(pull.request.spec.kv_from)
        if pull.began_at < self._silent_at.get(peer, pull.began_at):  # it need not find that out once more
            pull.pulled = Pulled(0, 0, "silent")
            return
        pull.pulled = pulled = self._pull_from(peer, pull)
        if pulled.failure == "silent":
            self._silent_at[peer] = self._clock.now()
        if pulled.failure == "unlike" and peer not in self._refused:
            self._refused.add(peer)
            logger.warning("KV of a peer is computed again; first contact said: %s", pulled.text)

    def _pull_from(self, peer: Addresses, pull: _Pull) -> Pulled:
        pulled = NOTHING
        try:
            puller = self._puller(pull.thread, peer)
            pull.transport, busy_s = puller.transport, puller.busy_s
            size = puller.terms.source.block_size
            offered = self._offered(pull, puller, self._keys(pull, size))
            end = min(offered.num_blocks * size // self._block_size, len(pull.keys))
            if self._seen_after(end) != self._seen_after(len(pull.keys)):
                pull.offered, end = end, 0
            wanted = range(pull.first, end)
            if wanted:
                pulled = puller.pull(offered.lease, range(puller.terms.num_layers), wanted, pull.guard)
                pull.took_s = puller.busy_s - busy_s
            if offered.num_blocks:
                puller.release(offered.lease)
        except Refusal as refusal:
            pulled = Pulled(0, 0, refusal.reason, str(refusal))
        return pulled

    def _seen_after(self, num_blocks: int) -> list[int]:
        """The first block of each layer with a window that is seen after so many."""
        size = self._block_size
        return [first_seen(window, num_blocks * size, size) for window in self._io.windows]

    def _offered(self, pull: Fetch, puller: Puller, keys: Sequence[bytes]) -> Offered:
        """The source's offer; asked again for an expected request: its prompt may come later. Raises Refusal."""
        offered = puller.ask(keys)
        for pause_s in ASK_AGAIN_S if pull.request.spec.kv_only else ():
            if offered.num_blocks:
                break
            time.sleep(pause_s)
            offered = puller.ask(keys)
        return offered

    def _keys(self, pull: Fetch, block_size: int) -> Sequence[bytes]:
        """Hashes as the source names its blocks: the same tokens in blocks of its size."""
        if block_size == self._block_size:
            return pull.keys
        tokens = known_tokens(pull.request, 0, len(pull.keys) * self._block_size)
        revision = self._config.identity.layout.agreed.revision
        return hash_blocks(tokens, block_size, root_hash(revision, pull.request.spec.cache_salt))

    def _puller(self, thread: KVThread, peer: Addresses) -> Puller:
        """Raises Refusal."""
        puller = self._pullers.get((thread, peer))
        if puller is None or puller.is_closed:
            puller = self._pullers[thread, peer] = connect_any(
                peer,
                self._config.identity,
                transport=self._config.transport,
                staging_bytes=self._config.staging_bytes,
                timeout_s=TIMEOUT_S,
                agent=self.gives.agent,
            )
        return puller

    # -- what came of it

    def _came(self, fetch: Fetch) -> None:
        assert isinstance(fetch, _Pull)
        pulled = Pulled(0, 0, "slow") if fetch.is_late else fetch.pulled
        fetch.num_done = pulled.num_blocks
        if pulled.failure:
            self.counts.drop(pulled.failure, fetch.num_blocks - pulled.num_blocks)
        if pulled.num_blocks:
            # all of its wait, asking and queueing too: a hand-over takes that; what is being computed, the bytes' time
            is_computed = not fetch.request.spec.kv_only
            waited_s = self._clock.now() - fetch.began_at if is_computed else fetch.took_s
            self.counts.moved(fetch.transport, pulled.num_bytes, waited_s)
            self._source.meter.fetched(pulled.num_bytes, waited_s)

    def _settled(self, fetch: Fetch, num_blocks: int, num_tokens: int) -> None:
        """End a pull that will bring no more; requests that waited along go on too."""
        assert isinstance(fetch, _Pull)
        if fetch.offered > fetch.first and fetch.request.status is RequestStatus.WAITING:
            return self._begin(fetch.request, fetch.offered * self._block_size)
        self.counts.num_tokens += num_tokens
        is_moved, now = num_blocks > 0 or fetch.is_brought, self._clock.now()
        outcome = "moved" if is_moved else "recomputed"
        if fetch.request.spec.kv_only:
            if is_moved:
                self._arrived[fetch.keys[fetch.first + num_blocks - 1]] = True
            if len(self._arrived) > MAX_ARRIVED:
                del self._arrived[next(iter(self._arrived))]
        else:
            self.counts.waited(now - fetch.began_at)
            self._handed_over(fetch.request, outcome)
        for request_id, since in list(self._along.items()):
            request = self._here[request_id]
            if request.status is not RequestStatus.WAITING_FOR_KV:
                del self._along[request_id]
                if request.spec.sample_index == 0:
                    self.counts.waited(now - since)
                self._handed_over(request, outcome)

    def _handed_over(self, request: RequestState, outcome: str) -> None:
        """All samples of a prompt count once."""
        if request.spec.sample_index == 0:
            self.counts.add(outcome)
        request.handover = outcome
