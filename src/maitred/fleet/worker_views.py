"""Views of several workers as one engine would give them: state, queue and live view. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import reduce
from heapq import nsmallest
from operator import add
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from maitred.core.replica import ReplicaState
from maitred.core.request import FinishReason
from maitred.engine.live_requests import LiveRequest
from maitred.engine.live_view import (
    FIRST_OWNER,
    MAX_CELLS,
    MAX_RUNNING,
    MAX_TENANTS,
    MAX_WAITING,
    OTHER,
    BlockMap,
    LiveView,
    QueuedRequest,
    TenantShare,
    run_lengths,
    short_id,
)
from maitred.scheduler.queue_view import QueueView, WaitingRequest

S = TypeVar("S", bound=msgspec.Struct)
_LARGEST = frozenset({"last_step_age_s", "heartbeat_age_s", "wake_s"})
_BY_ITSELF = frozenset({"alive", "error", "loading", "lacking", "asleep", "num_finished"})


def state_of_all(states: Sequence[ReplicaState], num_held: int, ended: Mapping[FinishReason, int]) -> ReplicaState:
    """Alive while one of them is. `num_held` wait for a worker, and of those that did so many have `ended`."""
    told: dict[str, Any] = {}
    for name in (field.name for field in fields(ReplicaState) if field.name not in _BY_ITSELF):
        values = [getattr(state, name) for state in states]
        told[name] = max(values) if name in _LARGEST else reduce(add, values)
    told["num_waiting"] += num_held
    living = [state for state in states if state.alive]
    errors = [f"worker {number}: {state.error}" for number, state in enumerate(states)]
    return ReplicaState(
        alive=bool(living),
        error=None if living else "; ".join(errors),
        loading=not living and any(state.loading for state in states),
        asleep=bool(living) and all(state.asleep for state in living),
        num_finished={r: ended.get(r, 0) + sum(s.num_finished.get(r, 0) for s in states) for r in FinishReason},
        **told,
    )


def queue_of_all(views: Sequence[QueueView], held: Sequence[WaitingRequest], offset: int, limit: int) -> QueueView:
    """Requests that wait in a worker, and then those that wait for one."""
    waiting = [request for view in views for request in view.waiting]
    waiting += held
    page = [replace(request, position=place) for place, request in enumerate(waiting)][offset : offset + limit]
    return QueueView(
        policy=views[0].policy,
        num_running=sum(view.num_running for view in views),
        max_num_seqs=sum(view.max_num_seqs for view in views),
        num_waiting=sum(view.num_waiting for view in views) + len(held),
        offset=offset,
        waiting=tuple(page),
    )


def live_view_of_all(views: Sequence[LiveView], held: Sequence[QueuedRequest]) -> LiveView:
    """One batch and one map of blocks, as small as an engine's own."""
    running = [request for view in views for request in view.running]
    waiting = [request for view in views for request in view.waiting]
    return replace(
        views[0],
        now=max(view.now for view in views),
        max_num_seqs=sum(view.max_num_seqs for view in views),
        num_running=sum(view.num_running for view in views),
        num_waiting=sum(view.num_waiting for view in views) + len(held),
        running=tuple(running[:MAX_RUNNING]),
        waiting=(*waiting, *held)[:MAX_WAITING],
        blocks=_blocks_of_all(views),
        tenants=_shares_of_all(views),
        counters=_summed([view.counters for view in views]),
        execute_s=sum(view.execute_s for view in views),
        host_s=sum(view.host_s for view in views),
        cost_s=max(view.cost_s for view in views),
    )


def waiting_request(
    live: LiveRequest, now: float, reason: str, predicted: float | None, terms: Mapping[str, float]
) -> WaitingRequest:
    """A request that waits for a worker; its position is written by `queue_of_all`."""
    spec, num_output = live.spec, len(live.output_token_ids)
    to_come = max(1.0, (predicted if predicted is not None else spec.max_tokens) - num_output)
    return WaitingRequest(
        position=0,
        request_id=spec.request_id,
        priority=spec.priority,
        tenant=spec.tenant,
        age_s=now - spec.arrived_at,
        num_prompt_tokens=spec.num_prompt_tokens,
        num_output_tokens=num_output,
        predicted_output_tokens=predicted,
        predicted_cost_tokens=spec.num_prompt_tokens + num_output + to_come,
        num_preemptions=live.charges.num_preemptions,
        reason=reason,
        terms=dict(terms),
    )


def queued_request(live: LiveRequest, reason: str) -> QueuedRequest:
    """The same for the live view."""
    spec = live.spec
    return QueuedRequest(
        id=short_id(spec.request_id),
        tenant=spec.tenant,
        priority=spec.priority,
        state="waiting",
        num_prompt_tokens=spec.num_prompt_tokens,
        num_output_tokens=len(live.output_token_ids),
        num_preemptions=live.charges.num_preemptions,
        arrived_at=round(spec.arrived_at, 4),
        reason=reason,
    )


def _blocks_of_all(views: Sequence[LiveView]) -> BlockMap:
    codes: list[int] = []
    num_named = 0
    for view in views:
        codes += (_renumbered(code, num_named) for code in _codes(view.blocks.runs))
        num_named += len(view.running)
    stride = max(1, -(-len(codes) // MAX_CELLS))
    blocks = views[0].blocks
    return replace(
        blocks,
        num_blocks=sum(view.blocks.num_blocks for view in views),
        num_used=sum(view.blocks.num_used for view in views),
        num_cached=sum(view.blocks.num_cached for view in views),
        blocks_per_cell=stride * blocks.blocks_per_cell,
        runs=run_lengths(codes[::stride]),
    )


def _codes(runs: Sequence[int]) -> Iterator[int]:
    for code, length in zip(runs[::2], runs[1::2], strict=True):
        yield from [code] * length


def _renumbered(code: int, num_before: int) -> int:
    """The code of a request that stands behind so many others now; past the named ones it becomes OTHER."""
    if code < FIRST_OWNER:
        return code
    return code + num_before if code - FIRST_OWNER + num_before < MAX_RUNNING else OTHER


def _shares_of_all(views: Sequence[LiveView]) -> tuple[TenantShare, ...]:
    shares: dict[str, TenantShare] = {}
    for share in (share for view in views for share in view.tenants):
        last = shares.get(share.name, TenantShare(share.name, share.weight, 0, 0))
        num_running, num_blocks = last.num_running + share.num_running, last.num_blocks + share.num_blocks
        shares[share.name] = replace(share, num_running=num_running, num_blocks=num_blocks)
    return tuple(nsmallest(MAX_TENANTS, shares.values(), key=lambda share: (-share.num_running, share.name)))


def _summed(counters: Sequence[S]) -> S:
    names = counters[0].__struct_fields__
    return replace(counters[0], **{name: sum(getattr(each, name) for each in counters) for name in names})
