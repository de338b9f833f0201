"""Timing of a request, and its share of what a step or batch takes, as its scheduler notes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import sub

from maitred.core.request import RequestState
from maitred.core.step import RequestTiming


def timing_of(request: RequestState, now: float) -> RequestTiming:
    """The split of `request`'s time so far; phases not reached yet count to `now` in the phase it is in."""
    ended = request.finished_at if request.finished_at is not None else now
    scheduled = request.first_scheduled_at if request.first_scheduled_at is not None else ended
    first_token = request.first_token_at if request.first_token_at is not None else ended
    stalled_now = ended - request.stalled_at if request.stalled_at is not None else 0.0
    in_prefill = request.stalled_prefill_s + (stalled_now if request.first_token_at is None else 0.0)
    in_decode = request.stalled_decode_s + (stalled_now if request.first_token_at is not None else 0.0)
    return RequestTiming(
        queue_s=scheduled - request.arrived_at,
        prefill_s=first_token - scheduled - in_prefill,
        decode_s=ended - first_token - in_decode,
        stall_s=in_prefill + in_decode,
        ttft_s=first_token - request.arrived_at,
        num_preemptions=request.num_preemptions,
    )


def resumed(request: RequestState, now: float) -> None:
    """A preempted request is in a step again: what it waited is a stall of the phase it was in."""
    if request.stalled_at is None:
        return
    if request.first_token_at is None:
        request.stalled_prefill_s += now - request.stalled_at
    else:
        request.stalled_decode_s += now - request.stalled_at
    request.stalled_at = None


def split_us(compute_us: int, amounts: Sequence[int]) -> list[int]:
    """Time over requests by their rows or tokens; the parts are whole, and sum up to it."""
    total = sum(amounts)
    ends = [compute_us * before // total for before in accumulate(amounts)]
    return list(map(sub, ends, [0, *ends]))
