"""Scheduling policies, each with its bound, and their table by name. `policy` has what a policy is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from operator import attrgetter
from typing import Annotated, Any

from maitred.config import SchedulerConfig
from maitred.core.errors import ConfigError, did_you_mean
from maitred.policy.parameters import Range, make_policy
from maitred.policy.policy import (
    NO_KV_NEED,
    GroupRule,
    KVNeed,
    Policy,
    PolicyFactory,
    Queued,
    Rank,
    UsedQuanta,
    arrival_term,
    by_arrival,
)


def fcfs(config: SchedulerConfig) -> Policy:
    """First come, first served.

    Source: textbook (Kleinrock, Queueing Systems, 1975); what Orca (OSDI 2022) and vLLM (SOSP 2023) do. Bound: no
    request is overtaken, so the wait is the work that was there before. Never preempts for a slot; when blocks run out,
    the last to arrive gives its own.
    """
    return Policy(
        source="Kleinrock, Queueing Systems, 1975; Orca, OSDI 2022",
        bound="never overtaken",
        order=by_arrival,
        overtaken_until=lambda request: request.arrived_at,
        terms=arrival_term,
        heeds_priority=False,
        reads_predictions=False,
    )


def by(at: Callable[[Queued], float]) -> Callable[[Queued], tuple[Any, ...]]:
    """Order by a time, smallest first; of equal ones the first to arrive."""
    return lambda request: (at(request), request.arrived_at, request.request_id)


def in_lower_class(
    class_of: Callable[[Queued], int], at: Callable[[Queued], float]
) -> Callable[[Queued, Queued], bool]:
    """Preemption rule: by a request of a lower class, and only one that is also before in the order by `at`."""
    return lambda waiting, running: class_of(waiting) < class_of(running) and at(waiting) < at(running)


def priority(config: SchedulerConfig, *, ageing_s: float) -> Policy:
    """Most urgent first (0 before 1), with ageing against starvation.

    Source: priority with ageing (Silberschatz, Galvin, Gagne, Operating System Concepts, section 5.3.4).
    Each level of priority counts as `ageing_s` seconds of later arrival. Bound: a request of priority p is overtaken
    only by requests that arrive less than p * ageing_s seconds after it; from then on its wait is as under fcfs.
    Preemption keeps that bound: a request is put out only by one that is more urgent and also before it in this order.
    """

    def aged_at(request: Queued) -> float:
        return request.arrived_at + request.priority * ageing_s

    return Policy(
        source="Silberschatz, Galvin, Gagne, Operating System Concepts, 5.3.4",
        bound="of priority p: overtaken only by arrivals within p * ageing_s",
        order=by(aged_at),
        overtaken_until=aged_at,
        terms=lambda request: {**arrival_term(request), "priority_s": request.priority * ageing_s},
        outranks=in_lower_class(attrgetter("priority"), aged_at),
        reads_predictions=False,
    )


def expected_outputs(request: Queued) -> float:
    """Return the expected outputs, from 1 to max_outputs whatever the predictor said; max_outputs without one."""
    expected = request.expected_outputs
    if expected is None or not expected <= request.max_outputs:  # a NaN goes here too
        return request.max_outputs
    return expected if expected > 1.0 else 1.0


def remaining_outputs(request: Queued) -> float:
    """Return the outputs to come, at least 1 however wrong the prediction was."""
    left = expected_outputs(request) - request.num_outputs
    return left if left > 1.0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Inputs that are not cached, `output_weight` for an output, `block_weight` for a KV block held at the end."""

    output_weight: float
    block_weight: float
    needs: Mapping[str, KVNeed]  # by request id, as `Policy.kv_needs`

    def uncached(self, request: Queued) -> int:
        """Inputs to compute."""
        left = request.num_inputs - self.needs.get(request.request_id, NO_KV_NEED).num_cached
        return left if left > 0 else 0

    def computing(self, request: Queued) -> float:
        """Return the cost of computing, without blocks and past outputs: uncached inputs count again."""
        return self.uncached(request) + self.output_weight * remaining_outputs(request)

    def blocks(self, request: Queued) -> float:
        return self.block_weight * self.needs.get(request.request_id, NO_KV_NEED).num_blocks

    def expected(self, request: Queued) -> float:
        """Return the expected cost of the whole request."""
        return self.uncached(request) + self.output_weight * expected_outputs(request) + self.blocks(request)

    def remaining(self, request: Queued) -> float:
        """Return the cost of what is to come, its prompt again included; with as much cached at most `expected`."""
        return self.computing(request) + self.blocks(request)

    def largest(self, request: Queued) -> float:
        """The most that any prediction, and an empty cache, can make of it."""
        most_blocks = self.needs.get(request.request_id, NO_KV_NEED).max_blocks
        return request.num_inputs + self.output_weight * request.max_outputs + self.block_weight * most_blocks


MAX_SLACK_S = 3600.0  # an objective looser than this counts as this, so that the bound is finite


def _deadline_of(default_s: float, ageing_s: float) -> Callable[[Queued], float]:
    """(s) arrived_at + the request's own objective, or that of its priority; at most what it was given for start and
    end; never before it arrived.
    """

    def deadline(request: Queued) -> float:
        slack = request.ttft_slo_s
        if slack is None:
            slack = default_s + request.priority * ageing_s
        at = request.arrived_at + min(slack, MAX_SLACK_S)
        if request.start_by is not None:
            at = min(at, request.start_by)
        if request.finish_by is not None:
            at = min(at, request.finish_by)
        return max(at, request.arrived_at)

    return deadline


def _before_first_token(at: Callable[[Queued], float]) -> Callable[[Queued, Queued], bool]:
    """Preemption rule for a time that is smallest for the most pressing request."""
    # Once it has its first token a request has met its deadline or missed it: to put it out would gain nothing.
    return lambda waiting, running: not running.num_outputs and at(waiting) < at(running)


def edf(config: SchedulerConfig, *, default_ttft_slo_s: float, ageing_s: float) -> Policy:
    """Earliest deadline first, for the first token.

    Source: Liu and Layland, Journal of the ACM 1973; Jackson 1955.
    The deadline is arrived_at + the request's TTFT objective, or default_ttft_slo_s + priority * ageing_s without one,
    at most an hour, and no later than its start_by and finish_by. Bound: overtaken only by requests that arrive before
    its own deadline. Preemption: of requests that have no first token yet, by one with an earlier deadline.
    """
    deadline = _deadline_of(default_ttft_slo_s, ageing_s)
    return Policy(
        source="Liu and Layland, Journal of the ACM, 1973",
        bound="overtaken only by arrivals before its own deadline, which is at most an hour after it arrived",
        order=by(deadline),
        overtaken_until=deadline,
        terms=lambda request: {**arrival_term(request), "slack_s": deadline(request) - request.arrived_at},
        outranks=_before_first_token(deadline),
        reads_predictions=False,
    )


def least_slack(
    config: SchedulerConfig, *, default_ttft_slo_s: float, ageing_s: float, prefill_tokens_per_s: float
) -> Policy:
    """Least slack first: by the latest moment at which its prefill can begin and still meet the deadline of `edf`.

    Source: Mok, PhD thesis, MIT 1983 (least laxity). While a request waits, its slack shrinks as fast as every other's,
    so the latest start is a static key. Bound and preemption: as edf; a request whose prefill is longer than its
    objective counts from its arrival, never from before it.
    """
    deadline = _deadline_of(default_ttft_slo_s, ageing_s)

    def latest_start(request: Queued) -> float:
        return max(request.arrived_at, deadline(request) - request.num_inputs / prefill_tokens_per_s)

    return Policy(
        source="Mok, PhD thesis, MIT, 1983",
        bound="overtaken only by arrivals before its own latest start, which is at most an hour after it arrived",
        order=by(latest_start),
        overtaken_until=latest_start,
        terms=lambda request: {
            **arrival_term(request),
            "slack_s": deadline(request) - request.arrived_at,
            "prefill_s": latest_start(request) - deadline(request),
        },
        outranks=_before_first_token(latest_start),
        reads_predictions=False,
    )


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


class VirtualTokenCounters(GroupRule):
    """Algorithm 2 of the paper: a counter for each tenant, lifted when a tenant comes back.

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


def lpm(config: SchedulerConfig, *, ageing_tokens_per_s: float, ageing_s: float) -> Policy:
    """Longest prefix match first, with a floor of age.

    Source: SGLang, Zheng et al. 2023, arXiv:2312.07104, section 3 (cache-aware scheduling), which has no bound; the
    ageing is ours. Each cached token counts as 1 / ageing_tokens_per_s seconds of earlier arrival, at most `ageing_s`.
    Bound: overtaken only by requests that arrive less than ageing_s seconds after it, whatever is cached. The scheduler
    scores again, a bounded number a step, when a block of a waiting prompt enters the cache, and at the head of the
    queue when one has left. Never preempts for a slot; when blocks run out, the last in order.
    """
    kv_needs: dict[str, KVNeed] = {}

    def prefix_s(request: Queued) -> float:
        num_cached = kv_needs.get(request.request_id, NO_KV_NEED).num_cached
        return min(num_cached / ageing_tokens_per_s, ageing_s)

    order = by(lambda request: request.arrived_at - prefix_s(request))
    return Policy(
        source="SGLang, Zheng et al. 2023, arXiv:2312.07104",
        bound="overtaken only by arrivals within ageing_s",
        order=order,
        overtaken_until=lambda request: request.arrived_at + ageing_s,
        terms=lambda request: {**arrival_term(request), "cached_prefix_s": -prefix_s(request)},
        resumed=order,
        kv_needs=kv_needs,
        heeds_priority=False,
        reads_predictions=False,
    )


def rr(config: SchedulerConfig, *, quantum_tokens: int) -> Policy:
    """Round robin: after `quantum_tokens` output tokens a request goes to the end of the queue, if another waits.

    Source: Kleinrock, Analysis of a time-shared processor, 1964; Silberschatz, 5.3.3.
    Bound: no request that came to the queue later overtakes. With n before it, waiting or running, and s
    slots, its first token comes after at most (n / s + 1) quanta and n + 1 prompts: quanta run side by side, prompts
    share one budget. What a preempted request computes again, with or without the prefix cache, counts as its prompt.
    Preempts at the end of a quantum only.
    """
    quanta: dict[str, UsedQuanta] = {}

    def joined_at(request: Queued) -> float:
        """Return when the request went to the end of the queue."""
        used = quanta.get(request.request_id)
        return request.arrived_at if used is None else used.ended_at

    return Policy(
        source="Kleinrock, Naval Research Logistics, 1964",
        bound="overtaken by no later arrival; with n before it, waiting or running, and s slots, its first "
        "token comes after at most (n / s + 1) quanta and n + 1 prompts, which share one budget",
        order=by(joined_at),
        overtaken_until=joined_at,
        terms=lambda request: {**arrival_term(request), "since_quantum_s": joined_at(request) - request.arrived_at},
        quantum_end=lambda request: max(request.num_computed, request.num_inputs) + quantum_tokens,
        quanta=quanta,
        heeds_priority=False,
        reads_predictions=False,
    )


def mlfq(config: SchedulerConfig, *, quantum_tokens: int, mlfq_levels: int, ageing_s: float) -> Policy:
    """Multi-level feedback queue with skip-join: a request sinks a level with each quantum that it uses up.

    Source: FastServe, Wu et al. 2023, arXiv:2305.05920; feedback queues: Corbato et al. 1962.
    Level l has a quantum of quantum_tokens * 2**l. A request joins at the first level whose quantum covers its prompt
    (skip-join), first come first served within a level. Promotion against starvation: a level counts as `ageing_s`
    seconds of later arrival, so waiting that long lifts a request above newcomers one level up.
    Bound: overtaken only by requests that arrive less than level * ageing_s seconds after it joined its level, and the
    last level is mlfq_levels - 1. Preemption: at the end of a quantum, and by a request of a higher level (a smaller
    number) that is also before it in this order.
    """
    quantum, last = quantum_tokens, mlfq_levels - 1
    quanta: dict[str, UsedQuanta] = {}

    def level(request: Queued) -> int:
        # the first l with quantum * 2**l >= prompt
        entry = max(0, (-(-request.num_inputs // quantum) - 1).bit_length())
        used = quanta.get(request.request_id)
        return min(last, entry if used is None else entry + used.num_used)

    def joined_at(request: Queued) -> float:
        """Return when the request went to the end of its level."""
        used = quanta.get(request.request_id)
        return request.arrived_at if used is None else used.ended_at

    def aged_at(request: Queued) -> float:
        return joined_at(request) + level(request) * ageing_s

    def quantum_end(request: Queued) -> int:
        return max(request.num_inputs, request.num_computed + (quantum << level(request)))

    return Policy(
        source="FastServe, Wu et al. 2023, arXiv:2305.05920",
        bound="at level l: overtaken only by arrivals within l * ageing_s; l < mlfq_levels",
        order=by(aged_at),
        overtaken_until=aged_at,
        terms=lambda request: {
            **arrival_term(request),
            "since_quantum_s": joined_at(request) - request.arrived_at,
            "level_s": level(request) * ageing_s,
        },
        outranks=in_lower_class(level, aged_at),
        quantum_end=quantum_end,
        quanta=quanta,
        heeds_priority=False,
        reads_predictions=False,
    )


# From 0 to 0.5 the mean wait is the same within noise in simulations with a short pool, from 1 on the longest grows; so
# it is as much as still decides between equal work, and 8,000 cached tokens stay below 500 fresh ones.
KV_BLOCK_WEIGHT = 0.25
BlockWeight = Annotated[float, Range(0.0, 1e6)]
"""Uncached inputs that a KV block counts as."""

COST_BOUND = (
    "overtaken only by arrivals within (prompt + output_token_weight * max_tokens + kv_block_weight * blocks of both) "
    "/ ageing_tokens_per_s"
)


def sjf(
    config: SchedulerConfig,
    *,
    ageing_tokens_per_s: float,
    output_token_weight: float,
    kv_block_weight: BlockWeight = KV_BLOCK_WEIGHT,
) -> Policy:
    """Shortest job first, by expected cost, with ageing.

    Source: Smith, Naval Research Logistics 1956 (optimal mean wait without preemption); with predicted lengths: Fu et
    al., Efficient LLM Scheduling by Learning to Rank, arXiv:2408.15792; ageing: Silberschatz, 5.3.4. Bound: overtaken
    only by requests that arrive less than (prompt + output_token_weight * max_tokens + kv_block_weight * blocks of
    both) / ageing_tokens_per_s seconds after it. Never preempts for a slot; when blocks run out, the last in order.
    """
    rate, kv_needs = ageing_tokens_per_s, dict[str, KVNeed]()
    costs = Costs(output_weight=output_token_weight, block_weight=kv_block_weight, needs=kv_needs)

    return Policy(
        source="Smith, Naval Research Logistics, 1956; Fu et al. 2024, arXiv:2408.15792",
        bound=COST_BOUND,
        order=by(lambda request: request.arrived_at + costs.expected(request) / rate),
        overtaken_until=lambda request: request.arrived_at + costs.largest(request) / rate,
        terms=lambda request: {**arrival_term(request), "cost_s": costs.expected(request) / rate},
        kv_needs=kv_needs,
        heeds_priority=False,
    )


def srpt(
    config: SchedulerConfig,
    *,
    ageing_tokens_per_s: float,
    output_token_weight: float,
    kv_block_weight: BlockWeight = KV_BLOCK_WEIGHT,
) -> Policy:
    """Shortest remaining processing time, by expected cost, with ageing.

    Source: Schrage, Operations Research 1968 (optimal mean response); for LLM serving with predictions and limited
    preemption: Shahout et al., Don't Stop Me Now (TRAIL), arXiv:2410.01035.
    Bound: as sjf. Preemption: a waiting request takes the slot of a running one when it is before it in this order and
    what it has to compute is less than what the other still needs, computing again what it loses included; so a request
    near its end, or one that would cost more to resume than is saved, runs on. A preempted request gets the key of what
    remains, never a later one than it had. When blocks run out, the one with the most to do (aged) gives its own.
    """
    weight, rate, kv_needs = output_token_weight, ageing_tokens_per_s, dict[str, KVNeed]()
    costs = Costs(output_weight=weight, block_weight=kv_block_weight, needs=kv_needs)

    order = by(lambda request: request.arrived_at + costs.remaining(request) / rate)

    def outranks(waiting: Queued, running: Queued) -> bool:
        # Asked of every running request while slots are full, so the commonest answer comes first.
        remaining, num_computed = weight * remaining_outputs(running), running.num_computed
        if num_computed + weight >= remaining:
            return False
        computing = costs.computing(waiting)
        return (
            computing + num_computed < remaining
            and waiting.arrived_at + (computing + costs.blocks(waiting)) / rate
            < running.arrived_at + (remaining + costs.blocks(running)) / rate
        )

    return Policy(
        source="Schrage, Operations Research, 1968; Shahout et al. 2024, arXiv:2410.01035",
        bound=COST_BOUND,
        order=order,
        overtaken_until=lambda request: request.arrived_at + costs.largest(request) / rate,
        terms=lambda request: {**arrival_term(request), "remaining_cost_s": costs.remaining(request) / rate},
        outranks=outranks,
        victim=order,
        resumed=order,
        kv_needs=kv_needs,
        heeds_priority=False,
    )


def interactive(
    config: SchedulerConfig,
    *,
    ageing_s: float,
    ageing_tokens_per_s: float,
    output_token_weight: float,
    kv_block_weight: BlockWeight = KV_BLOCK_WEIGHT,
) -> Policy:
    """Tiers, short ones first within a tier, and ageing that outweighs both: the policy for people and batches mixed.

    Source: multi-class scheduling with ageing (Silberschatz, 5.3.4) over sjf (Smith 1956), as one static key.
    A level of priority counts as `ageing_s` seconds, expected cost as under sjf. Bound: a request of priority p is
    overtaken only by requests that arrive less than p * ageing_s seconds, and the bound of sjf, after it. Preemption:
    only by a more urgent tier, and only when also before it in order.
    """
    rate, kv_needs = ageing_tokens_per_s, dict[str, KVNeed]()
    costs = Costs(output_weight=output_token_weight, block_weight=kv_block_weight, needs=kv_needs)

    def aged_at(request: Queued) -> float:
        return request.arrived_at + request.priority * ageing_s + costs.expected(request) / rate

    def overtaken_until(request: Queued) -> float:
        return request.arrived_at + request.priority * ageing_s + costs.largest(request) / rate

    def terms(request: Queued) -> dict[str, float]:
        return {
            **arrival_term(request),
            "priority_s": request.priority * ageing_s,
            "cost_s": costs.expected(request) / rate,
        }

    return Policy(
        source="Silberschatz, Galvin, Gagne, Operating System Concepts, 5.3.4; Smith 1956",
        bound="of priority p: overtaken only by arrivals within p * ageing_s + the bound of sjf",
        order=by(aged_at),
        overtaken_until=overtaken_until,
        terms=terms,
        outranks=in_lower_class(attrgetter("priority"), aged_at),
        kv_needs=kv_needs,
    )


POLICIES: dict[str, PolicyFactory] = {
    "fcfs": fcfs,
    "priority": priority,
    "interactive": interactive,
    "sjf": sjf,
    "srpt": srpt,
    "rr": rr,
    "mlfq": mlfq,
    "edf": edf,
    "least_slack": least_slack,
    "vtc": vtc,
    "lpm": lpm,
}


def policy_for(config: SchedulerConfig, policies: Mapping[str, PolicyFactory] = POLICIES) -> Policy:
    """Make a policy, with its state. Raises ConfigError, listing the choices, for an unknown name or argument."""
    try:
        make = policies[config.policy]
    except KeyError:
        raise ConfigError(
            f"scheduler.policy is {config.policy!r}{did_you_mean(config.policy, policies)}; choose one of "
            f"{', '.join(sorted(policies))}"
        ) from None
    return make_policy(make, config)


def heeding_priority() -> list[str]:
    """Names of ours under which a request's priority may change its place."""
    return [name for name in POLICIES if policy_for(SchedulerConfig(policy=name)).heeds_priority]
