"""What fidelity.py knows of a run from the others: a cost model, and what the word of the probe is worth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from machine_speed import Times, Trace

from maitred.core.cost_model import CostModel, Slowness
from maitred.sim.engine import SlownessAt
from maitred.sim.fit import fit_steps
from maitred.sim.recorded import MeasuredStep, RecordedRun

MAX_FITTED_STEPS = 3000
SPAN_S = 0.5


@dataclass(frozen=True)
class LiveRun:
    load: float
    policy: str
    round: int
    run: RecordedRun
    steps: list[MeasuredStep]
    trace: Trace
    before: Times  # of the probe
    after: Times
    others: float  # cores that others used

    @property
    def unsteady(self) -> float:
        return max(abs(after / before - 1) for before, after in zip(self.before, self.after, strict=True))

    @property
    def began_at(self) -> float:
        assert self.run.results.began_at is not None
        return self.run.results.began_at

    def slowness(self, worth: float) -> SlownessAt:
        """By the time since the first arrival."""
        return lambda at: tempered(self.trace.at(self.began_at + at), worth)


@dataclass(frozen=True)
class Known:
    """What is fitted for one load and policy without any step of it."""

    usual: CostModel  # at the probe's usual speed
    plain: CostModel  # as the steps came
    worth: float  # what the probe's word is worth


def fit_on_others(load: float, policy: str, runs: Sequence[LiveRun]) -> Known:
    others = [run for run in runs if (run.load, run.policy) != (load, policy)]
    plain = fitted([step for run in others for step in run.steps])
    worth = worth_of_probe(others, plain)
    usual = fitted([at_usual_speed(step, run.trace, worth) for run in others for step in run.steps])
    return Known(usual, plain, worth)


def worth_of_probe(runs: Sequence[LiveRun], model: CostModel) -> float:
    """The power of the probe's slowness that foretells the engine's best, by least squares over spans of these runs.

    1 where the probe tells all, 0 where its readings are noise; a machine that is as fast as usual leaves nothing else.
    """
    probe, engine = [], []
    for run in runs:
        spans: dict[int, list[MeasuredStep]] = {}
        for step in run.steps:
            spans.setdefault(int(step.at / SPAN_S), []).append(step)
        for steps in spans.values():
            modelled_s = sum(model.step_s(step.shape) for step in steps)
            slowed_s = sum(model.slowed_s(step.shape, run.trace.at(step.at)) for step in steps)
            probe.append(math.log(slowed_s / modelled_s))
            engine.append(math.log(sum(step.step_s for step in steps) / modelled_s))
    variance = statistics.variance(probe)
    return max(0.0, min(1.0, statistics.covariance(probe, engine) / variance)) if variance > 0 else 0.0


def tempered(slowness: Slowness, worth: float) -> Slowness:
    return Slowness(slowness.prompts**worth, slowness.rest**worth)


def fitted(steps: Sequence[MeasuredStep]) -> CostModel:
    chosen = Random(0).sample(steps, min(MAX_FITTED_STEPS, len(steps)))
    return fit_steps(chosen, chosen).cost_model


def at_usual_speed(step: MeasuredStep, trace: Trace, worth: float = 1.0) -> MeasuredStep:
    """As if all but prompts were as fast as usual; prompts count by how much slower they were than the rest."""
    slowness, shape = tempered(trace.at(step.at), worth), step.shape
    more = slowness.prompts / slowness.rest
    return step._replace(
        shape=shape._replace(
            prefill_tokens=shape.prefill_tokens * more, prefill_attention=shape.prefill_attention * more
        ),
        step_s=step.step_s / slowness.rest,
        gap_s=None if step.gap_s is None else step.gap_s / slowness.rest,
    )


def step_error(run: LiveRun, known: Known) -> float:
    """Of a single step at the speed that the probe found, mean."""
    steps = [at_usual_speed(step, run.trace, known.worth) for step in run.steps]
    return statistics.fmean(abs(known.usual.expected_s(step.shape) / step.step_s - 1) for step in steps)


def total_slowness(steps: Sequence[MeasuredStep], model: CostModel) -> float:
    return sum(step.step_s for step in steps) / sum(model.expected_s(step.shape) for step in steps)
