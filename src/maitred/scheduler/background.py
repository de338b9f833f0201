"""Background requests in a plan: as many tokens as lengthen the step by `batch_slack` at most, by measured step costs.

They come after all others, whatever the policy, and in the policy's order among themselves. A step without others is
theirs, up to a length that a newcomer can wait for; beside others nothing joins before steps of that size are measured.
Rows are taken in order while the modelled time allows, decoding ones before chunks of prompts; each chunk has as many
tokens as still fit. None is preempted for another of the class, but for blocks in a step of their own. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from maitred.core.cost_model import CostModel, Knot, StepShape, between, shape_of
from maitred.core.request import RequestState
from maitred.core.step import ScheduledRow
from maitred.kv.manager import Allocation
from maitred.scheduler.planning import (
    RUNNING,
    PlanBuilder,
    admit,
    grow,
    is_whole,
    plan_chunk,
    plan_decodes,
    plan_forced,
    preempt_for,
    service_of,
)
from maitred.scheduler.state import Background, SchedulerState

ALONE_S = 0.03  # modelled length of a step without others: what comes meanwhile waits for its end
SHORTEST = 2.0  # the same in steps of one token, where those take longer: one more row costs little there
FEW_TOKENS = 4  # least measured step that tells what one token takes; larger ones say nothing of it
LEAST_SPAN = 16  # tokens over which the growth of a step is looked at
LEAST_CHUNK = 16  # tokens of a prompt in a step of its own, whatever they take
ONE_TOKEN = StepShape(rows=1, decode_tokens=1, context_tokens=1, samples=1, groups=1)


class Allowance(NamedTuple):
    """The longest that a step may get (s), by each of these models; by none, any step may be taken."""

    limit_s: float
    costs: tuple[CostModel, ...]

    def fits(self, rows: Iterable[ScheduledRow]) -> bool:
        shape = shape_of(rows)
        return all(costs.step_s(shape) <= self.limit_s for costs in self.costs)

    def most(self, wanted: int, rows_of: Callable[[int], Iterable[ScheduledRow]]) -> int:
        """Return the largest count up to `wanted` whose rows fit; of one that does, all smaller ones do."""
        if wanted <= 0 or self.fits(rows_of(wanted)):
            return max(0, wanted)
        return bisect_left(range(1, wanted), True, key=lambda count: not self.fits(rows_of(count)))


def allowance(costs: CostModel | None, slack: float, others: Sequence[ScheduledRow]) -> Allowance:
    """Return how long a step with these rows of other requests may get; nothing joins them where no step so small was
    measured, and any number of rows goes alone before steps were.
    """
    if not others:
        if costs is None:
            return Allowance(inf, ())
        knows = not costs.steps or costs.steps[0].size <= FEW_TOKENS
        return Allowance(max(ALONE_S, SHORTEST * costs.step_s(ONE_TOKEN) if knows else 0.0), (costs,))
    shape = shape_of(others)
    if costs is None or (costs.steps and (len(costs.steps) < 2 or costs.steps[0].size > shape.tokens)):
        return Allowance(0.0, ())
    return Allowance((1.0 + slack) * costs.step_s(shape), (costs, _even(costs, shape.tokens)))


def _even(costs: CostModel, size: int) -> CostModel:
    """Return costs by which steps of `size` tokens grow evenly up to twice as many: neighbouring measurements differ by
    less than their noise, and behind one that is too long rows would join for nothing.
    """
    end, knots = max(2 * size, size + LEAST_SPAN), costs.steps
    if not knots:
        return costs
    line = (Knot(size, between(knots, size)), Knot(end, between(knots, end)))
    return replace(costs, steps=(*line, *(knot for knot in knots if knot.size > end)))


def join(state: SchedulerState, builder: PlanBuilder) -> None:
    """Add rows of background requests to a finished plan of the others."""
    background = state.background
    background.order.begin_step()
    num_others, budget, builder.num_blocks_short = len(builder.rows), builder.budget, 0
    allowed = allowance(state.step_costs, state.config.batch_slack, builder.rows)
    has_room = allowed.limit_s > 0.0 and _plan_decodes(background, state, builder, allowed)
    for request in sorted(background.prefilling.values(), key=background.order.place):
        if has_room and request.status is RUNNING:
            num_left = request.num_tokens - request.num_computed_tokens
            most = _chunk(request, request.num_computed_tokens, builder, allowed)
            plan_chunk(state, request, builder, most=most)
            has_room = most == num_left
    if has_room and not builder.preemptions and not state.order.queue:
        _plan_admissions(background, state, builder, allowed)
    rows, requests = builder.rows[num_others:], builder.requests[num_others:]
    background.order.issued(requests, service_of(rows, background.prefilling))
    state.counters.num_background_tokens += budget - builder.budget


def _plan_decodes(background: Background, state: SchedulerState, builder: PlanBuilder, allowed: Allowance) -> bool:
    """Return whether all decode."""
    requests, is_alone = sorted(background.decoding.values(), key=background.order.place), not builder.rows
    rows = [ScheduledRow(r.request_id, at := r.num_computed_tokens, 1, at + 1 == r.num_tokens) for r in requests]
    most = allowed.most(len(rows), lambda count: [*builder.rows, *rows[:count]])
    most = min(builder.budget, max(int(is_alone), most))  # one may always go alone
    plan_decodes(state, builder, requests[:most], grow if is_alone else _take_free)
    if is_alone:
        plan_forced(state, builder)
    return most >= len(requests)


def _take_free(state: SchedulerState, request: RequestState, builder: PlanBuilder) -> Allocation | None:
    return state.kv.allocate(request, 1)


def _plan_admissions(background: Background, state: SchedulerState, builder: PlanBuilder, allowed: Allowance) -> None:
    order, groups = background.order, state.sample_groups
    while builder.budget > 0 and state.num_running < state.config.max_num_seqs:
        head = order.head()
        if head is None or (groups.groups and groups.awaits_leader(head)):
            return
        hit = state.reusable(head)
        builder.num_blocks_short = state.kv.num_blocks_short(head, hit)
        if builder.num_blocks_short:
            if state.num_running or not preempt_for(state, head, builder):
                return
            hit = state.reusable(head)
        most = _chunk(head, hit.num_tokens, builder, allowed)
        if most:
            admit(state, head, hit, builder, most)
        if most < head.num_tokens - hit.num_tokens:
            return


def _chunk(request: RequestState, start: int, builder: PlanBuilder, allowed: Allowance) -> int:
    """Return how many of the request's tokens from `start` on go into the step."""
    num_left = request.num_tokens - start
    wanted = min(builder.budget, num_left)
    if is_whole(request):
        row = ScheduledRow(request.request_id, start, num_left, False)
        return num_left if not builder.rows or (wanted == num_left and allowed.fits([*builder.rows, row])) else 0
    most = allowed.most(wanted, lambda count: [*builder.rows, ScheduledRow(request.request_id, start, count, False)])
    return most if builder.rows else max(most, min(wanted, LEAST_CHUNK))
