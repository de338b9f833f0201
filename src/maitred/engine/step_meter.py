"""Step times of this machine, learned while it works: for swapping or computing again, and for how much to draft.

Both rules are told when what is measured is news, and their decisions are functions of what they were told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import floor, log2
from statistics import median
from typing import Any, NamedTuple

from maitred.core.cost_model import CostModel, Knot, SwapCosts
from maitred.core.step import ModelOutput, RequestProgress, ScheduledRow, SchedulerOutput
from maitred.scheduler.engine_core import EngineCore, PrefillMeter, StepListener, StepTimes

NEWS = 1.25  # swapping: told again when a prompt's token takes this many times more or less than what was told
STEP_NEWS = 1.1  # and steps
RECENT = 9  # steps of about the same number of tokens, whose lower quartile counts
COLD, FIRST, WARM = 2, 8, 32  # steps of a kind that touch memory anew; until it is first told; each looked at
LOOK_S, ASK_S = 0.03, 0.1  # after those: time between looks at steps of a kind, and at what they make
EXACT = 8  # up to so many tokens each number is by itself; then four to an octave
LONG_CHUNK = 512  # positions from which on a prompt's attention is too much of its step to tell of the tokens
BEHIND = 16  # tokens for each row that drafts: more is a proposer that catches up
MEMORY = 0.99  # of what a step's context showed, one step later
SURE = 3.0
STUTTER = 3.0  # times the median: says nothing of the context


class SwapMeter(StepListener):
    """Learns from each step what swapping costs; bandwidths were measured when the engine was built."""

    def __init__(self, *, bytes_per_block: int, out_bytes_per_s: float, in_bytes_per_s: float) -> None:
        self._swap = (bytes_per_block, out_bytes_per_s, in_bytes_per_s)
        self._prefill = PrefillMeter()
        self._told_prefill_s: float | None = None

    def begin(self, core: EngineCore) -> None:
        self._core = core

    def stepped(
        self, plan: SchedulerOutput, output: ModelOutput, progress: list[RequestProgress], times: StepTimes
    ) -> None:
        if (costs := self.swap_costs(plan, times.execute_s)) is not None:
            self._core.set_swap_costs(costs)

    def swap_costs(self, plan: SchedulerOutput, execute_s: float) -> SwapCosts | None:
        """Takes in a step; what swapping costs, when it is news."""
        self._prefill.observe(plan, execute_s)
        told, now_s = self._told_prefill_s, self._prefill.s_per_token
        if now_s is None or (told is not None and told / NEWS < now_s < told * NEWS):
            return None
        self._told_prefill_s = now_s
        return SwapCosts(*self._swap, now_s)


class ExpertLoad(StepListener):
    """Tells how unevenly the native executor's routed layers use their experts."""

    follows_steps = False

    def __init__(self, executor: Any) -> None:
        self._runner = executor.runner

    def figures(self) -> Mapping[str, float]:
        return {"expert_load_ratio": self._runner.expert_load_ratio}


class StepMeter(StepListener):
    """Learns from each step of one engine what steps and drafts cost."""

    follows_background = True

    def __init__(self, *, follows_steps: bool = True) -> None:
        self.follows_steps = follows_steps
        self._steps, self._drafts, self._host = Curve(), Curve(), Curve()
        self._context = Slope()
        self._catch_up: deque[float] = deque(maxlen=RECENT)  # s for each token
        self._computed: dict[str, int] = {}  # by request with drafts: tokens that the proposer has
        self._told: CostModel | None = None
        self._num_steps, self._total_s, self._asked_at = 0, 0.0, 0.0
        self._looked_at = {False: 0.0, True: 0.0}  # at steps without drafts and with some
        self._num_cold = {False: COLD, True: COLD}
        self._was_drafting = False

    @property
    def costs(self) -> CostModel | None:
        """Costs that were told last."""
        return self._told

    def begin(self, core: EngineCore) -> None:
        self._core = core

    def stepped(
        self, plan: SchedulerOutput, output: ModelOutput, progress: list[RequestProgress], times: StepTimes
    ) -> None:
        """Drafts cost the host time too."""
        host_s = self._core.clock.now() - times.executed_at + times.execute_at - times.scheduled_at
        if (costs := self.step_costs(plan, output, times.execute_s, host_s)) is not None:
            self._core.set_step_costs(costs)

    def step_costs(
        self, plan: SchedulerOutput, output: ModelOutput, execute_s: float, host_s: float
    ) -> CostModel | None:
        """Takes in a step; what steps cost, when it is news. Of many alike, only some are looked at."""
        self._num_steps += 1
        began_s, self._total_s = self._total_s, self._total_s + execute_s + host_s
        for request_id in plan.forgotten_request_ids:
            self._computed.pop(request_id, None)
        drafting = output.draft_s > 0.0
        was_drafting, self._was_drafting = self._was_drafting, drafting
        asked = self._asked(plan.rows) if drafting else NOT_ASKED
        is_warm = self._num_steps > WARM
        if is_warm and asked.num_behind == 0 and began_s - self._looked_at[drafting] < LOOK_S:
            return None  # whether it is looked at does not depend on how long it took
        if not plan.rows or plan.swap_outs or plan.swap_ins or execute_s <= output.draft_s:
            return None
        if self._num_cold[drafting]:
            self._num_cold[drafting] -= 1
            return None
        if was_drafting != drafting and asked.num_behind == 0:
            return None  # caches are colder than in steps of a kind that follow each other
        self._looked_at[drafting] = self._total_s
        self._look(plan.rows, output, asked, execute_s - output.draft_s, host_s)
        if self._num_steps < FIRST or (is_warm and not asked.num_behind and self._total_s - self._asked_at < ASK_S):
            return None
        self._asked_at = self._total_s
        return self._news()

    def _asked(self, rows: Iterable[ScheduledRow]) -> Asked:
        """Each step with drafts is noted, so that it is known how far their proposer is behind."""
        num_rows = num_drafts = longest = num_behind = 0
        computed = self._computed
        for request_id, start, num_tokens, _, _, _, wanted in rows:
            if wanted:
                num_rows += 1
                num_drafts += wanted
                longest = max(longest, wanted)
                num_behind += max(0, start + num_tokens - wanted - 1 - computed.get(request_id, 0))
                computed[request_id] = start + num_tokens
        return Asked(num_drafts, longest, num_behind if num_behind > BEHIND * num_rows else 0)

    def _look(
        self, rows: Sequence[ScheduledRow], output: ModelOutput, asked: Asked, model_s: float, host_s: float
    ) -> None:
        """`model_s` is the executor's time without making up drafts."""
        made = sum([row.num_drafts for row in output.rows]) if asked.longest else 0
        tokens = made - asked.num_drafts + sum([row.num_tokens for row in rows])
        is_decode = tokens == made + len(rows)
        usual_s = self._host.at(len(rows)) if is_decode else None
        if asked.longest:
            more_s = max(0.0, host_s - usual_s) if usual_s is not None else 0.0
            host_s -= more_s
            self._observe_drafts(asked, output.draft_s + more_s)
            if asked.num_behind:
                return
        elif is_decode:
            self._host.add(len(rows), host_s)
        if not is_decode and any(row.num_known > 1 and row.start + row.num_known > LONG_CHUNK for row in rows):
            return
        context = sum([row.start + row.num_tokens for row in rows]) if is_decode else 0
        self._observe_step(tokens, context, model_s + host_s)

    def _observe_drafts(self, asked: Asked, drafting_s: float) -> None:
        """A chain has fewer rows the longer it gets; counted is a link with as many as there are on average."""
        rows = asked.num_drafts / asked.longest
        if not asked.num_behind:
            self._drafts.add(rows, drafting_s / asked.longest)
        elif (usual_s := self._drafts.at(rows)) is not None:
            self._catch_up.append(max(0.0, drafting_s - usual_s * asked.longest) / asked.num_behind)

    def _observe_step(self, tokens: int, context: int, step_s: float) -> None:
        usual_s = self._steps.at(tokens)
        alone_s = step_s - self._context.slope * context
        if context and (usual_s is None or alone_s < STUTTER * usual_s):
            self._context.add(bucket_of(tokens), context, step_s)
        self._steps.add(tokens, max(alone_s, 0.0))

    def _news(self) -> CostModel | None:
        model = CostModel(
            context_token_s=self._context.slope,
            steps=self._steps.knots(),
            drafts=self._drafts.knots(),
            catch_up_token_s=median(self._catch_up) if self._catch_up else 0.0,
        )
        if not model.steps or (self._told is not None and _is_like(self._told, model)):
            return None
        self._told = model
        return model


class Asked(NamedTuple):
    """Work that a plan asks of a drafter."""

    num_drafts: int
    longest: int  # of one row
    num_behind: int  # known tokens that are computed first, if they are many


NOT_ASKED = Asked(0, 0, 0)


def bucket_of(count: float) -> int:
    return round(count) if count <= EXACT else EXACT + floor(4 * log2(count / EXACT) + 0.5)


class Curve:
    """Seconds by a count: the lower quartile of recent measurements at each, and never less for more.

    What makes a step take longer than it must is a machine that is cold or busy, and a kind of step that is rarely
    taken would be judged by that for long. So those that took several times as long as a newer one are dropped, too.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[tuple[float, float]]] = {}

    def add(self, count: float, seconds: float) -> None:
        before = self._recent.get(bucket_of(count), ())
        kept = [each for each in before if each[1] <= STUTTER * seconds]
        self._recent[bucket_of(count)] = deque([*kept, (count, seconds)], maxlen=RECENT)

    def at(self, count: float) -> float | None:
        found = self._recent.get(bucket_of(count))
        return _lower_quartile([seconds for _, seconds in found]) if found else None

    def knots(self) -> tuple[Knot, ...]:
        """Neighbours that fall both become their mean (pool adjacent violators): none knows which of them is wrong."""
        pooled: list[tuple[list[float], float, int]] = []  # (counts of the knots that share a time, it, measurements)
        for _, recent in sorted(self._recent.items()):
            counts, seconds = [sum(count for count, _ in recent) / len(recent)], _lower_quartile([s for _, s in recent])
            weight = len(recent)
            while pooled and pooled[-1][1] > seconds:
                before, before_s, before_weight = pooled.pop()
                seconds = (before_s * before_weight + seconds * weight) / (before_weight + weight)
                counts, weight = before + counts, before_weight + weight
            pooled.append((counts, seconds, weight))
        return tuple(Knot(count, seconds) for counts, seconds, _ in pooled for count in counts)


def _lower_quartile(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]


class Slope:
    """Seconds a unit, of pairs that belong to groups with a level of their own: least squares within groups.

    A slope that is less than SURE times its standard error is none: a few steps of alike contexts that stuttered would
    else explain all of what a step takes.
    """

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}  # of a group: weight, x, y, x x, x y, y y

    def add(self, group: int, x: float, y: float) -> None:
        sums = self._sums.setdefault(group, [0.0] * 6)
        for index, value in enumerate((1.0, x, y, x * x, x * y, y * y)):
            sums[index] = MEMORY * sums[index] + value

    @property
    def slope(self) -> float:
        """0 until unlike ones were seen, and never below."""
        together = spread = around = 0.0
        free = -1.0 - len(self._sums)
        for weight, x, y, xx, xy, yy in self._sums.values():
            together += xy - x * y / weight
            spread += xx - x * x / weight
            around += yy - y * y / weight
            free += weight
        enough = sum(sums[3] for sums in self._sums.values()) * 1e-4
        if spread <= enough or together <= 0.0 or free <= 0.0:
            return 0.0
        slope = together / spread
        left = max(0.0, around - slope * together)
        return slope if slope * together * free >= SURE**2 * left else 0.0


def _is_like(told: CostModel, model: CostModel) -> bool:
    """Whether no decision would change for what is new in it."""
    for before, now in ((told.steps, model.steps), (told.drafts, model.drafts)):
        if len(before) != len(now):
            return False
        if any(
            not a.seconds / STEP_NEWS <= b.seconds <= a.seconds * STEP_NEWS for a, b in zip(before, now, strict=True)
        ):
            return False
    pairs = (told.context_token_s, model.context_token_s), (told.catch_up_token_s, model.catch_up_token_s)
    return all(before_s / 1.5 <= now_s <= before_s * 1.5 for before_s, now_s in pairs)
