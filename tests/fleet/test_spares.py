"""Replicas beyond need: some are loaded and out of rotation, some asleep; both are there sooner than new ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from maitred.fleet.actions import Action, Sleep, Start, Stop
from maitred.fleet.replicas import ReplicaFacts, State
from tests.fleet.fleets import Driver, facts, make_core


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
    assert states(fleet) == ["ready", "warm"]
    assert fleet.core.fleet.by_name["replica-2"].in_flight == {}


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
    assert {r.name: r.state for r in fleet.core.fleet} == before
    assert of(fleet, Start)[3:] == []


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
