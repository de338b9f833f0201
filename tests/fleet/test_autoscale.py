"""How many replicas: what is started, for whom nobody is, and what it costs beside Kubernetes' rule."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.fleet.actions import Action, Sleep, Start, Stop
from maitred.fleet.replicas import ReplicaFacts, State
from maitred.fleet.sizing import AimedAt, AutoscaleConfig, Autoscaler, FleetFigures, as_asked
from tests.fleet.fleets import Driver, facts, make_core
from tests.fleet.scaling import Arrivals, HpaRule, Metric, Run, World


def scaler(**fields: Any) -> Autoscaler:
    return Autoscaler(AutoscaleConfig(**fields))


PAST: dict[str, Any] = {"num_arrived": 100, "num_ended": 100, "served_s": 400.0}


def learned() -> Autoscaler:
    """One that has seen a hundred requests of four seconds, long ago."""
    known = scaler(ttft_objective_s=1.0)
    known.decide(figures(num_ready=1, **PAST), -10_000.0)
    known.decide(figures(num_ready=0, **PAST), -1.0)
    return known


def figures(**fields: Any) -> FleetFigures:
    return FleetFigures(
        **{"low": 0, "high": 20, "target": 1, "num_ready": 1, "slots": 8, "next_start_s": (10.0,), **fields}
    )


def test_nobody_runs_while_nobody_asks_and_one_start_serves_all_who_come():
    fleet = scaler()
    assert fleet.decide(figures(target=0, num_ready=0), 0.0) == AimedAt(0, "idle")
    assert fleet.decide(figures(target=0, num_ready=0, num_held=200, num_arrived=200), 0.1) == AimedAt(1, "backlog")
    for tick in range(20):  # it loads
        coming = figures(num_ready=0, ready_in_s=[2.0 - tick / 10], num_held=200, num_arrived=200)
        assert fleet(coming, 0.2 + tick / 10) == 1


def test_the_last_one_stops_when_its_time_has_come_and_not_before():
    fleet = scaler(idle_s=30.0)
    assert fleet(figures(num_in_flight=1, num_arrived=1), 0.0) == 1
    gone = {"num_arrived": 1, "num_ended": 1, "served_s": 2.0}
    assert fleet(figures(**gone), 29.0) == 1
    assert fleet.decide(figures(**gone), 30.0) == AimedAt(0, "idle")
    assert fleet.decide(figures(low=1, **gone), 31.0) == AimedAt(1, "bounds")


def test_nobody_is_started_for_a_backlog_that_those_under_way_will_clear():
    # two requests a second per replica: 10 s from now three of them will have served far more than were held
    under_way = figures(target=3, num_ready=1, ready_in_s=[2.0, 2.0], num_in_flight=8, num_held=30, **PAST)
    assert learned()(under_way, 0.0) == 3
    alone = figures(num_ready=1, num_in_flight=8, num_held=60, **PAST)
    assert learned().decide(alone, 0.0).why == "backlog"


def test_a_quick_start_is_worth_it_where_a_slow_one_would_come_too_late():
    def wanted(next_start_s: float) -> int:
        return learned()(figures(next_start_s=(next_start_s,), num_in_flight=8, num_held=20, **PAST), 0.0)

    assert wanted(0.5) > 1, "one kept warm helps those who wait"
    assert wanted(30.0) == 1, "when a cold one were ready, nobody would wait any more"


def test_bounds_hold_and_say_so():
    crowd = figures(low=2, high=3, target=2, num_ready=2, num_in_flight=16, num_held=900, **PAST)
    assert learned().decide(crowd, 0.0) == AimedAt(3, "bounds")
    assert learned()(figures(low=5, high=6, num_ready=3, **PAST), 0.1) == 5


FIELDS = {
    "num_ready": st.integers(0, 30), "ready_in_s": st.lists(st.floats(0, 100), max_size=5),
    "num_in_flight": st.integers(0, 300), "num_held": st.integers(0, 1000),
}  # fmt: skip


@given(
    st.lists(st.tuples(st.floats(0, 90), st.fixed_dictionaries(FIELDS), st.integers(0, 50)), max_size=30),
    st.integers(0, 3),
    st.integers(3, 12),
)
def test_whatever_happens_it_stays_in_bounds_and_who_is_held_has_somebody_to_wait_for(
    moments: list[tuple[float, dict[str, Any], int]], low: int, high: int
):
    fleet, now, arrived, target = scaler(idle_s=10.0), 0.0, 0, low
    for passed_s, fields, num_new in moments:
        now, arrived = now + passed_s, arrived + num_new
        counters = {"num_arrived": arrived, "num_ended": arrived, "served_s": 3.0 * arrived}
        told = figures(low=low, high=high, target=target, **fields, **counters)
        target = fleet(told, now)
        assert max(low, bool(told.num_held or told.num_in_flight)) <= target <= high


LOADS: dict[str, Arrivals] = {
    "steady": lambda t: 4.0,
    "step": lambda t: 8.0 if 300 <= t < 900 else 1.0,
    "diurnal": lambda t: 5 - 4.5 * math.cos(2 * math.pi * t / 1800),
    "burst": lambda t: 12.0 if t % 600 < 40 else 1.0,
}


def ours(arrivals: Arrivals, *, start_s: float, seed: int = 0) -> Run:
    return World(scaler(ttft_objective_s=1.0), arrivals, start_s=start_s, seed=seed).play(1800)


def kubernetes(arrivals: Arrivals, *, start_s: float) -> Run:
    """By the manifest in `deploy/kubernetes/fleet`."""
    world = World(as_asked, arrivals, start_s=start_s)
    world.scaler = HpaRule.of_manifest(world.low, world.high, lambda: Metric(world.num_ended, world.waited_s))
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


def launching(low: int, high: int, **settings: int) -> Driver:
    fleet = Driver(make_core(slots=2, **settings))
    fleet.do(fleet.core.scaled(low, high, 0.0))
    return fleet


def told(name: str, state: State) -> ReplicaFacts:
    return facts(name, is_launched=True, state=state)


def get_ready(fleet: Driver) -> None:
    """All that are on their way."""
    while coming := [r.name for r in fleet.core.fleet if r.state is State.STARTING]:
        for name in coming:
            fleet.do(fleet.core.joined(told(name, State.READY), fleet.now))


def states(fleet: Driver) -> list[str]:
    return sorted(r.state.value for r in fleet.core.fleet)


def of(fleet: Driver, kind: type[Action]) -> list[Action]:
    found = [action for action in fleet.log if isinstance(action, kind)]
    fleet.log.clear()
    return found


def test_a_warm_one_takes_over_at_once_and_another_is_made_warm_for_it():
    fleet = launching(0, 4, warm=1)
    get_ready(fleet)
    assert states(fleet) == ["warm"], "beyond a need of nobody"
    assert fleet.arrive("r") == "replica-1"
    assert of(fleet, Start)[-2:] == [Start("replica-1", "warm"), Start("replica-2", "cold")]
    get_ready(fleet)
    assert (states(fleet), fleet.core.fleet.by_name["replica-2"].in_flight) == (["ready", "warm"], {})


def test_one_asleep_is_woken_before_a_new_one_is_started():
    fleet = launching(1, 4, asleep=1)
    get_ready(fleet)
    assert states(fleet) == ["asleep", "ready"]
    assert of(fleet, Sleep) == [Sleep("replica-2")]
    fleet.do(fleet.core.scaled(2, 4, 1.0))
    assert of(fleet, Start) == [Start("replica-2", "asleep"), Start("replica-3", "cold")]
    get_ready(fleet)
    assert states(fleet) == ["asleep", "ready", "ready"]


def test_those_no_longer_needed_become_spares_before_any_is_stopped():
    fleet = launching(3, 3, warm=1, asleep=1)
    get_ready(fleet)
    fleet.do(fleet.core.scaled(1, 1, 1.0))
    assert states(fleet) == ["asleep", "draining", "draining", "ready", "warm"], "spares are there already"
    assert len(of(fleet, Stop)) == 2


def test_a_warm_one_stands_in_for_one_that_died_which_becomes_the_spare():
    fleet = launching(1, 1, warm=1)
    get_ready(fleet)
    fleet.arrive("r", can_resume=False)
    fleet.do(fleet.core.left("replica-1", 1.0, returns=True))
    assert fleet.bound == {"r": "replica-2"}
    get_ready(fleet)
    assert {r.name: r.state for r in fleet.core.fleet} == {"replica-1": State.WARM, "replica-2": State.READY}


def test_what_a_spare_tells_of_itself_brings_it_into_no_rotation():
    fleet = launching(1, 1, warm=1, asleep=1)
    get_ready(fleet)
    before = {r.name: r.state for r in fleet.core.fleet}
    for name in before:
        fleet.do(fleet.core.joined(told(name, State.READY), 1.0))
    assert ({r.name: r.state for r in fleet.core.fleet}, of(fleet, Start)[3:]) == (before, [])


def test_a_restart_replaces_spares_too_and_leaves_as_many():
    fleet = launching(1, 1, warm=1, asleep=1)
    get_ready(fleet)
    fleet.do(fleet.core.restarted(["replica-1", "replica-2", "replica-3"], 1.0))
    for _ in range(3):
        get_ready(fleet)
        for stop in of(fleet, Stop):
            fleet.do(fleet.core.left(stop.name, 2.0))
    get_ready(fleet)
    assert states(fleet) == ["asleep", "ready", "warm"]
    assert {"replica-1", "replica-2", "replica-3"}.isdisjoint(fleet.core.fleet.by_name)
    assert len(fleet.core.fleet) == 3


def settle(fleet: Driver) -> None:
    """Until nothing changes: those on their way are there, those stopped are gone, those out are well again."""
    for _ in range(30):
        get_ready(fleet)
        for replica in list(fleet.core.fleet):
            if replica.state is State.EJECTED:
                fleet.do(fleet.core.probed(replica.name, True, fleet.now))
        for stop in of(fleet, Stop):
            fleet.do(fleet.core.left(stop.name, fleet.now))
        fleet.wait(1.0)


NAMES = st.sampled_from([f"replica-{number}" for number in range(1, 9)])
STEPS = st.one_of(
    st.tuples(st.just("scaled"), st.sampled_from([(1, 1), (2, 2), (3, 3)])),
    st.tuples(st.sampled_from(["killed", "lost", "drained", "silent", "ready"]), NAMES),
    st.tuples(st.just("restarted"), st.lists(NAMES, max_size=4)),
    st.tuples(st.just("waited"), st.sampled_from([0.5, 3.0])),
)


@given(warm=st.integers(0, 2), asleep=st.integers(0, 2), steps=st.lists(STEPS, max_size=12))
def test_whatever_happens_there_are_in_the_end_as_many_as_are_wanted_and_as_many_spares(
    warm: int, asleep: int, steps: list[tuple[str, Any]]
) -> None:
    fleet = launching(1, 1, warm=warm, asleep=asleep)
    for what, given_ in steps:
        take_step(fleet, what, given_)
    settle(fleet)
    target = fleet.core.view(fleet.now).target
    assert Counter(states(fleet)) == Counter({"ready": target, "warm": warm, "asleep": asleep})
    fleet.core.check_invariants()


def take_step(fleet: Driver, what: str, given_: Any) -> None:
    core, now = fleet.core, fleet.now
    if what == "scaled":
        fleet.do(core.scaled(*given_, now))
    elif what == "restarted":
        fleet.do(core.restarted(given_, now))
    elif what == "waited":
        fleet.wait(given_)
    elif given_ in core.fleet.by_name:
        if what in ("killed", "lost"):
            fleet.do(core.left(given_, now, what == "killed"))
        elif what == "drained":
            fleet.do(core.drained(given_, now))
        elif what == "silent":
            fleet.do(core.probed(given_, False, now))
        else:
            fleet.do(core.joined(told(given_, State.READY), now))
