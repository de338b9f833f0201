"""Reserving: blocks are set aside for KV that comes from elsewhere, or held under a lease until they are copied.

A request whose KV is on its way is out of the queue and delays no other. When the KV has come, its blocks are free but
findable, and the request is admitted like any other with a cached prefix; missing KV is computed. Blocks set aside are
given up before a running request would lose its own: the newest lease first, then the reservation of the last in the
policy's order.
"""

from __future__ import annotations

from collections.abc import Sequence

from maitred.core.request import RequestState, RequestStatus
from maitred.scheduler.reservations import ReservedBlocks
from maitred.scheduler.state import SchedulerState

# ---- KV that comes


def reserve(state: SchedulerState, request_id: str, num_tokens: int) -> ReservedBlocks | None:
    """Blocks for the KV of its first `num_tokens` tokens, and the request leaves the queue; None, with nothing changed,
    when that gains nothing, or when the blocks lack, or are needed by the first in the queue, which it comes behind.
    None too where the KV of the same tokens is on its way to another request: then this one waits along with it.
    """
    request, kv = state.requests.get(request_id), state.kv
    if request is None or request.status is not RequestStatus.WAITING or not kv.finds_again(request):
        return None
    if state.sample_groups.awaits_leader(request):
        return None
    most = request.num_tokens - (not request.spec.kv_only)  # a resumed request computes its last token
    num_blocks = min(num_tokens // kv.block_size, most // kv.block_size, len(request.block_hashes))
    end, hit = num_blocks * kv.block_size, kv.find_prefix(request)
    if end <= max(hit.num_tokens, state.reusable(request).num_tokens):
        return None
    if (leader := _brings_the_same(state, request, hit.num_tokens)) is not None:
        for each in (request, *state.sample_groups.fellows(request)):
            state.reservations.along[each.request_id] = leader
            _leave_queue(state, each)
        return None
    block_ids = kv.reserve(request, hit, num_blocks, _num_needed_ahead(state, request))
    if block_ids is None:
        return None
    reserved = state.reservations.reserved[request_id] = ReservedBlocks(hit.num_tokens, end, block_ids)
    for each in (request, *state.sample_groups.fellows(request)):
        _leave_queue(state, each)
    return reserved


def join_fellow(state: SchedulerState, request: RequestState) -> None:
    """A newcomer waits along with a sample of its prompt that waits for KV."""
    parent, reservations = request.spec.parent_id, state.reservations
    if parent is None or not state.kv.finds_again(request):
        return
    for request_id in reservations.reserved:
        if reservations.waiting[request_id].spec.parent_id == parent:
            _leave_queue(state, request)
            return
    for request_id, leader in reservations.along.items():
        if reservations.waiting[request_id].spec.parent_id == parent:
            reservations.along[request.request_id] = leader
            _leave_queue(state, request)
            return


def arrived(state: SchedulerState, request_id: str, num_tokens: int) -> bool:
    """The KV of so many tokens is in the reserved blocks, verified: it can be found, and the request queues again.
    False, with nothing changed, for one that has no reservation (any more).
    """
    reserved = state.reservations.reserved.get(request_id)
    if reserved is None:
        return False
    assert reserved.start <= num_tokens <= reserved.end, f"{num_tokens} tokens came for {reserved}"
    request = state.reservations.waiting[request_id]
    state.kv.commit(request, reserved.start, num_tokens)
    _end_reservation(state, request)
    _enter_queue(state, request)
    return True


def forget(state: SchedulerState, request: RequestState) -> None:
    """Forget a request that ends while it waits for KV."""
    if request.request_id in state.reservations.reserved:
        state.reservations.given_up_requests.append(request.request_id)
        _end_reservation(state, request)
    state.reservations.waiting.pop(request.request_id)
    state.reservations.along.pop(request.request_id, None)


def _brings_the_same(state: SchedulerState, request: RequestState, num_cached: int) -> str | None:
    """Return a request whose reservation covers more of this request's tokens than are cached, and only those."""
    for leader, reserved in state.reservations.reserved.items():
        last = reserved.end // state.kv.block_size - 1
        other, ours = state.reservations.waiting[leader], request.block_hashes
        if reserved.end > num_cached and last < len(ours) and other.block_hashes[last] == ours[last]:
            return leader
    return None


def _num_needed_ahead(state: SchedulerState, request: RequestState) -> int:
    """Blocks that the first in the queue is to find free, so that a large request does not starve."""
    head = state.peek()
    if head is None or head is request or state.place(request) < state.place(head):
        return 0
    return state.kv.num_blocks_needed(head, state.reusable(head))


def _leave_queue(state: SchedulerState, request: RequestState) -> None:
    request.status = RequestStatus.WAITING_FOR_KV
    state.reservations.waiting[request.request_id] = request
    state.books_of(request).order.withdraw(request)


def _enter_queue(state: SchedulerState, request: RequestState) -> None:
    request.status = RequestStatus.WAITING
    del state.reservations.waiting[request.request_id]
    state.books_of(request).order.put_back(request)


def _end_reservation(state: SchedulerState, request: RequestState) -> None:
    """Free the reservation's blocks; requests that waited along queue again."""
    reservations, parent = state.reservations, request.spec.parent_id
    del reservations.reserved[request.request_id]
    state.kv.free(request)
    for request_id in [each for each, leader in reservations.along.items() if leader == request.request_id]:
        del reservations.along[request_id]
        _enter_queue(state, reservations.waiting[request_id])
    for fellow in list(reservations.waiting.values()) if parent is not None else ():
        if fellow.spec.parent_id == parent and fellow.request_id not in reservations.reserved and fellow is not request:
            _enter_queue(state, fellow)


# ---- KV that others copy


def hold(state: SchedulerState, lease: str, block_hashes: Sequence[bytes]) -> tuple[int, ...]:
    """Blocks of the longest cached prefix, which stay what they are until the lease ends; a lease that holds some
    already holds these instead. Nothing changes when none is cached.
    """
    blocks = state.kv.hold(block_hashes)
    if blocks:
        release(state, lease)
        state.reservations.leases[lease] = blocks
    return blocks


def release(state: SchedulerState, lease: str) -> bool:
    """Free the lease's blocks; return whether it held any."""
    blocks = state.reservations.leases.pop(lease, None)
    if blocks is not None:
        state.kv.release(blocks)
    return blocks is not None


# ---- giving up


def give_up_one(state: SchedulerState, behind: RequestState | None = None) -> bool:
    """Frees the blocks of the newest lease, else of the last reservation in the policy's order, which must come behind
    that request if one is named; False when there is none.
    """
    reservations = state.reservations
    if reservations.leases:
        lease, blocks = reservations.leases.popitem()
        state.kv.release(blocks)
        reservations.given_up_leases.append(lease)
        return True
    if not reservations.reserved:
        return False
    last = max((reservations.waiting[request_id] for request_id in reservations.reserved), key=state.place)
    if behind is not None and state.place(last) < state.place(behind):
        return False
    reservations.given_up_requests.append(last.request_id)
    _end_reservation(state, last)
    _enter_queue(state, last)
    return True


def num_kept_before(state: SchedulerState, head: RequestState) -> int:
    """Blocks of reservations that are not given up for `head`, which comes behind them."""
    place, waiting = state.place(head), state.reservations.waiting
    before = (waiting[each] for each in state.reservations.reserved if state.place(waiting[each]) < place)
    return sum(state.kv.num_rows(0, len(request.block_table) * state.kv.block_size) for request in before)


def can_step(state: SchedulerState) -> bool:
    """Return whether a plan would compute something, or give something up: not while the blocks that the first in the
    queue lacks are reserved for requests before it, and none runs.
    """
    head, reservations = state.peek(), state.reservations
    if state.num_running or head is None:
        return state.num_running > 0
    if not reservations or reservations.leases or not state.kv.num_blocks_short(head, state.reusable(head)):
        return True
    place = state.place(head)
    return any(state.place(reservations.waiting[request_id]) > place for request_id in reservations.reserved)
