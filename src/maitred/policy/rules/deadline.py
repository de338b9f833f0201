"""EDF by deadline of the first token. Every request has a finite one, so every request's turn comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maitred.config import SchedulerConfig
from maitred.policy.policy import Policy, arrival_term
from maitred.policy.queued import Queued

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


def _by(
    at: Callable[[Queued], float],
) -> tuple[Callable[[Queued], tuple[Any, ...]], Callable[[Queued, Queued], bool]]:
    """Order and preemption rule for a time that is smallest for the most pressing request."""

    def order(request: Queued) -> tuple[Any, ...]:
        return (at(request), request.arrived_at, request.request_id)

    def outranks(waiting: Queued, running: Queued) -> bool:
        # Once it has its first token a request has met its deadline or missed it: to put it out would gain nothing.
        return not running.num_outputs and at(waiting) < at(running)

    return order, outranks


def edf(config: SchedulerConfig, *, default_ttft_slo_s: float, ageing_s: float) -> Policy:
    """Earliest deadline first, for the first token.

    Source: Liu and Layland, Journal of the ACM 1973; Jackson 1955.
    The deadline is arrived_at + the request's TTFT objective, or default_ttft_slo_s + priority * ageing_s without one,
    at most an hour, and no later than its start_by and finish_by. Bound: overtaken only by requests that arrive before
    its own deadline. Preemption: of requests that have no first token yet, by one with an earlier deadline.
    """
    deadline = _deadline_of(default_ttft_slo_s, ageing_s)
    order, outranks = _by(deadline)
    return Policy(
        source="Liu and Layland, Journal of the ACM, 1973",
        bound="overtaken only by arrivals before its own deadline, which is at most an hour after it arrived",
        order=order,
        overtaken_until=deadline,
        terms=lambda request: {**arrival_term(request), "slack_s": deadline(request) - request.arrived_at},
        outranks=outranks,
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

    order, outranks = _by(latest_start)
    return Policy(
        source="Mok, PhD thesis, MIT, 1983",
        bound="overtaken only by arrivals before its own latest start, which is at most an hour after it arrived",
        order=order,
        overtaken_until=latest_start,
        terms=lambda request: {
            **arrival_term(request),
            "slack_s": deadline(request) - request.arrived_at,
            "prefill_s": latest_start(request) - deadline(request),
        },
        outranks=outranks,
        reads_predictions=False,
    )
