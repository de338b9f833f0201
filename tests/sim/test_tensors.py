"""Tensor models in the simulator: the scheduler's own lanes, batches that take what a profile says."""

from __future__ import annotations

from random import Random

import pytest

from maitred.core.errors import ConfigError, ModelNotFound
from maitred.core.tensor_request import BatchRules, Instance
from maitred.scheduler.scheduler import Scheduler
from maitred.sim.engine import Simulation
from maitred.sim.results import SimulatedResults
from maitred.sim.tensor_profile import HostTimes, ModelTimes, ShapeTimes, decode_tensor_profile
from maitred.sim.tensors import (
    SimulatedEnsemble,
    SimulatedMachine,
    SimulatedModel,
    SimulatedStep,
    TensorArrival,
    TensorSimulation,
)
from tests.fakes import make_scheduler
from tests.sim.worlds import COSTS, arrival, setup

ROWS = (1, 2, 4, 8)
NO_HOST = HostTimes()


def times(name="m", *, fixed=0.01, row=0.001, lengths=(0,), **fields):
    shapes = (
        ShapeTimes(length=length, rows=ROWS, seconds=tuple(fixed + row * rows * max(1, length) for rows in ROWS))
        for length in lengths
    )
    return ModelTimes(model=name, version=1, shapes=tuple(shapes), **fields)


def model(name="m", *, buckets=(), num_instances=1, model_times=None, **rules):
    rules = BatchRules(max_batch_size=8, dynamic=True, instances=(Instance(),) * num_instances, **rules)
    return SimulatedModel(name=name, version=1, rules=rules, times=model_times or times(name), buckets=buckets)


def ask(at, number, name="m", **fields):
    return TensorArrival(at=at, request_id=f"r{number}", model=name, **fields)


def simulated(models, arrivals, host=NO_HOST, rng=None, follow=None):
    more = {} if follow is None else {"follow": follow}
    simulation = TensorSimulation(make_scheduler(), models, host, rng, **more)
    simulation.begin(iter(arrivals))
    return simulation.run()


def test_who_comes_while_a_batch_runs_shares_the_next_one():
    figures = simulated([model()], [ask(0.001 * number, number) for number in range(5)])["m"]
    assert (figures.num_batches, figures.num_rows) == (2, 5)
    assert figures.latency_s.largest == pytest.approx(0.011 + 0.014 - 0.001)


def test_a_delay_gathers_and_its_timer_is_as_coarse_as_the_hosts():
    delayed = model(delay_s=0.0015)
    exact = simulated([delayed], [ask(0.0, 0), ask(0.001, 1)])["m"]
    assert exact.num_batches == 1
    assert exact.latency_s.largest == pytest.approx(0.0015 + 0.012)
    coarse = simulated([delayed], [ask(0.0, 0)], HostTimes(timer_s=0.001))["m"]
    assert coarse.latency_s.largest == pytest.approx(0.002 + 0.011)


DIAMOND = SimulatedEnsemble(
    "whole", (SimulatedStep("sum", 0, (1, 2)), SimulatedStep("left", 0), SimulatedStep("right", 1))
)


APART = ((1, 1.0), (3, 1.0))  # batches that do not slow each other down


def of_ensemble(arrivals, **rules):
    models = [model(name, model_times=times(name, fixed=fixed, beside=APART), **rules) for name, fixed in
              (("left", 0.01), ("right", 0.03), ("sum", 0.02))]  # fmt: skip
    simulation = TensorSimulation(make_scheduler(), models, NO_HOST, ensembles=[DIAMOND])
    simulation.begin(iter(arrivals))
    return simulation.run()


def test_ensembles_share_batches_and_may_be_steps_of_another():
    figures = of_ensemble([ask(0.0, 0, "whole"), ask(0.0, 1, "sum")])
    assert figures["whole"].latency_s.largest == pytest.approx(0.031 + 0.021)
    assert (figures["sum"].num_batches, figures["sum"].latency_s.count) == (2, 1), "a step's answer is nobody's"
    assert (figures["left"].num_rows, figures["left"].latency_s.count) == (1, 0)

    figures = of_ensemble([ask(0.0, number, "whole") for number in range(3)], delay_s=0.001)
    assert [figures[name].num_batches for name in ("left", "right", "sum")] == [1, 1, 1]
    late = of_ensemble([ask(0.0, 0, "whole", deadline_s=0.02)])
    assert (late["whole"].latency_s.count, late["whole"].failures, late["sum"].num_batches) == (0, {"timeout": 1}, 0)

    outer = SimulatedEnsemble("outer", (SimulatedStep("whole", 0), SimulatedStep("sum", 0, (0,))))
    models = [model(name, model_times=times(name, beside=APART)) for name in ("left", "right", "sum")]
    simulation = TensorSimulation(make_scheduler(), models, NO_HOST, ensembles=[DIAMOND, outer])
    simulation.begin(iter([ask(0.0, 0, "outer", num_rows=2)]))
    figures = simulation.run()
    assert figures["outer"].latency_s.largest == pytest.approx(3 * 0.012)
    assert (figures["whole"].latency_s.count, figures["sum"].num_rows) == (0, 4)


def test_whoever_keeps_the_lanes_does_one_thing_after_another():
    figures = simulated([model()], [ask(0.0, 0), ask(0.0, 1)], HostTimes(request_s=0.002, batch_s=0.004))["m"]
    first = 0.001 + 0.002 + 0.011 + 0.002 + 0.001
    assert figures.num_batches == 2
    assert figures.latency_s.quantile(0.5) == pytest.approx(first, rel=2e-3)


def test_batches_at_once_slow_each_other_down_while_they_overlap():
    beside = times(beside=((1, 1.0), (2, 2.0)))
    figures = simulated([model(num_instances=2, model_times=beside)], [ask(0.0, 0), ask(0.0055, 1)])["m"]
    assert figures.latency_s.largest == pytest.approx(0.0165), "half alone, half at half the speed"


def test_lengths_of_a_bucket_share_a_batch_that_takes_what_its_longest_does():
    bucketed = model(buckets=(16,), delay_s=1.0, preferred_sizes=(2,), model_times=times(fixed=0.0, lengths=(8, 16)))
    figures = simulated([bucketed], [ask(0.0, 0, length=4), ask(0.0, 1, length=12)])["m"]
    assert figures.num_batches == 1
    assert figures.latency_s.largest == pytest.approx(2 * 0.012)


def test_the_next_of_a_client_comes_when_it_was_answered():
    def follow(before, now):
        return None if before.request_id == "r3" else ask(now, int(before.request_id[1:]) + 1)

    figures = simulated([model()], [ask(0.0, 0)], follow=follow)["m"]
    assert (figures.latency_s.count, figures.ended_at) == (4, pytest.approx(4 * 0.011))


def test_requests_that_are_late_fail_and_a_model_that_is_not_served_is_named():
    late = simulated([model()], [ask(0.0, 0), ask(0.001, 1, deadline_s=0.005)])["m"]
    assert dict(late.failures) == {"timeout": 1}
    assert late.latency_s.count == 1

    with pytest.raises(ModelNotFound, match="'other'"):
        simulated([model()], [ask(0.0, 0, "other")])


def test_the_spread_of_a_profile_is_drawn_and_the_same_seed_is_the_same_run():
    spread = model(model_times=times(spread=(0.5, 1.0, 3.0)))
    arrivals = [ask(0.1 * number, number) for number in range(50)]
    runs = [simulated([spread], arrivals, rng=Random(seed))["m"].latency_s.mean for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_step_of_the_language_model_and_a_batch_take_the_cores_from_each_other():
    def beside(scheduler: Scheduler) -> TensorSimulation:
        tensors = TensorSimulation(scheduler, [model(model_times=times(beside=((1, 1.0), (2, 1.5))))], HostTimes())
        tensors.begin(iter([ask(0.0, 0), ask(10.0, 1)]))
        return tensors

    alone = Simulation(setup(), COSTS, SimulatedResults()).run(iter([arrival("a", output=3)]))
    both = Simulation(setup(), COSTS, SimulatedResults(), tensors=beside)
    results = both.run(iter([arrival("a", output=3)]))
    assert results.total.num_finished == 1
    assert results.duration_s > alone.duration_s
    assert both.tensors is not None
    figures = both.tensors.figures["m"]
    assert figures.latency_s.count == 2, "the last one long after the language model's"
    assert figures.latency_s.largest > 0.011


def test_times_between_measured_ones_are_on_the_line_and_work_is_conserved():
    known = times(lengths=(8, 16))
    assert known.seconds(3, 8) == pytest.approx(0.01 + 0.024)
    assert known.seconds(2, 12) == pytest.approx(0.01 + 0.024)
    assert known.seconds(16, 8) == pytest.approx(2 * known.seconds(8, 8))
    assert times(beside=((1, 1.0), (2, 1.2))).times_as_long(4) == pytest.approx(2.4)

    machine = SimulatedMachine()
    for number in range(3):
        machine.begin(number, float, 1.0 + number, 1.0, 0.0)
    machine.advance(100.0)
    assert [at for at, _ in machine.ended] == pytest.approx([3.0, 5.0, 6.0])

    with pytest.raises(ConfigError, match="model-repository"):
        decode_tensor_profile(b"{}", "x.json")


def test_the_policy_of_the_chats_orders_the_lanes():
    told: list[str] = []
    simulation = TensorSimulation(
        make_scheduler(policy="priority"),
        [model(preferred_sizes=(1,))],
        HostTimes(),
        follow=lambda arrival, now: told.append(arrival.request_id),
    )
    simulation.begin(iter([ask(0.0, 0), ask(0.0, 1, priority=2), ask(0.0, 2, priority=0)]))
    simulation.run()
    assert told == ["r0", "r2", "r1"]
