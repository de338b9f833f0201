"""At ten times the load it can carry, a server does as much good as at its capacity, and is in time for those let in.

In simulated time, so that the machine that runs the tests makes no difference; `benchmarks/bench_servers.py overload`
is the same with a real engine and HTTP.
"""

from __future__ import annotations

import pytest

from maitred.config import AdmissionConfig
from maitred.core.request import FinishReason
from tests.gate.overloading import OverloadedServer

OBJECTIVE_S = 1.0
CAPACITY = 21.0  # requests/s, with the lengths of overloading.py: see the first test


def make_server(seed: int = 1, **fields: object) -> OverloadedServer:
    policy = str(fields.pop("policy", "fcfs"))
    config = AdmissionConfig(**{"ttft_objective_s": OBJECTIVE_S, **fields})  # type: ignore[arg-type]
    return OverloadedServer(config, seed=seed, policy=policy)


def test_the_capacity_is_what_the_other_tests_take_it_for():
    server = make_server(ttft_objective_s=None, max_queued_requests=64)
    assert len(server.run(10 * CAPACITY, 30.0).ended) / 30.0 == pytest.approx(CAPACITY, rel=0.1)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_ten_times_the_load_does_as_much_good_and_keeps_the_objective(policy: str, seed: int):
    at_capacity = make_server(seed, policy=policy).run(CAPACITY, 60.0)
    overloaded = make_server(seed, policy=policy).run(10 * CAPACITY, 60.0)
    assert overloaded.goodput(OBJECTIVE_S) >= 0.9 * at_capacity.goodput(OBJECTIVE_S)
    assert overloaded.goodput(OBJECTIVE_S) >= 0.8 * CAPACITY * 60.0
    for outcome in (at_capacity, overloaded):
        assert outcome.p99_ttft_s <= OBJECTIVE_S


def test_without_admission_everybody_is_late():
    """What admission is for: the same load, let in."""
    outcome = make_server(ttft_objective_s=None, max_queued_requests=100_000).run(3 * CAPACITY, 20.0)
    assert outcome.goodput(OBJECTIVE_S) < 0.2 * CAPACITY * 20.0


def test_a_load_it_can_carry_is_let_in():
    outcome = make_server().run(0.6 * CAPACITY, 60.0)
    assert outcome.num_refused <= 0.01 * outcome.num_offered
    assert outcome.p99_ttft_s <= OBJECTIVE_S


def test_it_recovers_at_once_when_the_load_is_over():
    server = make_server()
    server.run(10 * CAPACITY, 20.0)
    after = server.run(0.5 * CAPACITY, 5.0)
    assert after.num_refused == 0
    assert after.p99_ttft_s <= OBJECTIVE_S


def test_a_machine_that_slows_down_lets_in_less_and_stays_in_time():
    server = make_server()
    server.run(3 * CAPACITY, 30.0)
    server.machine.slowness = 3.0
    server.run(3 * CAPACITY, 5.0)  # it notices
    outcome = server.run(3 * CAPACITY, 60.0)
    assert outcome.p99_ttft_s <= 1.25 * OBJECTIVE_S
    assert outcome.goodput(OBJECTIVE_S) >= 0.75 * CAPACITY / 3.0 * 60.0


def test_the_urgent_get_in_and_the_others_are_shed_for_them():
    server = make_server(max_queued_requests=8)
    outcome = server.run(5 * CAPACITY, 30.0, priority=lambda random: 0 if random.random() < 0.1 else 1)
    assert FinishReason.SHED in outcome.ended
    assert outcome.goodput(OBJECTIVE_S) >= 0.7 * CAPACITY * 30.0


def test_retry_after_is_how_long_it_takes_to_serve_those_turned_away():
    outcome = make_server().run(3 * CAPACITY, 10.0)
    assert all(1.0 <= s <= 120.0 for s in outcome.retry_after_s)
    # twice the capacity is turned away, and once the capacity could have been served meanwhile: 10 s of work
    assert outcome.retry_after_s[-1] == pytest.approx(10.0, rel=0.5)
