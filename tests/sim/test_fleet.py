from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.cost_model import Band, CostModel
from maitred.fleet.config import BALANCES, FleetConfig
from maitred.fleet.sizing import AutoscaleConfig, Autoscaler
from maitred.scheduler.engine_core import StepListener
from maitred.sim.fleet import FleetSetup, FleetSimulation, ReplicaSetup
from maitred.sim.results import SimulatedResults
from maitred.sim.workload import chain
from tests.sim.worlds import COSTS, arrival, setup, simulation, workload

CHATS = {
    "a": {"input": "uniform:1,60", "output": "uniform:1,12", "prefix_tokens": 8, "max_tokens": 16},
    "b": {"turns": "uniform:1,3", "input": 5, "output": "uniform:1,6", "think_s": 0.05, "priority": 1, "max_tokens": 8},
}
LONG_CHATS = {
    "a": {"input": "uniform:1,90", "output": "uniform:1,70", "prefix_tokens": 64, "num_prefixes": 3, "max_tokens": 70},
    "b": {"turns": "uniform:1,3", "input": 5, "output": "uniform:1,40", "think_s": 0.05, "max_tokens": 40},
}
ONE = ReplicaSetup(engine=setup(), cost_model=COSTS)
LARGE = ReplicaSetup(engine=setup(num_blocks=4096, block_size=16), cost_model=COSTS)


def fleet(num: int, *, balance: str = "prefix", one: ReplicaSetup = ONE, **fields: Any) -> FleetSimulation:
    config = FleetConfig(balance=balance)
    made = FleetSetup(config=config, scheduler=one.engine.scheduler, replicas=[one] * num, **fields)
    return FleetSimulation(made, SimulatedResults())


def scaled(low: int, high: int, *, idle_s: float = 5.0, **fields: Any) -> FleetSimulation:
    autoscale = Autoscaler(AutoscaleConfig(idle_s=idle_s))
    return fleet(high, low=low, autoscale=autoscale, cold_start_s=2.0, wake_s=0.5, **fields)


@settings(max_examples=25)
@given(
    balance=st.sampled_from(BALANCES),
    num=st.integers(1, 5),
    rate=st.sampled_from([60.0, 5000.0]),
    num_blocks=st.integers(40, 80),
    seed=st.integers(0, 5),
)
def test_every_request_of_a_fleet_ends_once_and_nothing_is_left(balance, num, rate, num_blocks, seed):
    one = replace(ONE, engine=setup(num_blocks=num_blocks))
    simulated = fleet(num, balance=balance, one=one)
    results = simulated.run(workload(rate=rate, num_requests=30, seed=seed, classes=CHATS).arrivals())
    total = results.total
    assert (total.num_finished, total.num_failed, total.num_here) == (30, 0, 0)
    assert simulated.core.num_requests == 0
    simulated.core.check_invariants()
    assert simulated.figures.replica_s == pytest.approx(num * results.ended_at)


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_a_fleet_of_one_is_a_plain_engine(policy: str):
    asked = workload(rate=300.0, num_requests=80, classes=CHATS)
    plain = simulation(policy=policy, num_blocks=256).run(asked.arrivals())
    alone = fleet(1, one=replace(ONE, engine=setup(policy=policy, num_blocks=256))).run(asked.arrivals())
    assert alone.num_row_steps == plain.num_row_steps
    assert alone.total.ttft_s.count == plain.total.ttft_s.count
    if policy == "fcfs":  # elsewhere, who is bound to the reserve waits behind it
        assert alone.to_json() == plain.to_json()


@pytest.mark.parametrize("balance", ["prefix", "round_robin"])
@pytest.mark.parametrize("num_blocks", [40, 400])
def test_replicas_take_steps_that_only_decode_many_at_a_time_and_decide_alike(balance, num_blocks):
    costs = CostModel(fixed_s=1e-3, decode_token_s=1e-4, between_s=1e-4, jitter=(Band(1.0, (0.5, 1.0, 3.0)),))
    one = ReplicaSetup(engine=setup(num_blocks=num_blocks, block_size=16), cost_model=costs)
    asked = workload(rate=150.0, num_requests=120, classes=LONG_CHATS)

    def run(listener_of: Callable[[str], StepListener] | None) -> FleetSimulation:
        made = FleetSetup(config=FleetConfig(balance=balance), scheduler=one.engine.scheduler, replicas=[one] * 3)
        simulated = FleetSimulation(made, SimulatedResults(), seed=3, listener_of=listener_of)
        simulated.run(asked.arrivals())
        return simulated

    many, single = run(None), run(lambda name: StepListener())
    assert many.to_json() == single.to_json()
    assert many.results.tickets.kept == single.results.tickets.kept


def test_a_run_repeated_gives_the_same_figures():
    asked = workload(rate=2000.0, num_requests=200, seed=3, classes=CHATS)
    first, second = (scaled(1, 4, balance="two_choices") for _ in range(2))
    first.run(asked.arrivals())
    second.run(asked.arrivals())
    assert first.to_json() == second.to_json()


def test_a_replica_to_which_nothing_is_sent_gets_no_engine():
    asked = workload(rate=20.0, num_requests=40, classes=CHATS)
    num_engines = []
    for simulated in (fleet(8), fleet(200)):
        simulated.run(asked.arrivals())
        num_engines.append(sum(replica.has_engine for replica in simulated.replicas.values()))
    assert num_engines[0] == num_engines[1] <= 8


def test_prefixes_are_found_where_they_were_told_of_and_only_there():
    spans = chain(["system"], 256)
    asked = [arrival(f"r{i}", at=i * 1.0, prompt=320, spans=spans) for i in range(6)]
    simulated = fleet(3, one=LARGE)
    results = simulated.run(iter(asked))
    assert results.num_cached_tokens == 5 * 256
    assert simulated.to_json()["prefix_hit_ratio"] == pytest.approx(5 * 256 / (6 * 320))

    spans = chain(["system"], 256)
    together = [arrival(f"r{i}", at=i * 0.001, prompt=320, spans=spans) for i in range(3)]
    assert fleet(3, one=LARGE).run(iter(together)).num_cached_tokens == 0


def test_a_fleet_goes_to_zero_and_comes_back_sooner_from_sleep():
    asked = [arrival("early"), arrival("late", at=60.0)]
    simulated = scaled(0, 2)
    results = simulated.run(iter(asked))
    figures = simulated.to_json()
    assert results.total.num_finished == 2
    assert figures["num_starts"] == 2
    assert results.total.ttft_s.quantile(0.0) == pytest.approx(2.0, abs=0.1)  # both waited for a start
    assert figures["replica_s"] < 25.0

    asked = [arrival("early"), arrival("late", at=60.0)]
    total = scaled(0, 2, num_asleep=1).run(iter(asked)).total
    assert total.ttft_s.largest == pytest.approx(2.0, abs=0.1)
    assert total.ttft_s.quantile(0.0) == pytest.approx(0.5, abs=0.1)


def test_a_faster_device_gets_more_when_its_speed_is_known():
    slow = replace(LARGE, cost_model=replace(COSTS, fixed_s=8e-3, prefill_token_s=8e-5, decode_token_s=8e-4))
    asked = workload(rate=800.0, num_requests=300, classes={"a": {"input": 64, "output": 8, "max_tokens": 8}})
    waits = []
    for tells in (True, False):
        replicas = [replace(one, tells_speed=tells) for one in (LARGE, slow)]
        made = FleetSetup(config=FleetConfig(), scheduler=LARGE.engine.scheduler, replicas=replicas)
        waits.append(FleetSimulation(made, SimulatedResults()).run(asked.arrivals()).total.ttft_s.mean)
    assert waits[0] < waits[1]


def test_the_most_loaded_replica_is_measured_against_the_mean_but_not_when_they_run_empty():
    asked = [arrival(f"r{i}", output=400, max_tokens=400, prompt=8) for i in range(40)]
    one = replace(LARGE, engine=setup(max_num_seqs=20, num_blocks=4096), cost_model=replace(COSTS, fixed_s=0.05))
    even = fleet(2, balance="least_load", one=one)
    even.run(iter([*asked, arrival("last", at=10.0)]))
    assert even.to_json()["load_max_over_mean"] == pytest.approx(1.0, abs=0.01)

    one = replace(LARGE, engine=setup(max_num_seqs=20, num_blocks=4096), cost_model=replace(COSTS, fixed_s=0.05))
    long_and_short = [arrival(f"r{i}", output=400 if i % 2 else 40, max_tokens=400, prompt=8) for i in range(40)]
    uneven = fleet(2, balance="round_robin", one=one)
    uneven.run(iter(long_and_short))
    assert uneven.to_json()["load_max_over_mean"] is None
