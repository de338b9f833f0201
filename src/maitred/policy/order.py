"""A policy at work: the queue, the keys of all that wait or run, and how much of its quantum each has used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from maitred.policy.policy import Policy
from maitred.policy.prefix_watch import PrefixWatch
from maitred.policy.queue import RequestQueue
from maitred.request import RequestState
from maitred.step import ScheduledRow

RESCORE_WINDOW = 64  # most requests that one step scores again because the prefix cache changed

FindPrefix = Callable[[RequestState], tuple[int, int]]
"""A request's cached prefix: (blocks, tokens)."""


def _no_prefix(request: RequestState) -> tuple[int, int]:
    return (0, 0)


class ServiceOrder:
    """Answers who is next and who is last; knows nothing of blocks and plans."""

    def __init__(self, policy: Policy, find_prefix: FindPrefix = _no_prefix) -> None:
        self.policy = policy
        self.queue = RequestQueue(policy.groups)
        self.keys: dict[str, tuple[Any, ...]] = {}  # of those that wait in the queue or run
        self._quantum_ends: dict[str, int] = {}  # position at which the current quantum ends
        self._find_prefix = find_prefix
        self._watch = PrefixWatch() if policy.scores_prefix else None
        self._num_rescores_left = RESCORE_WINDOW

    def successor(self, policy: Policy, running: Iterable[RequestState]) -> ServiceOrder:
        """The same requests, waiting and running, ordered by another policy. Keys are made of what a request carries
        (arrival, quanta), never of the moment, so nobody loses the time it has waited.
        """
        order = ServiceOrder(policy, self._find_prefix)
        for request in running:
            order.keys[request.request_id] = policy.order(request)
            order._begin_quantum(request)
        for request in self.queue.in_order():
            order.enqueue(request)
        return order

    def begin_step(self) -> None:
        """Before a plan: takes in what the prefix cache gained, as far as one step's window goes."""
        self._num_rescores_left = RESCORE_WINDOW
        if self._watch is not None:
            for request_id in self._watch.gaining(RESCORE_WINDOW // 2):
                self._rescore(self.queue.get(request_id))

    def block_cached(self, digest: bytes) -> None:
        """The prefix cache gained a block."""
        if self._watch is not None:
            self._watch.cached(digest)

    def head(self) -> RequestState | None:
        """The next request, which stays in the queue. It is scored anew: what the cache lost is noticed here."""
        request = self.queue.peek()
        while self._watch is not None and request is not None and self._num_rescores_left > 0:
            if not self._rescore(request):
                break
            request = self.queue.peek()
        return request

    def enqueue(self, request: RequestState) -> None:
        """To the queue; a request that has a key keeps it, or a better one, and so its place."""
        if self.policy.groups is not None:
            self.policy.groups.on_queued(request)
        if self._watch is not None:
            num_blocks, request.cached_prefix_tokens = self._find_prefix(request)
            self._watch.watch(request, num_blocks)
        key = self.keys.get(request.request_id)
        if key is None:
            key = self.policy.order(request)
        elif self.policy.resumed is not None:
            key = min(key, self.policy.resumed(request))
        self.keys[request.request_id] = key
        self.queue.push(request, key)

    def started(self, request: RequestState) -> None:
        """Out of the queue and running, with the tokens of its prefix hit computed."""
        self.queue.remove(request.request_id)
        if self._watch is not None:
            self._watch.forget(request.request_id)
        if request.request_id not in self._quantum_ends:
            self._begin_quantum(request)
        if self.policy.groups is not None:
            self.policy.groups.on_started(request)

    def ended(self, request: RequestState) -> None:
        """It finished, wherever it stood."""
        request_id = request.request_id
        self.keys.pop(request_id, None)
        self._quantum_ends.pop(request_id, None)
        if request_id in self.queue:
            self.queue.remove(request_id)
            if self._watch is not None:
                self._watch.forget(request_id)
        rule = self.policy.groups
        if rule is not None:
            rule.on_finished(request)
            self.queue.note_rank(rule.group_of(request))

    def issued(self, rows: Iterable[ScheduledRow], requests: Iterable[RequestState]) -> None:
        """A plan was made: tells the groups what service they get. Ranks only rise by that; `queue.peek` notices."""
        rule = self.policy.groups
        if rule is not None:
            for row, request in zip(rows, requests, strict=True):
                rule.on_scheduled(request, row.num_tokens)

    def accepted(self, request: RequestState) -> None:
        """A draft was accepted, `num_computed_tokens` counts it: the groups hear of it as of a row of its own."""
        if self.policy.groups is not None:
            self.policy.groups.on_scheduled(request, 1)

    def take_expired(self, running: Iterable[RequestState], now: float, limit: int) -> list[RequestState]:
        """Those whose quantum is used up while somebody waits that comes before them now, the longest-standing first;
        at most `limit`, and at most as many as wait.

        Each has its next quantum and its new key already. A quantum is counted from where the last one ended, not from
        the start of a stay: what is computed again after a preemption uses up none of it, else a request longer than
        its quantum might never get on.
        """
        head = self.queue.peek()
        if self.policy.quantum_end is None or head is None or not limit:
            return []
        ends = self._quantum_ends
        expired = sorted((r for r in running if r.num_computed_tokens >= ends[r.request_id]), key=self.place)
        leaving, first = [], self.place(head)
        for request in expired[: min(limit, len(self.queue))]:
            request.num_quanta += 1
            request.quantum_ended_at = now
            self.keys[request.request_id] = self.policy.order(request)
            self._begin_quantum(request)
            if self.place(request) > first:
                leaving.append(request)
        return leaving

    def outranked(self, waiting: RequestState, running: Iterable[RequestState]) -> list[RequestState]:
        """Those whose slots and blocks a waiting request may take, the first to be preempted first."""
        rule = self.policy.outranks
        if rule is None:
            return []
        return sorted((r for r in running if rule(waiting, r)), key=self.victim_key, reverse=True)

    def place(self, request: RequestState) -> tuple[Any, ...]:
        """Smaller is served first, in and across groups."""
        key, rule = self.keys[request.request_id], self.policy.groups
        if rule is None:
            return key
        group = rule.group_of(request)
        return (rule.rank(group), group, key)

    def victim_key(self, request: RequestState) -> tuple[Any, ...]:
        """The largest is preempted first."""
        return self.place(request) if self.policy.victim is None else self.policy.victim(request)

    def check_invariants(self, running: Iterable[RequestState]) -> None:
        """Asserts that nothing is kept of requests that have gone; slow."""
        living = {r.request_id for r in [*self.queue, *running]}
        assert self.keys.keys() == living
        assert self._quantum_ends.keys() <= living
        assert self._watch is None or len(self._watch) <= len(self.queue)

    def _begin_quantum(self, request: RequestState) -> None:
        if self.policy.quantum_end is not None:
            self._quantum_ends[request.request_id] = self.policy.quantum_end(request)

    def _rescore(self, request: RequestState) -> bool:
        """True if the request's cached prefix is another than when it was scored last."""
        assert self._watch is not None
        num_blocks, num_tokens = self._find_prefix(request)
        self._watch.watch(request, num_blocks)
        if num_tokens == request.cached_prefix_tokens:
            return False
        self._num_rescores_left -= 1
        request.cached_prefix_tokens = num_tokens
        key = self.keys[request.request_id] = self.policy.order(request)
        self.queue.remove(request.request_id)
        self.queue.push(request, key)
        return True
