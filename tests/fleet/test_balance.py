"""Where each balance sends a request, and the bound on load that holds for all of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.fleet.actions import Bind
from maitred.fleet.balance import BALANCES, MAX_CANDIDATES, Cached, Candidate, HashRing, hash_of
from maitred.fleet.binding import PASSED_OF_ONE
from maitred.fleet.fleet_request import FleetRequest
from maitred.fleet.replicas import FleetReplica, Kind, Report
from tests.fleet.fleets import Driver, facts, make_core

KEYS = [hash_of(f"key {i}") for i in range(2000)]


def make_ring(**weights: float) -> HashRing:
    ring = HashRing()
    ring.set_weights(weights)
    return ring


def owners(ring: HashRing, names: str) -> list[str | None]:
    return [ring.owner(key, set(names)) for key in KEYS]


@given(count=st.integers(1, 8))
def test_a_newcomer_takes_its_share_and_no_key_moves_between_the_others(count: int):
    names = "abcdefghi"[: count + 1]
    ring = make_ring(**dict.fromkeys(names[:-1], 1.0))
    before = owners(ring, names)
    ring.set_weights(dict.fromkeys(names, 1.0))
    moved = [after for last, after in zip(before, owners(ring, names), strict=True) if last != after]
    assert set(moved) <= {names[-1]}
    assert len(moved) / len(KEYS) == pytest.approx(1 / (count + 1), rel=0.5)


def test_who_leaves_or_is_passed_over_moves_no_key_but_its_own():
    ring = make_ring(a=1.0, b=1.0, c=1.0)
    before = owners(ring, "abc")
    ring.set_weights({"a": 1.0, "c": 1.0})
    assert all(last in ("b", now) for last, now in zip(before, owners(ring, "ac"), strict=True))
    ring = make_ring(a=1.0, b=1.0, c=1.0)
    before, without = owners(ring, "abc"), owners(ring, "ac")
    assert all(last in ("b", now) for last, now in zip(before, without, strict=True))
    assert len(set(without)) == 2


def test_shares_follow_the_weights_and_an_empty_ring_has_no_owners():
    counts = Counter(owners(make_ring(a=1.0, b=3.0), "ab"))
    assert counts["b"] / counts["a"] == pytest.approx(3.0, rel=0.35)
    assert make_ring().owner(5, {"a"}) is None


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=5))
def test_a_ring_is_the_same_whatever_was_on_it_before(history: list[dict[str, float]]):
    ring = HashRing()
    for weights in history:
        ring.set_weights(weights)
    assert owners(ring, "abcd")[:200] == owners(make_ring(**history[-1]), "abcd")[:200]


KEYS_BALANCE = tuple(range(100, 110))


def make_fleet(balance: str, *names: str, **settings: object) -> Driver:
    return Driver(make_core(*(names or "abcd"), **{"balance": balance, "slots": 64} | settings))


def send(fleet: Driver, count: int, **fields: object) -> Counter[str]:
    """Where requests go that come one after the other while all before them are in flight."""
    first = len(fleet.bound)
    return Counter(fleet.arrive(f"r{first + i}", **fields) for i in range(count))


def send_and_end(fleet: Driver, count: int, **fields: object) -> Counter[str]:
    """As `send`, each after the end of the one before."""
    where: Counter[str] = Counter()
    for i in range(count):
        where[fleet.arrive(f"s{i}", **fields)] += 1
        fleet.end(f"s{i}")
    return where


@pytest.mark.parametrize("balance", sorted(BALANCES))
def test_nobody_is_bound_over_the_bound_while_another_has_room(balance: str):
    fleet = make_fleet(balance)
    fleet.core.reported("a", Report(stored=KEYS_BALANCE), 0.0)
    where = send(fleet, 100, keys=KEYS_BALANCE, hash_key=1)
    assert max(where.values()) <= 1.25 * 25 + 2


def test_round_robin_takes_turns_and_gives_no_arrears():
    fleet = make_fleet("round_robin")
    assert [fleet.arrive(f"r{i}") for i in range(6)] == ["a", "b", "c", "d", "a", "b"]
    fleet = make_fleet("round_robin", "a", "b")
    send_and_end(fleet, 20)
    fleet.do(fleet.core.joined(facts("c"), 0.0))
    assert send_and_end(fleet, 6) == {"a": 2, "b": 2, "c": 2}


def test_least_load_goes_where_fewest_are_in_flight_and_two_choices_is_nearly_even():
    fleet = make_fleet("least_load", "a", "b")
    send(fleet, 4)
    for request_id in [r for r, at in fleet.bound.items() if at == "b"]:
        fleet.end(request_id)
    assert fleet.arrive("next") == "b"
    fleet = make_fleet("two_choices")
    where = send(fleet, 100)
    assert max(where.values()) <= 30
    assert all(len(a.choice.candidates) == 2 for a in fleet.log[:50] if isinstance(a, Bind))


def test_hash_goes_by_the_key_or_the_first_prefix_key():
    fleet = make_fleet("hash")
    assert len(send_and_end(fleet, 20, hash_key=77)) == 1
    assert len({next(iter(send_and_end(fleet, 1, hash_key=key << 56))) for key in range(64)}) == 4
    fleet = make_fleet("hash")
    assert len(send_and_end(fleet, 20, keys=KEYS_BALANCE)) == 1


def test_a_session_stays_where_it_was_and_is_rebound_when_that_is_gone():
    fleet = make_fleet("session")
    (first,) = send_and_end(fleet, 20, hash_key=5)
    fleet.do(fleet.core.left(first, 0.0))
    (second,) = send_and_end(fleet, 20, hash_key=5)
    fleet.do(fleet.core.joined(facts(first), 0.0))
    assert send_and_end(fleet, 20, hash_key=5) == {second: 20}


def test_prefix_weighs_what_is_left_to_compute_with_who_is_there_and_tells_its_terms():
    fleet = make_fleet("prefix")
    fleet.core.reported("b", Report(stored=KEYS_BALANCE[:3]), 0.0)
    fleet.core.reported("c", Report(stored=KEYS_BALANCE[:7]), 0.0)
    assert fleet.arrive("r", keys=KEYS_BALANCE) == "c"
    fleet = make_fleet("prefix", "a", "b")
    fleet.core.reported("b", Report(stored=KEYS_BALANCE[:5]), 0.0)  # half: worth one in flight
    assert [fleet.arrive(f"r{i}", keys=KEYS_BALANCE) for i in range(3)] == ["b", "a", "b"]
    fleet = make_fleet("prefix", "a", "b")
    fleet.core.reported("b", Report(stored=KEYS_BALANCE[:5]), 0.0)
    fleet.arrive("r", keys=KEYS_BALANCE, num_bytes=4000)
    bind = fleet.log[-1]
    assert isinstance(bind, Bind)
    assert bind.choice.candidates == [Candidate("b", 500.0, 0.0, 500), Candidate("a", 1000.0, 0.0, 0)]
    fleet = make_fleet("prefix", "a", "b")
    fleet.core.reported("b", Report(stored=KEYS_BALANCE), 0.0)
    fleet.core.reported("b", Report(is_broken=True), 0.0)
    assert fleet.arrive("r", keys=KEYS_BALANCE) == "a"


def test_a_foreign_server_is_thought_to_have_what_was_sent_there():
    foreign = [facts(name, kind=Kind.FOREIGN) for name in "ab"]
    fleet = Driver(make_core(*foreign, slots=64))
    fleet.arrive("other", keys=(7,))
    fleet.arrive("first", keys=KEYS_BALANCE)
    fleet.end("other")
    fleet.end("first")
    assert fleet.arrive("again", keys=(*KEYS_BALANCE, 1)) == "b"


@pytest.mark.parametrize("balance", ["round_robin", "least_load", "two_choices", "prefix"])
def test_a_device_of_three_times_the_speed_gets_three_times_the_load(balance: str):
    fast, slow = facts("fast", tokens_per_s=3000.0), facts("slow", tokens_per_s=1000.0)
    fleet = Driver(make_core(fast, slow, balance=balance, slots=1000))
    where = send(fleet, 400)
    assert where["fast"] / where["slow"] == pytest.approx(3.0, rel=0.35)


def test_a_weight_of_the_user_goes_before_what_a_replica_tells():
    told = facts("a", tokens_per_s=9000.0, weight=1.0), facts("b", tokens_per_s=9.0, weight=1.0)
    where = send(Driver(make_core(*told, balance="least_load", slots=64)), 20)
    assert where == {"a": 10, "b": 10}


def test_what_another_router_sent_is_known_here_of_sessions_and_of_foreign_servers():
    replicas = [facts(name, url=f"http://{name}:1", kind=Kind.FOREIGN) for name in "ab"]
    fleet = Driver(make_core(*replicas, balance="session", slots=64))
    for url in ("http://b:1", "http://nobody:1"):
        fleet.core.bound_elsewhere(url, 7, KEYS_BALANCE, fleet.now)
    assert [fleet.arrive("session", hash_key=7), fleet.arrive("prefix", keys=KEYS_BALANCE)] == ["b", "b"]


@pytest.mark.parametrize("balance", ["prefix", "least_load"])
def test_idle_replicas_that_are_left_unranked_change_no_choice(balance: str):
    """Oracle: the same fleet, of which every replica is ranked."""
    quick, slow = (make_fleet(balance, *(f"r{i}" for i in range(90)), slots=4) for _ in range(2))
    slow.core._binder._balance = replace(slow.core._binder._balance, is_alike=False)
    rng = random.Random(1)
    for fleet in (quick, slow):
        for i in range(0, 90, 3):
            fleet.do(fleet.core.joined(facts(f"r{i}", tokens_per_s=3000.0, slots=4), 0.0))
        for i in range(1, 90, 7):
            fleet.do(fleet.core.joined(facts(f"r{i}", tokens_per_s=1000.0, slots=4), 0.0))
            fleet.core.reported(f"r{i}", Report(stored=KEYS_BALANCE[: 1 + i % 9], num_in_flight=i % 3), 0.0)
    for i in range(300):
        asked = {"keys": KEYS_BALANCE if rng.random() < 0.5 else (), "num_samples": rng.choice([1, 1, 3])}
        ended = rng.choice(sorted(quick.bound)) if quick.bound and rng.random() < 0.6 else None
        for fleet in (quick, slow):
            fleet.arrive(f"q{i}", **asked)
            if ended is not None:
                fleet.end(ended)
    assert quick.log == slow.log
    assert len(quick.log) >= 300
    quick.core.check_invariants()


def test_a_choice_looks_at_no_more_replicas_where_more_idle():
    fleet = make_fleet("prefix", *(f"r{i}" for i in range(500)))
    looked_at: list[int] = []
    balance = fleet.core._binder._balance

    def score(request: FleetRequest, candidates: Sequence[FleetReplica], cached: Cached) -> list[float]:
        looked_at.append(len(candidates))
        return balance.score(request, candidates, cached)

    fleet.core._binder._balance = replace(balance, score=score)
    send(fleet, 20)
    assert looked_at == [MAX_CANDIDATES] * 20


@pytest.mark.parametrize(("balance", "policy"), [("prefix", "fcfs"), ("prefix", "vtc"), ("least_load", "fcfs")])
def test_a_held_request_goes_first_where_its_prefix_is_and_passes_others_so_often_and_no_more(balance, policy):
    near = [f"near{i:02}" for i in range(PASSED_OF_ONE + 2)]
    fleet, served = make_fleet(balance, "a", slots=1, policy=policy), list[str]()
    fleet.core.reported("a", Report(stored=KEYS_BALANCE), 0.0)
    for name in ("first", "plain", "partly", *near):
        fleet.arrive(name, keys={"plain": (), "partly": (*KEYS_BALANCE[:2], 1, 2)}.get(name, KEYS_BALANCE))
        fleet.now += 1.0
    while fleet.bound:
        served += fleet.bound
        fleet.end(served[-1])
    passes = PASSED_OF_ONE if (balance, policy) == ("prefix", "fcfs") else 0
    assert served == ["first", *near[:passes], "plain", "partly", *near[passes:]]
