"""The engine at one moment, for people to look at: slots, queue, KV blocks, counters; small whatever it serves.

`live_view` runs in the engine's thread between two steps and decides nothing. What it reads is bounded: so many
requests by name, so many cells of the block map, whatever the number of requests and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from itertools import groupby
from typing import TypeVar

import msgspec

from maitred.core.clock import Clock
from maitred.core.request import FinishReason, RequestState, RequestStatus
from maitred.scheduler.engine_core import EngineCore
from maitred.scheduler.queue_view import LaneView, lane_views, reason_of
from maitred.scheduler.scheduler import Scheduler

S = TypeVar("S", bound=msgspec.Struct)
MAX_RUNNING = 64  # requests of the batch that are named
MAX_WAITING = 24  # of the queue
MAX_TENANTS = 16
MAX_LANES = 64
MAX_CELLS = 1024  # of the block map
MAX_READ = 4096  # entries of block tables that are read for it, about
MAX_ID_CHARS = 64

# What a cell of the block map holds; from FIRST_OWNER on, the request at that place in `running`.
FREE, CACHED, SHARED, OTHER, FIRST_OWNER = range(5)


class RunningRequest(msgspec.Struct, frozen=True):
    """One sample in the batch. Times are seconds of the engine's clock."""

    id: str
    tenant: str
    priority: int
    phase: str  # prefill or decode
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int  # of its prompt, from the prefix cache
    num_blocks: int
    num_preemptions: int
    arrived_at: float
    started_at: float | None  # its first step
    first_token_at: float | None
    num_draft_tokens: int = 0  # made up for it
    num_accepted_tokens: int = 0  # of them


class QueuedRequest(msgspec.Struct, frozen=True):
    """One sample that waits."""

    id: str
    tenant: str
    priority: int
    state: str  # waiting, preempted, waiting for KV, or sibling: waits for the prompt of another sample
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    arrived_at: float
    reason: str  # in words


class BlockMap(msgspec.Struct, frozen=True):
    """The KV cache in at most MAX_CELLS cells of `blocks_per_cell` neighbouring blocks each.

    `runs` is code, length, code, length ...: 0 free, 1 free but findable by prefix, 2 shared by several requests, 3
    held by a request that is not named, 4 + i held by `running[i]`. A cell of many blocks shows one of those in use.
    """

    num_blocks: int
    block_size: int  # tokens
    num_used: int
    num_cached: int  # findable by prefix, in use or free
    blocks_per_cell: int
    runs: tuple[int, ...]


class TenantShare(msgspec.Struct, frozen=True):
    """Share of a tenant in the batch."""

    name: str
    weight: float
    num_running: int
    num_blocks: int


class EngineCounters(msgspec.Struct, frozen=True):
    """Since the start; only grow."""

    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_scheduled_tokens: int
    num_preemptions: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_finished: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of them


class LiveView(msgspec.Struct, frozen=True):
    """A moment of one engine."""

    now: float  # s, the engine's clock
    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    num_running: int
    num_waiting: int
    running: tuple[RunningRequest, ...]  # the longest-standing first
    waiting: tuple[QueuedRequest, ...]  # the next first; those that wait for KV from elsewhere come last
    blocks: BlockMap
    tenants: tuple[TenantShare, ...]  # of those in the batch, the largest first
    counters: EngineCounters
    lanes: tuple[LaneView, ...] = ()  # of tensor models
    execute_s: float = 0.0  # total time in the executor
    host_s: float = 0.0  # total time of steps outside it
    cost_s: float = 0.0  # time of the engine's thread that this took


def look_at(core: EngineCore, clock: Clock) -> LiveView:
    """The view with its own cost, from which the caller decides when to look again."""
    began = clock.now()
    view = live_view(core.scheduler, began)
    return msgspec.structs.replace(
        view, execute_s=core.execute_s, host_s=core.host_s, cost_s=max(0.0, clock.now() - began)
    )


def live_view(scheduler: Scheduler, now: float) -> LiveView:
    """The view as things stand between two steps."""
    stats, running = scheduler.stats, scheduler.running
    drafts = stats.drafts + stats.predicted_drafts
    shown = nsmallest(MAX_RUNNING, running, key=_seated_at)
    kv = scheduler.kv_cache
    blocks_per_cell = -(-kv.num_blocks // MAX_CELLS)
    waiting = [*scheduler.next_in_line(MAX_WAITING), *scheduler.waiting_for_kv][:MAX_WAITING]
    return LiveView(
        now=round(now, 4),
        policy=scheduler.config.policy,
        max_num_seqs=scheduler.config.max_num_seqs,
        max_num_batched_tokens=scheduler.config.token_budget,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        running=tuple([_running(request) for request in shown]),
        waiting=tuple([_waiting(scheduler, request, place) for place, request in enumerate(waiting)]),
        blocks=BlockMap(
            num_blocks=stats.num_blocks,
            block_size=kv.block_size,
            num_used=stats.num_blocks_used,
            num_cached=stats.num_blocks_cached,
            blocks_per_cell=blocks_per_cell,
            runs=run_lengths(_cells(scheduler, shown, blocks_per_cell)),
        ),
        tenants=_shares(running),
        lanes=lane_views(scheduler, now, MAX_LANES),
        counters=EngineCounters(
            num_steps=stats.num_steps,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_generated_tokens=stats.num_generated_tokens,
            num_scheduled_tokens=stats.num_scheduled_tokens,
            num_preemptions=stats.num_preemptions,
            num_prefix_queried_tokens=stats.num_prefix_queried_tokens,
            num_prefix_hit_tokens=stats.num_prefix_hit_tokens,
            num_finished=sum(stats.num_finished.get(reason, 0) for reason in FinishReason),
            num_draft_tokens=drafts.num_tokens,
            num_accepted_tokens=drafts.num_accepted,
        ),
    )


def run_lengths(codes: Sequence[int]) -> tuple[int, ...]:
    """code, length, code, length ..."""
    flat: list[int] = []
    for code, run in groupby(codes):
        flat += (code, sum(1 for _ in run))
    return tuple(flat)


def _seated_at(request: RequestState) -> tuple[float, str]:
    return (request.first_scheduled_at or 0.0, request.request_id)


def _running(request: RequestState) -> RunningRequest:
    behind = request.num_tokens - request.num_computed_tokens
    return RunningRequest(
        id=short_id(request.request_id),
        tenant=request.tenant,
        priority=request.priority,
        # More than one token behind: its prompt, or after a preemption what it had already, is being computed.
        phase="prefill" if behind > 1 or request.first_token_at is None else "decode",
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.max_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=len(request.block_table),
        num_preemptions=request.num_preemptions,
        arrived_at=round(request.arrived_at, 4),
        started_at=_rounded(request.first_scheduled_at),
        first_token_at=_rounded(request.first_token_at),
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
    )


def _waiting(scheduler: Scheduler, request: RequestState, place: int) -> QueuedRequest:
    if request.status is RequestStatus.WAITING_FOR_KV:
        state = "waiting for KV"
    elif scheduler.awaits_leader(request):
        state = "sibling"
    elif request.num_preemptions:
        state = "preempted"
    else:
        state = "waiting"
    return queued_request(request, reason_of(scheduler, request, place), state)


def queued_request(request: RequestState, reason: str, state: str = "waiting") -> QueuedRequest:
    """One request of a queue, as the page draws it."""
    return QueuedRequest(
        id=short_id(request.request_id),
        tenant=request.tenant,
        priority=request.priority,
        state=state,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_preemptions=request.num_preemptions,
        arrived_at=round(request.arrived_at, 4),
        reason=reason,
    )


def short_id(request_id: str) -> str:
    """Clients may choose most of it; its end tells samples apart, so the middle goes."""
    if len(request_id) <= MAX_ID_CHARS:
        return request_id
    return f"{request_id[: MAX_ID_CHARS - 17]}…{request_id[-16:]}"


def _rounded(at: float | None) -> float | None:
    return round(at, 4) if at is not None else None


def _shares(running: Sequence[RequestState]) -> tuple[TenantShare, ...]:
    sums: dict[str, tuple[float, int, int]] = {}
    for request in running:
        _, seats, blocks = sums.get(request.tenant, (0.0, 0, 0))
        sums[request.tenant] = (request.weight, seats + 1, blocks + len(request.block_table))
    largest = nsmallest(MAX_TENANTS, sums.items(), key=lambda item: (-item[1][1], item[0]))
    return tuple([TenantShare(name, weight, seats, blocks) for name, (weight, seats, blocks) in largest])


def _cells(scheduler: Scheduler, shown: Sequence[RequestState], blocks_per_cell: int) -> list[int]:
    """A code for each cell. Of long tables only some entries are read, evenly spread."""
    kv = scheduler.kv_cache
    ref_counts, findable, stride = kv.ref_counts, kv.findable, max(1, blocks_per_cell)
    codes = [
        _code_of_unnamed(ref_counts[block], is_findable=block in findable) for block in range(0, kv.num_blocks, stride)
    ]
    every = max(1, -(-kv.num_used // MAX_READ))
    for place, request in enumerate(shown):
        _paint(codes, request.block_table, FIRST_OWNER + place, ref_counts, stride, every)
    return codes


def _code_of_unnamed(num_holders: int, *, is_findable: bool) -> int:
    if num_holders:
        return OTHER if num_holders == 1 else SHARED
    return CACHED if is_findable else FREE


def _paint(
    codes: list[int], table: Sequence[int], code: int, ref_counts: Sequence[int], blocks_per_cell: int, every: int
) -> None:
    """Walks a block table from its end, by steps of `every`, through what is the request's own; what it shares comes
    first in the table. So a request with a long shared prefix costs no more than another.
    """
    for index in range(len(table) - 1, -1, -every):
        block = table[index]
        if ref_counts[block] > 1:
            return
        codes[block // blocks_per_cell] = code


# ---- the views of several engines as one


def live_view_of_all(views: Sequence[LiveView], held: Sequence[QueuedRequest]) -> LiveView:
    """One batch and one map of blocks, as small as an engine's own; requests of `held` wait for an engine."""
    running = [request for view in views for request in view.running]
    waiting = [*(request for view in views for request in view.waiting), *held]
    total = _summed(views, ("max_num_seqs", "num_running", "num_waiting", "execute_s", "host_s"))
    return msgspec.structs.replace(
        total,
        now=max(view.now for view in views),
        num_waiting=total.num_waiting + len(held),
        running=tuple(running[:MAX_RUNNING]),
        waiting=tuple(waiting[:MAX_WAITING]),
        blocks=_blocks_of_all(views),
        tenants=_shares_of_all(views),
        counters=_summed([view.counters for view in views], EngineCounters.__struct_fields__),
        cost_s=max(view.cost_s for view in views),
    )


def _summed(records: Sequence[S], names: Sequence[str]) -> S:
    """The first of them, with sums of these fields."""
    return msgspec.structs.replace(records[0], **{name: sum(getattr(each, name) for each in records) for name in names})


def _blocks_of_all(views: Sequence[LiveView]) -> BlockMap:
    codes: list[int] = []
    num_named = 0
    for view in views:
        for code, length in zip(view.blocks.runs[::2], view.blocks.runs[1::2], strict=True):
            codes += [_renumbered(code, num_named)] * length
        num_named += len(view.running)
    stride = max(1, -(-len(codes) // MAX_CELLS))
    total = _summed([view.blocks for view in views], ("num_blocks", "num_used", "num_cached"))
    runs, blocks_per_cell = run_lengths(codes[::stride]), stride * total.blocks_per_cell
    return msgspec.structs.replace(total, blocks_per_cell=blocks_per_cell, runs=runs)


def _renumbered(code: int, num_before: int) -> int:
    """The code of a request that stands behind so many others now; past the named ones it becomes OTHER."""
    if code < FIRST_OWNER:
        return code
    return code + num_before if code - FIRST_OWNER + num_before < MAX_RUNNING else OTHER


def _shares_of_all(views: Sequence[LiveView]) -> tuple[TenantShare, ...]:
    shares: dict[str, list[TenantShare]] = {}
    for share in (share for view in views for share in view.tenants):
        shares.setdefault(share.name, []).append(share)
    summed = [_summed(each, ("num_running", "num_blocks")) for each in shares.values()]
    return tuple(nsmallest(MAX_TENANTS, summed, key=lambda share: (-share.num_running, share.name)))
