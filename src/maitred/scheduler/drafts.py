"""Drafts in a plan: positions after the last known token, whose tokens the executor makes up and the model checks.

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023, arXiv:2211.17192.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from maitred.request import RequestState
from maitred.scheduler.plan_builder import PlanBuilder
from maitred.scheduler.speculation import Speculation
from maitred.scheduler.state import SchedulerState

NumDrafts = Callable[[RequestState, int], int]
"""(request, rows in the plan) -> how many tokens to draft for it; pure. For recorded lengths, and for tests."""


def plan_drafts(state: SchedulerState, builder: PlanBuilder, lengths: Sequence[int]) -> None:
    """Add drafts to rows that sample, out of the tokens and blocks that the finished plan leaves: they preempt and
    delay no request. Their blocks are back before the next plan, unless accepted tokens are in them.

    `lengths` has how many are wanted for each row.
    """
    for index, (row, length) in enumerate(zip(builder.rows, lengths, strict=True)):
        if builder.budget <= 0:
            return
        if not length or not row.samples:
            continue
        request = builder.requests[index]
        # As many tokens as are accepted come with one more, and max_tokens is the most it may have.
        most = min(builder.budget, request.max_tokens - request.num_output_tokens - 1)
        wanted = min(length, most)
        if wanted <= 0:
            continue
        count, block_ids = state.kv.allocate_spare(request, wanted)
        builder.rows[index] = row._replace(
            num_tokens=row.num_tokens + count, new_block_ids=row.new_block_ids + block_ids, num_drafts=count
        )
        builder.budget -= count
        request.num_computed_tokens += count


def speculate(state: SchedulerState, speculation: Speculation, builder: PlanBuilder) -> bool:
    """Give the plan drafts out of the tokens that prompts leave; return whether it did."""
    if state.forgotten:
        speculation.forgotten(state.forgotten)
    if builder.budget <= 0:
        return False
    lengths = speculation.lengths(builder.rows, builder.requests)
    if not any(lengths):
        return False
    plan_drafts(state, builder, lengths)
    return True
