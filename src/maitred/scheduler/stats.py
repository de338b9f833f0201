"""Scheduler statistics: what was done so far and is held now; the numbers behind `ReplicaState`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from maitred.core.replica import DraftCounts
from maitred.core.request import FinishReason, RequestState


@dataclass(slots=True, kw_only=True)
class SchedulerCounters:
    """Counters that only grow."""

    num_steps: int = 0  # plans with at least one row
    num_prompt_tokens: int = 0  # prompts admitted to a first step; that of n samples counts once
    num_generated_tokens: int = 0
    num_scheduled_tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)  # of the executor's proposer
    predicted_drafts: DraftCounts = field(default_factory=DraftCounts)  # of texts that requests predicted
    num_preemptions: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def count_drafts(self, request: RequestState, num_made: int, num_accepted: int) -> None:
        """Count so many drafts of a row, of which so many became output."""
        request.num_draft_tokens += num_made
        request.num_accepted_tokens += num_accepted
        counts = self.predicted_drafts if request.spec.prediction_token_ids else self.drafts
        counts.count(num_made, num_accepted)

    def count_prompt(self, request: RequestState) -> None:
        """Count a prompt admitted to a first step; `num_cached_tokens` is set."""
        request.num_charged_prompt_tokens = request.num_prompt_tokens
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_prefix_queried_tokens += request.num_prompt_tokens
        self.num_prefix_hit_tokens += request.num_cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A moment's gauges, and a copy of the counters, named as in `ReplicaState`."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_scheduled_tokens: int
    drafts: DraftCounts
    predicted_drafts: DraftCounts
    num_preemptions: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_finished: Mapping[FinishReason, int]
