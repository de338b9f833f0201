"""Makes room while a plan is drafted: who gives up slot and blocks, and whether its KV goes to the host."""

from __future__ import annotations

from maitred.kvcache.manager import Allocation
from maitred.request import Request
from maitred.scheduler.notes import Preemption, PreemptionCause
from maitred.scheduler.plan_builder import Draft, Removed
from maitred.scheduler.state import Floor
from maitred.scheduler.swap import worth_swapping


def grow(floor: Floor, request: Request, draft: Draft) -> Allocation | None:
    """Room for one more token, taken from the worst running requests if need be; None if it is itself the worst."""
    while (allocation := floor.kv.allocate(request, 1)) is None:
        victim = floor.worst_running()
        draft.out_of_blocks = True
        preempt(floor, victim, draft, PreemptionCause.BLOCKS, by=request)
        if victim is request:
            return None
    return allocation


def make_room(floor: Floor, head: Request, draft: Draft) -> bool:
    """Preempts requests that `head` outranks, the worst first, for a slot and blocks; nobody if in vain."""
    kv = floor.kv
    outranked = [r for r in floor.order.outranked(head, floor.running()) if r.request_id not in draft.settled]
    hit = floor.reusable(head)
    short = kv.num_blocks_short(head, hit)
    if not outranked or short > sum(len(r.block_table) for r in outranked):
        return False
    victims = []
    for victim in outranked:
        victims.append(victim)
        short -= kv.num_freed_by(victim, hit)
        if short <= 0:
            break
    if short > 0:
        return False
    for victim in victims:
        preempt(floor, victim, draft, PreemptionCause.OUTRANKED, by=head)
    return not kv.num_blocks_short(head, floor.reusable(head))


def preempt(floor: Floor, request: Request, draft: Draft, cause: PreemptionCause, *, by: Request | None = None) -> None:
    """Back to the queue, to its old place; what it computed is lost, but for what prefix cache or host keep."""
    draft.preemptions.append(Preemption(request.request_id, cause, by.request_id if by is not None else None))
    _swap_out(floor, request, draft, draft.remove(request), cause)
    floor.leave_running(request)
    floor.families.preempted(request)
    request.num_preemptions += 1
    request.stalled_at = draft.now
    floor.counters.num_preemptions += 1
    floor.enqueue(request)


def _swap_out(floor: Floor, request: Request, draft: Draft, removed: Removed, cause: PreemptionCause) -> None:
    """To the host, what was computed before this plan, if that takes less time than computing it again will."""
    kv, costs = floor.kv, floor.swap_costs
    num_tokens = request.num_computed_tokens - removed.num_tokens
    lacking = cause is PreemptionCause.BLOCKS or (cause is PreemptionCause.OUTRANKED and draft.num_blocks_short)
    if not lacking and kv.finds_again(request):
        return  # while no blocks lack, the prefix cache keeps what was computed
    if costs is None or not kv.can_swap_out(num_tokens):
        return
    if worth_swapping(costs, kv.num_blocks_for(num_tokens), num_tokens):
        copies = kv.swap_out(request, num_tokens, removed.copied_from)
        draft.swap_outs += copies
        floor.counters.num_swapped_out_blocks += len(copies)
