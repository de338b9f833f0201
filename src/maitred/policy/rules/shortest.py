"""Short ones first, with ageing in the key: predicted cost counts as later arrival, so nobody starves.

A cost of C tokens counts as C / ageing_tokens_per_s seconds. It is bounded by prompt and max_tokens, so a wrong
prediction costs speed and never breaks a bound.
"""

from __future__ import annotations

from typing import Any

from maitred.config import SchedulerConfig
from maitred.policy.policy import Policy, arrival_term
from maitred.policy.rules.cost import (
    largest_cost,
    predicted_cost,
    remaining_cost,
    remaining_output,
)
from maitred.request import RequestState


def sjf(config: SchedulerConfig) -> Policy:
    """Shortest job first, by predicted cost, with ageing.

    Source: Smith, Naval Research Logistics 1956 (optimal mean wait without preemption); with predicted lengths: Fu et
    al., Efficient LLM Scheduling by Learning to Rank, arXiv:2408.15792; ageing: Silberschatz, 5.3.4.
    Bound: overtaken only by requests that arrive less than (prompt + output_token_weight * max_tokens) /
    ageing_tokens_per_s seconds after it. Preempts nobody for a slot; when blocks run out, the last in order.
    """
    weight, rate = config.output_token_weight, config.ageing_rate

    def order(request: RequestState) -> tuple[Any, ...]:
        return (
            request.arrived_at + predicted_cost(request, weight) / rate,
            request.arrived_at,
            request.request_id,
        )

    return Policy(
        source="Smith, Naval Research Logistics, 1956; Fu et al. 2024, arXiv:2408.15792",
        bound="overtaken only by arrivals within (prompt + output_token_weight * max_tokens) / ageing_tokens_per_s",
        order=order,
        overtaken_until=lambda request: request.arrived_at + largest_cost(request, weight) / rate,
        terms=lambda request: {**arrival_term(request), "cost_s": predicted_cost(request, weight) / rate},
    )


def srpt(config: SchedulerConfig) -> Policy:
    """Shortest remaining processing time, by predicted cost, with ageing.

    Source: Schrage, Operations Research 1968 (optimal mean response); for LLM serving with predictions and limited
    preemption: Shahout et al., Don't Stop Me Now (TRAIL), arXiv:2410.01035.
    Bound: as sjf. Preemption: a waiting request takes the slot of a running one when it is before it in this order and
    its whole cost is less than what the other still needs, computing again what it loses included; so a request
    near its end, or one that would cost more to resume than is saved, runs on. A preempted request gets the key of what
    remains, never a later one than it had. When blocks run out, the one with the most to do (aged) gives its own.
    """
    weight, rate = config.output_token_weight, config.ageing_rate

    def order(request: RequestState) -> tuple[Any, ...]:
        return (
            request.arrived_at + remaining_cost(request, weight) / rate,
            request.arrived_at,
            request.request_id,
        )

    def outranks(waiting: RequestState, running: RequestState) -> bool:
        # Asked of every running request while slots are full, so the commonest answer comes first.
        remaining = weight * remaining_output(running)
        if running.num_computed_tokens + waiting.num_prompt_tokens >= remaining:
            return False
        cost = remaining_cost(waiting, weight)
        return (
            cost + running.num_computed_tokens < remaining
            and waiting.arrived_at + cost / rate < running.arrived_at + remaining / rate
        )

    return Policy(
        source="Schrage, Operations Research, 1968; Shahout et al. 2024, arXiv:2410.01035",
        bound="overtaken only by arrivals within (prompt + output_token_weight * max_tokens) / ageing_tokens_per_s",
        order=order,
        overtaken_until=lambda request: request.arrived_at + largest_cost(request, weight) / rate,
        terms=lambda request: {**arrival_term(request), "remaining_cost_s": remaining_cost(request, weight) / rate},
        outranks=outranks,
        victim=order,
        resumed=order,
    )


def interactive(config: SchedulerConfig) -> Policy:
    """Tiers, short ones first within a tier, and ageing that outweighs both: the policy for people and batches mixed.

    Source: multi-class scheduling with ageing (Silberschatz, 5.3.4) over sjf (Smith 1956), as one static key.
    A level of priority counts as `ageing_s` seconds, predicted cost as under sjf. Bound: a request of priority p is
    overtaken only by requests that arrive less than p * ageing_s + (prompt + output_token_weight * max_tokens) /
    ageing_tokens_per_s seconds after it. Preemption: only by a more urgent tier, and only when also before it in order.
    """
    weight, rate, ageing_s = config.output_token_weight, config.ageing_rate, config.ageing_s

    def aged_at(request: RequestState) -> float:
        return request.arrived_at + request.priority * ageing_s + predicted_cost(request, weight) / rate

    def order(request: RequestState) -> tuple[Any, ...]:
        return (aged_at(request), request.arrived_at, request.request_id)

    def outranks(waiting: RequestState, running: RequestState) -> bool:
        return waiting.priority < running.priority and aged_at(waiting) < aged_at(running)

    def overtaken_until(request: RequestState) -> float:
        return request.arrived_at + request.priority * ageing_s + largest_cost(request, weight) / rate

    def terms(request: RequestState) -> dict[str, float]:
        return {
            **arrival_term(request),
            "priority_s": request.priority * ageing_s,
            "cost_s": predicted_cost(request, weight) / rate,
        }

    return Policy(
        source="Silberschatz, Galvin, Gagne, Operating System Concepts, 5.3.4; Smith 1956",
        bound="of priority p: overtaken only by arrivals within p * ageing_s + the bound of sjf",
        order=order,
        overtaken_until=overtaken_until,
        terms=terms,
        outranks=outranks,
    )
