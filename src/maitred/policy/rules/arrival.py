"""FCFS, and priority with ageing."""

from __future__ import annotations

from typing import Any

from maitred.config import SchedulerConfig
from maitred.policy.policy import Policy, arrival_term, by_arrival
from maitred.policy.queued import Queued


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


def priority(config: SchedulerConfig, *, ageing_s: float) -> Policy:
    """Most urgent first (0 before 1), with ageing against starvation.

    Source: priority with ageing (Silberschatz, Galvin, Gagne, Operating System Concepts, section 5.3.4).
    Each level of priority counts as `ageing_s` seconds of later arrival. Bound: a request of priority p is overtaken
    only by requests that arrive less than p * ageing_s seconds after it; from then on its wait is as under fcfs.
    Preemption keeps that bound: a request is put out only by one that is more urgent and also before it in this order.
    """

    def aged_at(request: Queued) -> float:
        return request.arrived_at + request.priority * ageing_s

    def order(request: Queued) -> tuple[Any, ...]:
        return (aged_at(request), request.arrived_at, request.request_id)

    def outranks(waiting: Queued, running: Queued) -> bool:
        return waiting.priority < running.priority and aged_at(waiting) < aged_at(running)

    return Policy(
        source="Silberschatz, Galvin, Gagne, Operating System Concepts, 5.3.4",
        bound="of priority p: overtaken only by arrivals within p * ageing_s",
        order=order,
        overtaken_until=aged_at,
        terms=lambda request: {**arrival_term(request), "priority_s": request.priority * ageing_s},
        outranks=outranks,
        reads_predictions=False,
    )
