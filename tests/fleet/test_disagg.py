"""Which of the workers of a fleet compute a prompt and which answer it, and what a failure of either leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.config import SchedulerConfig
from maitred.fleet.actions import Action, Bind, Move
from maitred.fleet.config import FleetConfig
from maitred.fleet.core import ClusterCore
from maitred.fleet.disagg import HandoverConfig, Option, WorkAsked, WorkerLoad, options
from maitred.fleet.fleet_request import Failure, FailureKind
from maitred.fleet.replicas import ReplicaFacts, State
from tests.fleet.fleets import make_request, worker, worker_facts

LONG = WorkAsked(num_inputs=4000, num_outputs=200)
loads = st.builds(
    lambda role, queued, rows, free, share, cached, sent: {
        "role": role, "queued_tokens": float(queued), "rows": rows, "context_tokens": rows * 1000,
        "free_blocks": free, "prefill_share": share, "num_cached": cached * 16, "bytes_in_flight": sent,
    },
    st.sampled_from(["prefill", "decode", "mixed"]),
    st.integers(0, 20_000),
    st.integers(0, 100),
    st.integers(0, 4096),
    st.floats(0, 1),
    st.integers(0, 200),
    st.floats(0, 1e9),
)  # fmt: skip
asks = st.builds(
    WorkAsked, st.integers(1, 8000), st.floats(1, 2000), st.none() | st.floats(0.05, 5),
    st.none() | st.floats(0.005, 0.1),
)  # fmt: skip


def workers(described: list[dict[str, object]], bandwidth: float = 10e9) -> list[WorkerLoad]:
    return [worker(f"w{i}", bandwidth=bandwidth, **load) for i, load in enumerate(described)]


def best(ask: WorkAsked, *there: WorkerLoad, handover: str = "auto") -> Option:
    return options(ask, there, handover)[0]


@given(asks, st.lists(loads, min_size=1, max_size=5), st.sampled_from(["auto", "always", "never"]))
def test_whoever_is_chosen_has_room_for_the_prompt_at_both_ends(ask, described, handover):
    there = {load.name: load for load in workers(described)}
    needed = ask.num_inputs // 16 + 2
    for way in options(ask, list(there.values()), handover):
        assert way.prefill != way.replica
        assert way.fetch_from not in (way.prefill or way.replica,)
        for name in {way.replica, way.prefill or way.replica}:
            assert there[name].free_blocks in (4096, max(needed, there[name].free_blocks))
        assert all(value >= 0 for value in way.terms.values())


@given(asks, st.lists(loads, min_size=2, max_size=4), st.floats(1e7, 1e11), st.floats(1, 1000))
def test_a_slower_link_never_makes_a_hand_over_likelier(ask, described, bandwidth, times_slower):
    """Where no prefix could be fetched in its place."""
    for load in described:
        load["num_cached"] = 0
    quick, slow = workers(described, bandwidth), workers(described, bandwidth / times_slower)
    ways, slower = options(ask, quick), options(ask, slow)
    if ways and ways[0].prefill is None:
        assert slower[0].prefill is None


@given(asks, st.lists(loads, min_size=2, max_size=4), st.floats(1e7, 1e11), st.floats(1, 1000))
def test_a_slower_link_moves_no_kv_where_a_quicker_one_moved_none(ask, described, bandwidth, times_slower):
    ways = options(ask, workers(described, bandwidth))
    slower = options(ask, workers(described, bandwidth / times_slower))
    if ways and ways[0].prefill is None and ways[0].fetch_from is None:
        assert slower[0].prefill is None
        assert slower[0].fetch_from is None


@given(asks, st.lists(loads, min_size=1, max_size=4))
def test_without_a_link_nothing_is_handed_over_whatever_was_asked_for(ask, described):
    for handover in ("auto", "always"):
        for way in options(ask, workers(described, bandwidth=0.0), handover):
            assert way.prefill is None
            assert way.fetch_from is None


def test_a_prompt_is_computed_where_that_costs_least():
    busy = worker("d", "decode", rows=40, context_tokens=40_000)
    assert best(LONG, worker("p", "prefill", prefill_share=0.7), busy).name == "p > d"
    busy = worker("p", "prefill", queued_tokens=16_000.0)
    assert best(WorkAsked(40, 200), busy, worker("d", "decode", rows=4, context_tokens=4000)).name == "d"
    there = worker("d", "decode", rows=10, context_tokens=10_000, num_cached=3984)
    assert best(LONG, worker("p", "prefill", prefill_share=0.5), there).name == "d"
    assert best(LONG, worker("p", "prefill"), worker("d", "decode", has_slot=False)).name == "p"
    has_it = worker("d1", "decode", num_cached=3200, has_slot=False)
    way = best(LONG, worker("d2", "decode"), has_it)
    assert (way.replica, way.prefill, way.fetch_from) == ("d2", None, "d1")
    assert best(LONG, worker("d2", "decode", bandwidth=1e6), has_it).fetch_from is None


def test_always_waits_for_room_and_moves_nothing_between_unlike_numbers():
    full = worker("d", "decode", free_blocks=10)
    assert options(LONG, [worker("p", "prefill"), full], "always") == []
    assert best(LONG, worker("p", "prefill"), full, handover="auto").name == "p"
    assert best(WorkAsked(8, 20), worker("p", "prefill"), worker("d", "decode"), handover="always").prefill is None
    unlike = [worker("p", "prefill", numbers="int8"), worker("d", "decode", numbers="bf16", num_cached=512)]
    assert {(way.prefill, way.fetch_from) for way in options(WorkAsked(1000, 100.0), unlike, "always")} == {
        (None, None)
    }


def test_a_tight_pace_is_worth_a_longer_wait_and_a_tight_first_token_is_not():
    busy = {"queued_tokens": 12_000.0, "prefill_share": 0.6}
    there = worker("p", "prefill", **busy), worker("d", "decode", rows=30, context_tokens=30_000)
    assert best(replace_ask(ttft_s=5.0, tpot_s=0.012), *there).name == "p > d"
    assert best(replace_ask(ttft_s=0.2, tpot_s=0.5), *there).name == "d"


def replace_ask(ttft_s: float, tpot_s: float) -> WorkAsked:
    return LONG._replace(ttft_objective_s=ttft_s, tpot_objective_s=tpot_s)


def test_terms_name_what_was_foretold():
    way = best(LONG, worker("p", "prefill"), worker("d", "decode", rows=40, context_tokens=40_000))
    assert set(way.terms) == {"cost", "ttft_s", "tpot_s", "fetch_s", "transfer_s", "harm_s"}
    faster = worker("p", "prefill")
    faster = faster._replace(facts=replace(faster.facts, costs=replace(faster.facts.costs, prefill_token_s=1e-5)))
    assert best(LONG, faster, worker("d", "decode", rows=40)).ttft_s < way.ttft_s


REFUSED = Failure(FailureKind.RESET, message="connection refused")


def host(name: str, role: str) -> ReplicaFacts:
    return ReplicaFacts(name=name, models=("m",), fingerprint="f", has_beats=True, worker=worker_facts(role))


@pytest.fixture
def core() -> ClusterCore:
    handover = HandoverConfig(handover="always")
    core = ClusterCore(FleetConfig(), SchedulerConfig(predictor="max_tokens"), handover=handover)
    for name, role in (("p1", "prefill"), ("d1", "decode"), ("p2", "prefill")):
        core.joined(host(name, role), 0.0)
    return core


def test_always_waits_for_a_role_that_may_come_and_answers_alone_where_it_failed(core: ClusterCore):
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


def test_a_prompt_is_computed_elsewhere_when_its_prefill_replica_is_gone_or_silent(core: ClusterCore):
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
    loads = {name: core.fleet.work.load(name, worker_facts(), 0.1) for name in (prefill, "d1")}
    assert ([load.queued_tokens for load in loads.values()], loads["d1"].rows) == ([0, 0], 1)


def test_a_first_token_is_foretold_where_workers_hand_over_and_nothing_elsewhere(core: ClusterCore):
    told = []
    for name in "abc":
        told.append(core.foretold_ttft_s(2000, 0.0))
        choice = only_bind(core.arrived(make_request(name, num_bytes=8000, num_inputs=2000), 0.0)).choice
        assert told[-1] == pytest.approx(choice.foretold[0].ttft_s)
    assert told == sorted(told)
    assert told[2] > told[0]
    core = ClusterCore(FleetConfig(), SchedulerConfig(), handover=HandoverConfig(handover="never"))
    core.joined(host("m1", "mixed"), 0.0)
    assert core.foretold_ttft_s(2000, 0.0) is None
