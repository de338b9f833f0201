"""By what is in the prefix cache already."""

from __future__ import annotations

from typing import Any

from maitred.config import SchedulerConfig
from maitred.policy.policy import Policy, arrival_term
from maitred.request import RequestState


def lpm(config: SchedulerConfig) -> Policy:
    """Longest prefix match first, with a floor of age.

    Source: SGLang, Zheng et al. 2023, arXiv:2312.07104, section 3 (cache-aware scheduling), which has no bound; the
    ageing is ours. Each cached token counts as 1 / ageing_tokens_per_s seconds of earlier arrival, at most `ageing_s`.
    Bound: overtaken only by requests that arrive less than ageing_s seconds after it, whatever is cached. The scheduler
    scores again, a bounded number a step, when a block of a waiting prompt enters the cache, and at the head of the
    queue when one has left. Preempts nobody for a slot; when blocks run out, the last in order.
    """
    rate, ageing_s = config.ageing_rate, config.ageing_s

    def prefix_s(request: RequestState) -> float:
        return min(request.cached_prefix_tokens / rate, ageing_s)

    def order(request: RequestState) -> tuple[Any, ...]:
        return (request.arrived_at - prefix_s(request), request.arrived_at, request.request_id)

    return Policy(
        source="SGLang, Zheng et al. 2023, arXiv:2312.07104",
        bound="overtaken only by arrivals within ageing_s",
        order=order,
        overtaken_until=lambda request: request.arrived_at + ageing_s,
        terms=lambda request: {**arrival_term(request), "cached_prefix_s": -prefix_s(request)},
        resumed=order,
        scores_prefix=True,
    )
