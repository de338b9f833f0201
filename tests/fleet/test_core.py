"""What the core decides: who is held and bound, what becomes of those whose replica fails, drains or is not there."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from maitred.config import SchedulerConfig
from maitred.core.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    ModelNotFound,
    PromptTooLong,
    QueueTimeout,
    RequestTimeout,
)
from maitred.fleet.actions import Action, Bind, Move, Probe, Refuse, Start, Stop
from maitred.fleet.balance import BALANCES
from maitred.fleet.binding import use_of
from maitred.fleet.fleet_request import AnswerUsage, Failure, FailureKind, FleetRequest
from maitred.fleet.replicas import FleetReplica, Kind, Report, State
from maitred.policy.policies import POLICIES
from maitred.testing.conformance_fleet import check_fleet_policy
from tests.fleet.fleets import Driver, Recording, facts, make_core, make_request


@pytest.mark.parametrize(("number", "name"), enumerate(sorted(POLICIES)))
def test_a_policy_keeps_its_promises_over_several_replicas(number: int, name: str):
    """Each before one of the six balances, and each balance with a policy or two."""
    check_fleet_policy(POLICIES[name], (number % 6,))


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_keeps_its_promises_before_every_balance(name: str):
    check_fleet_policy(POLICIES[name])


RESET, ERROR = Failure(FailureKind.RESET), Failure(FailureKind.ERROR)
LONG = {"num_bytes": 4000}


# -- late binding


def test_a_request_is_held_until_a_replica_has_room_for_all_its_samples():
    fleet = Driver(make_core("a", "b", slots=1))
    assert [fleet.arrive(f"r{i}") for i in range(3)] == ["a", "b", None]
    fleet.end("r1")
    assert fleet.bound["r2"] == "b"
    fleet = Driver(make_core("a", slots=8, reserve=0.125))
    assert [fleet.arrive(f"r{i}") for i in range(10)].count("a") == 9
    fleet = Driver(make_core("a", slots=4))
    fleet.arrive("four", num_samples=4)
    assert fleet.arrive("one") is None


def test_those_held_are_bound_in_the_order_of_the_policy_also_of_another_one():
    fleet = Driver(make_core("a", slots=1, policy="priority"))
    fleet.arrive("running", priority=0)
    for request_id, priority in (("late", 2), ("urgent", 0), ("usual", 1)):
        fleet.arrive(request_id, priority=priority)
    assert [r.request_id for r in fleet.core.held()] == ["urgent", "usual", "late"]
    fleet.end("running")
    assert "urgent" in fleet.bound
    fleet = Driver(make_core("a", slots=1))
    fleet.arrive("running")
    for request_id, priority in (("late", 2), ("urgent", 0), ("usual", 1)):
        fleet.arrive(request_id, priority=priority)
    fleet.do(fleet.core.configured(SchedulerConfig(policy="priority"), fleet.now))
    assert [r.request_id for r in fleet.core.held()] == ["urgent", "usual", "late"]
    with pytest.raises(ConfigError):
        fleet.core.configured(SchedulerConfig(policy="none such"), fleet.now)
    fleet.end("running")
    assert "urgent" in fleet.bound
    fleet.core.check_invariants()


def test_background_work_gets_slots_that_are_idle_and_keeps_none_from_another_request():
    fleet = Driver(make_core("a", "b", slots=2, reserve=0.5))
    assert [fleet.arrive(f"line{i}", background=True) for i in range(5)] == ["a", "b", "a", "b", None]
    assert [fleet.arrive(f"chat{i}") for i in range(7)] == ["a", "b", "a", "b", "a", "b", None]
    assert (fleet.core.num_held, fleet.core.num_queued) == (2, 1)
    assert [r.request_id for r in fleet.core.held()] == ["chat6", "line4"]
    fleet.core.check_invariants()
    fleet.end("line0")
    assert fleet.core.num_held == 2, "it took no slot of others"
    for name in ("chat0", "chat2", "chat4", "chat6"):
        fleet.end(name)
    assert fleet.bound["line4"] == "a"
    fleet.do(fleet.core.left("a", fleet.now))
    assert "line2" in fleet.held, "its replica is gone, and the other has no idle slot"
    fleet.core.check_invariants()


def test_background_service_counts_for_no_other_request_of_its_tenant():
    fleet = Driver(make_core("a", slots=1, policy="vtc"))
    fleet.arrive("line", tenant="greedy", background=True, **LONG)
    fleet.arrive("running", tenant="third")
    fleet.arrive("own", tenant="greedy")
    fleet.arrive("other", tenant="modest")
    assert [r.request_id for r in fleet.core.held()] == ["own", "other"]
    fleet.do(fleet.core.configured(SchedulerConfig(policy="priority"), fleet.now))
    for name in ("line", "running", "other", "own"):
        fleet.end(name)
    fleet.core.check_invariants()
    assert not fleet.core.held()


def test_a_models_backlog_holds_up_no_other_and_who_may_preempt_is_bound_at_once():
    fleet = Driver(make_core(facts("a", models=("m",)), facts("b", models=("n",)), slots=1))
    assert [fleet.arrive(f"m{i}", model="m") for i in range(3)] == ["a", None, None]
    assert fleet.arrive("n", model="n") == "b"
    fleet = Driver(make_core("a", slots=2, policy="priority"))
    for i in range(2):
        fleet.arrive(f"batch{i}", priority=2)
    assert [fleet.arrive(f"urgent{i}", priority=0) for i in range(3)] == ["a", "a", None]


@pytest.mark.parametrize("policy", POLICIES)
def test_lengths_are_foretold_where_the_policy_reads_them_and_no_place_hangs_on_them_elsewhere(policy: str):
    core, request = make_core("a", policy=policy), make_request("r")
    core.arrived(request, 0.0)
    key, reads = core.policy.order(request), core.policy.reads_predictions
    assert (request.expected_outputs is not None) == reads
    request.expected_outputs = 1.0
    assert (core.policy.order(request) != key) == reads


def test_service_counts_for_all_replicas_together():
    fleet = Driver(make_core(slots=1, policy="vtc"))
    for i in range(3):
        fleet.arrive(f"greedy{i}", tenant="greedy", **LONG)
        fleet.arrive(f"modest{i}", tenant="modest")
    for name in "ab":
        fleet.do(fleet.core.joined(facts(name), 0.0))
    assert fleet.bound == {"greedy0": "a", "modest0": "b"}
    fleet.end("greedy0")
    fleet.end("modest0")
    assert fleet.bound == {"modest1": "a", "modest2": "b"}


def test_full_replicas_get_nobody_until_their_time_and_load_of_others_takes_some_room():
    fleet = Driver(make_core("a"))
    fleet.arrive("r")
    fleet.fail("r", Failure(FailureKind.FULL, retry_after_s=5.0))
    assert fleet.core.fleet.by_name["a"].state is State.READY
    fleet.wait(4.9)
    assert "r" in fleet.held
    fleet.wait(0.2)
    assert fleet.bound["r"] == "a"
    fleet = Driver(make_core("a", slots=4))
    fleet.core.reported("a", Report(num_in_flight=1000), 0.0)
    assert [fleet.arrive(f"r{i}") for i in range(2)] == ["a", None]
    core = make_core("a")
    core.arrived(make_request("r"), 0.0)
    with pytest.raises(InvalidRequest, match="'r' is in use"):
        core.arrived(make_request("r"), 0.0)


# -- time


def test_deadlines_end_who_has_no_slot_or_is_not_done():
    fleet = Driver(make_core("a", slots=1))
    fleet.arrive("running")
    fleet.arrive("r", start_by=2.0)
    fleet.wait(3.0)
    assert isinstance(fleet.refused["r"].error, QueueTimeout)
    assert "running" in fleet.bound
    fleet = Driver(make_core("a", slots=1))
    fleet.arrive("running", finish_by=2.0)
    fleet.wait(3.0)
    assert isinstance(fleet.refused["running"].error, RequestTimeout)
    assert fleet.core.num_requests == 0


def test_a_request_is_held_for_so_long_with_nobody_there_and_for_ever_in_a_busy_fleet():
    fleet = Driver(make_core(hold_timeout_s=10.0))
    fleet.arrive("r")
    fleet.wait(9.0)
    assert "r" in fleet.held
    fleet.wait(2.0)
    assert isinstance(fleet.refused["r"].error, QueueTimeout)
    fleet = Driver(make_core("a", slots=1, hold_timeout_s=10.0))
    fleet.arrive("running")
    fleet.arrive("r")
    fleet.wait(100.0)
    assert "r" in fleet.held


# -- models and tiers


def test_names_are_held_until_models_are_told_and_known_while_nobody_is_there():
    fleet = Driver(make_core(facts("a", models=None)))
    assert fleet.arrive("mine", model="m") is None
    assert fleet.arrive("other", model="x") is None
    fleet.do(fleet.core.joined(facts("a"), 1.0))
    assert fleet.bound == {"mine": "a"}
    error = fleet.refused["other"].error
    assert isinstance(error, ModelNotFound)
    assert "there are: m" in str(error)
    fleet = Driver(make_core("a"))
    fleet.do(fleet.core.left("a", 0.0))
    fleet.arrive("known", model="m")
    fleet.arrive("unknown", model="x")
    assert fleet.held == {"known"}


TIERS = {"edge": {"replicas": ["e"], "max_prompt_tokens": 500, "spill_after_s": 3.0}, "cloud": {}}


def tiered() -> Driver:
    return Driver(make_core(facts("e", url="e"), facts("c", url="c"), slots=1, tiers=TIERS))


def test_a_tier_is_asked_before_the_next_which_gets_long_ones_and_who_waited():
    fleet = tiered()
    assert (fleet.arrive("short"), fleet.arrive("long", **LONG)) == ("e", "c")
    fleet = tiered()
    fleet.arrive("first")
    assert fleet.arrive("second") is None
    fleet.wait(3.0)
    assert fleet.bound["second"] == "c"


def test_what_is_local_never_leaves_the_first_tier_and_no_estimate_refuses_it():
    fleet = tiered()
    fleet.arrive("first")
    fleet.arrive("second", is_local=True)
    fleet.wait(100.0)
    assert "second" in fleet.held
    fleet.arrive("long", is_local=True, num_counted=501)
    error = fleet.refused["long"].error
    assert isinstance(error, PromptTooLong)
    assert "501 tokens; at most 500 in edge" in str(error)
    fleet = tiered()
    assert fleet.core.counter(make_request("short", is_local=True)) is None
    assert fleet.core.counter(make_request("long", **LONG)) is None, "for the cloud it is not"
    assert fleet.core.counter(make_request("long", is_local=True, **LONG)) == "e"
    assert fleet.arrive("counted", is_local=True, num_counted=500, **LONG) == "e"
    fleet.end("counted")
    assert fleet.arrive("estimated", is_local=True, **LONG) == "e"


# -- faults


def test_a_reset_takes_a_replica_out_and_probes_go_on_until_one_is_good():
    fleet = Driver(make_core("a", "b"))
    assert fleet.arrive("r") == "a"
    fleet.fail("r", RESET)
    assert fleet.bound["r"] == "b"
    assert fleet.core.fleet.by_name["a"].state is State.EJECTED
    fleet.wait(0.3)
    assert fleet.log[-1] == Probe("a")
    fleet.do(fleet.core.probed("a", True, fleet.now))
    assert fleet.core.fleet.by_name["a"].state is State.READY
    fleet = Driver(make_core("a", "b"))
    fleet.arrive("r")
    fleet.fail("r", RESET)
    for _ in range(5):
        fleet.wait(2.0)
        assert fleet.log.pop() == Probe("a")
        fleet.do(fleet.core.probed("a", False, fleet.now))


def test_failures_in_a_row_take_a_replica_out_but_errors_never_more_than_half():
    fleet = Driver(make_core("a", "b", slots=8, balance="session"))
    for i, outcome in enumerate(["bad", "bad", "good", "bad", "bad", "bad"]):
        assert fleet.core.fleet.by_name["a"].state is State.READY
        fleet.arrive(f"r{i}", hash_key=i)
        if fleet.bound[f"r{i}"] != "a":
            fleet.end(f"r{i}")
            continue
        if outcome == "bad":
            fleet.fail(f"r{i}", ERROR)
        fleet.end(f"r{i}")
    assert fleet.core.fleet.by_name["a"].state is State.EJECTED
    fleet = Driver(make_core("a", "b", "c", "d", slots=64, max_failures=1))
    for i in range(12):
        fleet.arrive(f"e{i}")
        fleet.fail(f"e{i}", ERROR)
    states = [r.state for r in fleet.core.fleet]
    assert states.count(State.EJECTED) == 2
    for i in range(12):
        if fleet.arrive(f"r{i}") is not None:
            fleet.fail(f"r{i}", RESET)
    assert all(r.state is State.EJECTED for r in fleet.core.fleet)


def test_silent_and_ejected_replicas_lose_what_they_had_to_others():
    fleet = Driver(make_core(facts("a", has_beats=True), facts("b", has_beats=False)))
    assert fleet.arrive("r") == "a"
    fleet.wait(2.2)
    assert fleet.bound["r"] == "a"
    fleet.wait(0.1)
    assert fleet.bound["r"] == "b"
    assert Move("r", "a", "silent") in fleet.log
    fleet.do(fleet.core.reported("a", Report(), fleet.now))
    assert fleet.core.fleet.by_name["a"].state is State.READY
    fleet.fail("r", RESET)
    assert "r" not in fleet.refused, "a, which is heard of again, did not die of it"
    fleet = Driver(make_core(facts("a", has_beats=True), facts("b", has_beats=False), slots=8, balance="session"))
    on_a = next(f"r{i}" for i in range(64) if fleet.arrive(f"r{i}", hash_key=i) == "a")
    lost = next(f"s{i}" for i in range(64) if fleet.arrive(f"s{i}", hash_key=i) == "a")
    fleet.fail(lost, RESET)
    assert fleet.core.fleet.by_name["a"].state is State.EJECTED
    assert fleet.bound[on_a] == "a"
    fleet.wait(2.3)
    assert fleet.bound[on_a] == "b"


def test_when_all_fall_silent_at_once_probes_are_asked_before_the_last_half_is_taken_out():
    fleet = Driver(make_core(facts("a", has_beats=True), facts("b", has_beats=True)))
    fleet.arrive("r0")
    fleet.arrive("r1")
    fleet.wait(2.25)
    states = {r.name: r.state for r in fleet.core.fleet}
    assert sorted(states.values()) == [State.EJECTED, State.READY]
    left = next(name for name, state in states.items() if state is State.READY)
    assert Probe(left) in fleet.log
    fleet.do(fleet.core.probed(left, False, fleet.now))
    assert not fleet.core.fleet.ready


def test_a_request_is_tried_three_times_and_given_to_nobody_after_two_deaths():
    fleet = Driver(make_core("a", "b", "c", "d"))
    seen = [fleet.arrive("r")]
    for _ in range(2):
        fleet.fail("r", ERROR)
        seen.append(fleet.bound["r"])
    assert len(set(seen)) == 3
    fleet.fail("r", ERROR)
    assert fleet.refused["r"].failure is ERROR
    fleet = Driver(make_core("a", "b", "c", max_retries=9))
    fleet.arrive("poison")
    fleet.fail("poison", RESET)
    fleet.fail("poison", RESET)
    assert isinstance(fleet.refused["poison"].error, EngineDead)
    assert fleet.core.fleet.ready.bit_count() == 1


def test_retries_are_a_tenth_of_requests_beyond_those_of_one_full_replica():
    fleet = Driver(make_core("a", "b", slots=30, reserve=0.0, max_failures=1000))
    num_tried_again = 0
    for i in range(100):
        fleet.arrive(f"r{i}")
        fleet.fail(f"r{i}", ERROR)
        if f"r{i}" in fleet.bound:
            num_tried_again += 1
            fleet.end(f"r{i}")
    assert 30 <= num_tried_again <= 40
    fleet = Driver(make_core("a", "b", slots=40))
    for i in range(40):
        fleet.arrive(f"r{i}")
    for request_id in [r for r, at in fleet.bound.items() if at == "a"]:
        fleet.fail(request_id, RESET)
    assert not fleet.refused


# -- after the first byte


def begin(fleet: Driver, request_id: str, **fields: object) -> None:
    fleet.arrive(request_id, **fields)
    fleet.core.progressed(request_id, 3, fleet.now)


def test_who_has_tokens_goes_on_where_the_same_numbers_are_computed():
    fleet = Driver(make_core(facts("a", fingerprint="x"), facts("b", fingerprint="y"), facts("c", fingerprint="x")))
    begin(fleet, "r", can_resume=True)
    fleet.fail("r", RESET)
    bind = next(action for action in reversed(fleet.log) if isinstance(action, Bind))
    assert (bind.choice.replica, bind.attempt, bind.resumes) == ("c", 2, True)


@pytest.mark.parametrize(("rule", "goes_on"), [("exact", False), ("always", True), ("never", False)])
def test_where_numerics_differ_the_rule_decides(rule: str, goes_on: bool):
    fleet = Driver(make_core(facts("a", fingerprint="x"), facts("b", fingerprint="y"), resume=rule, hold_timeout_s=1.0))
    begin(fleet, "r", can_resume=True)
    fleet.fail("r", RESET)
    fleet.wait(2.0)
    assert ("r" in fleet.bound) == goes_on


def test_a_part_of_an_answer_waits_for_nobody_and_a_foreign_one_ends_with_an_error():
    fleet = Driver(make_core(facts("a", fingerprint="x"), facts("b", fingerprint="y")))
    begin(fleet, "r", can_resume=True)
    fleet.do(fleet.core.left("a", 0.0))
    assert "no replica that is left computes the same numbers" in str(fleet.refused["r"].error)
    fleet = Driver(make_core(facts("a", kind=Kind.FOREIGN), facts("b", kind=Kind.FOREIGN)))
    begin(fleet, "r", can_resume=False)
    fleet.fail("r", RESET)
    assert "in the middle of the answer" in str(fleet.refused["r"].error)


def test_an_engine_that_hangs_loses_what_it_had_and_one_back_within_seconds_keeps_it():
    told = {"fingerprint": "x", "has_beats": False}
    fleet = Driver(make_core(facts("a", **told), facts("b", state=State.STARTING, **told), slots=8))
    begin(fleet, "stream", can_resume=True)
    begin(fleet, "whole", can_resume=False)
    fleet.arrive("new")
    fleet.arrive("cause")
    fleet.core.request("cause").has_fled = True
    hung = facts("a", state=State.STARTING, error="the engine's process has been silent for 3 s", **told)
    fleet.do(fleet.core.joined(hung, fleet.now))
    fleet.wait(9.0)
    assert set(fleet.bound.values()) == {"a"}, "there is no other"
    fleet.do(fleet.core.joined(facts("b", **told), fleet.now))
    fleet.wait(2.3)
    assert fleet.bound == {"stream": "b", "whole": "a", "new": "b", "cause": "a"}
    assert Move("stream", "a", "hung") in fleet.log
    assert (fleet.core.request("stream").has_fled, fleet.core.request("stream").num_deaths) == (True, 0)
    fleet = Driver(make_core(facts("a", fingerprint="x"), facts("b", fingerprint="x")))
    begin(fleet, "r", can_resume=True)
    for _ in range(2):
        fleet.do(fleet.core.joined(facts("a", fingerprint="x", state=State.STARTING), fleet.now))
        fleet.wait(1.5)
        fleet.do(fleet.core.joined(facts("a", fingerprint="x"), fleet.now))
    assert fleet.bound == {"r": "a"}


def test_where_one_foreign_server_limits_a_client_another_is_asked_and_whoever_waits_gets_the_slot():
    limited = Failure(FailureKind.LIMITED)
    fleet = Driver(make_core("a", "b", slots=1))
    assert (fleet.arrive("r"), fleet.arrive("s"), fleet.arrive("t")) == ("a", "b", None)
    fleet.fail("r", limited)
    assert (fleet.bound, fleet.held) == ({"s": "b", "t": "a"}, {"r"})
    fleet.end("s")
    assert fleet.bound["r"] == "b"
    fleet.fail("r", limited)
    assert fleet.refused["r"].failure == limited
    assert all(r.state is State.READY for r in fleet.core.fleet)


# -- drain, leave, size


def test_a_drain_moves_who_has_no_token_lets_others_finish_and_moves_them_at_the_deadline():
    fleet = Driver(make_core(facts("a", fingerprint="x"), facts("b", fingerprint="x"), replica_drain_s=5.0))
    begin(fleet, "begun", can_resume=True)
    fleet.arrive("elsewhere")
    fleet.arrive("fresh")
    assert fleet.bound == {"begun": "a", "elsewhere": "b", "fresh": "a"}
    fleet.do(fleet.core.drained("a", 0.0))
    assert fleet.bound == {"begun": "a", "elsewhere": "b", "fresh": "b"}
    fleet.end("fresh")
    fleet.wait(6.0)
    assert (fleet.bound["begun"], fleet.core.request("begun").num_retries) == ("b", 0)


def test_who_could_go_nowhere_else_stays_and_one_told_to_end_is_left_before():
    fleet = Driver(make_core("a"))
    fleet.arrive("r")
    fleet.do(fleet.core.drained("a", 0.0))
    assert fleet.bound == {"r": "a"}
    assert fleet.arrive("new") is None
    fleet = Driver(make_core(facts("a", fingerprint="x"), facts("b", fingerprint="x"), replica_drain_s=50.0))
    begin(fleet, "begun", can_resume=True)
    fleet.do(fleet.core.drained("a", 0.0))
    fleet.do(fleet.core.leaving("a", 1.0, 0.0))
    fleet.wait(0.6)
    assert fleet.bound["begun"] == "b"


def test_one_that_drains_by_itself_is_left_shortly_before_it_ends_and_used_again_when_it_is_back():
    fleet = Driver(make_core(*(facts(name, fingerprint="x", has_beats=True) for name in "ab"), silence_s=100.0))
    begin(fleet, "begun", can_resume=True)
    fleet.arrive("elsewhere")
    fleet.arrive("fresh")
    fleet.do(fleet.core.leaving("a", 5.0, 0.0))
    told = facts("a", fingerprint="x", has_beats=True, state=State.STARTING)
    fleet.do(fleet.core.joined(told, 0.0))
    assert fleet.bound == {"begun": "a", "elsewhere": "b", "fresh": "b"}
    fleet.end("fresh")
    fleet.wait(3.9)
    assert (fleet.bound["begun"], fleet.core.fleet.by_name["a"].state) == ("a", State.DRAINING)
    fleet.wait(0.2)
    assert fleet.bound["begun"] == "b"
    fleet.do(fleet.core.joined(facts("a", fingerprint="x", state=State.STARTING), 5.0))
    assert fleet.core.fleet.by_name["a"].state is State.STARTING, "its stream of events has ended"
    fleet.do(fleet.core.joined(facts("a", fingerprint="x"), 6.0))
    assert fleet.arrive("later") == "a"


def ready(fleet: Driver, start: Start) -> None:
    fleet.do(fleet.core.joined(facts(start.name, is_launched=True), fleet.now))


def starts(fleet: Driver) -> list[Start]:
    return [action for action in fleet.log if isinstance(action, Start)]


def test_from_zero_one_start_serves_all_and_one_that_is_gone_is_replaced():
    fleet = Driver(make_core(slots=8))
    fleet.do(fleet.core.scaled(0, 2, 0.0))
    for i in range(5):
        assert fleet.arrive(f"r{i}") is None
    assert len(starts(fleet)) == 1
    ready(fleet, starts(fleet)[0])
    assert len(fleet.bound) == 5
    fleet = Driver(make_core())
    fleet.do(fleet.core.scaled(2, 2, 0.0))
    for start in starts(fleet):
        ready(fleet, start)
    fleet.do(fleet.core.left("replica-1", 1.0))
    assert [start.name for start in starts(fleet)] == ["replica-1", "replica-2", "replica-3"]


def test_fewer_replicas_drain_before_they_stop_and_a_restart_goes_one_by_one():
    fleet = Driver(make_core())
    fleet.do(fleet.core.scaled(2, 2, 0.0))
    for start in starts(fleet):
        ready(fleet, start)
    begin(fleet, "r0")
    begin(fleet, "r1")
    fleet.do(fleet.core.scaled(1, 1, 1.0))
    (draining,) = [r for r in fleet.core.fleet if r.state is State.DRAINING]
    assert Stop(draining.name) not in fleet.log
    fleet.end(next(iter(draining.in_flight)))
    assert Stop(draining.name) in fleet.log
    fleet = Driver(make_core())
    fleet.do(fleet.core.scaled(2, 2, 0.0))
    for start in starts(fleet):
        ready(fleet, start)
    fleet.log.clear()
    fleet.do(fleet.core.restarted(["replica-1", "replica-2"], 0.0))
    for old in ("replica-1", "replica-2"):
        (start,) = starts(fleet)
        assert Stop(old) not in fleet.log
        fleet.log.clear()
        ready(fleet, start)
        assert Stop(old) in fleet.log
        fleet.do(fleet.core.left(old, 1.0))
    assert sorted(r.name for r in fleet.core.fleet) == ["replica-3", "replica-4"]


# -- what is told


def test_the_view_has_the_fields_of_the_admin_route():
    fleet = Driver(make_core(facts("a", url="http://a", pid=7), slots=1))
    fleet.core.reported("a", Report(stored=(1, 2)), 0.0)
    fleet.arrive("r0")
    fleet.arrive("r1")
    view = fleet.core.view(3.0)
    assert (view.target, view.held, view.oldest_held_s) == (0, 1, 3.0)
    (replica,) = view.replicas
    assert (replica.name, replica.url, replica.kind, replica.state) == ("a", "http://a", "maitred", "ready")
    assert (replica.pid, replica.in_flight, replica.slots, replica.models) == (7, 1, 1, ("m",))
    assert (replica.tier, replica.prefix_keys, replica.error) == ("", 2, None)


def test_usage_teaches_bytes_of_a_token_and_a_refusal_is_told_once():
    fleet = Driver(make_core("a"))
    for i in range(300):
        fleet.arrive(f"r{i}", num_bytes=800)
        fleet.end(f"r{i}", AnswerUsage(num_prompt_tokens=100, num_output_tokens=5))
    fleet.arrive("r", num_bytes=800)
    assert fleet.core.request("r").num_inputs == pytest.approx(100, abs=5)
    fleet = Driver(make_core("a", max_retries=0))
    fleet.arrive("r")
    fleet.fail("r", ERROR)
    assert ([type(action) for action in fleet.log], fleet.core.aborted("r", 1.0)) == ([Bind, Refuse], [])
    assert fleet.core.num_requests == 0


NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
MODELS = st.sampled_from(["m", "n", None])
NEAR_AND_FAR = {"near": {"replicas": ["a", "b"], "max_prompt_tokens": 150, "spill_after_s": 3.0}, "far": {}}


class Fleet(RuleBasedStateMachine):
    """A router's view of a core, beside a slow obvious one of who may be where."""

    def __init__(self) -> None:
        super().__init__()
        self.recording: Recording | None = None
        self.num_arrivals = 0
        self.num_retries = 0
        self.retrying: set[str] = set()
        self.deaths: dict[str, int] = {}
        self.ended: set[str] = set()

    @initialize(
        balance=st.sampled_from(sorted(BALANCES)), policy=st.sampled_from(sorted(POLICIES)),
        tiers=st.sampled_from([{}, NEAR_AND_FAR]), ratio=st.sampled_from([1.0, 1.25, 10.0]),
    )  # fmt: skip
    def begin(self, balance: str, policy: str, tiers: dict[str, Any], ratio: float) -> None:
        self.core = make_core(
            policy=policy, balance=balance, tiers=tiers, max_load_ratio=ratio, slots=3, reserve=0.125,
            hold_timeout_s=9.0,
        )  # fmt: skip
        self.recording = Recording(self.core)
        self.driver = Driver(self.core)
        for number, name in enumerate(["a", "b", "c"]):
            told = facts(
                name, url=name, slots=4 + 2 * number, models=("m", "n"), has_beats=name == "a", fingerprint="x"
            )
            self.do(self.core.joined(told, 0.0))

    # -- what happens

    @rule(name=NAMES, slots=st.integers(1, 4), models=st.sampled_from([("m",), ("m", "n"), None]), data=st.data())
    def join(self, name: str, slots: int, models: tuple[str, ...] | None, data: st.DataObject) -> None:
        told = facts(
            name,
            url=name,
            slots=slots,
            models=models,
            state=data.draw(st.sampled_from([State.READY, State.READY, State.STARTING])),
            kind=data.draw(st.sampled_from(list(Kind))),
            has_beats=data.draw(st.booleans()),
            fingerprint=data.draw(st.sampled_from(["x", "y"])),
            weight=data.draw(st.sampled_from([None, 2.0])),
        )
        self.do(self.core.joined(told, self.now))

    @rule(name=NAMES, what=st.sampled_from(["leaves", "dies", "drains", "drains by itself", "answers", "answers not"]))
    def befall(self, name: str, what: str) -> None:
        if what == "drains":
            self.do(self.core.drained(name, self.now))
        elif what == "drains by itself":
            self.do(self.core.leaving(name, 1.5, self.now))
        elif what in ("leaves", "dies"):
            self.do(self.core.left(name, self.now, what == "dies"))
        else:
            self.do(self.core.probed(name, what == "answers", self.now))

    @rule(name=NAMES, load=st.one_of(st.none(), st.integers(0, 9)), keys=st.lists(st.integers(0, 9)))
    def report(self, name: str, load: int | None, keys: list[int]) -> None:
        self.do(self.core.reported(name, Report(num_in_flight=load, stored=keys[:4], removed=keys[4:]), self.now))

    @rule(
        count=st.integers(1, 12), model=MODELS, num_bytes=st.integers(1, 2000), num_samples=st.integers(1, 3),
        num_keys=st.integers(0, 6), priority=st.integers(0, 2), tenant=st.sampled_from("tuv"),
        slack=st.sampled_from([None, 0.0, 2.0]), can_resume=st.booleans(), is_local=st.booleans(),
        hash_key=st.sampled_from([None, 1, 2**63]),
    )  # fmt: skip
    def arrive(self, count: int, num_keys: int, slack: float | None, **fields: Any) -> None:
        by = None if slack is None else self.now + slack
        for _ in range(count):
            self.num_arrivals += 1
            name, keys = f"r{self.num_arrivals:04d}", tuple(range(num_keys))
            request = make_request(name, self.now, keys=keys, start_by=by, finish_by=by, **fields)
            self.driver.held.add(name)
            self.do(self.core.arrived(request, self.now))

    @precondition(lambda self: self.driver.bound)
    @rule(data=st.data(), num_tokens=st.integers(0, 3))
    def progress(self, data: st.DataObject, num_tokens: int) -> None:
        self.core.progressed(self.draw_bound(data), num_tokens, self.now)

    @precondition(lambda self: self.driver.bound)
    @rule(data=st.data(), usage=st.sampled_from([None, AnswerUsage(90, 8, 40), AnswerUsage(3, 1)]))
    def end(self, data: st.DataObject, usage: AnswerUsage | None) -> None:
        request_id = self.draw_bound(data)
        del self.driver.bound[request_id]
        self.ended.add(request_id)
        self.do(self.core.ended(request_id, usage, self.now))

    @precondition(lambda self: self.driver.bound)
    @rule(data=st.data(), kind=st.sampled_from(list(FailureKind)))
    def fail(self, data: st.DataObject, kind: FailureKind) -> None:
        self.fail_one(self.draw_bound(data), kind)

    @rule(name=NAMES, kind=st.sampled_from(list(FailureKind)))
    def fail_all_of(self, name: str, kind: FailureKind) -> None:
        for request_id in [request_id for request_id, at in self.driver.bound.items() if at == name]:
            if self.driver.bound.get(request_id) == name:
                self.fail_one(request_id, kind)

    def fail_one(self, request_id: str, kind: FailureKind) -> None:
        replica = self.core.fleet.by_name[self.driver.bound[request_id]]
        was_ready = replica.state is State.READY
        if kind not in (FailureKind.FULL, FailureKind.LIMITED):
            self.note_failure(self.request(request_id), Failure(kind).is_death)
        del self.driver.bound[request_id]
        self.driver.held.add(request_id)
        self.do(self.core.failed(request_id, Failure(kind, retry_after_s=2.0), self.now))
        if kind is FailureKind.ERROR and was_ready and replica.state is State.EJECTED:
            states = [r.state for r in self.core.fleet]
            assert states.count(State.READY) >= states.count(State.EJECTED)

    @precondition(lambda self: self.driver.bound or self.driver.held)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted({*self.driver.bound, *self.driver.held})))
        self.driver.bound.pop(request_id, None)
        self.driver.held.discard(request_id)
        self.ended.add(request_id)
        self.do(self.core.aborted(request_id, self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 10.0]))
    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (at := self.core.next_tick()) is not None and at <= until:
            self.driver.now = max(self.now, at)
            self.do(self.core.tick(self.now))
        self.driver.now = until

    # -- what must hold

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        self.core.check_invariants()
        assert self.driver.held.isdisjoint(self.driver.bound)
        assert self.core.num_requests == len(self.driver.held) + len(self.driver.bound)
        assert {r.request_id for r in self.core.held()} == self.driver.held
        for request_id, name in self.driver.bound.items():
            assert request_id in self.core.fleet.by_name[name].in_flight
        assert len(self.ended) + len(self.driver.refused) + self.core.num_requests == self.num_arrivals

    @invariant()
    def nobody_is_held_while_a_replica_that_it_may_use_has_room(self) -> None:
        for request in self.core.held():
            idle = [r.name for r in self.usable(request) if not r.is_full and r.room > 0]
            assert not idle, f"{request.request_id} is held while {idle} have room"

    @invariant()
    def retries_are_few(self) -> None:
        assert self.num_retries <= 10 + 0.1 * self.num_arrivals
        living = [self.request(request_id) for request_id in (*self.driver.held, *self.driver.bound)]
        assert all(request.num_retries <= 2 for request in living)

    @invariant()
    def who_saw_two_replicas_die_is_given_to_no_third(self) -> None:
        for request in map(self.request, (*self.driver.held, *self.driver.bound)):
            assert self.deaths.get(request.request_id, 0) - (request.silent_at == -1) < 2

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Move) and action.reason not in ("drain", "hung"):
                request = self.core.request(action.request_id)
                if request is not None:  # else it was refused for it
                    self.note_failure(request, True)
        loads = {r.name: r.load for r in self.core.fleet}
        bindings = [action for action in self.driver.do(actions) if isinstance(action, Bind)]
        for bind in reversed(bindings):  # as it was before each
            if bind.request_id in self.retrying:
                self.retrying.remove(bind.request_id)
                self.num_retries += 1
            if (request := self.core.request(bind.request_id)) is None:  # that one was lost at once, and it is refused
                continue
            replica = self.core.fleet.by_name[bind.choice.replica]
            assert replica.state is State.READY
            loads[replica.name] -= request.num_samples
            self.check_bound(request, replica, loads)

    def check_bound(self, request: FleetRequest, chosen: FleetReplica, loads: dict[str, int]) -> None:
        """Nobody is above ceil(ratio x mean) + 1 while another, in the tier that he is in, has room below it."""
        usable = self.usable(request)
        assert chosen in usable
        share = self.core.config.max_load_ratio * sum(loads[r.name] for r in usable) / sum(r.speed for r in usable)

        def is_within(replica: FleetReplica) -> bool:
            return loads[replica.name] + request.num_samples <= ceil(share * replica.speed) + 1

        def has_room(replica: FleetReplica) -> bool:
            own = loads[replica.name] - replica.num_others
            return not replica.is_full and max(1, replica.limit - replica.num_others) > own

        if not is_within(chosen):
            others = [r for r in usable if r.tier == chosen.tier and has_room(r) and is_within(r)]
            assert not others, f"{request.request_id} went to {chosen.name}, over the bound, beside {others}"

    def usable(self, request: FleetRequest) -> list[FleetReplica]:
        """The slow obvious way."""
        use = use_of(request)
        may = [
            r
            for r in self.core.fleet
            if r.state is State.READY
            and (use.model is None or use.model in (r.facts.models or ()))
            and use.tiers >> r.tier & 1
            and use.fingerprint in (None, r.facts.fingerprint)
        ]
        return [r for r in may if not use.barred >> r.bit & 1] or may

    # -- helpers

    @property
    def now(self) -> float:
        return self.driver.now

    def request(self, request_id: str) -> FleetRequest:
        request = self.core.request(request_id)
        assert request is not None
        return request

    def draw_bound(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.driver.bound)))

    def note_failure(self, request: FleetRequest, is_death: bool) -> None:
        died = is_death or request.has_begun
        self.deaths[request.request_id] = self.deaths.get(request.request_id, 0) + died
        if not request.has_begun:
            self.retrying.add(request.request_id)

    def teardown(self) -> None:
        if self.recording is not None:
            self.recording.assert_replays()


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
