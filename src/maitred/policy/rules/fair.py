"""Fair shares: every tenant that waits gets the same service, in proportion to its weight."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

from maitred.config import SchedulerConfig
from maitred.policy.policy import Policy, Rank, by_arrival
from maitred.policy.queued import Queued

MIN_WEIGHT = 1e-3
MIN_COUNTERS_TO_PRUNE = 256


def vtc(config: SchedulerConfig, *, output_token_weight: float) -> Policy:
    """Virtual token counter: the tenant that has had least is next; within a tenant, first come first served.

    Source: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, arXiv:2401.00588, algorithm 2, with
    weights. Service is w_p = 1 for an input token that is computed (not one from the prefix cache, nor one computed
    again after a preemption) and w_q = output_token_weight for an output token, over the tenant's weight.
    Bound (the paper's theorem on backlogged clients): between two tenants that have requests waiting all along, service
    differs by at most 2 * max(w_p * L_input, w_q * M), over the smaller weight. M is the most tokens of a running
    batch: here max_num_seqs requests of the longest prompt and output. So others get at most that much more than a
    tenant that waits, whatever they send.
    A small KV pool makes it less. When a tenant is served it has had least; until it is served again only its running
    requests add to that. A request that has yielded t tokens since holds t of the pool, so at most pool / t do, and all
    of them yield at most O, the sum of min(max_num_seqs, pool / t) over t = 1 .. L_output. So a counter is ahead by at
    most L_input + w_q * O; of what it counts, one prompt at most is still to be computed; and the gap is twice the sum.
    Never preempts for a slot; when blocks run out, the last request of the tenant that has had most.
    """
    weight = output_token_weight
    counters = VirtualTokenCounters(weight)

    def max_service_gap(longest_prompt: int, longest_output: int, max_num_seqs: int, num_kv_tokens: int) -> float:
        batch = max_num_seqs * (longest_prompt + longest_output)
        to_come = sum(min(max_num_seqs, num_kv_tokens // t) for t in range(1, longest_output + 1))
        return 2.0 * min(max(longest_prompt, weight * batch), 2 * longest_prompt + weight * to_come)

    return Policy(
        source="Sheng et al., OSDI 2024, arXiv:2401.00588",
        bound="of two waiting tenants, service differs by at most 2 * max(L_input, output_token_weight * M) / weight, "
        "where M is max_num_seqs * (L_input + L_output) and L is the longest there is; or, where that is less, by "
        "2 * (2 * L_input + output_token_weight * O) / weight, where O is the sum of min(max_num_seqs, KV tokens / t) "
        "for t = 1 .. L_output",
        order=by_arrival,
        overtaken_until=lambda request: request.arrived_at,
        terms=lambda request: {"counter_tokens": counters.rank(request.tenant)[0], "arrived_at_s": request.arrived_at},
        groups=counters,
        max_service_gap=max_service_gap,
        heeds_priority=False,
        reads_predictions=False,
    )


class VirtualTokenCounters:
    """Algorithm 2 of the paper as a GroupRule: a counter for each tenant, lifted when a tenant comes back.

    Of equal counters the tenant that joined first is next, so that a crowd of new names overtakes no tenant.
    """

    def __init__(self, output_weight: float) -> None:
        self._output_weight = output_weight
        self._counters: dict[str, float] = {}
        self._joined: dict[str, int] = {}  # when (as a number in a row) it began to wait
        self._waiting: dict[str, set[str]] = {}  # tenants that have requests waiting -> their ids
        self._lowest: list[tuple[float, str]] = []  # heap over `_listed`; counters only rise, so entries are too low
        self._listed: set[str] = set()
        self._floor = 0.0  # the least counter of any tenant that can wait; only rises
        self._last_to_leave: str | None = None  # the queue
        self._num_joins = 0
        self._prune_over = MIN_COUNTERS_TO_PRUNE  # counters; doubles when few can be forgotten

    def group_of(self, request: Queued) -> str:
        return request.tenant

    def rank(self, group: str) -> Rank:
        return (self._counters.get(group, self._floor), self._joined.get(group, 0))

    def on_queued(self, request: Queued) -> None:
        tenant = request.tenant
        if tenant not in self._waiting:
            self._join(tenant)
        self._waiting[tenant].add(request.request_id)

    def on_started(self, request: Queued) -> None:
        self._leave(request)
        if request.first_scheduled_at is None:
            self._charge(request, request.num_inputs - request.num_computed)

    def on_scheduled(self, request: Queued, num_tokens: int) -> None:
        if request.num_computed == request.num_inputs + request.num_outputs:  # this row samples
            self._charge(request, self._output_weight)

    def on_finished(self, request: Queued) -> None:
        self._leave(request)

    def _join(self, tenant: str) -> None:
        """Lift a returning tenant to the least counter of the waiting ones; service is not saved up while away."""
        self._raise_floor()
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)
        self._num_joins += 1
        self._joined[tenant] = self._num_joins
        self._waiting[tenant] = set()
        if tenant not in self._listed:
            self._listed.add(tenant)
            heappush(self._lowest, (self._counters[tenant], tenant))
        if len(self._counters) > self._prune_over:
            self._prune()

    def _leave(self, request: Queued) -> None:
        ids = self._waiting.get(request.tenant)
        if ids is not None:
            ids.discard(request.request_id)
            if not ids:
                del self._waiting[request.tenant]
                self._last_to_leave = request.tenant

    def _charge(self, request: Queued, tokens: float) -> None:
        tenant = request.tenant
        self._counters[tenant] = self._counters.get(tenant, self._floor) + tokens / max(request.weight, MIN_WEIGHT)

    def _raise_floor(self) -> None:
        """Raise the floor to the least counter of the waiting tenants, or to that of the last that waited."""
        heap = self._lowest
        while heap:
            counter, tenant = heap[0]
            current = self._counters.get(tenant, self._floor)
            if tenant not in self._waiting:
                heappop(heap)
                self._listed.discard(tenant)
            elif current != counter:
                heapreplace(heap, (current, tenant))
            else:
                self._floor = max(self._floor, counter)
                return
        if self._last_to_leave is not None:
            self._floor = max(self._floor, self._counters.get(self._last_to_leave, 0.0))

    def _prune(self) -> None:
        """Forgets tenants that are not waiting and would be lifted anyway if they came back."""
        gone = [t for t, counter in self._counters.items() if counter <= self._floor and t not in self._waiting]
        for tenant in gone:
            del self._counters[tenant]
            self._joined.pop(tenant, None)  # it has none if it was forgotten before, and charged since
        self._prune_over = 2 * len(self._counters) + MIN_COUNTERS_TO_PRUNE
