"""Longest prefix match first: by what is in the prefix cache already."""

from __future__ import annotations

from typing import Any

from maitred.config import SchedulerConfig
from maitred.policy.policy import Policy, arrival_term
from maitred.policy.queued import NO_KV_NEED, KVNeed, Queued


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

    def order(request: Queued) -> tuple[Any, ...]:
        return (request.arrived_at - prefix_s(request), request.arrived_at, request.request_id)

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
