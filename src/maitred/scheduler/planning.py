"""Makes one step's plan: those that run first, then those that wait, in order, within the token budget."""

from __future__ import annotations

from maitred.request import Request, RequestStatus, resumed
from maitred.scheduler.notes import Blocked, Lack, PreemptionCause
from maitred.scheduler.plan_builder import Draft, describe
from maitred.scheduler.preemption import grow, make_room, preempt
from maitred.scheduler.state import Floor
from maitred.step import ScheduledRow

RUNNING = RequestStatus.RUNNING


def draft_step(floor: Floor, now: float) -> Draft:
    """What is drafted counts as computed from here on, and blocks are allocated for it."""
    draft = Draft(floor.config.token_budget, now)
    floor.order.begin_step()
    floor.kv.begin_step()
    _give_up_slots(floor, draft, now)
    _plan_decodes(floor, draft)
    _plan_prefills(floor, draft, now)
    _plan_admissions(floor, draft, now)
    return draft


def why_blocked(floor: Floor, draft: Draft) -> Blocked | None:
    """What the first in the queue lacks, now that admission has stopped."""
    head = floor.order.queue.peek()
    if head is None:
        return None
    if draft.out_of_blocks:
        return Blocked(Lack.RUNNING_LACK_BLOCKS, head.request_id)
    if floor.families.awaits_leader(head):
        return Blocked(Lack.LEADER, head.request_id)
    if floor.num_running >= floor.config.max_num_seqs:
        return Blocked(Lack.SLOTS, head.request_id)
    if draft.budget <= 0:
        return Blocked(Lack.BUDGET, head.request_id)
    return Blocked(Lack.BLOCKS, head.request_id, draft.num_blocks_short)


# ---- those that run


def _give_up_slots(floor: Floor, draft: Draft, now: float) -> None:
    while floor.num_running > floor.config.max_num_seqs:  # after `configure`
        preempt(floor, floor.worst_running(), draft, PreemptionCause.LIMITS)
    if floor.order.policy.quantum_end is not None:
        for request in floor.order.take_expired(floor.running(), now, _num_replaceable(floor)):
            preempt(floor, request, draft, PreemptionCause.QUANTUM)


def _num_replaceable(floor: Floor) -> int:
    """How many may leave for those that wait: none if the first finds room without that, else at least one, and
    as many as the budget has tokens to replace, so that not all leave at once and their slots stay idle.
    """
    head = floor.order.head()
    if head is None or floor.families.awaits_leader(head):
        return 0
    hit = floor.reusable(head)
    if floor.num_running < floor.config.max_num_seqs and not floor.kv.num_blocks_short(head, hit):
        return 0
    budget = floor.config.token_budget - floor.num_running
    return max(1, budget // max(1, head.num_tokens - hit.num_tokens))


def _plan_decodes(floor: Floor, draft: Draft) -> None:
    rows, requests = draft.rows, draft.requests
    ref_counts, block_size = floor.kv.ref_counts, floor.kv.block_size
    for request in list(floor.decoding.values()):
        start, table = request.num_computed_tokens, request.block_table
        block = start // block_size
        if block < len(table) and ref_counts[table[block]] == 1:
            rows.append(ScheduledRow(request.request_id, start, 1, True))
        elif request.status is not RUNNING:
            continue  # preempted for the sake of a row before it
        else:
            grown = grow(floor, request, draft)
            if grown is None:
                continue
            draft.copies += grown.copies
            rows.append(ScheduledRow(request.request_id, start, 1, True, grown.new_block_ids, grown.replaced_blocks))
        requests.append(request)
        request.num_computed_tokens = start + 1
    draft.budget = floor.config.token_budget - len(rows)


def _plan_prefills(floor: Floor, draft: Draft, now: float) -> None:
    """Further chunks of prompts already begun; their blocks were allocated when they were admitted."""
    for request in sorted(floor.prefilling.values(), key=floor.order.place):
        _plan_admissions(floor, draft, now, ahead_of=request)
        if draft.budget > 0 and request.status is RUNNING and request.request_id not in draft.settled:
            _plan_chunk(request, draft)


def _plan_chunk(request: Request, draft: Draft, block_ids: tuple[int, ...] = ()) -> None:
    start = request.num_computed_tokens
    num_tokens = min(draft.budget, request.num_tokens - start)
    samples = start + num_tokens == request.num_tokens
    draft.rows.append(ScheduledRow(request.request_id, start, num_tokens, samples, block_ids))
    draft.requests.append(request)
    draft.budget -= num_tokens
    request.num_computed_tokens = start + num_tokens


# ---- those that wait


def _plan_admissions(floor: Floor, draft: Draft, now: float, ahead_of: Request | None = None) -> None:
    """Strictly in order: if the first has no room, nobody behind it is admitted, so large ones do not starve. Nor while
    another sample computes its prompt: that takes up the budget but for what is left of the last step.

    With `ahead_of`, only those that outrank a running request, so that its long prompt does not keep them waiting.
    """
    order, kv = floor.order, floor.kv
    while draft.budget > 0 and not draft.out_of_blocks:
        head = order.head()
        if head is None or (ahead_of is not None and not order.outranked(head, [ahead_of])):
            return
        if floor.families.awaits_leader(head):
            return
        if floor.num_running >= floor.config.max_num_seqs and not make_room(floor, head, draft):
            return
        hit = floor.reusable(head)
        draft.num_blocks_short = kv.num_blocks_short(head, hit)
        if draft.num_blocks_short:
            if not make_room(floor, head, draft):
                return
            hit = floor.reusable(head)
        allocation = kv.admit(head, hit)
        assert allocation is not None, "admitted without checking for blocks"
        floor.start(head)
        resumed(head, now)
        if head.first_scheduled_at is None:
            head.first_scheduled_at = now
            head.num_cached_tokens = min(hit.num_tokens, head.num_prompt_tokens)
            if not hit.forked:  # else the prompt was counted with the sample it is shared with
                floor.counters.count_prompt(head)
        draft.settled.add(head.request_id)
        draft.new_requests.append(describe(head))
        draft.copies += allocation.copies
        draft.swap_ins += allocation.swap_ins
        floor.counters.num_swapped_in_blocks += len(allocation.swap_ins)
        _plan_chunk(head, draft, allocation.new_block_ids)
