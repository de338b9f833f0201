"""Plan builder: the rows of a plan that is being made, which can still be taken back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from maitred.core.request import RequestState
from maitred.core.step import BlockCopy, NewRequest, ScheduledRow, SchedulerOutput
from maitred.scheduler.notes import Preemption


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

    def plan(self, step: int, forgotten: Sequence[str]) -> SchedulerOutput:
        """Return the plan as it stands; `forgotten` left their slots since the plan before."""
        return SchedulerOutput(
            step=step,
            rows=tuple(self.rows),
            new_requests=tuple(self.new_requests),
            forgotten_request_ids=tuple(forgotten),
            block_copies=tuple(self.copies),
            swap_outs=tuple(self.swap_outs),
            swap_ins=tuple(self.swap_ins),
        )


def describe(request: RequestState) -> NewRequest:
    """Describe a request that the executor does not hold."""
    return NewRequest(
        request_id=request.request_id,
        num_output_tokens=len(request.output_token_ids),
        output_token_ids=tuple(request.output_token_ids),
        spec=request.spec,
    )
