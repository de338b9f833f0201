"""Late binding: a request goes to a replica when one that it may use has room, and not before. Pure.

Held requests stand in one order, in a queue for each set of replicas that may be used. The queues share one policy, and
with it what the policy knows of service, so the order runs across them: of the first of each the one in the smallest
place is next. A queue whose replicas are full holds up no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from maitred.fleet.actions import Action, Bind
from maitred.fleet.balance import BALANCES, MAX_CANDIDATES, Cached, Choice, cached_tokens, choose
from maitred.fleet.config import FleetConfig
from maitred.fleet.disagg import DEFAULT_HANDOVER, HandoverConfig, Role, WorkAsked, WorkerLoad, options
from maitred.fleet.fleet_request import FleetRequest, Place
from maitred.fleet.prefix_index import Lessons, PrefixIndex
from maitred.fleet.replicas import FleetReplica, Replicas, State, Use
from maitred.policy.order import ServiceOrder
from maitred.policy.policy import KVNeed, Policy

Order = ServiceOrder[FleetRequest]
Policies = tuple[Policy, Policy]
"""One policy twice: for all requests but those of the class background, and for those, whose service counts apart."""


class Waiting:
    """All requests, held and bound, in order."""

    def __init__(self, policies: Policies, find_kv: Callable[[FleetRequest], KVNeed]) -> None:
        self._policies = policies
        self._find_kv = find_kv
        self._orders: dict[Use, Order] = {}
        self._use_of: dict[str, Use] = {}
        self.num_held = 0
        self.num_background = 0  # of them, those of the class background

    def __iter__(self) -> Iterator[FleetRequest]:
        """Held requests, in no order."""
        for order in self._orders.values():
            yield from order.queue

    def queues(self) -> list[tuple[Use, Order]]:
        """Queues that hold a request, those of the class background last."""
        held = [(use, order) for use, order in self._orders.items() if order.queue]
        return sorted(held, key=lambda each: each[0].background) if self.num_background else held

    def hold(self, request: FleetRequest, use: Use) -> None:
        """A new one, or one that was bound; it keeps the place that it had."""
        order = self._order_of(request, use)
        order.enqueue(request)
        self._count_held(request, 1)
        self._note_rank(request)

    def move(self, request: FleetRequest, use: Use) -> None:
        """Move a request that may use other replicas than before."""
        if self._use_of[request.request_id] != use:
            self._order_of(request, use)

    def admit(self, request: FleetRequest, use: Use) -> None:
        """A new one that will not wait: `bound` follows."""
        self._order_of(request, use).admit(request)
        self._count_held(request, 1)

    def bound(self, request: FleetRequest) -> None:
        self._orders[self._use_of[request.request_id]].started(request)
        self._count_held(request, -1)

    def _count_held(self, request: FleetRequest, num: int) -> None:
        self.num_held += num
        self.num_background += num if request.background else 0

    def progressed(self, request: FleetRequest, num_tokens: int) -> None:
        """Count so many more output tokens, not in the request yet; the policy's groups are told of each."""
        groups = self._policies[request.background].groups
        if groups is None:
            request.num_outputs += num_tokens
            request.num_computed += num_tokens
            return
        on_scheduled = groups.on_scheduled
        for _ in range(num_tokens):
            on_scheduled(request, 1)
            request.num_outputs += 1
            request.num_computed += 1

    def ended(self, request: FleetRequest) -> None:
        use = self._use_of.pop(request.request_id)
        order = self._orders[use]
        if request.request_id in order.queue:
            self._count_held(request, -1)
        order.ended(request)
        if not order.keys:
            del self._orders[use]
        self._note_rank(request)

    def reorder(self, policies: Policies, bound: Iterable[FleetRequest]) -> None:
        """Order by another policy from now on, bound requests too; all keep the time they have waited."""
        self._policies = policies
        of_use: dict[Use, list[FleetRequest]] = {}
        for request in bound:
            of_use.setdefault(self._use_of[request.request_id], []).append(request)
        orders = self._orders.items()
        self._orders = {use: order.successor(policies[use.background], of_use.get(use, ())) for use, order in orders}

    def first_beside(self, request: FleetRequest, count: int) -> list[FleetRequest]:
        """The next ones of the queue that the request is in."""
        return self._orders[self._use_of[request.request_id]].queue.first(count)

    def key_of(self, request: FleetRequest) -> tuple[Any, ...]:
        """The request's key within its group."""
        return self._orders[self._use_of[request.request_id]].keys[request.request_id]

    def place(self, request: FleetRequest) -> tuple[Any, ...]:
        """Smaller is served first."""
        return (request.background, *self._orders[self._use_of[request.request_id]].place(request))

    def victim_key(self, request: FleetRequest) -> tuple[Any, ...]:
        """The largest is preempted first."""
        return self._orders[self._use_of[request.request_id]].victim_key(request)

    def in_order(self) -> list[FleetRequest]:
        """Held requests, the next first; sorts, so it is for people to look at."""
        return sorted(self, key=self.place)

    def block_cached(self, keys: Iterable[int]) -> None:
        """A replica has these prefixes now."""
        if self._policies[0].kv_needs is not None:
            for order in self._orders.values():
                for key in keys:
                    order.block_cached(key)

    def check_invariants(self, bound: Iterable[FleetRequest]) -> None:
        """Asserts that nothing is kept of requests that have gone; slow."""
        living = {r.request_id for r in (*self, *bound)}
        assert self._use_of.keys() == living
        for use, order in self._orders.items():
            assert order.keys.keys() == {request_id for request_id, its in self._use_of.items() if its == use}
        for policy in self._policies:
            assert policy.quanta.keys() <= living
            assert policy.kv_needs is None or policy.kv_needs.keys() <= living
        assert self.num_held == sum(1 for _ in self)
        assert self.num_background == sum(request.background for request in self)

    def _order_of(self, request: FleetRequest, use: Use) -> Order:
        """Move a request into the order of `use`, with the key that it has, if any."""
        order = self._orders.get(use)
        if order is None:
            order = self._orders[use] = ServiceOrder(self._policies[use.background], self._find_kv)
        last = self._use_of.get(request.request_id)
        self._use_of[request.request_id] = use
        if last is not None and last != use:
            before = self._orders[last]
            before.hand_over(request, order)
            self._note_rank(request)
            if not before.keys:
                del self._orders[last]
        return order

    def _note_rank(self, request: FleetRequest) -> None:
        """Tell all queues that its group's rank may have fallen; only one has heard."""
        rule = self._policies[request.background].groups
        if rule is not None:
            for order in self._orders.values():
                order.queue.note_rank(rule.group_of(request))


MAX_USES = 256
PASSED_OF_ONE, MAX_PASSED = 32, 256  # places ahead that a request may be bound, for each replica, and in all


class Binder:
    """Holds requests and binds them."""

    def __init__(
        self,
        config: FleetConfig,
        policies: Policies,
        fleet: Replicas,
        index: PrefixIndex,
        lessons: Lessons,
        handover: HandoverConfig = DEFAULT_HANDOVER,
    ) -> None:
        self._config, self._fleet, self._index, self._lessons = config, fleet, index, lessons
        self._handover = handover
        self.policy = policies[0]
        self.waiting = Waiting(policies, self._find_kv)
        self._balance = BALANCES[config.balance](fleet)
        self._victims: dict[str, str] = {}  # a bound request -> the one that was bound to preempt it
        self._preempts: dict[str, str] = {}  # the other way round
        self._in_vain: dict[Use, tuple[str, int]] = {}  # (first of a queue, binds so far) that may preempt no request
        self.num_binds = 0
        self.closed: Mapping[str | None, tuple[Any, ...] | None] = {}
        """Models that make room for another: only requests before this place are bound there; None is none."""

    def hold(self, request: FleetRequest, now: float) -> None:
        request.place, request.held_at = Place.HELD, now
        self.waiting.hold(request, use_of(request))

    def bind_at_once(self, request: FleetRequest, now: float) -> Bind | None:
        """Bind a new request if `hold` and `dispatch` would: no request is held, and a replica has room. Else None."""
        use = use_of(request)
        usable = self._fleet.usable(use)
        room = usable & self._fleet.room
        is_closed = request.background or request.model in self.closed
        if self.waiting.num_held or not room or is_closed or self._foretells(usable):
            return None
        request.held_at = now
        self.waiting.admit(request, use)
        return self._bind(request, room, usable, now)

    def dispatch(self, now: float) -> list[Action]:
        """Bind held requests in order, until none is held that a replica it may use has room for."""
        bound: list[Action] = []
        while self.waiting.num_held and (found := self._next()) is not None:
            first, room, usable = found
            bind = self._bind(self._nearest(first, room, usable), room, usable, now)
            if bind is None:
                break  # the first in order waits for room
            bound.append(bind)
        return bound

    def reorder(self, policies: Policies, bound: Iterable[FleetRequest]) -> None:
        """Everything is ordered by another policy from now on."""
        self.policy = policies[0]
        self.waiting.reorder(policies, bound)
        self._in_vain.clear()

    def bound_elsewhere(self, replica: FleetReplica, hash_key: int | None, keys: Sequence[int]) -> None:
        """Note a bind by another router, which shares its sessions and the history of foreign servers."""
        if hash_key is not None and self._balance.met is not None:
            self._balance.met(hash_key, replica)
        self._lessons.sent_elsewhere(keys, replica)

    def release(self, request: FleetRequest) -> None:
        """Free the slot of a request that ended, or is to be held again."""
        self._fleet.free(self._fleet.at(request.replica), request)
        self._fleet.work.released(request.request_id)
        self._lessons.left_replica(request)
        victim = self._preempts.pop(request.request_id, None)
        if victim is not None:
            self._victims.pop(victim, None)
        by = self._victims.pop(request.request_id, None)
        if by is not None:
            self._preempts.pop(by, None)

    def check_invariants(self, bound: list[FleetRequest]) -> None:
        self.waiting.check_invariants(bound)
        ids = {r.request_id for r in bound}
        assert {by: victim for victim, by in self._victims.items()} == self._preempts
        assert self._victims.keys() <= ids
        assert self._preempts.keys() <= ids

    # -- the next request

    def _next(self) -> tuple[FleetRequest, int, int] | None:
        """(request, bits that have room for it, bits that it may use); None when no request can be bound."""
        found, first = None, None
        queues = self.waiting.queues()
        for use, order in queues:
            if found is not None and use.background:
                break
            usable = self._fleet.usable(use)
            room = usable & (self._fleet.idle if use.background else self._fleet.room)
            if not room and (use.background or not usable or self.policy.outranks is None):
                continue
            request = order.head()
            assert request is not None, "queues() names those that hold somebody"
            if use.model in self.closed and not self._is_before(request, self.closed[use.model]):
                continue
            room = room or self._outranked(request, use, order, usable)
            place = order.place(request) if room and len(queues) > 1 else ()
            if room and (first is None or place < first):
                found, first = (request, room, usable), place
        return found

    def _is_before(self, request: FleetRequest, place: tuple[Any, ...] | None) -> bool:
        return place is not None and self.waiting.place(request) < place

    def _nearest(self, first: FleetRequest, room: int, usable: int) -> FleetRequest:
        """The first in the order, or one of those behind it that has more of its prompt cached where there is room, for
        a prefix may be evicted before its turn. No more requests than that pass any.
        """
        if self.waiting.num_held == 1 or not self._balance.looks_at_prefixes or first.model in self.closed:
            return first
        if self.policy.outranks is not None or self.policy.groups is not None:
            return first  # the order is a promise
        most_passed, found = min(PASSED_OF_ONE * usable.bit_count(), MAX_PASSED), list[FleetRequest]()
        share, nearest, num_passed = 0.0, first, 0
        for request in self.waiting.first_beside(first, most_passed):
            keys = request.keys
            if share < 1.0 and keys and self._index.holders(keys[int(share * len(keys) + 1e-9)]) & room:
                share, nearest, num_passed = self._index.hits(keys, room)[0].num_keys / len(keys), request, len(found)
            if request.num_passed >= most_passed:
                break
            found.append(request)
        for request in found[:num_passed]:
            request.num_passed += 1
        return nearest

    def _outranked(self, request: FleetRequest, use: Use, order: Order, usable: int) -> int:
        """Bits of the replicas with a request in flight whose slot it may take, and no other request is to."""
        asked = (request.request_id, self.num_binds)
        if self._in_vain.get(use) == asked:
            return 0
        bits = 0
        for replica in self._fleet.of(usable):
            if not replica.is_full and self._victim(request, replica) is not None:
                bits |= 1 << replica.bit
        if not bits:
            if len(self._in_vain) >= MAX_USES:
                self._in_vain.clear()
            self._in_vain[use] = asked
        return bits

    def _victim(self, request: FleetRequest, replica: FleetReplica) -> FleetRequest | None:
        """The one there that it would preempt first."""
        rule, victims = self.policy.outranks, self._victims
        assert rule is not None
        there = [r for r in replica.in_flight.values() if r.request_id not in victims and not r.background]
        found = [r for r in there if rule(request, r)]
        return max(found, key=self.waiting.victim_key) if found else None

    # -- where to

    def _bind(self, request: FleetRequest, room: int, usable: int, now: float) -> Bind | None:
        """None where `_foretells` and no worker has room for its KV."""
        takes_slot = not room & self._fleet.room
        if request.background:
            replica = min(
                self._fleet.of(room), key=lambda each: ((each.num_others + each.num_own) / each.speed, each.name)
            )
            choice = Choice(replica.name)
        elif self._foretells(usable):
            found = self._foretold(request, room, usable, now)
            if found is None:
                return None
            replica, choice = found
        else:
            replica, choice = choose(
                request,
                self._fleet,
                room,
                usable,
                balance=self._balance,
                index=self._index,
                ratio=self._config.max_load_ratio,
            )
        if takes_slot and (victim := self._victim(request, replica)) is not None:
            self._victims[victim.request_id] = request.request_id
            self._preempts[request.request_id] = victim.request_id
        self._note_start(request, replica, now)
        self._fleet.bind(replica, request)
        self._lessons.sent(request, replica)
        self.num_binds += 1
        return Bind(request.request_id, choice, request.num_attempts, request.has_begun)

    def _foretells(self, usable: int) -> bool:
        """Whether workers may hand over, and have told what foretelling their times takes."""
        return self._handover.handover != "never" and all(r.facts.worker is not None for r in self._fleet.of(usable))

    def _foretold(
        self, request: FleetRequest, room: int, usable: int, now: float
    ) -> tuple[FleetReplica, Choice] | None:
        """Choose by `disagg`; None when the request must wait. Writes `num_cached`."""
        fleet, asked = self._fleet, self._handover
        if asked.handover == "always" and self._awaits_role(request, usable):
            return None
        cached = cached_tokens(request, self._index, usable)
        loads = self._loads(room, usable, cached, now)
        num_known, objective_s = request.num_inputs + request.num_outputs, request.ttft_slo_s or asked.ttft_s
        ask = WorkAsked(num_known, fleet.work.outputs_left(request), objective_s, asked.tpot_s)
        ways = options(ask, loads, asked.handover)
        if not ways:
            return None
        best = ways[0]
        computes = fleet.by_name[best.prefill or best.replica]
        finds = computes if best.fetch_from is None else fleet.by_name[best.fetch_from]
        request.num_cached = min(cached.get(finds.bit, 0), request.num_inputs - 1)
        assert computes.facts.worker is not None
        fleet.work.bound(request, best, computes.facts.worker, now)
        foretold = tuple(ways[:MAX_CANDIDATES])
        return fleet.by_name[best.replica], Choice(best.replica, best.prefill, (), best.fetch_from, foretold)

    def _awaits_role(self, request: FleetRequest, usable: int) -> bool:
        """Whether all that are ready have one role of the two, and others are starting; a silent or failed one may
        never be back."""
        roles = {replica.facts.worker.role for replica in self._fleet.of(usable) if replica.facts.worker is not None}
        others = self._fleet.of(self._fleet.known(use_of(request)) & ~usable)
        starts = any(replica.state is State.STARTING and not replica.facts.is_silent for replica in others)
        return starts and len(roles - {Role.MIXED}) == len(roles) == 1

    def foretold_ttft_s(self, num_tokens: int, now: float) -> float | None:
        """Foretold TTFT (s) of a new request with such a prompt, none of it cached, served as would be chosen. None
        while a request is held, or nothing is foretold.
        """
        usable, asked = self._fleet.ready, self._handover
        if self.waiting.num_held > self.waiting.num_background or not usable or not self._foretells(usable):
            return None
        ask = WorkAsked(max(1, num_tokens), self._fleet.work.mean_outputs, asked.ttft_s, asked.tpot_s)
        ways = options(ask, self._loads(usable & self._fleet.room, usable, {}, now), asked.handover)
        return ways[0].ttft_s if ways else None

    def _loads(self, room: int, usable: int, cached: Cached, now: float) -> list[WorkerLoad]:
        work = self._fleet.work
        return [
            work.load(r.name, r.facts.worker, now)._replace(
                num_cached=cached.get(r.bit, 0), has_slot=bool(room >> r.bit & 1)
            )
            for r in self._fleet.of(usable)
            if r.facts.worker is not None
        ]

    def _note_start(self, request: FleetRequest, replica: FleetReplica, now: float) -> None:
        request.num_computed = request.num_cached
        self.waiting.bound(request)
        request.num_computed = request.num_inputs + request.num_outputs
        if request.first_scheduled_at is None:
            request.first_scheduled_at = now
        request.held_s += now - request.held_at
        request.bound_at, request.place, request.replica = now, Place.BOUND, replica.bit
        request.num_attempts += 1

    def _find_kv(self, request: FleetRequest) -> KVNeed:
        """The most that any replica it may use has cached, for a policy that looks at it."""
        hits = self._index.hits(request.keys, self._fleet.usable(use_of(request))) if request.keys else ()
        if not hits:
            return KVNeed()
        num_keys = hits[0].num_keys
        return KVNeed(num_cached=request.num_inputs * num_keys // len(request.keys), num_cached_blocks=num_keys)


def use_of(request: FleetRequest) -> Use:
    return Use(request.model, request.tiers, request.barred, request.fingerprint, request.background)
