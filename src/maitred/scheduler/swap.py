"""Swap or recompute: a preempted request's KV is copied to the host and back, or computed again, by time."""

from __future__ import annotations

from typing import NamedTuple

from maitred.kv.tiers import worth_fetching


class SwapCosts(NamedTuple):
    """Costs of swapping and of recomputing on this machine; measured by the engine, told to the scheduler."""

    bytes_per_block: int
    out_bytes_per_s: float  # device to host
    in_bytes_per_s: float  # host to device
    prefill_s_per_token: float  # of a long prompt


def worth_swapping(costs: SwapCosts, num_blocks: int, num_tokens: int) -> bool:
    """Copying so many blocks out and in again takes less time than computing so many tokens again."""
    num_bytes = num_blocks * costs.bytes_per_block
    out_s = num_bytes / costs.out_bytes_per_s
    return worth_fetching(num_bytes, num_tokens, costs.in_bytes_per_s, out_s, costs.prefill_s_per_token)
