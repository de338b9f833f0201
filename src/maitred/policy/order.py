"""Policy order: the queue, the keys of all that wait or run, their quanta, and what they need of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import Any, Generic

from maitred.policy.policy import NO_KV_NEED, KVNeed, Policy, Queued, UsedQuanta
from maitred.policy.queue import Q, RequestQueue

RESCORE_WINDOW = 64  # most requests that one step scores again because the prefix cache changed


class ServiceOrder(Generic[Q]):
    """Policy at work: answers which request is next and which is last; knows nothing of blocks and plans."""

    def __init__(self, policy: Policy, find_kv: Callable[[Q], KVNeed] = lambda request: NO_KV_NEED) -> None:
        """`find_kv` looks for what a request needs of the KV cache now."""
        self.policy = policy
        self.queue: RequestQueue[Q] = RequestQueue(policy.groups)
        self.keys: dict[str, tuple[Any, ...]] = {}  # of those that wait in the queue or run
        self._quantum_ends: dict[str, int] = {}  # position at which the current quantum ends
        self._find_kv = find_kv
        self._kv_needs = policy.kv_needs if policy.kv_needs is not None else {}
        self._watch = PrefixWatch() if policy.kv_needs is not None else None
        self._num_rescores_left = RESCORE_WINDOW
        self.on_rank_fall: Callable[[str], None] | None = None  # told of groups, for other queues under the policy

    def successor(self, policy: Policy, running: Iterable[Q], withdrawn: Iterable[Q] = ()) -> ServiceOrder[Q]:
        """Return an order of the same requests, waiting, running and withdrawn, under another policy. Keys are made of
        what a request carries (arrival, quanta), never of the moment, so no waiting time is lost.
        """
        order = ServiceOrder(policy, self._find_kv)
        policy.quanta.update(self.policy.quanta)
        for request in running:
            if policy.kv_needs is not None:  # of one that runs, what it needed when it started
                need = self._kv_needs.get(request.request_id)
                policy.kv_needs[request.request_id] = self._find_kv(request) if need is None else need
            order.keys[request.request_id] = policy.order(request)
            order._begin_quantum(request)
        for request in self.queue.in_order():
            order.enqueue(request)
        for request in withdrawn:
            order.enqueue(request)
            order.withdraw(request)
        return order

    def begin_step(self) -> None:
        """Begin a step before its plan: take in what the prefix cache gained, as far as one step's window goes."""
        self._num_rescores_left = RESCORE_WINDOW
        if self._watch is not None:
            for request_id in self._watch.gaining(RESCORE_WINDOW // 2):
                self._rescore(self.queue.get(request_id))

    def block_cached(self, digest: Hashable) -> None:
        """The prefix cache gained a block."""
        if self._watch is not None:
            self._watch.cached(digest)

    def head(self) -> Q | None:
        """The next request, which stays in the queue. It is scored anew: what the cache lost is noticed here."""
        request = self.queue.peek()
        while self._watch is not None and request is not None and self._num_rescores_left > 0:
            if not self._rescore(request):
                break
            request = self.queue.peek()
        return request

    def enqueue(self, request: Q) -> None:
        """Queue the request; one that has a key keeps it, or a better one, and so its place."""
        self.queue.push(request, self.admit(request))

    def admit(self, request: Q) -> tuple[Any, ...]:
        """Take in a request as `enqueue` does that is `started` before it has waited; return its key."""
        if self.policy.groups is not None:
            self.tell_groups(self.policy.groups.on_queued, request)
        key = self.keys.get(request.request_id)
        if self._watch is not None and (key is None or self.policy.resumed is not None):
            self._look_for_kv(request, self._watch)
        if key is None:
            key = self.policy.order(request)
        elif self.policy.resumed is not None:
            key = min(key, self.policy.resumed(request))
        self.keys[request.request_id] = key
        return key

    def withdraw(self, request: Q) -> None:
        """Take the request out of the queue until it is `put_back`, or ends; its key stays, and groups see it wait."""
        self.queue.remove(request.request_id)
        if self._watch is not None:
            self._watch.forget(request.request_id)

    def put_back(self, request: Q) -> None:
        """Put the request back at its old place; the cache's gains for it count from the next step on."""
        self.queue.push(request, self.keys[request.request_id])
        if self._watch is not None:
            self._watch.score_again(request.request_id)

    def hand_over(self, request: Q, other: ServiceOrder[Q]) -> None:
        """Hand the request to another order of the same policy, with its key, and from queue to queue if it waits."""
        request_id = request.request_id
        other.keys[request_id] = self.keys.pop(request_id)
        if request_id in self._quantum_ends:
            other._quantum_ends[request_id] = self._quantum_ends.pop(request_id)
        if request_id in self.queue:
            self.queue.remove(request_id)
            if self._watch is not None and other._watch is not None:
                self._watch.forget(request_id)
                other._look_for_kv(request, other._watch)
            other.queue.push(request, other.keys[request_id])

    def started(self, request: Q) -> None:
        """Move the request from the queue to the running ones, with the tokens of its prefix hit computed."""
        if request.request_id in self.queue:
            self.queue.remove(request.request_id)
        if self._watch is not None:
            self._watch.forget(request.request_id)
        if request.request_id not in self._quantum_ends:
            self._begin_quantum(request)
        if self.policy.groups is not None:
            self.policy.groups.on_started(request)

    def ended(self, request: Q) -> None:
        """Forget a finished request, waiting or running."""
        request_id = request.request_id
        self.keys.pop(request_id, None)
        self._quantum_ends.pop(request_id, None)
        self.policy.quanta.pop(request_id, None)
        self._kv_needs.pop(request_id, None)
        if request_id in self.queue:
            self.queue.remove(request_id)
            if self._watch is not None:
                self._watch.forget(request_id)
        rule = self.policy.groups
        if rule is not None:
            self.tell_groups(rule.on_finished, request)
            self.queue.note_rank(rule.group_of(request))

    def tell_groups(self, hook: Callable[[Queued], None], request: Queued) -> None:
        """Calls `on_queued` or `on_finished` of the policy's groups, and tells all queues if a rank falls by it: a rise
        is noticed where it matters.
        """
        rule = self.policy.groups
        if self.on_rank_fall is None or rule is None:
            hook(request)
            return
        group = rule.group_of(request)
        before = rule.rank(group)
        hook(request)
        if rule.rank(group) < before:
            self.queue.note_rank(group)
            self.on_rank_fall(group)

    def issued(self, requests: Iterable[Q], amounts: Iterable[int]) -> None:
        """A plan computes so much of each: tells the groups what service they get. Ranks only rise by that;
        `queue.peek` notices.
        """
        rule = self.policy.groups
        if rule is not None:
            for request, amount in zip(requests, amounts, strict=True):
                rule.on_scheduled(request, amount)

    def accepted(self, request: Q) -> None:
        """A draft was accepted, or a token forced: the groups hear of it as of a row of its own, which
        `num_computed_tokens` counts now."""
        if self.policy.groups is not None:
            self.policy.groups.on_scheduled(request, 1)

    def take_expired(self, running: Iterable[Q], now: float, limit: int) -> list[Q]:
        """Take running requests with a used-up quantum that a waiting request now precedes, the longest-standing first;
        at most `limit`, and at most as many as wait.

        Each has its next quantum and its new key already. A quantum is counted from where the last one ended, not from
        the start of a stay: what is computed again after a preemption uses up none of it, else a request longer than
        its quantum might never get on.
        """
        head = self.queue.peek()
        if self.policy.quantum_end is None or head is None or not limit:
            return []
        ends, quanta = self._quantum_ends, self.policy.quanta
        expired = sorted((r for r in running if r.num_computed >= ends[r.request_id]), key=self.place)
        leaving, first = [], self.place(head)
        for request in expired[: min(limit, len(self.queue))]:
            used = quanta.get(request.request_id)
            quanta[request.request_id] = UsedQuanta(1 if used is None else used.num_used + 1, now)
            self.keys[request.request_id] = self.policy.order(request)
            self._begin_quantum(request)
            if self.place(request) > first:
                leaving.append(request)
        return leaving

    def outranked(self, waiting: Q, running: Iterable[Q]) -> list[Q]:
        """Return the requests that a waiting request may displace, the first to be preempted first."""
        rule = self.policy.outranks
        if rule is None:
            return []
        return sorted((r for r in running if rule(waiting, r)), key=self.victim_key, reverse=True)

    def place(self, request: Q) -> tuple[Any, ...]:
        """Smaller is served first, in and across groups."""
        return self._placed(request, self.keys[request.request_id])

    def place_of_newcomer(self, request: Q) -> tuple[Any, ...]:
        """Return the `place` of a request that has not come to the queue yet."""
        return self._placed(request, self.policy.order(request))

    def _placed(self, request: Q, key: tuple[Any, ...]) -> tuple[Any, ...]:
        rule = self.policy.groups
        if rule is None:
            return key
        group = rule.group_of(request)
        return (rule.rank(group), group, key)

    def victim_key(self, request: Q) -> tuple[Any, ...]:
        """The largest is preempted first."""
        return self.place(request) if self.policy.victim is None else self.policy.victim(request)

    def check_invariants(self, running: Iterable[Q]) -> None:
        """Asserts that nothing is kept of requests that have gone; slow."""
        living = {r.request_id for r in [*self.queue, *running]}
        assert self.keys.keys() == living
        assert self._quantum_ends.keys() <= living
        assert self.policy.quanta.keys() <= living
        assert self._kv_needs.keys() <= living
        assert self._watch is None or len(self._watch) <= len(self.queue)

    def _begin_quantum(self, request: Q) -> None:
        if self.policy.quantum_end is not None:
            self._quantum_ends[request.request_id] = self.policy.quantum_end(request)

    def _look_for_kv(self, request: Q, watch: PrefixWatch) -> bool:
        """True if the request needs something else of the KV cache than when it was looked for last."""
        need = self._find_kv(request)
        watch.watch(request, need.num_cached_blocks)
        if need == self._kv_needs.get(request.request_id):
            return False
        self._kv_needs[request.request_id] = need
        return True

    def _rescore(self, request: Q) -> bool:
        """True if the request has another key than when it was scored last."""
        assert self._watch is not None
        key = self.keys[request.request_id]
        if request.first_scheduled_at is not None and self.policy.resumed is None:
            self._watch.forget(request.request_id)  # it was preempted, and keeps the key it had
            return False
        if not self._look_for_kv(request, self._watch):
            return False
        self._num_rescores_left -= 1
        new_key = self.policy.order(request)
        self.keys[request.request_id] = new_key if request.first_scheduled_at is None else min(key, new_key)
        self.queue.remove(request.request_id)
        self.queue.push(request, self.keys[request.request_id])
        return True


class PrefixWatch:
    """Each waiting request watches the first block of its prompt that is not cached; losses are found at the head."""

    def __init__(self) -> None:
        self._watchers: dict[Hashable, dict[str, None]] = {}  # block hash -> ids; dicts, because sets have no order
        self._watched: dict[str, Hashable] = {}
        self._gaining: dict[str, None] = {}  # ids whose score is too low, first come first served

    def watch(self, request: Queued, num_cached_blocks: int) -> None:
        self.forget(request.request_id)
        if num_cached_blocks < len(request.block_hashes):
            digest = request.block_hashes[num_cached_blocks]
            self._watched[request.request_id] = digest
            self._watchers.setdefault(digest, {})[request.request_id] = None

    def forget(self, request_id: str) -> None:
        """Forget a request that waits no more, or is scored anew."""
        self._gaining.pop(request_id, None)
        digest = self._watched.pop(request_id, None)
        if digest is not None:
            watchers = self._watchers[digest]
            del watchers[request_id]
            if not watchers:
                del self._watchers[digest]

    def cached(self, digest: Hashable) -> None:
        """A block can be found from now on."""
        watchers = self._watchers.pop(digest, None)
        if watchers is not None:
            for request_id in watchers:
                del self._watched[request_id]
            self._gaining |= watchers

    def score_again(self, request_id: str) -> None:
        """Score a request that is not watched."""
        self._gaining[request_id] = None

    def gaining(self, limit: int) -> list[str]:
        """The next ids to be scored again; `watch` or `forget` each of them."""
        return list(islice(self._gaining, limit))

    def __len__(self) -> int:
        """Ids it knows of."""
        return len(self._watched) + len(self._gaining)
