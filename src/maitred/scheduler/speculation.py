"""Drafts in a plan: as many for each request as raise expected tokens a second, by measured times.

A slot is a request's next position to draft for. Its chance of survival falls with each position: all before it must be
accepted too. Slots are taken the likeliest first, and the length on that way with most expected tokens in its modelled
time is chosen: bandwidth-bound steps have room for many, full ones for none. Pure. Sources: Leviathan et al. 2023,
arXiv:2211.17192 (section 3.4, what a length is worth); Liu et al., Optimizing Speculative Decoding for Serving Large
Language Models Using Goodput, 2024, arXiv:2406.14066.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from maitred.core.cost_model import CostModel, shape_of
from maitred.core.request import RequestState
from maitred.core.step import ModelOutput, SampledRow, ScheduledRow, SchedulerOutput
from maitred.policy.policies import expected_outputs
from maitred.scheduler.planning import PlanBuilder
from maitred.scheduler.state import SchedulerState

NumDrafts = Callable[[RequestState, int], int]
"""(request, rows in the plan) -> how many tokens to draft for it; pure. For recorded lengths, and for tests."""

MEMORY = 0.97
"""Weight of what a request's drafts showed one step before, beside what they show now."""
SHARED_MEMORY = 0.99
PRIOR_WEIGHT = 16.0
"""Drafts' worth of what the proposer showed with others, beside what it showed with this request."""
LEVELS = 64
"""Chances are told apart in so many steps: requests of one level get one length."""
LASTS, NONE_LASTS = 6, 64
"""Steps for which a decision stands while the same requests decode, since to decide takes a good part of what a small
model's step does; one against drafts stands longer, until a trial shows something or, after a while, others come."""
FEWER = 7 / 8
"""Share of the rows of a decision: with fewer left, a step that was too full may not be."""
TRIAL_SHARE = 0.01
"""Share of time for drafts that are not expected to pay, which shows when they would, and for steps without any where
drafts are expected to, which measures those.
"""
LEAST_LOST = 0.05
"""Share of a step's time that a step without drafts is taken to lose at least: smaller gains cannot be measured."""


@dataclass(slots=True)
class Shown:
    """Results of drafts, older ones counting less."""

    memory: float
    asked: float = 0.0  # rows that were to have drafts
    offered: float = 0.0  # rows that had some
    tried: float = 0.0  # drafts, up to the first wrong one of each row
    right: float = 0.0
    num_computed: int = 0  # tokens of the request that its proposer has computed

    def learn(self, num_made: int, num_accepted: int) -> None:
        keep = self.memory
        self.asked = keep * self.asked + 1.0
        self.offered = keep * self.offered + (num_made > 0)
        if num_made:
            self.tried = keep * self.tried + min(num_made, num_accepted + 1)
            self.right = keep * self.right + num_accepted

    def chances(self, offer: float, accept: float) -> tuple[float, float]:
        """Return the chances, with the results of other requests as a prior."""
        weight = PRIOR_WEIGHT
        return (
            (self.offered + weight * offer) / (self.asked + weight),
            (self.right + weight * accept) / (self.tried + weight),
        )


@dataclass(slots=True)
class _Level:
    """Requests with equal chances that drafts are made and accepted."""

    offer: float
    accept: float
    rows: list[int] = field(default_factory=list)
    catch_up_s: float = 0.0  # what their proposer has yet to compute, spread over the steps that they have left

    def gain(self, most: int) -> float:
        """Expected tokens of a step with all the drafts that there may be."""
        return self.offer * len(self.rows) * sum(self.accept**depth for depth in range(1, most + 1))


@dataclass(slots=True)
class Speculation:
    """Decides for one engine; `most` (1 to 16) is the most tokens of a request in a step."""

    most: int
    costs: CostModel | None = None  # of this machine, as it was last measured; nothing is drafted before
    num_trials: int = 0
    _again: Sequence[int] = ()  # a trial has two steps, for the first finds colder caches than it would leave
    _num_resting: int = 0  # steps to come without a look at anything
    _decided: _Decided | None = None
    _credit_s: float = 0.0  # for trials
    _all: Shown = field(default_factory=lambda: Shown(SHARED_MEMORY))
    _shown: dict[str, Shown] = field(default_factory=dict)

    def lengths(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> Sequence[int]:
        """Drafts for each row of a plan without any, or nothing for none; rows that compute prompts have none."""
        if len(again := self._again) == len(rows) > 0:
            self._again = ()
            return again
        if self._num_resting:
            self._num_resting -= 1
            return ()
        costs, decided = self.costs, self._decided
        if costs is None or not rows:
            return ()
        num_tokens = sum([row.num_tokens for row in rows])
        if num_tokens > len(rows) and all(row.num_tokens > 1 for row in rows):
            return ()
        if decided is None or decided.num_left <= 0 or not decided.is_about(costs, num_tokens, rows):
            decided = self._decided = self._decide(costs, num_tokens, rows, requests)
        decided.num_left -= LASTS if decided.is_none else 1
        if decided.is_none:
            self._credit_s += TRIAL_SHARE * decided.step.base_s * LASTS
            self._num_resting = LASTS - 1
            return self._trial(decided, rows, requests) if self._credit_s > decided.trial_s else ()
        self._credit_s += TRIAL_SHARE * decided.step.base_s
        if self._credit_s <= decided.trial_s:
            return decided.lengths
        self._credit_s -= decided.trial_s
        self._num_resting = 1  # two, as in a trial of drafts
        return ()

    def _decide(
        self, costs: CostModel, num_tokens: int, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]
    ) -> _Decided:
        step, lengths = _Step(costs, rows), [0] * len(rows)
        levels = self._levels(step, rows, requests)
        best, share_lost = _best(step, levels, self.most)
        for level, length in zip(levels, best, strict=True):
            for index in level.rows:
                lengths[index] = length
        trial_s = 2 * step.base_s * max(share_lost, LEAST_LOST) if any(lengths) else self._trial_s(step)
        return _Decided(costs, num_tokens, rows[0].request_id, rows[-1].request_id, step, lengths, trial_s)

    def learn_of(self, plan: SchedulerOutput, output: ModelOutput) -> None:
        """Learn the results of a plan's drafts."""
        drafted = {row.request_id: row for row in plan.rows if row.num_drafts}
        for result in output.rows if drafted else ():
            if result.request_id in drafted and result.token_ids:
                self.learn(drafted[result.request_id], result)

    def learn(self, row: ScheduledRow, result: SampledRow) -> None:
        """Learn the results of a row with drafts."""
        if result.num_accepted and self._decided is not None and self._decided.is_none:
            self._decided, self._num_resting = None, 0  # a trial that brought nothing leaves it at that
        shown = self._shown.setdefault(row.request_id, Shown(MEMORY))
        shown.num_computed = row.start + row.num_known + result.num_accepted
        for one in (shown, self._all):
            one.learn(result.num_drafts, result.num_accepted)

    def forgotten(self, request_ids: Iterable[str]) -> None:
        """Forget requests that left the executor; what their proposer computed is gone."""
        for request_id in request_ids:
            shown = self._shown.get(request_id)
            if shown is not None:
                shown.num_computed = 0

    def ended(self, request_id: str) -> None:
        self._shown.pop(request_id, None)

    def chances(self, request_id: str) -> tuple[float, float]:
        """Return the chance that a request gets drafts when asked, and that one is accepted after those before it."""
        every, own = self._all, self._shown.get(request_id)
        offer, accept = (every.offered + 1.0) / (every.asked + 1.0), (every.right + 1.0) / (every.tried + 2.0)
        return (offer, accept) if own is None else own.chances(offer, accept)

    def num_behind(self, request: RequestState) -> int:
        """Known tokens that its proposer has yet to compute before it drafts, if they are more than it made up last."""
        shown = self._shown.get(request.request_id)
        behind = request.num_tokens - 1 - (shown.num_computed if shown is not None else 0)
        return behind if behind > self.most else 0

    def _levels(self, step: _Step, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> list[_Level]:
        """Return the levels of decoding rows, without those too few of whose drafts would pay for catching up."""
        levels: dict[tuple[int, int, int], _Level] = {}
        token_s, prior, shown = step.costs.catch_up_token_s, self.chances(""), self._shown
        for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
            if not row.samples or row.num_tokens > 1:
                continue
            own = shown.get(row.request_id)
            offer, accept = prior if own is None else own.chances(*prior)
            behind = self.num_behind(request) / _num_left(request) if token_s else 0.0  # for a token to come
            key = round(offer * LEVELS), round(accept * LEVELS), int(4 * behind).bit_length()
            level = levels.get(key)
            if level is None:
                level = levels[key] = _Level(key[0] / LEVELS, key[1] / LEVELS)
            level.rows.append(index)
            level.catch_up_s += token_s * behind
        return [level for level in levels.values() if level.catch_up_s < level.gain(self.most) * step.token_s]

    def _trial_s(self, step: _Step) -> float:
        """Return the time of one draft or, every second time, of the longest length, to measure that too."""
        length = 1 if self.num_trials % 2 else self.most
        return max(2 * step.more_s(length, [1] * length), TRIAL_SHARE * step.base_s)

    def _trial(
        self, decided: _Decided, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]
    ) -> Sequence[int]:
        """Return one row's drafts now and then: as many as the time put aside for it allows."""
        step, index, lengths = decided.step, self.num_trials % len(rows), [0] * len(rows)
        if not rows[index].samples or rows[index].num_tokens > 1:
            self.num_trials += 1
            return lengths
        catch_up_s = step.costs.catch_up_token_s * self.num_behind(requests[index])
        length = self.most
        while length and (cost_s := catch_up_s + 2 * step.more_s(length, [1] * length)) > self._credit_s:
            length -= 1
        if length:
            self._credit_s -= max(cost_s, TRIAL_SHARE * step.base_s)
            lengths[index] = length
            self._again = lengths
        self.num_trials += 1
        # A row too far behind is passed over, and waited for: others may be less so.
        decided.trial_s = self._trial_s(step) if length else min(2 * decided.trial_s, cost_s)
        return lengths


def _num_left(request: RequestState) -> float:
    """Tokens that are expected to come."""
    return max(1.0, expected_outputs(request) - request.num_output_tokens)


@dataclass(slots=True)
class _Decided:
    """Lengths for the rows of a plan, and of those after it while the same requests are in it."""

    costs: CostModel
    num_tokens: int
    first_id: str
    last_id: str
    step: _Step
    lengths: list[int]
    trial_s: float  # what the least trial takes, or two steps without drafts
    is_none: bool = field(init=False)
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.is_none = not any(self.lengths)
        decode_only = self.num_tokens == len(self.lengths)  # else others begin to decode soon
        self.num_left = NONE_LASTS if self.is_none and decode_only else LASTS

    def is_about(self, costs: CostModel, num_tokens: int, rows: Sequence[ScheduledRow]) -> bool:
        """Requests come in at the end and go from anywhere, which changes how many there are."""
        if self.is_none:
            is_new = self.num_left > NONE_LASTS - 2 * LASTS
            return len(rows) >= FEWER * len(self.lengths) and (is_new or rows[-1].request_id == self.last_id)
        return (
            costs is self.costs
            and num_tokens == self.num_tokens
            and len(rows) == len(self.lengths)
            and rows[0].request_id == self.first_id
            and rows[-1].request_id == self.last_id
        )


class _Step:
    """A step without drafts, and what it takes longer with some.

    Where prompts are in it, `base_s` is what it would take without them: their time is worth what they bring, and a
    draft is to be had for less than a step of those that decode.
    """

    __slots__ = ("_decode", "_prefill", "_tokens_s", "base_s", "costs", "num_decoding")

    def __init__(self, costs: CostModel, rows: Sequence[ScheduledRow]) -> None:
        decoding = [row for row in rows if row.num_tokens == 1]
        shape, alone = shape_of(rows), shape_of(decoding)
        self.costs, self._prefill, self._decode = costs, shape.prefill_tokens, shape.decode_tokens
        self._tokens_s = costs.tokens_s(self._prefill, self._decode)
        self.num_decoding = len(decoding)
        self.base_s = costs.step_s(alone if decoding else shape)

    @property
    def token_s(self) -> float:
        """Time of one token of the decoding rows."""
        return self.base_s / max(1, self.num_decoding)

    def more_s(self, num_drafts: float, rows_at_depth: Iterable[float]) -> float:
        """Return the added time of so many drafts in all, asked of so many rows at each depth."""
        costs = self.costs
        tokens_s = costs.tokens_s(self._prefill, self._decode + num_drafts) - self._tokens_s
        return tokens_s + num_drafts * costs.sample_s + sum([costs.draft_s(rows) for rows in rows_at_depth])


def _best(step: _Step, levels: Sequence[_Level], most: int) -> tuple[list[int], float]:
    """The length of each level that gives most expected tokens a second, on the way from the likeliest slot down; and
    which share of them a step without drafts loses."""
    slots = sorted(
        (-(level.accept**depth), depth, index)
        for index, level in enumerate(levels)
        for depth in range(1, most + 1)
        if level.offer * level.accept > 0
    )
    expected, to_come = float(step.num_decoding), sum(level.gain(most) for level in levels)
    best_rate, best_end = expected / step.base_s if step.base_s > 0 else inf, 0
    plain_rate = best_rate
    drafts = draft_s = longer_s = 0.0
    rows_at_depth = [0] * (most + 1)
    for end, (survival, depth, index) in enumerate(slots, 1):
        if expected + to_come <= best_rate * (step.base_s + longer_s):
            break  # not even if the rest cost nothing
        level = levels[index]
        made, before = level.offer * len(level.rows), rows_at_depth[depth]
        expected -= made * survival
        to_come += made * survival
        drafts += made
        rows_at_depth[depth] = before + len(level.rows)
        draft_s += step.costs.draft_s(rows_at_depth[depth]) - step.costs.draft_s(before)
        draft_s += level.catch_up_s if depth == 1 else 0.0
        longer_s = draft_s + step.more_s(drafts, ())
        rate = expected / (step.base_s + longer_s)
        if rate > best_rate:
            best_rate, best_end = rate, end
    lengths = [0] * len(levels)
    for _, depth, index in slots[:best_end]:
        lengths[index] = depth
    return lengths, 1.0 - plain_rate / best_rate if best_end else 0.0


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
