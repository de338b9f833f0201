"""Planning of one step: those that run first, then those that wait, in order, within the token budget."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from maitred.core.cost_model import SwapCosts
from maitred.core.request import RequestState, RequestStatus
from maitred.core.step import BlockCopy, NewRequest, PoolChanges, ScheduledRow, SchedulerOutput
from maitred.kv.manager import NO_POOL_CHANGES, Allocation, PrefixHit
from maitred.kv.tiers import worth_fetching
from maitred.scheduler.notes import Blocked, Lack, Preemption, PreemptionCause
from maitred.scheduler.reserving import give_up_one, num_kept_before
from maitred.scheduler.state import SchedulerState
from maitred.scheduler.timing import resumed


class Removed(NamedTuple):
    """Row taken out of a plan, and what came with it."""

    num_tokens: int
    copied_from: Mapping[int, int]  # target of a copy -> its source


NOT_PLANNED = Removed(0, {})


@dataclass(slots=True, eq=False)
class PlanBuilder:
    """One step's rows, with the request of each, and the rest of the token budget."""

    budget: int
    now: float  # s, of the step
    rows: list[ScheduledRow] = field(default_factory=list)
    requests: list[RequestState] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swap_outs: list[BlockCopy] = field(default_factory=list)
    swap_ins: list[BlockCopy] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)  # admitted in this step, so not preempted in it
    out_of_blocks: bool = False  # a running request was preempted for its blocks: admit none
    num_blocks_short: int = 0  # for the first in the queue, when that is why it was not admitted
    preemptions: list[Preemption] = field(default_factory=list)

    def remove(self, request: RequestState) -> Removed:
        """Takes back the request's row, if it has one, before its blocks are freed."""
        if request not in self.requests:
            return NOT_PLANNED
        index = self.requests.index(request)
        num_tokens = self.rows[index].num_tokens
        self.budget += num_tokens
        del self.rows[index], self.requests[index]
        # Its blocks may be handed out again in this step: two copies to one target would have no order.
        table = set(request.block_table)
        copied_from = {copy.target: copy.source for copy in self.copies if copy.target in table}
        if copied_from:
            self.copies = [copy for copy in self.copies if copy.target not in table]
        return Removed(num_tokens, copied_from)

    def plan(self, step: int, forgotten: Sequence[str], pool: PoolChanges = NO_POOL_CHANGES) -> SchedulerOutput:
        """Return the plan as it stands; `forgotten` left their slots since the plan before."""
        return SchedulerOutput(
            step=step,
            rows=tuple(self.rows),
            new_requests=tuple(self.new_requests),
            forgotten_request_ids=tuple(forgotten),
            block_copies=tuple(self.copies),
            swap_outs=tuple(self.swap_outs),
            swap_ins=tuple(self.swap_ins),
            page_changes=pool.page_changes,
            state_copies=pool.state_copies,
            state_saves=pool.state_saves,
        )


def describe(request: RequestState, state_slot: int | None = None) -> NewRequest:
    """Describe a request that the executor does not hold."""
    return NewRequest(
        request_id=request.request_id,
        num_output_tokens=len(request.output_token_ids),
        output_token_ids=tuple(request.output_token_ids),
        spec=request.spec,
        state_slot=state_slot,
    )


RUNNING = RequestStatus.RUNNING
NO_LIMIT = 1 << 62  # tokens
Grow = Callable[[SchedulerState, RequestState, PlanBuilder], Allocation | None]
"""Makes room for one more token of a request; None where there is none."""


def build_plan(state: SchedulerState, now: float) -> PlanBuilder:
    """Make a plan; planned tokens count as computed from here on, and blocks are allocated for them."""
    builder = PlanBuilder(state.config.token_budget, now)
    state.order.begin_step()
    state.kv.begin_step()
    _give_up_slots(state, builder, now)
    plan_decodes(state, builder, list(state.decoding.values()), grow)
    plan_forced(state, builder)
    _plan_prefills(state, builder)
    _plan_admissions(state, builder)
    return builder


def why_blocked(state: SchedulerState, builder: PlanBuilder, head: RequestState | None) -> Blocked | None:
    """Return what the first in a queue lacks, now that admission has stopped."""
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
    if head.background and not builder.num_blocks_short:
        return Blocked(Lack.SLACK, head.request_id)
    return Blocked(Lack.BLOCKS, head.request_id, builder.num_blocks_short)


def service_of(rows: Iterable[ScheduledRow], prefilling: Container[str]) -> Iterator[int]:
    """Return each row's tokens for the policy's groups; forced ones were counted when they became known."""
    for row in rows:
        yield row.num_tokens if row.request_id in prefilling else int(row.samples)


def steady_requests(state: SchedulerState) -> list[RequestState]:
    """See `Scheduler.steady_requests`: only requests that decode run, each in a block of its own, under a policy that
    asks nothing of a step, and the first in the queue has no room whatever they write.
    """
    policy, kv = state.order.policy, state.kv
    if state.prefilling or state.num_running > state.config.max_num_seqs or state.sample_groups.groups:
        return []
    if not state.background.is_empty:
        return []
    if policy.groups is not None or kv.has_pool_changes or kv.evicted is not None or state.reservations:
        return []
    requests, size, ref_counts = list(state.decoding.values()), kv.block_size, kv.ref_counts
    head = state.order.queue.peek()
    if head is not None:
        if policy.outranks is not None or policy.quantum_end is not None or policy.kv_needs is not None:
            return []
        if state.num_running < state.config.max_num_seqs and _may_gain_room(state, head, requests):
            return []
    for request in requests:
        table, at = request.block_table, request.num_computed_tokens // size
        if request.num_tokens - request.num_computed_tokens != 1 or (at < len(table) and ref_counts[table[at]] != 1):
            return []
    return requests


def _may_gain_room(state: SchedulerState, head: RequestState, running: Sequence[RequestState]) -> bool:
    """Whether the first in the queue has room, or may find more of its prefix in what a running request writes."""
    hit, size = state.reusable(head), state.kv.block_size
    if not state.kv.num_blocks_short(head, hit):
        return True
    shared = [min(len(hit.blocks), request.num_computed_tokens // size) for request in running]
    ahead = [request.num_computed_tokens // size > len(hit.blocks) for request in running]
    return any(
        not is_ahead and (not num or request.block_hashes[num - 1] == head.block_hashes[num - 1])
        for request, num, is_ahead in zip(running, shared, ahead, strict=True)
    )


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
    if head is None or state.background.num_running or (groups.groups and groups.awaits_leader(head)):
        return 0
    hit = state.reusable(head)
    if state.num_running < state.config.max_num_seqs and not state.kv.num_blocks_short(head, hit):
        return 0
    if state.kv.num_pages_for(head.num_tokens) > state.kv.num_pages - num_kept_before(state, head):
        return 0  # it would find no room if all left
    budget = state.config.token_budget - state.num_running
    return max(1, budget // max(1, head.num_tokens - hit.num_tokens))


def plan_decodes(state: SchedulerState, builder: PlanBuilder, decoding: Sequence[RequestState], grow: Grow) -> None:
    """Add a row for each request that decodes and, where its next block is lacking, grows."""
    rows, requests = builder.rows, builder.requests
    budget = builder.budget + len(rows)
    ref_counts, block_size = state.kv.ref_counts, state.kv.block_size
    for request in decoding:
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
    builder.budget = budget - len(rows)


def plan_forced(state: SchedulerState, builder: PlanBuilder) -> None:
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


def _plan_prefills(state: SchedulerState, builder: PlanBuilder) -> None:
    """Further chunks of prompts already begun; their blocks were allocated when they were admitted, not their windows'
    pages.
    """
    for request in sorted(state.prefilling.values(), key=state.order.place):
        _plan_admissions(state, builder, ahead_of=request)
        if builder.budget > 0 and request.status is RUNNING and request.request_id not in builder.settled:
            plan_chunk(state, request, builder)


def plan_chunk(
    state: SchedulerState,
    request: RequestState,
    builder: PlanBuilder,
    block_ids: tuple[int, ...] = (),
    most: int = NO_LIMIT,
) -> None:
    start = request.num_computed_tokens
    num_tokens = request.num_tokens - start
    if not is_whole(request):
        num_tokens = min(builder.budget, num_tokens, most)
    if num_tokens and state.kv.opens_windows:
        num_tokens = _open_windows(state, request, builder, num_tokens)
    if not num_tokens:
        return
    samples = start + num_tokens == request.num_tokens
    builder.rows.append(ScheduledRow(request.request_id, start, num_tokens, samples, block_ids))
    builder.requests.append(request)
    builder.budget -= num_tokens
    request.num_computed_tokens = start + num_tokens


def is_whole(request: RequestState) -> bool:
    """Whether all of the prompt is one step's."""
    return request.spec.pooling is not None and request.spec.pooling.whole


def _open_windows(state: SchedulerState, request: RequestState, builder: PlanBuilder, num_tokens: int) -> int:
    """Return for how many of a chunk's tokens there is room in the layers of windows, made if for none.

    0 if the request is itself the worst, or the worst has just begun.
    """
    while not (count := state.kv.allocate_spare(request, num_tokens)[0]):
        if not _make_room(state, request, builder, spared=builder.settled):
            return 0
    return count


# ---- those that wait


def _plan_admissions(state: SchedulerState, builder: PlanBuilder, ahead_of: RequestState | None = None) -> None:
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
        if builder.rows and is_whole(head) and head.num_tokens > builder.budget:
            return  # a step of its own takes it, whatever the budget is
        hit = state.reusable(head)
        builder.num_blocks_short = kv.num_blocks_short(head, hit)
        if builder.num_blocks_short:
            if not preempt_for(state, head, builder):  # which frees what is set aside, too
                return
            hit = state.reusable(head)
        admit(state, head, hit, builder)


def admit(
    state: SchedulerState, head: RequestState, hit: PrefixHit, builder: PlanBuilder, most: int = NO_LIMIT
) -> None:
    """Move the first in the queue, for which there is room, to a slot; plan so many tokens of it at most."""
    allocation = state.kv.admit(head, hit)
    assert allocation is not None, "admitted without checking for blocks"
    state.start(head)
    resumed(head, builder.now)
    if head.first_scheduled_at is None:
        head.first_scheduled_at = builder.now
        head.num_cached_tokens = min(hit.num_tokens, head.num_prompt_tokens)
        if not hit.forked and not (state.sample_groups.groups and state.sample_groups.was_computed(head)):
            state.counters.count_prompt(head)
    builder.settled.add(head.request_id)
    builder.new_requests.append(describe(head, allocation.state_slot))
    builder.copies += allocation.copies
    builder.swap_ins += allocation.swap_ins
    state.counters.num_swapped_in_blocks += len(allocation.swap_ins)
    plan_chunk(state, head, builder, allocation.new_block_ids, most)


def grow(state: SchedulerState, request: RequestState, builder: PlanBuilder) -> Allocation | None:
    """Room for one more token, taken from what is set aside, then from the worst running requests if need be; None if
    it is itself the worst.
    """
    while (allocation := state.kv.allocate(request, 1)) is None:
        if not _make_room(state, request, builder):
            return None
    return allocation


def _make_room(state: SchedulerState, request: RequestState, builder: PlanBuilder, spared: Container[str] = ()) -> bool:
    """Give up what is set aside, or preempt the worst running request; False if that is `request`, or to be spared. One
    of the class background is preempted before anything else is given up.
    """
    victim = state.worst_running()
    if (victim is request or not victim.background) and give_up_one(state):
        return True
    if victim.request_id in spared:
        return False
    builder.out_of_blocks |= not victim.background
    preempt(state, victim, builder, PreemptionCause.BLOCKS, by=request)
    return victim is not request


def preempt_for(state: SchedulerState, head: RequestState, builder: PlanBuilder) -> bool:
    """Preempt requests that `head` outranks, set-aside blocks first, then the worst; none if in vain."""
    kv, victims = state.kv, _victims_for(state, head, builder)
    if not victims and state.num_running:
        return False
    spares = bool(victims) and victims[-1].background  # all are of that class, and go first
    while state.reservations and kv.num_blocks_short(head, state.reusable(head)) and not spares:
        if not give_up_one(state, behind=head):
            break
        victims = _victims_for(state, head, builder)
    for victim in victims:
        preempt(state, victim, builder, PreemptionCause.OUTRANKED, by=head)
    return not kv.num_blocks_short(head, state.reusable(head))


def _victims_for(state: SchedulerState, head: RequestState, builder: PlanBuilder) -> list[RequestState]:
    """Return the requests that would make enough room for `head`; none if all would not, or when it has room."""
    kv = state.kv
    outranked = [r for r in state.outranked(head) if r.request_id not in builder.settled]
    hit = state.reusable(head)
    short = kv.num_blocks_short(head, hit)
    if not short and state.num_running < state.config.max_num_seqs:
        return []
    if not outranked or short > kv.pages_per_block * sum(len(r.block_table) for r in outranked):
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
    if state.sample_groups.groups:
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
    sums_up = request.spec.pooling is not None and request.spec.pooling.all_tokens  # what the executor forgets
    if costs is None or sums_up or not kv.can_swap_out(num_tokens):
        return
    if worth_swapping(costs, kv.num_rows(0, num_tokens), num_tokens):
        copies = kv.swap_out(request, num_tokens, removed.copied_from)
        builder.swap_outs += copies
        state.counters.num_swapped_out_blocks += len(copies)


def worth_swapping(costs: SwapCosts, num_blocks: int, num_tokens: int) -> bool:
    """Copying so many blocks out and in again takes less time than computing so many tokens again."""
    num_bytes = num_blocks * costs.bytes_per_block
    out_s = num_bytes / costs.out_bytes_per_s
    return worth_fetching(num_bytes, num_tokens, costs.in_bytes_per_s, out_s, costs.prefill_s_per_token)
