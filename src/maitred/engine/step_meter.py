"""What steps take on this machine, learned while it works: for swapping or computing again, and for how much to draft.

Both rules are told when what is measured is news, and their decisions are functions of what they were told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from math import floor, log2
from statistics import median

from maitred.cost_model import CostModel, Knot
from maitred.engine.prefill_meter import PrefillMeter
from maitred.scheduler.swap import SwapCosts
from maitred.step import ModelOutput, ScheduledRow, SchedulerOutput

NEWS = 1.25  # swapping: told again when a prompt's token takes this many times more or less than what was told
STEP_NEWS = 1.1  # and steps
RECENT = 9  # steps of about the same number of tokens, whose median counts: one that stuttered is none of it
WARM, EVERY = 32, 8  # after so many steps every so many of those without drafts
MADE_S = 2e-5  # of a step with drafts: asking a proposer for none takes less
EXACT = 8  # up to so many tokens each number is by itself; then four to an octave
LONG_CHUNK = 512  # positions from which on a prompt's attention is too much of its step to tell of the tokens
MEMORY = 0.99  # of what a step's context showed, one step later
STUTTER = 3.0  # times the median: says nothing of the context


class StepMeter:
    """Learns from each step of one engine; bandwidths of swapping were measured when it was built, if there is any."""

    def __init__(self, *, bytes_per_block: int = 0, out_bytes_per_s: float = 0.0, in_bytes_per_s: float = 0.0) -> None:
        self._swap = (bytes_per_block, out_bytes_per_s, in_bytes_per_s)
        self._prefill = PrefillMeter()
        self._told_prefill_s: float | None = None
        self._steps, self._drafts = Curve(), Curve()
        self._context = Slope()
        self._told: CostModel | None = None
        self._num_steps = self._asked_at = 0
        self._drafting: Set[str] = frozenset()  # in the step before

    def swap_costs(self, plan: SchedulerOutput, execute_s: float) -> SwapCosts | None:
        """Takes in a step; what swapping costs, when it is news."""
        self._prefill.observe(plan, execute_s)
        told, now_s = self._told_prefill_s, self._prefill.s_per_token
        if now_s is None or (told is not None and told / NEWS < now_s < told * NEWS):
            return None
        self._told_prefill_s = now_s
        return SwapCosts(*self._swap, now_s)

    def step_costs(self, plan: SchedulerOutput, output: ModelOutput, step_s: float) -> CostModel | None:
        """Takes in a step; what steps cost, when it is news. Of many alike, only some are looked at."""
        self._num_steps += 1
        if self._num_steps > WARM and self._num_steps % EVERY and not output.draft_s > MADE_S:
            return None
        if not plan.rows or plan.swap_outs or plan.swap_ins or step_s <= output.draft_s:
            return None
        made = {row.request_id: row.num_drafts for row in output.rows}
        self._observe_drafts(plan.rows, made, output.draft_s)
        if any(row.num_known > 1 and row.start + row.num_known > LONG_CHUNK for row in plan.rows):
            return None
        tokens = sum(row.num_known + (made.get(row.request_id, 0) if row.num_drafts else 0) for row in plan.rows)
        context = sum(row.start + row.num_tokens for row in plan.rows)
        is_decode = all(row.num_known == 1 for row in plan.rows)
        self._observe_step(tokens, context if is_decode else 0, step_s - output.draft_s)
        if self._num_steps > WARM and self._num_steps - self._asked_at < RECENT:
            return None
        self._asked_at = self._num_steps
        return self._news()

    def _observe_drafts(self, rows: Iterable[ScheduledRow], made: dict[str, int], draft_s: float) -> None:
        """A chain has fewer rows the longer it gets; counted is a link with as many as there are on average."""
        lengths = {row.request_id: row.num_drafts for row in rows if row.num_drafts}
        before, self._drafting = self._drafting, lengths.keys()
        if not lengths.keys() <= before:
            return  # who drafts for the first time makes its proposer catch up
        lengths = {request_id: length for request_id, length in lengths.items() if made.get(request_id)}
        if lengths:
            self._drafts.add(sum(lengths.values()) / max(lengths.values()), draft_s / max(lengths.values()))

    def _observe_step(self, tokens: int, context: int, step_s: float) -> None:
        usual_s = self._steps.at(tokens)
        alone_s = step_s - self._context.slope * context
        if context and (usual_s is None or alone_s < STUTTER * usual_s):
            self._context.add(bucket_of(tokens), context, step_s)
        self._steps.add(tokens, max(alone_s, 0.0))

    def _news(self) -> CostModel | None:
        model = CostModel(context_token_s=self._context.slope, steps=self._steps.knots(), drafts=self._drafts.knots())
        if not model.steps or (self._told is not None and _is_like(self._told, model)):
            return None
        self._told = model
        return model


def bucket_of(count: float) -> int:
    return round(count) if count <= EXACT else EXACT + floor(4 * log2(count / EXACT) + 0.5)


class Curve:
    """Seconds by a count: the median of recent measurements at each, and never less for more."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[tuple[float, float]]] = {}

    def add(self, count: float, seconds: float) -> None:
        self._recent.setdefault(bucket_of(count), deque(maxlen=RECENT)).append((count, seconds))

    def at(self, count: float) -> float | None:
        found = self._recent.get(bucket_of(count))
        return median(seconds for _, seconds in found) if found else None

    def knots(self) -> tuple[Knot, ...]:
        """Neighbours that fall both become their mean (pool adjacent violators): none knows which of them is wrong."""
        pooled: list[tuple[list[float], float]] = []  # (counts of the knots that share a time, it)
        for _, recent in sorted(self._recent.items()):
            counts, seconds = [sum(count for count, _ in recent) / len(recent)], median(s for _, s in recent)
            while pooled and pooled[-1][1] > seconds:
                before, before_s = pooled.pop()
                seconds = (before_s * len(before) + seconds * len(counts)) / (len(before) + len(counts))
                counts = before + counts
            pooled.append((counts, seconds))
        return tuple(Knot(count, seconds) for counts, seconds in pooled for count in counts)


class Slope:
    """Seconds a unit, of pairs that belong to groups with a level of their own: least squares within groups."""

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}  # of a group: weight, x, y, x x, x y

    def add(self, group: int, x: float, y: float) -> None:
        sums = self._sums.setdefault(group, [0.0] * 5)
        for index, value in enumerate((1.0, x, y, x * x, x * y)):
            sums[index] = MEMORY * sums[index] + value

    @property
    def slope(self) -> float:
        """0 until unlike ones were seen, and never below."""
        together = spread = 0.0
        for weight, x, y, xx, xy in self._sums.values():
            together += xy - x * y / weight
            spread += xx - x * x / weight
        enough = sum(sums[3] for sums in self._sums.values()) * 1e-4
        return max(0.0, together / spread) if spread > enough else 0.0


def _is_like(told: CostModel, model: CostModel) -> bool:
    """Whether nobody would decide otherwise for what is new in it."""
    for before, now in ((told.steps, model.steps), (told.drafts, model.drafts)):
        if len(before) != len(now):
            return False
        if any(
            not a.seconds / STEP_NEWS <= b.seconds <= a.seconds * STEP_NEWS for a, b in zip(before, now, strict=True)
        ):
            return False
    before_s, now_s = told.context_token_s, model.context_token_s
    return before_s / 1.5 <= now_s <= before_s * 1.5
