"""What a router does when a replica fails that computes a prompt for another one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from maitred.config import SchedulerConfig
from maitred.fleet.actions import Action, Bind, Move
from maitred.fleet.config import FleetConfig
from maitred.fleet.core import ClusterCore
from maitred.fleet.disagg import HandoverConfig, WorkAsked, options
from maitred.fleet.fleet_request import Failure, FailureKind
from maitred.fleet.replicas import ReplicaFacts, State
from tests.fleet.fleets import make_request
from tests.fleet.workers import facts, worker

REFUSED = Failure(FailureKind.RESET, message="connection refused")


def host(name: str, role: str) -> ReplicaFacts:
    return ReplicaFacts(name=name, models=("m",), fingerprint="f", has_beats=True, worker=facts(role))


@pytest.fixture
def core() -> ClusterCore:
    handover = HandoverConfig(handover="always")
    core = ClusterCore(FleetConfig(), SchedulerConfig(predictor="max_tokens"), handover=handover)
    for name, role in (("p1", "prefill"), ("d1", "decode"), ("p2", "prefill")):
        core.joined(host(name, role), 0.0)
    return core


def test_always_waits_for_the_role_that_is_not_there_as_long_as_it_may_come(core: ClusterCore):
    core.joined(replace(host("d1", "decode"), state=State.STARTING), 0.0)
    assert core.arrived(make_request("a", num_bytes=8000), 0.0) == []
    choice = only_bind(core.joined(host("d1", "decode"), 0.1)).choice
    assert (choice.prefill, choice.replica) == ("p1", "d1")
    core.joined(replace(host("d1", "decode"), state=State.STARTING), 0.2)
    assert core.arrived(make_request("b", num_bytes=8000), 0.2) == []
    alone = [action for action in core.left("d1", 0.3) if isinstance(action, Bind)]
    assert {bind.choice.prefill for bind in alone} == {None}, "no answer would come in any other way"
    assert {bind.request_id for bind in alone} == {"a", "b"}
    core.check_invariants()


def test_always_answers_alone_where_the_other_role_failed_or_is_silent(core: ClusterCore):
    """Such a host may never be back, and a request that waited for it would wait as long."""
    core.joined(replace(host("d1", "decode"), state=State.STARTING, is_silent=True), 0.0)
    assert only_bind(core.arrived(make_request("a", num_bytes=8000), 0.0)).choice.prefill is None
    core.joined(host("d1", "decode"), 0.1)
    bound = only_bind(core.arrived(make_request("b", num_bytes=8000), 0.1)).choice
    assert bound.replica == "d1"
    again = only_bind(core.failed("b", REFUSED, 0.2, "d1")).choice
    assert core.fleet.by_name["d1"].state is State.EJECTED
    assert (again.prefill, again.replica != "d1") == (None, True)
    core.check_invariants()


def only_bind(actions: list[Action]) -> Bind:
    (bind,) = [action for action in actions if isinstance(action, Bind)]
    return bind


def test_a_prompt_is_computed_elsewhere_when_its_prefill_replica_is_gone(core: ClusterCore):
    first = only_bind(core.arrived(make_request("a", num_bytes=8000), 0.0)).choice
    assert first.replica == "d1"
    second = only_bind(core.failed("a", REFUSED, 0.1, first.prefill)).choice
    assert (second.replica, {first.prefill, second.prefill}) == ("d1", {"p1", "p2"})
    states = {replica.name: replica.state for replica in core.fleet}
    assert states.pop(first.prefill) is State.EJECTED
    assert set(states.values()) == {State.READY}
    core.check_invariants()


def test_a_prompt_is_taken_from_a_prefill_replica_that_falls_silent(core: ClusterCore):
    first = only_bind(core.arrived(make_request("a", num_bytes=8000), 0.0)).choice
    core.handed_over("a", 0.1)
    again = only_bind(core.arrived(make_request("b", num_bytes=8000), 0.1)).choice
    actions = core.left(again.prefill, 0.2)
    assert [action.request_id for action in actions if isinstance(action, Move)] == ["b"]
    assert only_bind(actions).choice.prefill not in (None, again.prefill)
    assert first.replica == "d1"
    core.fleet.work.check_invariants()


def test_a_prompt_whose_tokens_nobody_sees_counts_as_computed_when_it_is_told(core: ClusterCore):
    prefill = only_bind(core.arrived(make_request("a", num_bytes=8000), 0.0)).choice.prefill
    assert prefill is not None
    core.handed_over("a", 0.1, is_computed=True)
    loads = {name: core.fleet.work.load(name, facts(), 0.1) for name in (prefill, "d1")}
    assert [load.queued_tokens for load in loads.values()] == [0, 0]
    assert loads["d1"].rows == 1


def test_nothing_is_moved_between_workers_of_unlike_numbers():
    unlike = [worker("p", "prefill", numbers="int8"), worker("d", "decode", numbers="bf16", num_cached=512)]
    assert {(way.prefill, way.fetch_from) for way in options(WorkAsked(1000, 100.0), unlike, "always")} == {
        (None, None)
    }


def test_admission_is_foretold_the_first_token_of_the_way_that_is_chosen(core: ClusterCore):
    told = []
    for name in "abc":
        told.append(core.foretold_ttft_s(2000, 0.0))
        choice = only_bind(core.arrived(make_request(name, num_bytes=8000, num_inputs=2000), 0.0)).choice
        assert told[-1] == pytest.approx(choice.foretold[0].ttft_s)
    assert told == sorted(told)
    assert told[2] > told[0]


def test_nothing_is_foretold_where_workers_hand_nothing_over():
    core = ClusterCore(FleetConfig(), SchedulerConfig(), handover=HandoverConfig(handover="never"))
    core.joined(host("m1", "mixed"), 0.0)
    assert core.foretold_ttft_s(2000, 0.0) is None
