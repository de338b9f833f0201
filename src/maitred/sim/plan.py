"""Plans: which workers a load takes, searched over simulations of the scheduler, router and hand-over that serve.

Each candidate is first held against bounds by formula, so that simulations are spent on what could be best. The goodput
of one worker of each role is then found by bisecting the rate (DistServe's placement: Zhong et al. 2024,
arXiv:2401.09670, section 4), which gives counts, and whole layouts are decided by simulation. Everything follows from
the seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import NamedTuple

from maitred.core.cost_model import CostModel, StepShape
from maitred.fleet.disagg import LAX_TPOT_S, LAX_TTFT_S, Role
from maitred.sim.layouts import (
    Group,
    Judged,
    LayoutFigures,
    PlannedDevice,
    PlanTerms,
    WorkerLayout,
    simulate_layout,
    simulate_worker,
)
from maitred.sim.links import SimulatedLink

MODES = ("aggregated", "disaggregated", "hybrid")
MOST_SEQS = 1024
PREFILL_SEQS = 64  # prompts at once on a prefill worker
BUDGETS = {Role.MIXED: (2048, 512), Role.PREFILL: (2048, 8192)}  # tokens of a step that are tried
KEEPS_UP = 0.97  # of the throughput under overload: beyond, a queue grows without end
FINENESS = 0.04  # of a rate, to which it is searched
JUDGED = (150, 400)  # requests judged for one worker, and for a layout; those before are its warm-up
MOST_WARM_UP = (400, 3200)
MOST_OVERLOADED = 600  # requests that tell what one worker can do at most
MOST_PROBES = 10  # rates tried of one worker
MOST_MOVES = 12  # workers added or taken in a search
FASTEST_LINK = 1e12  # bytes/s
MOST_WHOLE, MOST_IN_SLICE = 64, 32  # devices that are simulated whole, and of a slice where there are more
SLICE_PARTS = (0.25, 0.5, 1.0)  # of a slice, by which its figures are checked
MOST_LAYOUTS = 3  # of a mode, the best by one worker's goodput, that are simulated as a whole


@dataclass(slots=True)
class Plan:
    """What a search has found."""

    best: dict[str, LayoutFigures] = field(default_factory=dict)  # of each mode
    tried: list[LayoutFigures] = field(default_factory=list)  # layouts that met the objectives
    rejected: Counter[str] = field(default_factory=Counter)  # candidates by reason
    nearest: dict[str, tuple[float, str]] = field(default_factory=dict)  # objective -> best value (s) seen, of what
    pays_from: float | None = None  # bytes/s of the link; inf is at no speed
    parts: list[LayoutFigures] = field(default_factory=list)  # of a slice of the best layout, by SLICE_PARTS
    num_simulations: int = 0
    num_row_steps: int = 0
    is_cut: bool = False  # before its end


class WorkerBound(NamedTuple):
    """Limits of a worker by formula."""

    rate: float  # requests a second that it cannot exceed
    batch: int  # requests that decode at once within pace and memory
    in_flight_s: float  # a request's stay at that batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGoal:
    """What a search is for: a rate met by as little as possible, or the highest rate of some devices."""

    rate: float | None = None
    """Requests a second; None is the highest of `num_devices`."""
    num_devices: int | None = None
    modes: tuple[str, ...] = MODES
    minimise: str = "devices"
    """devices, cost or energy."""
    max_num_seqs: int | None = None
    """Fixed limits of every worker; None searches."""
    token_budget: int | None = None

    def needs(self, layout: WorkerLayout) -> tuple[float, ...]:
        """What is minimised, then devices and price."""
        watts = layout.num_slices * sum(group.count * group.candidate.target.power_w for group in layout.groups)
        first = {"devices": float(layout.num_devices), "cost": layout.price, "energy": watts}[self.minimise]
        return (first, layout.num_devices, layout.price)


class Planner:
    """One search; `plan` is what it has found so far, also when it is cut."""

    def __init__(
        self,
        wanted: PlanGoal,
        terms: PlanTerms,
        candidates: Sequence[PlannedDevice],
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`tell` gets a line for each mode, and an empty one before each simulation; what it raises ends the search."""
        self.wanted, self.terms, self.plan = wanted, terms, Plan()
        self._demand, self._tell = terms.demand, tell
        self._candidates = sorted(candidates, key=lambda each: (each.target.num_devices, each.name))
        self._goodputs: dict[Group, float] = {}
        self._throughputs: dict[Group, float] = {}
        self._best_of: dict[Role, list[Group]] = {}
        goals = terms.objectives
        even_s = None if goals.e2e_s is None else goals.e2e_s / terms.demand.mean_output
        self._pace_s = goals.tpot_s or goals.itl_s or even_s or LAX_TPOT_S
        self._ttft_s = goals.ttft_s or goals.e2e_s or LAX_TTFT_S
        # a worker alone is held against some first token, so that its queue cannot grow unseen
        self._worker_terms = replace(terms, objectives=replace(goals, ttft_s=self._ttft_s))

    def search(self) -> Plan:
        for mode in self.wanted.modes:
            for layout in self._layouts(mode):
                if self.wanted.rate is None:
                    self._find_rate(layout)
                else:
                    self._find_counts(layout, self.wanted.rate)
            if mode in self.plan.best:
                self._tell(f"{mode}: {self.plan.best[mode].layout.label}")
        if {"aggregated", "disaggregated"} <= self.plan.best.keys():
            self.plan.pays_from = self._find_link()
        best = min(self.plan.best.values(), key=self.score, default=None)
        if best is not None and best.layout.num_slices > 1:
            self.plan.parts = [self._part(best, share) for share in SLICE_PARTS]
        return self.plan

    def score(self, outcome: LayoutFigures) -> tuple[float, ...]:
        """Smaller is better: rate or what is minimised, then requests that met the objectives, then their time."""
        needs, equals = self.wanted.needs(outcome.layout), (-round(outcome.attainment, 2), outcome.latency_s)
        if self.wanted.rate is None:
            return (-outcome.rate, *needs, *equals)
        first = outcome.watts if self.wanted.minimise == "energy" else needs[0]
        return (first, *needs[1:], *equals)

    def front(self) -> list[LayoutFigures]:
        """Layouts that no other beats in both: what is minimised, or the rate, and how long a request takes."""
        front: list[LayoutFigures] = []
        for outcome in sorted(self.plan.tried, key=lambda each: (self.score(each)[0], each.latency_s)):
            if not front or outcome.latency_s < front[-1].latency_s:
                front.append(outcome)
        return front

    # -- layouts of a mode

    def _layouts(self, mode: str) -> Iterator[WorkerLayout]:
        """Layouts to be settled by simulation, the most hopeful first."""
        if mode == "disaggregated":
            decoding = self._workers(Role.DECODE)
            yield from self._ranked(mode, [(p, d) for p in self._workers(Role.PREFILL) for d in decoding])
            return
        alike = self._ranked(mode, [(group,) for group in self._workers(Role.MIXED)])
        if mode == "aggregated":
            yield from alike
            return
        for first in alike[:1]:
            (mixed,) = first.groups
            if (apart := max(1, round(mixed.count / 4))) < mixed.count:
                prefill = replace(mixed, role=Role.PREFILL, count=apart)
                yield replace(first, groups=(prefill, replace(mixed, count=mixed.count - apart)))
            else:
                self._reject("one worker alone has no other to hand over to")

    def _ranked(self, mode: str, groups: Sequence[tuple[Group, ...]]) -> list[WorkerLayout]:
        """Layouts of these workers, in the numbers that one worker's goodput asks for."""
        found: list[tuple[float, WorkerLayout]] = []
        for each in groups:
            goodputs, rate = [self._goodputs[group] for group in each], self.wanted.rate
            num_devices = self.wanted.num_devices or 0.0
            if rate is not None:
                num_devices = sum(rate / most * group.num_devices for most, group in zip(goodputs, each, strict=True))
            num_slices = ceil(num_devices / MOST_IN_SLICE) if num_devices > MOST_WHOLE else 1
            if rate is not None:
                counts = [max(1, ceil(rate / num_slices / goodput - FINENESS)) for goodput in goodputs]
            else:
                counts, rate = self._split(each, goodputs, int(num_devices) // num_slices)
            if min(counts) < 1:
                self._reject("more devices than there are")
                continue
            counted = tuple(replace(group, count=count) for group, count in zip(each, counts, strict=True))
            found.append((rate, WorkerLayout(mode, counted, num_slices)))
        found.sort(key=lambda each: (-each[0], *self.wanted.needs(each[1])))
        for _ in found[MOST_LAYOUTS:]:
            self._reject("another layout of its mode needs less, or reaches more, by one worker's goodput")
        return [layout for _, layout in found[:MOST_LAYOUTS]]

    def _split(self, groups: tuple[Group, ...], goodputs: list[float], have: int) -> tuple[list[int], float]:
        """Counts that use so many devices for the highest rate, and that rate."""
        sizes = [group.num_devices for group in groups]
        if len(groups) == 1:
            return [have // sizes[0]], have // sizes[0] * goodputs[0]
        ways = [(n, (have - n * sizes[0]) // sizes[1]) for n in range(1, have // sizes[0] + 1)]
        rates = [(min(n * goodputs[0], m * goodputs[1]), n, m) for n, m in ways if m > 0]
        rate, *counts = max(rates, default=(0.0, 0, 0))
        return list(counts), rate

    # -- workers of a role

    def _workers(self, role: Role) -> list[Group]:
        """The best settings of each candidate; one of more devices only where it gets more out of each."""
        if role in self._best_of:
            return self._best_of[role]
        best: list[tuple[float, Group]] = []
        for candidate in self._candidates:
            to_beat = max((value for value, _ in best), default=0.0)
            found: tuple[float, Group] | None = None
            settings = list(self._settings(role, candidate))
            if best and all(self._falls_short(group, to_beat) for group in settings):
                for _ in settings:
                    self._reject("slower than another worker of its role, by formula")
                continue
            for group in settings:
                value = self._value(group, max(to_beat, found[0] if found else 0.0))
                if value > (found[0] if found else 0.0):
                    found = (value, group)
            if found is not None:
                best.append(found)
        self._best_of[role] = [group for _, group in sorted(best, key=lambda each: -each[0])]
        return self._best_of[role]

    def _falls_short(self, group: Group, to_beat: float) -> bool:
        """Whether it would not beat, if it reached of its bound what the best worker with as much queued reached."""
        shares = [
            most / self.bound(other).rate for other, most in self._throughputs.items() if other.role is group.role
        ]
        return self.bound(group).rate * max(shares, default=1.0) * KEEPS_UP <= to_beat * self._unit(group)

    def _unit(self, group: Group) -> float:
        return self.wanted.needs(WorkerLayout("", (group,)))[0]

    def _value(self, group: Group, to_beat: float) -> float:
        """Goodput for a unit of what is minimised; 0 where it is not over `to_beat`."""
        unit, bound = self._unit(group), self.bound(group)
        if bound.rate <= to_beat * unit:
            self._reject("slower than another worker of its role, by formula")
            return 0.0
        self._goodputs[group] = self._goodput(group, bound, to_beat * unit)
        return self._goodputs[group] / unit

    def _settings(self, role: Role, candidate: PlannedDevice) -> Iterator[Group]:
        """Limits worth a simulation; none where the candidate cannot hold the model or be quick enough."""
        target, wanted, cache, demand = candidate.target, self.wanted, self.terms.cache, self._demand
        most = wanted.num_devices
        if most is not None and target.num_devices + (role is not Role.MIXED) > most:
            return self._reject("more devices than there are")
        room = target.num_blocks(cache, MOST_SEQS) * cache.block_size
        if room < demand.longest:
            return self._reject(f"no room for the longest request ({demand.longest:,} tokens)")
        batch = self._batch(target.cost_model, room)
        if role is not Role.PREFILL and not batch:
            self._note("tpot", self._step_s(target.cost_model, 1), candidate.name)
            return self._reject("a token takes longer than promised, alone")
        quick = demand.fresh[ceil(self.terms.attainment * len(demand.fresh)) - 1]
        first_s = _prompt_s(target.cost_model, quick, 8192) + target.edge.first_token_s(quick)
        if role is not Role.DECODE and first_s > self._ttft_s:
            self._note("ttft", first_s, candidate.name)
            return self._reject("a first token takes longer than promised, alone")
        seqs = [PREFILL_SEQS] if role is Role.PREFILL else [_round_down(batch), _round_down(batch / 2)]
        budgets = BUDGETS.get(role, (target.token_budget,))
        for max_num_seqs in dict.fromkeys([wanted.max_num_seqs] if wanted.max_num_seqs else seqs):
            for budget in dict.fromkeys([wanted.token_budget] if wanted.token_budget else budgets):
                yield Group(role, candidate, max_num_seqs, max(budget, max_num_seqs))
        return None

    def _batch(self, costs: CostModel, room: int) -> int:
        """Requests that can decode at once within the pace that is promised and in memory."""
        low, high = 0, max(1, min(MOST_SEQS, int(room / (self._demand.mean_prompt + self._demand.mean_output))))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._step_s(costs, middle) <= self._pace_s else (low, middle - 1)
        return low

    def _step_s(self, costs: CostModel, rows: int) -> float:
        context = int(rows * self._demand.mean_context)
        shape = StepShape(rows=rows, decode_tokens=rows, context_tokens=context, samples=rows, groups=1)
        return costs.step_s(shape) + costs.gap_s(rows)

    def bound(self, group: Group) -> WorkerBound:
        """A worker's limits: arithmetic of prompts, weights and KV read by its largest batch."""
        costs, demand, cache = group.costs, self._demand, self.terms.cache
        room = group.candidate.target.num_blocks(cache, group.max_num_seqs) * cache.block_size
        batch = max(1, min(group.max_num_seqs, self._batch(costs, room)))
        step_s = self._step_s(costs, batch)
        steps = demand.mean_output / batch  # of a request, as its share
        budget = group.token_budget
        token_s = costs.tokens_s(budget, 0) / budget
        prompt_s = demand.mean_fresh * (token_s + costs.exchange_token_s)
        prompt_s += demand.mean_fresh**2 / 2 * costs.prefill_attention_s
        read_s = costs.tokens_s(0, batch)
        mixed_s = steps * (step_s - read_s) + max(steps * read_s, demand.mean_fresh * token_s)
        decode_s = steps * step_s + cache.block_size / 2 * token_s  # a prompt's last tokens are computed again
        request_s = {Role.PREFILL: prompt_s, Role.DECODE: decode_s, Role.MIXED: mixed_s}[group.role]
        stay_s = prompt_s if group.role is Role.PREFILL else demand.mean_output * step_s
        return WorkerBound(1 / request_s, batch, stay_s)

    def _goodput(self, group: Group, bound: WorkerBound, to_beat: float) -> float:
        """The highest rate at which one worker meets the objectives of its role and keeps up; 0 for none that beats
        `to_beat` by more than a rate is fine, which is tried first. More than is asked of all need not be known.
        """
        asked = inf if self.wanted.rate is None else self.wanted.rate
        most = KEEPS_UP * (self._throughput(group, bound) if group.role is Role.MIXED else bound.rate)
        low, high = to_beat * (1 + FINENESS), most
        if high <= low or (low and not self._keeps(group, low, bound)):
            self._reject("slower than another worker of its role")
            return 0.0
        rate = max(low, min(asked, (low * high) ** 0.5 or most))
        for _ in range(MOST_PROBES):
            if self._keeps(group, rate, bound):
                low = rate
            else:
                high = rate
            if high - low <= FINENESS * high or low >= asked:
                break
            rate = (low * high) ** 0.5 or high / 2
        if not low:
            self._reject("misses an objective at any rate")
        return low

    def _throughput(self, group: Group, bound: WorkerBound) -> float:
        """Requests a second that end under overload, once it is full."""
        ends = sorted(self._simulate_one(group, 1.3 * bound.rate, bound, overloaded=True).ends)
        first = len(ends) // 3
        last = max(first + 1, len(ends) - 1 - min(bound.batch, first))
        full = (last - first) / max(1e-9, ends[last] - ends[first])  # ends come in bunches where steps are long
        self._throughputs[group] = min(bound.rate, max(full, len(ends) / ends[-1]))
        return self._throughputs[group]

    def _most_of(self, group: Group, role: Role) -> float:
        """Requests a second that one worker of the group can do in a role: as simulated, else by formula."""
        alone = replace(group, role=role, count=1)
        return self._throughputs.get(alone) or self.bound(alone).rate

    def _keeps_up(self, layout: WorkerLayout, rate: float) -> int | None:
        """Index of the group that would fall behind without end; None where none would. A simulation is too short to
        tell a rate that is a little too high.
        """
        first, last, rate = layout.groups[0], layout.groups[-1], rate / layout.num_slices
        if layout.mode != "hybrid":
            mosts = [group.count * self._most_of(group, group.role) for group in layout.groups]
            slowest = min(range(len(mosts)), key=mosts.__getitem__)
            return slowest if rate > KEEPS_UP * mosts[slowest] else None
        prompts = min(rate, first.count * self._most_of(first, Role.PREFILL))  # that are computed apart
        busy = (rate - prompts) / self._most_of(last, Role.MIXED) + prompts / self._most_of(last, Role.DECODE)
        return len(layout.groups) - 1 if busy > KEEPS_UP * last.count else None

    def _keeps(self, group: Group, rate: float, bound: WorkerBound) -> bool:
        results = self._simulate_one(group, rate, bound)
        met = results.attainment >= self.terms.attainment
        if not met:
            self._note_missed(results, group.candidate.name)
        return met

    def _simulate_one(self, group: Group, rate: float, bound: WorkerBound, *, overloaded: bool = False) -> Judged:
        self._tell("")
        warm_up, terms = min(MOST_WARM_UP[0], 1 + int(rate * bound.in_flight_s)), self._worker_terms
        if overloaded:  # to its end, whatever is good
            terms, num_judged = replace(terms, attainment=0.0), max(JUDGED[0], min(3 * warm_up, MOST_OVERLOADED))
        else:
            num_judged = JUDGED[0]
        results = simulate_worker(terms, group, rate, warm_up, num_judged)
        self._count(results.num_row_steps)
        return results

    # -- whole layouts

    def _find_counts(self, layout: WorkerLayout, rate: float) -> None:
        """Add a worker where an objective is missed, until none is; then take one after another."""
        for _ in range(MOST_MOVES):
            if self._is_beaten(layout):
                return self._reject("another layout of its mode meets the rate with less")
            short = self._keeps_up(layout, rate)
            if short is None:
                outcome = self.simulate(layout, rate)
                if outcome.is_met:
                    break
                short = self._short_of(outcome)
            layout = layout.changed(short, 1) or layout
        else:
            return self._reject("misses an objective as a whole")
        for index in reversed(range(len(layout.groups))):
            layout = self._shrunk(layout, index, rate)
        few, enough = layout.num_slices * (1 - 1 / min(group.count for group in layout.groups)), layout.num_slices
        while enough - few > max(1.0, FINENESS / 2 * enough):  # less than a worker of each slice
            fewer = replace(layout, num_slices=int((few + enough) / 2))
            if self._keeps_up(fewer, rate) is None and self.simulate(fewer, rate).is_met:
                enough = fewer.num_slices
            else:
                few = fewer.num_slices

    def _shrunk(self, layout: WorkerLayout, index: int, rate: float) -> WorkerLayout:
        """The fewest workers of a group that do, by bisection."""
        have = layout.groups[index].count
        few, enough = 0, have  # so many are not, and are
        while enough - few > 1:
            count = have - 1 if enough == have and few == 0 and have < 4 else (few + enough) // 2
            smaller = layout.changed(index, count - have)
            if smaller is not None and self._keeps_up(smaller, rate) is None and self.simulate(smaller, rate).is_met:
                enough = count
            else:
                few = count
        return layout.changed(index, enough - have) or layout

    def _is_beaten(self, layout: WorkerLayout) -> bool:
        best = self.plan.best.get(layout.mode)
        return best is not None and self.wanted.needs(layout) >= self.wanted.needs(best.layout)

    def _short_of(self, outcome: LayoutFigures) -> int:
        """The group to be added to: of prefill workers where first tokens are late, else of the others."""
        late = outcome.misses["ttft"] > outcome.misses["tpot"] + outcome.misses["itl"]
        roles = [group.role for group in outcome.layout.groups]
        return 0 if late or len(roles) == 1 else len(roles) - 1

    def _find_rate(self, layout: WorkerLayout) -> None:
        """Bisect for the highest rate, from what one worker of each role can do."""
        goodputs = [self._goodputs.get(replace(g, count=1), inf) * g.count for g in layout.groups]
        most = layout.num_slices * min(goodputs)
        if layout.mode == "hybrid":
            most *= sum(g.count for g in layout.groups) / layout.groups[-1].count
        least, high, rate = 0.0, 1.25 * most, most
        if (best := self.plan.best.get(layout.mode)) is not None:
            least, rate = best.rate, max(best.rate * (1 + FINENESS), most)
            if rate >= high:
                return self._reject("another layout of its mode reaches more")
        while high - least > FINENESS * most:
            if self._keeps_up(layout, rate) is None and self.simulate(layout, rate).is_met:
                least = rate
            else:
                high = rate
            rate = (least + high) / 2
        if not least:
            self._reject("misses an objective as a whole")
        return None

    def simulate(self, layout: WorkerLayout, rate: float) -> LayoutFigures:
        """Simulate a whole layout at a rate; one that meets the objectives is kept."""
        outcome = self._run(layout, rate)
        self._keep(outcome)
        return outcome

    def _run(
        self, layout: WorkerLayout, rate: float, link: SimulatedLink | None = None, num_judged: int = JUDGED[1]
    ) -> LayoutFigures:
        self._tell("")
        terms = self.terms if link is None else replace(self.terms, link=link)
        in_flight = rate / layout.num_slices * self.bound(layout.groups[-1]).in_flight_s
        warm_up = min(MOST_WARM_UP[1], 1 + int(in_flight))
        outcome = simulate_layout(terms, layout, rate, warm_up, num_judged)
        self._count(outcome.num_row_steps)
        return outcome

    def _count(self, num_row_steps: int) -> None:
        self.plan.num_simulations += 1
        self.plan.num_row_steps += num_row_steps

    def _keep(self, outcome: LayoutFigures) -> None:
        plan, mode = self.plan, outcome.layout.mode
        if not outcome.is_met:
            self._note_missed(outcome, outcome.layout.label)
            return
        plan.tried.append(outcome)
        if mode not in plan.best or self.score(outcome) < self.score(plan.best[mode]):
            plan.best[mode] = outcome

    def _find_link(self) -> float:
        """The slowest link, but for a factor of two, over which the best disaggregated layout beats the best aggregated
        one: from what it has to carry on upwards.
        """
        apart, together = self.plan.best["disaggregated"], self.plan.best["aggregated"]
        layout, rate = apart.layout, together.rate
        needs_more = self.wanted.rate is not None and self.score(apart)[:2] > self.score(together)[:2]

        def pays(bandwidth: float) -> bool:
            return self._run(layout, rate, SimulatedLink(bandwidth, 20e-6)).is_met

        if needs_more or self._keeps_up(layout, rate) is not None or (apart.rate < rate and not pays(FASTEST_LINK)):
            return inf
        kv_bytes = self._demand.mean_fresh * layout.groups[0].candidate.target.kv_bytes_per_token
        bandwidth = 2 * kv_bytes * rate / layout.num_slices / min(group.count for group in layout.groups)
        while bandwidth < FASTEST_LINK and not pays(bandwidth):
            bandwidth *= 2
        return bandwidth

    def _part(self, best: LayoutFigures, share: float) -> LayoutFigures:
        """A part of one slice at its part of the rate, over the same time: what size changes is its error."""
        layout, of_rate = best.layout.part(share)
        num_judged = int(2 * JUDGED[1] * share)
        return self._run(layout, of_rate * best.rate / best.layout.num_slices, num_judged=num_judged)

    def _reject(self, reason: str) -> None:
        self.plan.rejected[reason] += 1

    def _note(self, objective: str, value_s: float, what: str) -> None:
        if value_s < self.plan.nearest.get(objective, (inf, ""))[0]:
            self.plan.nearest[objective] = (value_s, what)

    def _note_missed(self, results: Judged | LayoutFigures, what: str) -> None:
        figures = results.total if isinstance(results, Judged) else results.figures
        for name in results.misses:
            sketch = getattr(figures, f"{name}_s", None)
            if sketch is not None and (value_s := sketch.quantile(self.terms.attainment)) is not None:
                self._note(name, value_s, what)


def _prompt_s(costs: CostModel, tokens: int, budget: int) -> float:
    """Time of a prompt that has the worker for itself."""
    seconds, start = 0.0, 0
    while start < tokens:
        chunk = min(budget, tokens - start)
        pairs = chunk * start + chunk * (chunk + 1) // 2
        shape = StepShape(1, chunk, 0, start + chunk, pairs, int(start + chunk == tokens), 1)
        seconds, start = seconds + costs.step_s(shape), start + chunk
    return seconds


def _round_down(batch: float) -> int:
    """The largest of 1, 2, 3, 4, 6, 8, 12, 16 and so on that is not over it."""
    power = 1 << max(0, int(batch).bit_length() - 1)
    return power * 3 // 2 if power > 1 and batch >= power * 1.5 else power
