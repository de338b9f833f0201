"""KV that arrives from elsewhere, simulated: hand-overs between workers, and prefixes fetched from a peer or from disk.

A chunk's KV leaves layer by layer while later layers and chunks compute, so all of it but the last layer's may be there
when the prompt is done. What the receiver reserved is given up as its scheduler says; then it computes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from maitred.core.request import ResumePoint
from maitred.core.step import RequestProgress
from maitred.fleet.disagg import WorkerFacts
from maitred.fleet.replicas import ReplicaFacts
from maitred.kv.tiers import worth_fetching
from maitred.scheduler.engine_core import StepListener
from maitred.scheduler.reservations import GivenUp
from maitred.sim.clients import SimulatedRequest
from maitred.sim.engine import SimulatedEngine
from maitred.sim.fleet_figures import HandoverFigures
from maitred.sim.links import DISK, LinkFlow, Links, SimulatedDisk, SimulatedLink


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """One engine of a fleet."""

    name: str
    number: int  # of its setup
    facts: ReplicaFacts
    make_engine: Callable[[SimulatedReplica], SimulatedEngine]
    progress: list[RequestProgress] = field(default_factory=list)  # of the step under way, told when it ends
    is_stepping: bool = False  # or is to, at a time that is set
    reports_at: float | None = None  # s, the beat at which its cache's changes are told
    noted_at: float = 0.0  # s, when they were noted, or will be
    is_gone: bool = False
    _engine: SimulatedEngine | None = None

    @property
    def engine(self) -> SimulatedEngine:
        """Made for the first request, since an engine takes time and memory that an idle replica does not need."""
        if self._engine is None:
            self._engine = self.make_engine(self)
        return self._engine

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    @property
    def worker(self) -> WorkerFacts:
        assert self.facts.worker is not None, f"{self.name} hands nothing over"
        return self.facts.worker


@dataclass(slots=True, eq=False)
class _Move:
    """KV on its way into what `receiver` reserved for a request: positions [start, end)."""

    request_id: str
    receiver: SimulatedReplica
    links: Links
    flow: LinkFlow
    start: int
    end: int
    sent: int  # up to which position
    tier: str = ""  # that a prefix is fetched from; none is a hand-over
    sender: SimulatedReplica | None = None  # none is the disk
    holds: bool = False  # the sender keeps the blocks under a lease
    # of a hand-over
    twin: SimulatedRequest | None = None  # the request at the sender, for its first token
    live: SimulatedRequest | None = None
    not_before: float = 0.0  # s, when the last layer of what was sent can be there
    token_at: float | None = None  # s, when the first token came

    @property
    def lease(self) -> str:
        return f"{self.tier or 'handover'}/{self.request_id}"


class _GivesUp(StepListener):
    def __init__(self, note: Callable[[GivenUp], None]) -> None:
        self._note = note

    def given_up(self, given_up: GivenUp) -> None:
        self._note(given_up)


class Handovers:
    """Hand-overs of one fleet. `wake` is told of replicas that have something to do, `rid` of requests that have left
    their prefill worker; `expect` calls back at a time, if that replica is still there.
    """

    def __init__(
        self,
        link: SimulatedLink | None,
        disk: SimulatedDisk | None,
        *,
        wake: Callable[[SimulatedReplica, float], None],
        rid: Callable[[str, float], None],
        expect: Callable[[float, Callable[[SimulatedReplica, float], None], SimulatedReplica], None],
    ) -> None:
        self.figures, self.disk = HandoverFigures(), disk
        self._wake, self._rid, self._expect = wake, rid, expect
        self._network = Links(link or SimulatedLink(1.0, 0.0))
        self._disk_links = Links(DISK)
        self._moves: dict[str, _Move] = {}  # hand-overs, by request
        self._fetches: dict[str, _Move] = {}  # prefixes, by request
        self._flows: dict[LinkFlow, _Move] = {}
        self._now = 0.0

    # -- time

    @property
    def next_at(self) -> float | None:
        """Return when the next transfer has ended (s)."""
        return min((at for links in self._all_links if (at := links.next_at) is not None), default=None)

    @property
    def _all_links(self) -> tuple[Links, Links]:
        return self._network, self._disk_links

    def advance(self, now: float) -> None:
        self._now = now
        for links in self._all_links:
            for flow in links.advance(now):
                move = self._flows[flow]
                arrives_at = max(now + links.link.latency_s, move.not_before)
                self._expect(arrives_at, partial(self._arrived, move), move.receiver)

    def to_json(self) -> dict[str, Any]:
        num_bytes = sum(links.num_bytes for links in self._all_links)
        return self.figures.to_json(num_bytes, None if self.disk is None else len(self.disk))

    # -- they begin

    def bind(
        self,
        live: SimulatedRequest,
        receiver: SimulatedReplica,
        prefill: SimulatedReplica | None,
        peer: SimulatedReplica | None,
        now: float,
    ) -> None:
        """Raises RequestError when it can never be served."""
        self._now = now
        receiver.engine.wait_until(now)
        receiver.engine.add(live)
        worker, hands_over = receiver, prefill is not None and self._hand_over(live, receiver, prefill, now)
        if prefill is not None:
            worker = prefill if hands_over else receiver
            if not hands_over:
                self._rid(live.spec.request_id, now)
        if not hands_over:
            self.figures.outcomes["local"] += 1
        if not (peer is not None and self._fetch_from_peer(live, worker, peer, now)) and self.disk is not None:
            self._fetch_from_disk(live, worker, self.disk, now)
        self._wake(worker, now)

    def _hand_over(
        self, live: SimulatedRequest, receiver: SimulatedReplica, prefill: SimulatedReplica, now: float
    ) -> bool:
        """Hand over; return whether the receiver has reserved blocks for its prompt, and `prefill` computes it."""
        spec, arrival = live.spec, live.arrival
        reserved = receiver.engine.core.reserve(spec.request_id, spec.num_prompt_tokens)
        if reserved is None:
            return False
        twin = replace(
            live,
            arrival=replace(arrival, output_tokens=1, max_tokens=1),
            spec=msgspec.structs.replace(spec, max_tokens=1),
            slots=[],
        )
        prefill.engine.wait_until(now)
        prefill.engine.add(twin)
        flow = self._network.open(prefill.name, receiver.name)
        start, end = reserved.start, reserved.end
        move = _Move(spec.request_id, receiver, self._network, flow, start, end, start, sender=prefill)
        move.twin, move.live = twin, live
        self._moves[spec.request_id] = self._flows[flow] = move
        return True

    # -- prefixes

    def _fetch_from_peer(
        self, live: SimulatedRequest, worker: SimulatedReplica, peer: SimulatedReplica, now: float
    ) -> bool:
        request_id, peer_core = live.spec.request_id, peer.engine.core
        peer.engine.wait_until(now)
        lease = f"peer/{request_id}"
        num_held = len(peer_core.hold(lease, tuple(live.spec.block_hashes)))
        if self._fetch(request_id, worker, num_held, self._network, "peer", peer, now):
            return True
        peer_core.release(lease)
        return False

    def _fetch_from_disk(
        self, live: SimulatedRequest, worker: SimulatedReplica, disk: SimulatedDisk, now: float
    ) -> None:
        """Fetch from disk where that takes less time than computing."""
        facts, state = worker.worker, worker.engine.scheduler.request(live.spec.request_id)
        if state is None:
            return
        num_known, size = disk.num_known(live.spec.block_hashes), facts.block_size
        num_more = (num_known - len(worker.engine.kv_cache.find_prefix(state).blocks)) * size
        token_s = facts.costs.tokens_s(facts.token_budget, 0) / facts.token_budget
        num_bytes = num_more * facts.bytes_per_token
        if num_more > 0 and worth_fetching(num_bytes, num_more, DISK.bandwidth, DISK.latency_s, token_s):
            self._fetch(live.spec.request_id, worker, num_known, self._disk_links, "disk", None, now)

    def _fetch(
        self,
        request_id: str,
        worker: SimulatedReplica,
        num_blocks: int,
        links: Links,
        tier: str,
        peer: SimulatedReplica | None,
        now: float,
    ) -> bool:
        """Begin a fetch; return whether there is anything of those blocks to fetch, and room for it."""
        facts = worker.worker
        reserved = worker.engine.core.reserve(request_id, num_blocks * facts.block_size) if num_blocks else None
        if reserved is None:
            return False
        flow = links.open(tier if peer is None else peer.name, worker.name)
        start, end = reserved.start, reserved.end
        move = _Move(request_id, worker, links, flow, start, end, end, tier, peer, holds=peer is not None)
        self._fetches[request_id] = self._flows[flow] = move
        links.send(flow, round((end - start) * facts.bytes_per_token), now)
        return True

    def _fetched(self, move: _Move, now: float) -> None:
        self.figures.hit_tokens[move.tier] += move.end - move.start
        self._end_fetch(move, move.end, now)

    def _end_fetch(self, move: _Move, num_tokens: int, now: float) -> None:
        """End a fetch of which so much came."""
        del self._fetches[move.request_id]
        self._close(move, now)
        move.receiver.engine.wait_until(now)
        move.receiver.engine.core.kv_arrived(move.request_id, num_tokens)
        self._wake(move.receiver, now)

    # -- prompts are computed

    def stepped(self, replica: SimulatedReplica, began_at: float, ended_at: float) -> None:
        """A step that began and will have ended then: what it computes is sent meanwhile."""
        self._now = began_at
        for move in self._moves.values():
            if move.sender is replica and move.token_at is None and move.twin is not None:
                self._send_computed(move, replica.worker, began_at, ended_at)

    def _send_computed(self, move: _Move, facts: WorkerFacts, began_at: float, ended_at: float) -> None:
        assert move.twin is not None
        state = move.twin.state
        assert state is not None
        num_computed = state.num_prompt_tokens if state.finished else state.num_computed_tokens
        whole = min(num_computed // facts.block_size * facts.block_size, move.end)
        if whole <= move.sent:
            return
        num_bytes = round((whole - move.sent) * facts.bytes_per_token)
        move.sent = whole
        last_layer_s = num_bytes / facts.num_layers / move.links.link.bandwidth
        move.not_before = ended_at + last_layer_s + move.links.link.latency_s
        move.links.send(move.flow, num_bytes, began_at)

    def told(self, replica: SimulatedReplica, progress: list[RequestProgress], now: float) -> list[RequestProgress]:
        """A step's progress as clients are to hear of it: a hand-over's first token is not the end."""
        return [self._told(replica, told, now) if told.request_id in self._moves else told for told in progress]

    def _told(self, replica: SimulatedReplica, told: RequestProgress, now: float) -> RequestProgress:
        move = self._moves[told.request_id]
        assert move.live is not None
        if replica is move.receiver or not told.new_token_ids or move.live.arrival.output_tokens == 1:
            self._is_over(move, replica, now)
            return told
        self._first_token(move, replica, now)
        return told._replace(finish_reason=None, timing=None)

    def _is_over(self, move: _Move, replica: SimulatedReplica, now: float) -> None:
        """Note that the request ended at one of the two, and so at the other."""
        assert move.live is not None
        assert move.twin is not None
        self.drop(move.request_id, now, ended_at=replica)
        if replica is not move.receiver:
            move.receiver.engine.take_back(move.request_id)
            move.live.state, move.live.slots = move.twin.state, move.twin.slots

    def _first_token(self, move: _Move, sender: SimulatedReplica, now: float) -> None:
        live, twin = move.live, move.twin
        assert live is not None
        assert twin is not None
        del sender.engine.live[move.request_id]
        move.token_at, live.last_token_at, live.slots = now, now, twin.slots
        live.slots[-1].append(now)
        if move.flow.left == 0.0 and move.not_before <= now:
            self._settle(move, move.end, now)
        else:
            num_blocks = move.end // sender.worker.block_size
            move.holds = True
            sender.engine.core.hold(move.lease, tuple(live.spec.block_hashes[:num_blocks]))

    # -- they end

    def _arrived(self, move: _Move, _: SimulatedReplica, now: float) -> None:
        """Take in all that was sent, unless more was sent meanwhile, or it was cut."""
        if move.flow not in self._flows or move.flow.left > 0.0 or now < move.not_before:
            return
        if move.tier:
            self._fetched(move, now)
        elif move.token_at is not None:
            self._settle(move, move.end, now)

    def _settle(self, move: _Move, num_tokens: int, now: float) -> None:
        """The receiver goes on after the first token, with so much of the prompt's KV."""
        live, receiver = move.live, move.receiver
        assert live is not None
        assert move.twin is not None
        assert move.twin.state is not None
        self._forget(move, now)
        receiver.engine.wait_until(now)
        receiver.engine.core.kv_arrived(move.request_id, num_tokens)
        receiver.engine.take_back(move.request_id)
        receiver.progress = [told for told in receiver.progress if told.request_id != move.request_id]
        point = ResumePoint(output_token_ids=[0], charges=move.twin.state.charges, last_token_at=now, stalled_at=now)
        live.spec = msgspec.structs.replace(live.spec, resumed=point)
        receiver.engine.add(live)
        self.figures.outcomes["moved" if num_tokens == move.end else "recomputed"] += 1
        self.figures.wait_s.add(now - (move.token_at or now))
        live.moves.append((move.token_at or now, now))
        self._wake(receiver, now)
        self._rid(move.request_id, now)

    def listener_of(self, replica: SimulatedReplica) -> StepListener:
        """Hears of requests that this replica's scheduler gives up in a step, for want of blocks."""
        return _GivesUp(partial(self._note_given_up, replica))

    def _note_given_up(self, replica: SimulatedReplica, given_up: GivenUp) -> None:
        """What becomes of them comes after the step."""
        if self._fetches or self._moves:
            self._expect(self._now, partial(self._given_up, given_up), replica)

    def _given_up(self, given_up: GivenUp, replica: SimulatedReplica, now: float) -> None:
        """Compute again the requests given up, and those that wait for given-up leases."""
        for request_id in given_up.request_ids:
            fetch, move = self._fetches.get(request_id), self._moves.get(request_id)
            if fetch is not None and fetch.receiver is replica:
                self._end_fetch(fetch, fetch.start, now)
            if move is not None and move.receiver is replica:
                self._fall_back(move, now)
        for lease in given_up.leases:
            for move in [*self._fetches.values(), *self._moves.values()]:
                if move.sender is replica and move.lease == lease:
                    move.holds = False
                    (self._end_fetch if move.tier else self._settle)(move, move.start, now)

    def _fall_back(self, move: _Move, now: float) -> None:
        """The receiver's reservation is gone: it computes all of it, from where the client is."""
        if move.token_at is not None:
            self._settle(move, move.start, now)
            return
        self.figures.outcomes["recomputed"] += 1
        self.drop(move.request_id, now)
        self._rid(move.request_id, now)

    def drop(self, request_id: str, now: float, ended_at: SimulatedReplica | None = None) -> None:
        """Expect nothing for it any more; `ended_at` has ended it already."""
        fetch, move = self._fetches.pop(request_id, None), self._moves.get(request_id)
        if fetch is not None:
            self._close(fetch, now)
        if move is not None:
            self._forget(move, now)
            if move.sender is not None and move.token_at is None and move.sender is not ended_at:
                move.sender.engine.take_back(request_id)

    def _forget(self, move: _Move, now: float) -> None:
        del self._moves[move.request_id]
        self._close(move, now)

    def _close(self, move: _Move, now: float) -> None:
        if self._flows.pop(move.flow, None) is not None:
            move.links.cut(move.flow, now)
        if move.holds and move.sender is not None:
            move.sender.engine.core.release(move.lease)
