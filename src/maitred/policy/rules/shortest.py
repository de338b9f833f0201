"""Shortest job first, with ageing in the key: expected cost counts as later arrival, against starvation.

The cost of a request is its inputs that are not cached (asked again as the cache gains and loses), output_token_weight
for each output expected, and kv_block_weight for each KV block that it will hold. A cost of C counts as
C / ageing_tokens_per_s seconds. It is bounded by prompt and max_tokens, so a wrong prediction and an evicted block cost
speed and never break a bound.
"""

from __future__ import annotations

from typing import Annotated, Any

from maitred.config import SchedulerConfig
from maitred.policy.parameters import Range
from maitred.policy.policy import Policy, arrival_term
from maitred.policy.queued import KVNeed, Queued
from maitred.policy.rules.cost import Costs, remaining_outputs

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

    def order(request: Queued) -> tuple[Any, ...]:
        return (request.arrived_at + costs.expected(request) / rate, request.arrived_at, request.request_id)

    return Policy(
        source="Smith, Naval Research Logistics, 1956; Fu et al. 2024, arXiv:2408.15792",
        bound=COST_BOUND,
        order=order,
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

    def order(request: Queued) -> tuple[Any, ...]:
        return (request.arrived_at + costs.remaining(request) / rate, request.arrived_at, request.request_id)

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

    def order(request: Queued) -> tuple[Any, ...]:
        return (aged_at(request), request.arrived_at, request.request_id)

    def outranks(waiting: Queued, running: Queued) -> bool:
        return waiting.priority < running.priority and aged_at(waiting) < aged_at(running)

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
        order=order,
        overtaken_until=overtaken_until,
        terms=terms,
        outranks=outranks,
        kv_needs=kv_needs,
    )
