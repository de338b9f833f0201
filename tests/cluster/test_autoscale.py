"""How many replicas: what is started, for whom nobody is, and what it costs beside Kubernetes' rule."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.cluster.autoscale import AutoscaleConfig, Autoscaler, FleetLoad, Target
from maitred.errors import ConfigError
from tests.cluster.scaling import Arrivals, HpaRule, Run, World


def scaler(low: int = 1, high: int = 20, **fields: Any) -> Autoscaler:
    return Autoscaler(AutoscaleConfig(min_replicas=low, max_replicas=high, **fields))


def learned(low: int = 0, high: int = 20, *, service_s: float = 4.0) -> Autoscaler:
    """One that has seen a hundred requests, long ago."""
    known = scaler(low, high, ttft_objective_s=1.0)
    known.target(load(num_ready=1, num_arrived=100, num_ended=100, served_s=100 * service_s), -10_000.0)
    known.target(load(num_ready=0, num_arrived=100, num_ended=100, served_s=100 * service_s), -1.0)
    return known


def load(**fields: Any) -> FleetLoad:
    return FleetLoad(**{"num_ready": 1, "slots": 8, "next_start_s": (10.0,), **fields})


PAST: dict[str, Any] = {"num_arrived": 100, "num_ended": 100, "served_s": 400.0}


def test_nobody_runs_while_nobody_asks_and_one_start_serves_all_who_come():
    fleet = scaler(low=0)
    assert fleet.target(load(num_ready=0), 0.0) == Target(0, "idle")
    assert fleet.target(load(num_ready=0, num_held=200, num_arrived=200), 0.1) == Target(1, "backlog")
    for tick in range(20):  # it loads
        coming = load(num_ready=0, ready_in_s=[2.0 - tick / 10], num_held=200, num_arrived=200)
        assert fleet.target(coming, 0.2 + tick / 10).num_replicas == 1


def test_the_last_one_stops_when_its_time_has_come_and_not_before():
    fleet = scaler(low=0, idle_s=30.0)
    assert fleet.target(load(num_in_flight=1, num_arrived=1), 0.0).num_replicas == 1
    gone = load(num_arrived=1, num_ended=1, served_s=2.0)
    assert fleet.target(gone, 29.0).num_replicas == 1
    assert fleet.target(gone, 30.0) == Target(0, "idle")
    assert scaler(low=1).target(gone, 1000.0).num_replicas == 1, "a floor is kept"


def test_nobody_is_started_for_a_backlog_that_those_under_way_will_clear():
    # two requests a second per replica: 10 s from now 3 of them will have served 16 + 2 x 8 more than were held
    under_way = load(num_ready=1, ready_in_s=[2.0, 2.0], num_in_flight=8, num_held=30, **PAST)
    assert learned().target(under_way, 0.0).num_replicas <= 3
    alone = load(num_ready=1, num_in_flight=8, num_held=60, **PAST)
    assert learned().target(alone, 0.0).num_replicas > 1


def test_a_quick_start_is_worth_it_where_a_slow_one_would_come_too_late():
    def wanted(next_start_s: float) -> int:
        held = load(num_ready=1, next_start_s=(next_start_s,), num_in_flight=8, num_held=20, **PAST)
        return learned().target(held, 0.0).num_replicas

    assert wanted(0.5) > 1, "one kept warm helps those who wait"
    assert wanted(30.0) <= 1, "when a cold one were ready, nobody would wait any more"


def test_bounds_hold_and_say_so():
    fleet = learned(low=2, high=3)
    assert fleet.target(load(num_ready=2, num_in_flight=16, num_held=900, **PAST), 0.0) == Target(3, "bounds")
    fleet.reconfigure(AutoscaleConfig(min_replicas=5, max_replicas=6))
    assert fleet.target(load(num_ready=3, **PAST), 0.1).num_replicas >= 5


@pytest.mark.parametrize(
    ("low", "high", "words"), [(-1, 1, "at least 0"), (3, 2, "must be at least 3"), (0, 0, "must be at least 1")]
)
def test_wrong_bounds_are_refused(low: int, high: int, words: str):
    with pytest.raises(ConfigError, match=words):
        AutoscaleConfig(min_replicas=low, max_replicas=high)


FIELDS = {
    "num_ready": st.integers(0, 30),
    "ready_in_s": st.lists(st.floats(0, 100), max_size=5),
    "num_in_flight": st.integers(0, 300),
    "num_held": st.integers(0, 1000),
}


@given(
    st.lists(st.tuples(st.floats(0, 90), st.fixed_dictionaries(FIELDS), st.integers(0, 50)), max_size=30),
    st.integers(0, 3),
    st.integers(3, 12),
)
def test_whatever_happens_it_stays_in_bounds_and_who_is_held_has_somebody_to_wait_for(
    moments: list[tuple[float, dict[str, Any], int]], low: int, high: int
):
    fleet, now, arrived = scaler(low, high, idle_s=10.0), 0.0, 0
    for passed_s, fields, num_new in moments:
        now, arrived = now + passed_s, arrived + num_new
        told = load(**fields, num_arrived=arrived, num_ended=arrived, served_s=3.0 * arrived)
        target = fleet.target(told, now).num_replicas
        assert max(low, bool(told.num_held or told.num_in_flight)) <= target <= high


LOADS: dict[str, Arrivals] = {
    "steady": lambda t: 4.0,
    "step": lambda t: 8.0 if 300 <= t < 900 else 1.0,
    "diurnal": lambda t: 5 - 4.5 * math.cos(2 * math.pi * t / 1800),
    "burst": lambda t: 12.0 if t % 600 < 40 else 1.0,
}


def ours(arrivals: Arrivals, *, start_s: float, seed: int = 0) -> Run:
    fleet = scaler(ttft_objective_s=1.0)
    world = World(
        lambda told, now: fleet.target(told, now).num_replicas, arrivals, num_ready=1, start_s=start_s, seed=seed
    )
    return world.play(1800)


def kubernetes(arrivals: Arrivals, *, start_s: float) -> Run:
    rule = HpaRule(1.0, 1, 20)
    world = World(rule, arrivals, num_ready=1, start_s=start_s)
    rule.waited = world.mean_wait_s
    return world.play(1800)


@pytest.mark.parametrize("name", LOADS)
def test_it_costs_less_than_kubernetes_rule_and_keeps_more_promises(name: str):
    mine, theirs = ours(LOADS[name], start_s=3.0), kubernetes(LOADS[name], start_s=3.0)
    assert mine.replica_s <= 0.8 * theirs.replica_s
    assert mine.attainment(1.0) >= theirs.attainment(1.0)


@pytest.mark.parametrize("start_s", [3.0, 20.0])
@pytest.mark.parametrize("arrivals_per_s", [0.3, 4.0, 10.0])
def test_a_steady_load_sees_no_reversal_within_a_minute(arrivals_per_s: float, start_s: float):
    for seed in range(2):
        run = ours(lambda t: arrivals_per_s, start_s=start_s, seed=seed)
        assert not list(run.reversals(60.0))
        assert run.attainment(1.0) > 0.95
