"""KV of other engines: given to engines that ask for it by its hashes, and pulled for requests that name its source.

The engine's thread decides, reserves and holds; threads of connections copy. Whatever does not come is computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from maitred.core.clock import Clock
from maitred.core.cost_model import CostModel
from maitred.core.replica import HandoverCounts, TierView
from maitred.core.request import RequestState, RequestStatus
from maitred.engine.kv_giving import TIMEOUT_S, GivenKV, PeerConfig
from maitred.engine.kv_growth import IsOneRun
from maitred.engine.kv_tiers import KVTiers
from maitred.kv.layout import HeldBlocks, LayerIO
from maitred.kv.leases import Refusal
from maitred.kv.prefix_cache import hash_blocks, known_tokens, root_hash
from maitred.kv.puller import Pulled, Puller, connect_any
from maitred.kv.threads import ThreadOfJobs
from maitred.kv.tiers import FetchMeter, break_even_tokens, most_seconds
from maitred.kv.wire import Offered
from maitred.scheduler.engine_core import EngineCore, StepListener
from maitred.scheduler.reservations import GivenUp
from maitred.scheduler.swap import SwapCosts

logger = logging.getLogger(__name__)
NUM_LANES = 8  # pulls at a time: one of a prompt that is being computed takes as long as that
MAX_ARRIVED = 4096  # prompts whose KV came before the request that goes on with it
PATIENCE_S = 2 * TIMEOUT_S  # more than a pull should take: of a silent peer it hears before
ASK_AGAIN_S = (0.02, 0.05, 0.1, 0.2, 0.4)
FIRST_GUESS = (1e9, 0.01)  # bytes/s, s; until a pull was measured


@dataclass(slots=True, eq=False)
class _Lane:
    """A thread that pulls, one after another; it has connections of its own."""

    thread: ThreadOfJobs
    pullers: dict[tuple[str, ...], Puller] = field(default_factory=dict)
    num_pulls: int = 0  # that it has and was given; the engine's thread counts


@dataclass(slots=True, eq=False)
class _Pull:
    request: RequestState
    addresses: Sequence[str]
    keys: Sequence[bytes]  # from the first block on
    start: int  # block
    is_brought: bool  # the blocks before it came by a pull that expected the request
    held: HeldBlocks
    began_at: float  # s
    lane: _Lane
    transport: str = ""  # once it is connected
    busy_s: float = 0.0  # that its bytes took
    watch: threading.Timer | None = None  # None while what is pulled is computed, or until computing was measured
    is_late: bool = False  # it was abandoned

    def end(self) -> None:
        """Stop the pull; no thread writes its blocks after this returns."""
        self.held.give_up()
        if self.watch is not None:
            self.watch.cancel()


class KVPeers(StepListener):
    """One engine's end of all transfers. All methods are the engine thread's. `gives.growing` is a listener of its own,
    the first.
    """

    def __init__(
        self,
        io: LayerIO,
        config: PeerConfig,
        *,
        tiers: KVTiers | None = None,
        block_size: int,
        clock: Clock,
        is_one_run: IsOneRun,
    ) -> None:
        """`is_one_run` is the executor's."""
        self._io, self._config, self._block_size = io, config, block_size
        self._clock = clock
        self.num_layers = io.num_layers
        self.counts = HandoverCounts()
        self._step_costs: CostModel | None = None
        self._meter = FetchMeter(bandwidth=FIRST_GUESS[0], latency_s=FIRST_GUESS[1])
        self._bytes_per_block = io.num_layers * io.layout.layer_bytes
        self._pulls: dict[str, _Pull] = {}
        self._refused: set[tuple[str, ...]] = set()  # the pulling threads': whose first contact was told of
        self._silent_at: dict[tuple[str, ...], float] = {}  # theirs too: s, when one was found to say nothing
        self._lanes = [_Lane(ThreadOfJobs("maitred-kv-pull")) for _ in range(NUM_LANES)]
        self._here: dict[str, RequestState] = {}
        self._along: dict[str, float] = {}  # requests that wait for what another one pulls -> s, since when
        self._arrived: dict[bytes, bool] = {}  # hashes of the last blocks that expecting pulls brought
        here = self._here.values()
        self.gives = GivenKV(io, config, here, tiers=tiers, block_size=block_size, clock=clock, is_one_run=is_one_run)

    def begin(self, core: EngineCore) -> None:
        self._core = core
        core.measure_prefill()
        self.gives.begin(core)

    def measured(self, costs: SwapCosts | CostModel, now: float) -> None:
        if isinstance(costs, CostModel):
            self._step_costs = costs

    def figures(self) -> Mapping[str, Any]:
        return {"handovers": HandoverCounts() + self.counts, "step_costs": self._step_costs}

    # -- requests

    def added(self, request: RequestState, now: float) -> None:
        """One that says where its KV is waits for it, if there are blocks to bring it into."""
        addresses, request_id = request.spec.kv_from, request.request_id
        self._here[request_id] = request
        if not addresses:
            request.handover = "local" if request.spec.resumed is None else "recomputed"
        elif request.status is RequestStatus.WAITING_FOR_KV:  # with another sample
            self._along[request_id] = self._clock.now()
        else:
            self._begin(request)

    def _begin(self, request: RequestState) -> None:
        request_id = request.request_id
        reserved = self._core.reserve(request_id, request.num_tokens)
        if reserved is None:
            return self._goes_without(request)
        first = reserved.start // self._block_size
        keys = request.block_hashes[: reserved.end // self._block_size]
        pull = _Pull(
            request,
            request.spec.kv_from,
            keys,
            first,
            self._was_brought(request, first),
            HeldBlocks(self._io, reserved.block_ids, first=first),
            self._clock.now(),
            min(self._lanes, key=lambda lane: lane.num_pulls),
        )
        self._pulls[request_id] = pull
        pull.lane.num_pulls += 1
        if not request.spec.kv_only:
            self._watch(pull)
        return pull.lane.thread.give(partial(self._pull, pull))

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
            self._came(request, outcome)

    def ended(self, request_id: str) -> None:
        """Forget an ended request; for one that waits for KV, `given_up` is called."""
        self._here.pop(request_id, None)
        self._along.pop(request_id, None)
        self.gives.ended(request_id)

    def given_up(self, given_up: GivenUp) -> None:
        """Stop pulls of these requests; no thread touches the blocks after this returns."""
        for request_id in given_up.request_ids:
            pull = self._pulls.pop(request_id, None)
            if pull is not None:
                pull.end()
                self._settled(pull, 0)
                if pull.request.spec.kv_only:  # else it would be computed
                    self._core.call_soon(partial(self._core.abort, request_id))
        for lease in given_up.leases:
            self.gives.given_up(lease)

    def close(self) -> None:
        for pull in self._pulls.values():
            pull.end()
        self.gives.close()
        for lane in self._lanes:
            lane.thread.end(0.0)
            for puller in list(lane.pullers.values()):
                puller.abort()

    def tier_views(self) -> Sequence[TierView]:
        """Pulls, as a tier that has nothing of its own."""
        prefill_s, bandwidth, latency_s = self._core.prefill_s_per_token, self._meter.bandwidth, self._meter.latency_s
        per_token = self._bytes_per_block / self._block_size
        view = TierView(
            name="peer",
            num_bytes=0,
            num_blocks=0,
            hit_tokens=self.counts.num_tokens,
            stored_blocks=0,
            waiting_blocks=0,
            evicted_blocks=0,
            dropped=dict(self.counts.dropped),
            bytes_per_s=bandwidth,
            latency_s=latency_s,
            break_even_tokens=break_even_tokens(per_token, bandwidth, latency_s, prefill_s),
        )
        return (view,)

    def _watch(self, pull: _Pull) -> None:
        """A pull that is slower than computing is abandoned, as any fetch; whether to try is its sender's to say."""
        prefill_s = self._core.prefill_s_per_token
        if prefill_s is None:
            return
        on_the_way = sum(len(each.keys) - each.start for each in self._pulls.values()) * self._bytes_per_block
        num_tokens = (len(pull.keys) - pull.start) * self._block_size
        most_s = most_seconds(self._meter.seconds_for(on_the_way), num_tokens * prefill_s)
        pull.watch = threading.Timer(most_s + PATIENCE_S, self._core.call_soon, [partial(self._overdue, pull)])
        pull.watch.daemon = True
        pull.watch.start()

    def _overdue(self, pull: _Pull) -> None:
        request_id = pull.request.request_id
        if self._pulls.get(request_id) is pull:
            pull.is_late = True
            self._ended(pull, Pulled(0, 0, "slow"))

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
        """Whatever comes of it, the engine's thread is told."""
        pulled = Pulled(0, 0)
        try:
            pulled = self._pull_unless_silent(pull)
        finally:
            self._core.call_soon(partial(self._pulled, pull, pulled))

    def _pull_unless_silent(self, pull: _Pull) -> Pulled:
        peer = tuple(pull.addresses)
        if pull.is_late:
            return Pulled(0, 0)
        if pull.began_at < self._silent_at.get(peer, pull.began_at):  # it need not find that out once more
            return Pulled(0, 0, "silent")
        pulled = self._pull_from(peer, pull)
        if pulled.failure == "silent":
            self._silent_at[peer] = self._clock.now()
        if pulled.failure == "unlike" and peer not in self._refused:
            self._refused.add(peer)
            logger.warning("KV of a peer is computed again; first contact said: %s", pulled.text)
        return pulled

    def _pull_from(self, peer: tuple[str, ...], pull: _Pull) -> Pulled:
        pulled = Pulled(0, 0)
        try:
            puller = self._puller(pull.lane.pullers, peer)
            pull.transport, busy_s = puller.transport, puller.busy_s
            size = puller.terms.source.block_size
            offered = self._offered(pull, puller, self._keys(pull, size))
            wanted = range(pull.start, min(offered.num_blocks * size // self._block_size, len(pull.keys)))
            if wanted:
                pulled = puller.pull(offered.lease, range(puller.terms.num_layers), wanted, pull.held)
                pull.busy_s = puller.busy_s - busy_s
            if offered.num_blocks:
                puller.release(offered.lease)
        except Refusal as refusal:
            pulled = Pulled(0, 0, refusal.reason, str(refusal))
        return pulled

    def _offered(self, pull: _Pull, puller: Puller, keys: Sequence[bytes]) -> Offered:
        """The source's offer; asked again for an expected request: its prompt may come later. Raises Refusal."""
        offered = puller.ask(keys)
        for pause_s in ASK_AGAIN_S if pull.request.spec.kv_only else ():
            if offered.num_blocks:
                break
            time.sleep(pause_s)
            offered = puller.ask(keys)
        return offered

    def _keys(self, pull: _Pull, block_size: int) -> Sequence[bytes]:
        """Hashes as the source names its blocks: the same tokens in blocks of its size."""
        if block_size == self._block_size:
            return pull.keys
        tokens = known_tokens(pull.request, 0, len(pull.keys) * self._block_size)
        revision = self._config.identity.layout.agreed.revision
        return hash_blocks(tokens, block_size, root_hash(revision, pull.request.spec.cache_salt))

    def _puller(self, pullers: dict[tuple[str, ...], Puller], addresses: tuple[str, ...]) -> Puller:
        """Raises Refusal."""
        puller = pullers.get(addresses)
        if puller is None or puller.is_closed:
            puller = pullers[addresses] = connect_any(
                addresses,
                self._config.identity,
                transport=self._config.transport,
                staging_bytes=self._config.staging_bytes,
                timeout_s=TIMEOUT_S,
                agent=self.gives.agent,
            )
        return puller

    def _pulled(self, pull: _Pull, pulled: Pulled) -> None:
        pull.lane.num_pulls -= 1
        if not pull.is_late:
            self._ended(pull, pulled)

    def _ended(self, pull: _Pull, pulled: Pulled) -> None:
        request_id, num_blocks = pull.request.request_id, pulled.num_blocks
        if pulled.failure:
            self.counts.drop(pulled.failure, len(pull.keys) - pull.start - num_blocks)
        if num_blocks:
            # all of its wait, asking and queueing too: a hand-over takes that; what is being computed, the bytes' time
            is_computed = not pull.request.spec.kv_only
            waited_s = self._clock.now() - pull.began_at if is_computed else pull.busy_s
            self.counts.moved(pull.transport, pulled.num_bytes, waited_s)
            self._meter.fetched(pulled.num_bytes, waited_s)
        if self._pulls.get(request_id) is not pull:
            return  # its blocks were given up
        del self._pulls[request_id]
        pull.end()
        if self._core.kv_arrived(request_id, (pull.start + num_blocks) * self._block_size):
            self.counts.num_tokens += num_blocks * self._block_size
        if pull.request.spec.kv_only:
            self._core.abort(request_id)  # no client is told: it has done what it was here for
        self._settled(pull, num_blocks)

    def _settled(self, pull: _Pull, num_blocks: int) -> None:
        """End a pull that brought `num_blocks`, and will bring no more; requests that waited along go on too."""
        is_moved, now = num_blocks > 0 or pull.is_brought, self._clock.now()
        outcome = "moved" if is_moved else "recomputed"
        if pull.request.spec.kv_only:
            if is_moved:
                self._arrived[pull.keys[pull.start + num_blocks - 1]] = True
            if len(self._arrived) > MAX_ARRIVED:
                del self._arrived[next(iter(self._arrived))]
        else:
            self.counts.waited(now - pull.began_at)
            self._came(pull.request, outcome)
        for request_id, since in list(self._along.items()):
            request = self._here[request_id]
            if request.status is not RequestStatus.WAITING_FOR_KV:
                del self._along[request_id]
                if request.spec.sample_index == 0:
                    self.counts.waited(now - since)
                self._came(request, outcome)

    def _came(self, request: RequestState, outcome: str) -> None:
        """All samples of a prompt count once."""
        if request.spec.sample_index == 0:
            self.counts.add(outcome)
        request.handover = outcome
