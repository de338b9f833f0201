"""Preemption: which request gives up slot and blocks while a plan is made, and whether its KV goes to the host."""

from __future__ import annotations

from maitred.core.request import RequestState
from maitred.kv.manager import Allocation
from maitred.scheduler.notes import Preemption, PreemptionCause
from maitred.scheduler.plan_builder import PlanBuilder, Removed
from maitred.scheduler.reserving import give_up_one
from maitred.scheduler.state import SchedulerState
from maitred.scheduler.swap import worth_swapping


def grow(state: SchedulerState, request: RequestState, builder: PlanBuilder) -> Allocation | None:
    """Room for one more token, taken from what is set aside, then from the worst running requests if need be; None if
    it is itself the worst.
    """
    while (allocation := state.kv.allocate(request, 1)) is None:
        if give_up_one(state):
            continue
        victim = state.worst_running()
        builder.out_of_blocks = True
        preempt(state, victim, builder, PreemptionCause.BLOCKS, by=request)
        if victim is request:
            return None
    return allocation


def preempt_for(state: SchedulerState, head: RequestState, builder: PlanBuilder) -> bool:
    """Preempt requests that `head` outranks, set-aside blocks first, then the worst; none if in vain."""
    kv, victims = state.kv, _victims_for(state, head, builder)
    if not victims and state.num_running:
        return False
    while state.reservations and kv.num_blocks_short(head, state.reusable(head)) and give_up_one(state, behind=head):
        victims = _victims_for(state, head, builder)
    for victim in victims:
        preempt(state, victim, builder, PreemptionCause.OUTRANKED, by=head)
    return not kv.num_blocks_short(head, state.reusable(head))


def _victims_for(state: SchedulerState, head: RequestState, builder: PlanBuilder) -> list[RequestState]:
    """Return the requests that would make enough room for `head`; none if all would not, or when it has room."""
    kv = state.kv
    outranked = [r for r in state.order.outranked(head, state.running()) if r.request_id not in builder.settled]
    hit = state.reusable(head)
    short = kv.num_blocks_short(head, hit)
    if not short and state.num_running < state.config.max_num_seqs:
        return []
    if not outranked or short > sum(len(r.block_table) for r in outranked):
        return []
    victims = []
    for victim in outranked:
        victims.append(victim)
        short -= kv.num_freed_by(victim, hit)
        if short <= 0:
            break
    return victims if short <= 0 else []


def preempt(
    state: SchedulerState,
    request: RequestState,
    builder: PlanBuilder,
    cause: PreemptionCause,
    *,
    by: RequestState | None = None,
) -> None:
    """Back to the queue, to its old place; what it computed is lost, but for what prefix cache or host keep."""
    builder.preemptions.append(Preemption(request.request_id, cause, by.request_id if by is not None else None))
    _swap_out(state, request, builder, builder.remove(request), cause)
    state.leave_running(request)
    state.sample_groups.preempted(request)
    request.num_preemptions += 1
    request.stalled_at = builder.now
    state.counters.num_preemptions += 1
    state.enqueue(request)


def _swap_out(
    state: SchedulerState, request: RequestState, builder: PlanBuilder, removed: Removed, cause: PreemptionCause
) -> None:
    """Copy to the host what was computed before this plan, if that takes less time than computing it again will."""
    kv, costs = state.kv, state.swap_costs
    num_tokens = request.num_computed_tokens - removed.num_tokens
    lacking = cause is PreemptionCause.BLOCKS or (cause is PreemptionCause.OUTRANKED and builder.num_blocks_short)
    if not lacking and kv.finds_again(request):
        return  # while no blocks lack, the prefix cache keeps what was computed
    if costs is None or not kv.can_swap_out(num_tokens):
        return
    if worth_swapping(costs, kv.num_blocks_for(num_tokens), num_tokens):
        copies = kv.swap_out(request, num_tokens, removed.copied_from)
        builder.swap_outs += copies
        state.counters.num_swapped_out_blocks += len(copies)
