"""Fit a cost model to measured steps: non-negative least squares on relative errors, and how far to trust it.

A step's time is modelled as a sum of terms, each a count of what is in the step times a coefficient that is at least 0.
Dividing each equation by its measured time makes a step of 2 ms weigh as much as one of 200 ms. Steps in which the
machine did something else are left out of the fit (more than three scaled median deviations off) but not of the errors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from maitred.core.cost_model import Band, CostModel, StepShape, shape_of
from maitred.core.request import FinishReason, RequestState
from maitred.decisions.log import Arrived, Ended, Step
from maitred.sim.profile import EdgeModel, EdgeSample, TermError
from maitred.sim.results import UNITS_PER_S, GroupResults, Objectives, SimulatedResults
from maitred.sim.workload import Arrival

ENDED_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


class MeasuredStep(NamedTuple):
    """One step as it was measured."""

    shape: StepShape
    step_s: float  # schedule to update
    gap_s: float | None  # from there to the next schedule; None when the engine was idle in between
    at: float = 0.0  # s, when it was scheduled, by the run's own clock


def measured_steps(steps: Iterable[Step]) -> Iterator[MeasuredStep]:
    """Steps without rows are left out."""
    num_here, previous = 0, None
    for step in steps:
        if previous is not None:
            yield _record(previous, step.scheduled_at if num_here > 0 else None)
        num_here += sum(_change(event) for event in step.events)
        num_here -= sum(outcome.finish_reason is not None for outcome in step.outcomes)
        previous = step if step.plan.rows else None
    if previous is not None:
        yield _record(previous, None)


def _record(step: Step, next_at: float | None) -> MeasuredStep:
    gap_s = None if next_at is None else next_at - step.updated_at
    return MeasuredStep(shape_of(step.plan.rows), step.updated_at - step.scheduled_at, gap_s, step.scheduled_at)


def _change(event: object) -> int:
    return isinstance(event, Arrived) - isinstance(event, Ended)


class RecordedRun(NamedTuple):
    """A run, measured, and what was asked of it."""

    results: SimulatedResults
    arrivals: list[Arrival]  # in order; `at` counts from the first one


def read_run(steps: Iterable[Step], objectives: Objectives | None = None) -> RecordedRun:
    """Results by the log's own times: a token is there when its step's update is."""
    reading = _Reading(objectives)
    for step in steps:
        reading.take_in(step)
    reading.arrivals.sort(key=lambda arrival: arrival.at)
    return RecordedRun(reading.results, reading.arrivals)


class _Reading:
    def __init__(self, objectives: Objectives | None) -> None:
        self.results = SimulatedResults(objectives)
        self.arrivals: list[Arrival] = []
        self._began_at: float | None = None
        self._here: dict[str, tuple[RequestState, GroupResults]] = {}

    def take_in(self, step: Step) -> None:
        for event in step.events:
            if isinstance(event, Arrived):
                self._arrived(event)
            elif isinstance(event, Ended):
                self._ended_from_outside(event)
        for new in step.plan.new_requests:
            request, _ = self._here[new.request_id]
            request.num_preemptions += request.first_scheduled_at is not None
        for row in step.plan.rows:
            request, _ = self._here[row.request_id]
            if request.first_scheduled_at is None:
                request.first_scheduled_at = step.scheduled_at
        for outcome in step.outcomes:
            self._told(outcome.request_id, outcome.num_tokens, outcome.finish_reason, step.updated_at)
        if step.plan.rows:
            self.results.num_steps += 1
            self.results.num_row_steps += len(step.plan.rows)
            self.results.busy_units += round((step.updated_at - step.scheduled_at) * UNITS_PER_S)

    def _arrived(self, event: Arrived) -> None:
        request = RequestState(event.spec)
        if self._began_at is None:
            self._began_at = request.arrived_at
        group = self.results.tenant(request.tenant, request.weight)
        self.results.arrived(group, request.arrived_at)
        self._here[request.request_id] = (request, group)

    def _ended_from_outside(self, event: Ended) -> None:
        _, group = self._here.pop(event.request_id)
        self.results.failed(group, event.now, event.reason.value)

    def _told(self, request_id: str, num_tokens: int, reason: FinishReason | None, now: float) -> None:
        request, group = self._here[request_id]
        if num_tokens:
            if request.first_token_at is None:
                request.first_token_at = now
            elif request.last_token_at is not None:
                group.itl_s.add(now - request.last_token_at)
            request.last_token_at = now
            request.output_token_ids += [0] * num_tokens
        if reason is None:
            return
        del self._here[request_id]
        if reason in ENDED_BY_ITSELF:
            request.finished_at = now
            self.results.finished(group, request)
            self.arrivals.append(self._arrival(request))
        else:
            self.results.failed(group, now, reason.value)

    def _arrival(self, request: RequestState) -> Arrival:
        assert self._began_at is not None
        return Arrival(
            at=request.arrived_at - self._began_at,
            request_id=request.request_id,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            max_tokens=request.max_tokens,
            tenant=request.tenant,
            priority=request.priority,
            weight=request.weight,
            ttft_slo_s=request.ttft_slo_s,
            own=request.request_id.encode(),
        )


TERMS: dict[str, Callable[[StepShape], float]] = {
    "fixed_s": lambda shape: 1.0,
    "row_s": lambda shape: shape.rows,
    "prefill_token_s": lambda shape: shape.prefill_tokens,
    "decode_token_s": lambda shape: shape.decode_tokens,
    "context_token_s": lambda shape: shape.context_tokens,
    "prefill_attention_s": lambda shape: shape.prefill_attention,
    "sample_s": lambda shape: shape.samples,
    "group_s": lambda shape: shape.groups,
}
NUM_QUANTILES = 101
LONGEST_MS = 1e9  # JSON has no infinity
BANDS_MS = (*(1.2**i for i in range(25)), LONGEST_MS)  # 1 to 80 ms; narrow, so that they also even out what terms miss
MIN_IN_BAND = 40
NUM_SWEEPS = 3000
NUM_TRIMS = 3
MIN_EDGE_SAMPLES = 8
LEAST_S = 1e-6  # what relative errors are of


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost model and its errors on steps that it has not seen."""

    cost_model: CostModel
    terms: dict[str, TermError]
    num_steps: int
    num_held_out_steps: int
    mape: float
    p90_error: float
    bias: float


def fit_steps(steps: Sequence[MeasuredStep], held_out: Sequence[MeasuredStep]) -> Fit:
    """Coefficients from `steps`, errors from `held_out`; neither may be empty."""
    columns = [[term(step.shape) for term in TERMS.values()] for step in steps]
    times = [step.step_s for step in steps]
    coefficients, errors = _robust_fit(columns, times)
    between_s, between_row_s = _fit_gaps(steps)
    named: dict[str, Any] = dict(zip(TERMS, coefficients, strict=True))
    plain = CostModel(between_s=between_s, between_row_s=between_row_s, **named)
    model = with_jitter(plain, steps)
    ratios = [plain.step_s(step.shape) / step.step_s for step in held_out]
    relative = sorted(abs(ratio - 1) for ratio in ratios)
    modelled = math.fsum(plain.step_s(step.shape) for step in held_out)
    return Fit(
        cost_model=model,
        terms=_term_errors(plain, coefficients, errors, steps, held_out),
        num_steps=len(steps),
        num_held_out_steps=len(held_out),
        mape=math.fsum(relative) / len(relative),
        p90_error=relative[int(0.9 * (len(relative) - 1))],
        bias=modelled / math.fsum(step.step_s for step in held_out) - 1,
    )


class EdgeFit(NamedTuple):
    edge: EdgeModel
    error: float
    """Mean over lengths of prompts: modelled over median measured time to the first token, less 1."""


def fit_edge(samples: Sequence[EdgeSample]) -> EdgeFit:
    """Fit the edge to every other sample; the error is that on the rest. `MIN_EDGE_SAMPLES` or more.

    Medians of prompts of like length are fitted: half of the requests are slower, and a few by much.
    """
    fitted, held_out = _medians(samples[::2]), _medians(samples[1::2])
    rows = [[1.0 / first_token_s, prompt_tokens / first_token_s] for prompt_tokens, first_token_s in fitted]
    fixed_s, prompt_token_s = nonnegative_least_squares(rows, [1.0] * len(rows))
    gaps = [sample.gaps_s / sample.num_gaps for sample in samples if sample.num_gaps]
    output_token_s = max(0.0, statistics.median(gaps)) if gaps else 0.0
    edge = EdgeModel(fixed_s=fixed_s, prompt_token_s=prompt_token_s, output_token_s=output_token_s)
    ratios = sorted(max(0.0, each.first_token_s / edge.first_token_s(each.prompt_tokens)) for each in samples)
    edge = replace(edge, jitter=quantiles_of(ratios) if len(ratios) >= MIN_IN_BAND else ())
    off = [abs(edge.first_token_s(prompt_tokens) / first_token_s - 1) for prompt_tokens, first_token_s in held_out]
    return EdgeFit(edge, statistics.fmean(off))


def _medians(samples: Sequence[EdgeSample]) -> list[tuple[int, float]]:
    """(prompt tokens, time to the first token) of those within a doubling of length."""
    alike: dict[int, list[EdgeSample]] = {}
    for sample in samples:
        alike.setdefault(sample.prompt_tokens.bit_length(), []).append(sample)
    return [
        (
            statistics.median_low(sample.prompt_tokens for sample in group),
            max(LEAST_S, statistics.median(sample.first_token_s for sample in group)),
        )
        for group in alike.values()
    ]


def with_jitter(model: CostModel, steps: Sequence[MeasuredStep]) -> CostModel:
    """`model` with the spread of measured over modelled times, in bands of step length, and that of the gaps."""
    pairs = [(model.step_s(step.shape), step.step_s) for step in steps]
    bands, low = [], 0.0
    for high_ms in BANDS_MS:
        ratios = sorted(real / modelled for modelled, real in pairs if low <= modelled < high_ms / 1e3)
        if len(ratios) >= MIN_IN_BAND:
            bands.append(Band(high_ms / 1e3, quantiles_of(ratios)))
            low = high_ms / 1e3
    if bands:
        bands[-1] = Band(LONGEST_MS / 1e3, bands[-1].quantiles)
    gaps = sorted(
        step.gap_s / modelled
        for step in steps
        if step.gap_s is not None and (modelled := model.gap_s(step.shape.rows)) > 0
    )
    gap_quantiles = quantiles_of(gaps) if len(gaps) >= MIN_IN_BAND else ()
    return replace(model, jitter=tuple(bands), gap_jitter=gap_quantiles)


def quantiles_of(ordered: Sequence[float]) -> tuple[float, ...]:
    """Evenly spaced, ends included."""
    last = len(ordered) - 1
    return tuple(ordered[round(i * last / (NUM_QUANTILES - 1))] for i in range(NUM_QUANTILES))


def _fit_gaps(steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """(each gap, each row of the step before it); least squares without weights, because their sum is what matters."""
    known = [(step.shape, step.gap_s) for step in steps if step.gap_s is not None]
    if not known:
        return 0.0, 0.0
    each, row = nonnegative_least_squares([[1.0, shape.rows] for shape, _ in known], [gap for _, gap in known])
    return each, row


def _robust_fit(columns: list[list[float]], times: list[float]) -> tuple[list[float], list[float]]:
    kept = list(range(len(times)))
    for _ in range(NUM_TRIMS):
        relative = [[x / times[i] for x in columns[i]] for i in kept]
        coefficients = nonnegative_least_squares(relative, [1.0] * len(kept))
        off = [_dot(columns[i], coefficients) / times[i] - 1 for i in range(len(times))]
        middle = _median(off)
        limit = 3 * 1.4826 * _median([abs(x - middle) for x in off])
        errors = _standard_errors(relative, coefficients)
        inside = [i for i in range(len(times)) if abs(off[i] - middle) <= limit]
        if len(inside) in (len(kept), 0):
            break
        kept = inside
    return coefficients, errors


def nonnegative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Minimises the sum of (row . c - target)^2 over c >= 0, by coordinate descent on the normal equations.

    Source: Franc, Hlavac and Navara, "Sequential coordinate-wise algorithm for non-negative least squares", 2005.
    """
    size = len(rows[0])
    scales = [math.sqrt(math.fsum(row[j] ** 2 for row in rows)) or 1.0 for j in range(size)]
    scaled = [[x / scale for x, scale in zip(row, scales, strict=True)] for row in rows]
    gram = [[math.fsum(row[i] * row[j] for row in scaled) for j in range(size)] for i in range(size)]
    found = [0.0] * size
    slopes = [-math.fsum(row[j] * target for row, target in zip(scaled, targets, strict=True)) for j in range(size)]
    for _ in range(NUM_SWEEPS):
        largest = 0.0
        for j in range(size):
            if gram[j][j] == 0.0:
                continue
            moved = max(0.0, found[j] - slopes[j] / gram[j][j]) - found[j]
            if moved:
                found[j] += moved
                slopes = [slope + moved * weight for slope, weight in zip(slopes, gram[j], strict=True)]
                largest = max(largest, abs(moved))
        if largest < 1e-12:
            break
    return [value / scale for value, scale in zip(found, scales, strict=True)]


def _standard_errors(rows: Sequence[Sequence[float]], coefficients: Sequence[float]) -> list[float]:
    """Return standard errors of the coefficients over 0, as in ordinary least squares of those; 0 for the others."""
    active = [j for j, c in enumerate(coefficients) if c > 0]
    errors = [0.0] * len(coefficients)
    if len(rows) <= len(active):
        return errors
    variance = math.fsum((_dot(row, coefficients) - 1) ** 2 for row in rows) / (len(rows) - len(active))
    gram = [[math.fsum(row[i] * row[j] for row in rows) for j in active] for i in active]
    for index, spread in zip(active, _inverse_diagonal(gram), strict=True):
        errors[index] = math.sqrt(max(0.0, spread) * variance)
    return errors


def _inverse_diagonal(matrix: list[list[float]]) -> list[float]:
    """Return the inverse's diagonal by Gauss-Jordan on the matrix scaled to a unit diagonal."""
    size = len(matrix)
    scales = [math.sqrt(matrix[i][i]) for i in range(size)]
    work = [[matrix[i][j] / scales[i] / scales[j] for j in range(size)] for i in range(size)]
    for i in range(size):
        work[i] += [float(i == j) for j in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(work[r][i]))
        work[i], work[pivot] = work[pivot], work[i]
        if abs(work[i][i]) < 1e-12:
            return [math.inf] * size
        work[i] = [x / work[i][i] for x in work[i]]
        for r in range(size):
            if r != i:
                factor = work[r][i]
                work[r] = [x - factor * y for x, y in zip(work[r], work[i], strict=True)]
    return [work[i][size + i] / scales[i] ** 2 for i in range(size)]


def _term_errors(
    model: CostModel,
    coefficients: Sequence[float],
    errors: Sequence[float],
    steps: Sequence[MeasuredStep],
    held_out: Sequence[MeasuredStep],
) -> dict[str, TermError]:
    total = math.fsum(model.step_s(step.shape) for step in steps)
    off: dict[str, list[float]] = {name: [] for name in TERMS}
    for step in held_out:
        parts = {name: c * term(step.shape) for (name, term), c in zip(TERMS.items(), coefficients, strict=True)}
        off[max(parts, key=lambda name: parts[name])].append(abs(model.step_s(step.shape) / step.step_s - 1))
    return {
        name: TermError(
            seconds=c,
            standard_error_s=error,
            share=c * math.fsum(term(step.shape) for step in steps) / total,
            held_out_error=math.fsum(off[name]) / len(off[name]) if off[name] else None,
        )
        for (name, term), c, error in zip(TERMS.items(), coefficients, errors, strict=True)
    }


def _dot(row: Sequence[float], coefficients: Sequence[float]) -> float:
    return math.fsum(x * c for x, c in zip(row, coefficients, strict=True))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
