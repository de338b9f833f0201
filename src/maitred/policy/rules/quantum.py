"""Time slices, counted in tokens: round robin and multi-level feedback.

A prompt is never cut: the first quantum ends after it. A preempted request's blocks mostly stay in the prefix cache;
without that cache it computes them again, which uses up none of its next quantum, so each quantum gets it on.
"""

from __future__ import annotations

from typing import Any

from maitred.config import SchedulerConfig
from maitred.policy.policy import Policy, arrival_term
from maitred.policy.queued import Queued, UsedQuanta


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

    def order(request: Queued) -> tuple[Any, ...]:
        return (joined_at(request), request.arrived_at, request.request_id)

    return Policy(
        source="Kleinrock, Naval Research Logistics, 1964",
        bound="overtaken by no later arrival; with n before it, waiting or running, and s slots, its first "
        "token comes after at most (n / s + 1) quanta and n + 1 prompts, which share one budget",
        order=order,
        overtaken_until=joined_at,
        terms=lambda request: {
            **arrival_term(request),
            "since_quantum_s": joined_at(request) - request.arrived_at,
        },
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

    def order(request: Queued) -> tuple[Any, ...]:
        return (aged_at(request), request.arrived_at, request.request_id)

    def outranks(waiting: Queued, running: Queued) -> bool:
        return level(waiting) < level(running) and aged_at(waiting) < aged_at(running)

    def quantum_end(request: Queued) -> int:
        return max(request.num_inputs, request.num_computed + (quantum << level(request)))

    return Policy(
        source="FastServe, Wu et al. 2023, arXiv:2305.05920",
        bound="at level l: overtaken only by arrivals within l * ageing_s; l < mlfq_levels",
        order=order,
        overtaken_until=aged_at,
        terms=lambda request: {
            **arrival_term(request),
            "since_quantum_s": joined_at(request) - request.arrived_at,
            "level_s": level(request) * ageing_s,
        },
        outranks=outranks,
        quantum_end=quantum_end,
        quanta=quanta,
        heeds_priority=False,
        reads_predictions=False,
    )
