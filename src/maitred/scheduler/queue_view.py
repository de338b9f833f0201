"""Queue view for people: which request waits for how long and why. Computed between two steps; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from maitred.config import SchedulerConfig
from maitred.core.request import RequestState, RequestStatus
from maitred.core.tensor_request import Batch, LaneKey, TensorRequest
from maitred.scheduler.notes import Blocked, Lack, LaneWait
from maitred.scheduler.scheduler import Scheduler

MAX_PAGE = 1000
LEAST_ROWS_PER_S = 0.05  # of an empty lane, to be told


class WaitingRequest(msgspec.Struct, frozen=True):
    """One waiting sample."""

    position: int  # 0 is next
    request_id: str
    priority: int
    tenant: str
    age_s: float  # since it arrived
    num_prompt_tokens: int
    num_output_tokens: int  # over 0 for one that was preempted
    predicted_output_tokens: float | None
    predicted_cost_tokens: float  # to be computed yet: known tokens, and output to come as predicted
    num_preemptions: int
    reason: str  # why it waits, in words
    terms: dict[str, float]  # of its place in the policy's order
    background: bool = False  # behind all others, whatever the policy


class LaneView(msgspec.Struct, frozen=True):
    """Waiting and running requests of a tensor model in one shape, or one length bucket."""

    model: str
    version: int
    bucket: str
    num_waiting: int
    num_waiting_rows: int
    num_running_rows: int
    age_s: float  # of the one that has waited longest; 0 where none waits
    reason: str  # why the next one waits, in words
    rows_per_s: float = 0.0  # of the last seconds


class QueueView(msgspec.Struct, frozen=True):
    """A page of the queue, the next first; those that wait for KV from elsewhere come last."""

    policy: str
    num_running: int
    max_num_seqs: int
    num_waiting: int  # in all, not only on this page
    offset: int
    waiting: tuple[WaitingRequest, ...]
    lanes: tuple[LaneView, ...] = ()  # of tensor models, those with requests now or lately


def queue_of_all(views: Sequence[QueueView], held: Sequence[WaitingRequest], offset: int, limit: int) -> QueueView:
    """Requests that wait in a worker, and then those that wait for one."""
    waiting = [request for view in views for request in view.waiting]
    waiting += held
    waiting = [msgspec.structs.replace(request, position=place) for place, request in enumerate(waiting)]
    return QueueView(
        policy=views[0].policy,
        num_running=sum(view.num_running for view in views),
        max_num_seqs=sum(view.max_num_seqs for view in views),
        num_waiting=sum(view.num_waiting for view in views) + len(held),
        offset=offset,
        waiting=tuple(waiting[offset : offset + limit]),
    )


def queue_view(scheduler: Scheduler, now: float, *, offset: int = 0, limit: int = 100) -> QueueView:
    """Costs a sort of the whole queue, so it is for people and not for every step."""
    waiting = (*scheduler.waiting, *scheduler.waiting_for_kv)
    page = waiting[offset : offset + min(limit, MAX_PAGE)]
    return QueueView(
        policy=scheduler.config.policy,
        num_running=scheduler.num_running,
        max_num_seqs=scheduler.config.max_num_seqs,
        num_waiting=len(waiting),
        offset=offset,
        waiting=tuple(
            waiting_request(
                request,
                now,
                reason=reason_of(scheduler, request, place),
                terms=scheduler.terms(request.request_id),
                position=place,
            )
            for place, request in enumerate(page, offset)
        ),
        lanes=lane_views(scheduler, now),
    )


def lane_views(scheduler: Scheduler, now: float, most: int = MAX_PAGE) -> tuple[LaneView, ...]:
    """Return the lanes by model, version and bucket; at most so many."""
    rates = {
        LaneKey(*model.key, bucket): rate
        for model in scheduler.lanes.models
        for bucket, rate in model.rows_per_s(now).items()
        if rate >= LEAST_ROWS_PER_S
    }
    lanes: dict[LaneKey, list[TensorRequest]] = {key: [] for key in rates}
    for request in scheduler.lanes.requests:
        lanes.setdefault(request.spec.lane, []).append(request)
    return tuple(_lane(scheduler, lane, lanes[lane], rates.get(lane, 0.0), now) for lane in sorted(lanes)[:most])


def _lane(
    scheduler: Scheduler, lane: LaneKey, requests: list[TensorRequest], rows_per_s: float, now: float
) -> LaneView:
    waiting = [one for one in requests if one.status is RequestStatus.WAITING]
    batches = [batch for batch in scheduler.lanes.batches if batch.lane[:2] == lane[:2]]
    return LaneView(
        model=lane.model,
        version=lane.version,
        bucket=lane.bucket,
        num_waiting=len(waiting),
        num_waiting_rows=sum(one.num_rows for one in waiting),
        num_running_rows=sum(batch.num_rows for batch in batches if batch.lane == lane),
        age_s=now - min(one.queued_at for one in waiting) if waiting else 0.0,
        reason=_reason_of_lane(scheduler, batches, lane, now) if waiting else "",
        rows_per_s=round(rows_per_s, 3),
    )


def _reason_of_lane(scheduler: Scheduler, batches: list[Batch], lane: LaneKey, now: float) -> str:
    match scheduler.lanes.why_not(lane, now)[0]:
        case LaneWait.INSTANCES:
            running = ", ".join(f"{batch.num_rows} rows on {batch.instance}" for batch in batches)
            return f"all instances run: {running}"
        case LaneWait.DELAY:
            return "for others to share its batch"
        case LaneWait.RESOURCES:
            return "resources that its instances share are taken"
        case LaneWait.SHARE:
            return "for its share of the machine beside the language model"
        case LaneWait.TURN:
            return "it goes next"


def waiting_request(
    request: RequestState, now: float, *, reason: str, terms: Mapping[str, float], position: int = 0
) -> WaitingRequest:
    """One request of a queue, as it is shown."""
    predicted = request.predicted_output_tokens
    to_come = max(1.0, (predicted if predicted is not None else request.max_tokens) - request.num_output_tokens)
    return WaitingRequest(
        position=position,
        request_id=request.request_id,
        priority=request.priority,
        tenant=request.tenant,
        age_s=now - request.arrived_at,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        predicted_output_tokens=predicted,
        predicted_cost_tokens=request.num_tokens + to_come,
        num_preemptions=request.num_preemptions,
        reason=reason,
        terms=dict(terms),
        background=request.background,
    )


def reason_of(scheduler: Scheduler, request: RequestState, position: int) -> str:
    """Why it waits, as of the last step."""
    if request.status is RequestStatus.WAITING_FOR_KV:
        return "KV of its prompt is on its way from elsewhere"
    if scheduler.awaits_leader(request):
        return "another sample of the same prompt computes the prompt first"
    if position > 0:
        class_of = "as background work, and " if request.background else ""
        others = "other" if position == 1 else "others"
        return f"behind {position} {others} {class_of}by policy {scheduler.config.policy}"
    if scheduler.blocked is None:
        return "first in line: it arrived after the last step"
    return f"first in line: {lack_in_words(scheduler.blocked, scheduler.config)}"


def lack_in_words(blocked: Blocked, config: SchedulerConfig) -> str:
    match blocked.lack:
        case Lack.SLOTS:
            return f"all {config.max_num_seqs} slots are taken"
        case Lack.BLOCKS:
            return f"it lacks {blocked.num_blocks_short} free KV blocks"
        case Lack.BUDGET:
            return f"the step's {config.token_budget} tokens went to others"
        case Lack.SLACK:
            return f"others are in the step, which it would lengthen by more than {config.batch_slack:.0%}"
        case Lack.LEADER:
            return "another sample of the same prompt computes the prompt first"
        case Lack.RUNNING_LACK_BLOCKS:
            return "running requests lack KV blocks, so nobody is admitted"
