"""Held requests: one order for all, in a queue for each set of replicas that may be used.

The queues share one policy, and with it what it knows of service, so the order runs across them: of the first of each
the one in the smallest place is next. A queue whose replicas are full holds up no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from maitred.fleet.fleet_request import FleetRequest
from maitred.fleet.replicas import Use
from maitred.policy.order import ServiceOrder
from maitred.policy.policy import Policy
from maitred.policy.queued import KVNeed

Order = ServiceOrder[FleetRequest]


class Waiting:
    """All requests, held and bound, in order."""

    def __init__(self, policy: Policy, find_kv: Callable[[FleetRequest], KVNeed]) -> None:
        self.policy = policy
        self._find_kv = find_kv
        self._orders: dict[Use, Order] = {}
        self._use_of: dict[str, Use] = {}
        self.num_held = 0

    def __iter__(self) -> Iterator[FleetRequest]:
        """Held requests, in no order."""
        for order in self._orders.values():
            yield from order.queue

    def queues(self) -> list[tuple[Use, Order]]:
        """Queues that hold a request."""
        return [(use, order) for use, order in self._orders.items() if order.queue]

    def hold(self, request: FleetRequest, use: Use) -> None:
        """A new one, or one that was bound; it keeps the place that it had."""
        order = self._order_of(request, use)
        order.enqueue(request)
        self.num_held += 1
        self._note_rank(request)

    def move(self, request: FleetRequest, use: Use) -> None:
        """Move a request that may use other replicas than before."""
        if self._use_of[request.request_id] != use:
            self._order_of(request, use)

    def admit(self, request: FleetRequest, use: Use) -> None:
        """A new one that will not wait: `bound` follows."""
        self._order_of(request, use).admit(request)
        self.num_held += 1

    def bound(self, request: FleetRequest) -> None:
        self._orders[self._use_of[request.request_id]].started(request)
        self.num_held -= 1

    def progressed(self, request: FleetRequest, num_tokens: int) -> None:
        """Count so many more output tokens, not in the request yet; the policy's groups are told of each."""
        if self.policy.groups is None:
            request.num_outputs += num_tokens
            request.num_computed += num_tokens
            return
        on_scheduled = self.policy.groups.on_scheduled
        for _ in range(num_tokens):
            on_scheduled(request, 1)
            request.num_outputs += 1
            request.num_computed += 1

    def ended(self, request: FleetRequest) -> None:
        use = self._use_of.pop(request.request_id)
        order = self._orders[use]
        if request.request_id in order.queue:
            self.num_held -= 1
        order.ended(request)
        if not order.keys:
            del self._orders[use]
        self._note_rank(request)

    def reorder(self, policy: Policy, bound: Iterable[FleetRequest]) -> None:
        """Order by another policy from now on, bound requests too; all keep the time they have waited."""
        self.policy = policy
        of_use: dict[Use, list[FleetRequest]] = {}
        for request in bound:
            of_use.setdefault(self._use_of[request.request_id], []).append(request)
        self._orders = {use: order.successor(policy, of_use.get(use, ())) for use, order in self._orders.items()}

    def key_of(self, request: FleetRequest) -> tuple[Any, ...]:
        """The request's key within its group."""
        return self._orders[self._use_of[request.request_id]].keys[request.request_id]

    def place(self, request: FleetRequest) -> tuple[Any, ...]:
        """Smaller is served first."""
        return self._orders[self._use_of[request.request_id]].place(request)

    def victim_key(self, request: FleetRequest) -> tuple[Any, ...]:
        """The largest is preempted first."""
        return self._orders[self._use_of[request.request_id]].victim_key(request)

    def in_order(self) -> list[FleetRequest]:
        """Held requests, the next first; sorts, so it is for people to look at."""
        return sorted(self, key=self.place)

    def block_cached(self, keys: Iterable[int]) -> None:
        """A replica has these prefixes now."""
        if self.policy.kv_needs is not None:
            for order in self._orders.values():
                for key in keys:
                    order.block_cached(key)

    def check_invariants(self, bound: Iterable[FleetRequest]) -> None:
        """Asserts that nothing is kept of requests that have gone; slow."""
        living = {r.request_id for r in (*self, *bound)}
        assert self._use_of.keys() == living
        for use, order in self._orders.items():
            assert order.keys.keys() == {request_id for request_id, its in self._use_of.items() if its == use}
        assert self.policy.quanta.keys() <= living
        assert self.policy.kv_needs is None or self.policy.kv_needs.keys() <= living
        assert self.num_held == sum(1 for _ in self)

    def _order_of(self, request: FleetRequest, use: Use) -> Order:
        """Move a request into the order of `use`, with the key that it has, if any."""
        order = self._orders.get(use)
        if order is None:
            order = self._orders[use] = ServiceOrder(self.policy, self._find_kv)
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
        rule = self.policy.groups
        if rule is not None:
            for order in self._orders.values():
                order.queue.note_rank(rule.group_of(request))
