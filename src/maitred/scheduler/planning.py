"""Planning of one step: those that run first, then those that wait, in order, within the token budget."""

from __future__ import annotations

from collections.abc import Iterator

from maitred.core.request import RequestState, RequestStatus
from maitred.core.step import ScheduledRow
from maitred.scheduler.notes import Blocked, Lack, PreemptionCause
from maitred.scheduler.plan_builder import PlanBuilder, describe
from maitred.scheduler.preemption import grow, preempt, preempt_for
from maitred.scheduler.reserving import num_kept_before
from maitred.scheduler.state import SchedulerState
from maitred.scheduler.timing import resumed

RUNNING = RequestStatus.RUNNING


def build_plan(state: SchedulerState, now: float) -> PlanBuilder:
    """Make a plan; planned tokens count as computed from here on, and blocks are allocated for them."""
    builder = PlanBuilder(state.config.token_budget, now)
    state.order.begin_step()
    state.kv.begin_step()
    _give_up_slots(state, builder, now)
    _plan_decodes(state, builder)
    _plan_forced(state, builder)
    _plan_prefills(state, builder, now)
    _plan_admissions(state, builder, now)
    return builder


def why_blocked(state: SchedulerState, builder: PlanBuilder) -> Blocked | None:
    """Return what the first in the queue lacks, now that admission has stopped."""
    head = state.order.queue.peek()
    if head is None:
        return None
    if builder.out_of_blocks:
        return Blocked(Lack.RUNNING_LACK_BLOCKS, head.request_id)
    if state.sample_groups.groups and state.sample_groups.awaits_leader(head):
        return Blocked(Lack.LEADER, head.request_id)
    if state.num_running >= state.config.max_num_seqs:
        return Blocked(Lack.SLOTS, head.request_id)
    if builder.budget <= 0:
        return Blocked(Lack.BUDGET, head.request_id)
    return Blocked(Lack.BLOCKS, head.request_id, builder.num_blocks_short)


def service_of(state: SchedulerState, builder: PlanBuilder) -> Iterator[int]:
    """Return each row's tokens for the policy's groups; forced ones were counted when they became known."""
    for row in builder.rows:
        yield row.num_tokens if row.request_id in state.prefilling else int(row.samples)


# ---- those that run


def _give_up_slots(state: SchedulerState, builder: PlanBuilder, now: float) -> None:
    while state.num_running > state.config.max_num_seqs:  # after `configure`
        preempt(state, state.worst_running(), builder, PreemptionCause.LIMITS)
    if state.order.policy.quantum_end is not None:
        for request in state.order.take_expired(state.running(), now, _num_replaceable(state)):
            preempt(state, request, builder, PreemptionCause.QUANTUM)


def _num_replaceable(state: SchedulerState) -> int:
    """Return how many requests may leave for waiting ones: none if the first finds room without that, else at least
    one, and as many as the budget has tokens to replace, so that not all leave at once and their slots stay idle.
    """
    head = state.order.head()
    groups = state.sample_groups
    if head is None or (groups.groups and groups.awaits_leader(head)):
        return 0
    hit = state.reusable(head)
    if state.num_running < state.config.max_num_seqs and not state.kv.num_blocks_short(head, hit):
        return 0
    if state.kv.num_blocks_for(head.num_tokens) > state.kv.num_blocks - num_kept_before(state, head):
        return 0  # it would find no room if all left
    budget = state.config.token_budget - state.num_running
    return max(1, budget // max(1, head.num_tokens - hit.num_tokens))


def _plan_decodes(state: SchedulerState, builder: PlanBuilder) -> None:
    rows, requests = builder.rows, builder.requests
    ref_counts, block_size = state.kv.ref_counts, state.kv.block_size
    for request in list(state.decoding.values()):
        start, table = request.num_computed_tokens, request.block_table
        block = start // block_size
        samples = start + 1 == request.num_tokens
        if block < len(table) and ref_counts[table[block]] == 1:
            rows.append(ScheduledRow(request.request_id, start, 1, samples))
        elif request.status is not RUNNING:
            continue  # preempted for the sake of a row before it
        else:
            grown = grow(state, request, builder)
            if grown is None:
                continue
            builder.copies += grown.copies
            rows.append(ScheduledRow(request.request_id, start, 1, samples, grown.new_block_ids, grown.replaced_blocks))
        requests.append(request)
        request.num_computed_tokens = start + 1
    builder.budget = state.config.token_budget - len(rows)


def _plan_forced(state: SchedulerState, builder: PlanBuilder) -> None:
    """Add tokens to decoding rows with forced tokens to catch up with, out of the tokens and free blocks that the first
    token of each row leaves: a row that does not come to its last known token samples in a later step.
    """
    if all(row.samples for row in builder.rows):
        return
    for index, (row, request) in enumerate(zip(builder.rows, builder.requests, strict=True)):
        wanted = min(request.num_tokens - request.num_computed_tokens, builder.budget)
        if wanted <= 0:
            continue
        count, block_ids = state.kv.allocate_spare(request, wanted)
        request.num_computed_tokens += count
        builder.rows[index] = row._replace(
            num_tokens=row.num_tokens + count,
            samples=request.num_computed_tokens == request.num_tokens,
            new_block_ids=row.new_block_ids + block_ids,
        )
        builder.budget -= count


def _plan_prefills(state: SchedulerState, builder: PlanBuilder, now: float) -> None:
    """Further chunks of prompts already begun; their blocks were allocated when they were admitted."""
    for request in sorted(state.prefilling.values(), key=state.order.place):
        _plan_admissions(state, builder, now, ahead_of=request)
        if builder.budget > 0 and request.status is RUNNING and request.request_id not in builder.settled:
            _plan_chunk(request, builder)


def _plan_chunk(request: RequestState, builder: PlanBuilder, block_ids: tuple[int, ...] = ()) -> None:
    start = request.num_computed_tokens
    num_tokens = min(builder.budget, request.num_tokens - start)
    samples = start + num_tokens == request.num_tokens
    builder.rows.append(ScheduledRow(request.request_id, start, num_tokens, samples, block_ids))
    builder.requests.append(request)
    builder.budget -= num_tokens
    request.num_computed_tokens = start + num_tokens


# ---- those that wait


def _plan_admissions(
    state: SchedulerState, builder: PlanBuilder, now: float, ahead_of: RequestState | None = None
) -> None:
    """Admit strictly in order: if the first has no room, no later request is admitted, so large ones do not starve. Nor
    while another sample computes its prompt: that takes up the budget except for the rest of the last step.

    With `ahead_of`, admit only requests that outrank a running one, so that its long prompt does not delay them.
    """
    order, kv = state.order, state.kv
    while builder.budget > 0 and not builder.out_of_blocks:
        head = order.head()
        if head is None or (ahead_of is not None and not order.outranked(head, [ahead_of])):
            return
        if state.sample_groups.groups and state.sample_groups.awaits_leader(head):
            return
        if state.num_running >= state.config.max_num_seqs and not preempt_for(state, head, builder):
            return
        hit = state.reusable(head)
        builder.num_blocks_short = kv.num_blocks_short(head, hit)
        if builder.num_blocks_short:
            if not preempt_for(state, head, builder):  # which frees what is set aside, too
                return
            hit = state.reusable(head)
        allocation = kv.admit(head, hit)
        assert allocation is not None, "admitted without checking for blocks"
        state.start(head)
        resumed(head, now)
        if head.first_scheduled_at is None:
            head.first_scheduled_at = now
            head.num_cached_tokens = min(hit.num_tokens, head.num_prompt_tokens)
            if not hit.forked:  # else the prompt was counted with the sample it is shared with
                state.counters.count_prompt(head)
        builder.settled.add(head.request_id)
        builder.new_requests.append(describe(head))
        builder.copies += allocation.copies
        builder.swap_ins += allocation.swap_ins
        state.counters.num_swapped_in_blocks += len(allocation.swap_ins)
        _plan_chunk(head, builder, allocation.new_block_ids)
