"""How many tokens to draft for whom: as many as make expected tokens a second grow, by what was measured.

A slot is a request's next position to draft for. Its chance of survival falls with each position: all before it must be
accepted too. Slots are taken the likeliest first, and of all lengths on that way the one is chosen that gives most
expected tokens in its modelled time: bandwidth-bound steps have room for many, full ones for none. Pure.
Sources: Leviathan et al. 2023, arXiv:2211.17192 (section 3.4, what a length is worth); Liu et al., Optimizing
Speculative Decoding for Serving Large Language Models Using Goodput, 2024, arXiv:2406.14066.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from maitred.cost_model import CostModel, StepShape, shape_of
from maitred.request import RequestState
from maitred.step import SampledRow, ScheduledRow

MEMORY = 0.97
"""Weight of what a request's drafts showed one step before, beside what they show now."""
SHARED_MEMORY = 0.99
PRIOR_WEIGHT = 16.0
"""Drafts' worth of what the proposer showed with others, beside what it showed with this request."""
LEVELS = 64
"""Chances are told apart in so many steps: requests of one level get one length."""
LASTS, NONE_LASTS = 6, 64
"""Steps for which a decision stands while the same requests decode, since to decide takes a good part of what a small
model's step does; one against drafts stands longer, until a trial shows something."""
TRIAL_SHARE = 0.01
"""Of time, for drafts that are not expected to pay, so that it is noticed when they would."""


@dataclass(slots=True)
class Shown:
    """What drafts showed, older ones counting less."""

    memory: float
    asked: float = 0.0  # rows that were to have drafts
    offered: float = 0.0  # rows that had some
    tried: float = 0.0  # drafts, up to the first wrong one of each row
    right: float = 0.0

    def learn(self, num_made: int, num_accepted: int) -> None:
        keep = self.memory
        self.asked = keep * self.asked + 1.0
        self.offered = keep * self.offered + (num_made > 0)
        if num_made:
            self.tried = keep * self.tried + min(num_made, num_accepted + 1)
            self.right = keep * self.right + num_accepted


@dataclass(slots=True)
class _Level:
    """Requests whose drafts are as likely to be made and accepted."""

    offer: float
    accept: float
    rows: list[int]


@dataclass(slots=True)
class Speculation:
    """Decides for one engine; `most` (1 to 16) is the most tokens of a request in a step."""

    most: int
    costs: CostModel | None = None  # of this machine, as it was last measured; nothing is drafted before
    num_trials: int = 0
    _decided: _Decided | None = None
    _credit_s: float = 0.0  # for trials
    _all: Shown = field(default_factory=lambda: Shown(SHARED_MEMORY))
    _shown: dict[str, Shown] = field(default_factory=dict)

    def lengths(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> Sequence[int]:
        """Drafts for each row of a plan without any; all 0 while prompts are in it, for they come first."""
        costs, decided = self.costs, self._decided
        if costs is None or not rows or any(row.num_tokens > 1 for row in rows):
            self._decided = None
            return [0] * len(rows)
        if decided is None or decided.num_left == 0 or not decided.is_about(costs, rows):
            decided = self._decided = self._decide(costs, rows, requests)
        decided.num_left -= 1
        if decided.is_none:
            self._credit_s += TRIAL_SHARE * decided.step.base_s
            if self._credit_s > decided.trial_s:
                return self._trial(decided.step, rows)
        return decided.lengths

    def _decide(self, costs: CostModel, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> _Decided:
        step, levels, lengths = _Step(costs, shape_of(rows)), self._levels(rows, requests), [0] * len(rows)
        for level, length in zip(levels, _best(step, levels, self.most), strict=True):
            for index in level.rows:
                lengths[index] = length
        trial_s = max(step.more_s(1, (1,)), TRIAL_SHARE * step.base_s)
        return _Decided(costs, rows[0].request_id, rows[-1].request_id, step, lengths, trial_s)

    def learn(self, row: ScheduledRow, result: SampledRow) -> None:
        """What came of a row with drafts."""
        if self._decided is not None and self._decided.is_none:
            self._decided = None
        shown = self._shown.setdefault(row.request_id, Shown(MEMORY))
        for one in (shown, self._all):
            one.learn(result.num_drafts, result.num_accepted)

    def ended(self, request_id: str) -> None:
        self._shown.pop(request_id, None)

    def chances(self, request_id: str) -> tuple[float, float]:
        """That there are drafts for a request when asked for, and that one is accepted after those before it."""
        every, own = self._all, self._shown.get(request_id)
        offer, accept = (every.offered + 1.0) / (every.asked + 1.0), (every.right + 1.0) / (every.tried + 2.0)
        if own is None:
            return offer, accept
        weight = PRIOR_WEIGHT
        return (
            (own.offered + weight * offer) / (own.asked + weight),
            (own.right + weight * accept) / (own.tried + weight),
        )

    def _levels(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> list[_Level]:
        levels: dict[tuple[int, int], _Level] = {}
        for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
            if not row.samples:
                continue
            offer, accept = self.chances(request.request_id)
            key = round(offer * LEVELS), round(accept * LEVELS)
            level = levels.get(key)
            if level is None:
                level = levels[key] = _Level(key[0] / LEVELS, key[1] / LEVELS, [])
            level.rows.append(index)
        return list(levels.values())

    def _trial(self, step: _Step, rows: Sequence[ScheduledRow]) -> Sequence[int]:
        """One row's drafts now and then: as many as the time put aside for it allows."""
        index, lengths = self.num_trials % len(rows), [0] * len(rows)
        if not rows[index].samples:
            self.num_trials += 1
            return lengths
        length = self.most
        while length and (cost_s := step.more_s(length, [1] * length)) > self._credit_s:
            length -= 1
        if length:
            self.num_trials += 1
            self._credit_s -= max(cost_s, TRIAL_SHARE * step.base_s)
            lengths[index] = length
        return lengths


@dataclass(slots=True)
class _Decided:
    """Lengths for the rows of a plan, and of those after it while the same requests are in it."""

    costs: CostModel
    first_id: str
    last_id: str
    step: _Step
    lengths: list[int]
    trial_s: float  # what the least trial takes
    is_none: bool = field(init=False)
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.is_none = not any(self.lengths)
        self.num_left = NONE_LASTS if self.is_none else LASTS

    def is_about(self, costs: CostModel, rows: Sequence[ScheduledRow]) -> bool:
        """Requests come in at the end and go from anywhere, which changes how many there are."""
        return (
            costs is self.costs
            and len(rows) == len(self.lengths)
            and rows[0].request_id == self.first_id
            and rows[-1].request_id == self.last_id
        )


class _Step:
    """A step without drafts, and what it takes longer with some."""

    __slots__ = ("_costs", "_shape", "base_s")

    def __init__(self, costs: CostModel, shape: StepShape) -> None:
        self._costs, self._shape = costs, shape
        self.base_s = costs.step_s(shape)

    def more_s(self, num_drafts: float, rows_at_depth: Iterable[float]) -> float:
        """With so many drafts in all, of so many rows at each depth."""
        shape, costs = self._shape, self._costs
        longer = shape._replace(
            decode_tokens=shape.decode_tokens + num_drafts,  # type: ignore[arg-type]  # expected ones are no integers
            samples=shape.samples + num_drafts,  # type: ignore[arg-type]
        )
        return costs.step_s(longer) - self.base_s + sum(costs.draft_s(rows) for rows in rows_at_depth)


def _best(step: _Step, levels: Sequence[_Level], most: int) -> list[int]:
    """The length of each level that gives most expected tokens a second, on the way from the likeliest slot down."""
    slots = sorted(
        (
            (level.accept**depth, depth, index)
            for index, level in enumerate(levels)
            for depth in range(1, most + 1)
            if level.offer * level.accept > 0
        ),
        key=lambda slot: (-slot[0], slot[1], slot[2]),
    )
    expected = float(sum(len(level.rows) for level in levels))
    best_rate, best_end = expected / step.base_s if step.base_s > 0 else inf, 0
    drafts, rows_at_depth = 0.0, [0.0] * most
    for end, (survival, depth, index) in enumerate(slots, 1):
        level = levels[index]
        made = level.offer * len(level.rows)
        expected += made * survival
        drafts += made
        rows_at_depth[depth - 1] += made
        rate = expected / (step.base_s + step.more_s(drafts, rows_at_depth[:depth]))
        if rate > best_rate:
            best_rate, best_end = rate, end
    lengths = [0] * len(levels)
    for _, depth, index in slots[:best_end]:
        lengths[index] = depth
    return lengths
