"""Mixed load, clients that leave and an engine that is killed; `make soak` does it for a minute, then for twenty."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks.soak_server import Tally, holds_no_more_than, is_idle, load, sample
from benchmarks.soak_tenants import Welch, welch
from tests.conftest import start_server
from tests.reliability.test_served_engine import on_linux
from tests.waiting import until


@on_linux
@pytest.mark.soak
@pytest.mark.parametrize(("seconds", "kill_after"), [(5, 2), (60, 20)])
def test_under_mixed_load_and_a_kill_every_answer_is_whole_and_nothing_is_left(seconds: int, kill_after: int):
    server = start_server()
    try:
        asyncio.run(load(server, Tally(), num_clients=6, requests_each=3))
        until(lambda: is_idle(server))
        before, tally = sample(server, 0.0), Tally()
        asyncio.run(load(server, tally, num_clients=6, seconds=seconds, kill_after=kill_after))
        assert not tally.wrong
        assert tally.kills == 1
        assert tally.answered >= seconds / 3
        until(lambda: is_idle(server))
        until(lambda: holds_no_more_than(server, before))
        assert sample(server, 0.0).server_mib < before.server_mib + 48
        assert sample(server, 0.0).num_threads <= before.num_threads + 8  # those of pools come when they are wanted
    finally:
        ended = server.stop()
    assert ended == 0


@pytest.mark.parametrize(
    ("t", "freedom", "p"),  # of printed tables of Student's t
    [
        (0.0, 50, 1.0),
        (12.7062, 1, 0.05),
        (2.2281, 10, 0.05),
        (4.5869, 10, 0.001),
        (3.3735, 120, 0.001),
        (3.2905, 1e7, 0.001),
    ],
)
def test_probabilities_are_those_of_the_tables(t: float, freedom: float, p: float):
    assert Welch(t, 1.0, freedom).p == pytest.approx(p, rel=1e-3)
    assert Welch(-t, 1.0, freedom).p == pytest.approx(p, rel=1e-3)


def test_unequal_variances_have_the_degrees_of_freedom_of_the_textbook():
    found = welch([1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 20.0])  # 2.5 / 5 and 50 / 2
    assert found.difference == -12.0
    assert found.error == pytest.approx(25.5**0.5)
    assert found.freedom == pytest.approx(25.5**2 / (0.5**2 / 4 + 25.0**2 / 1))


def test_a_difference_is_seen_and_none_where_there_is_none():
    chooser = random.Random(3)
    quick, slow = ([chooser.gauss(mean, 0.5) for _ in range(200)] for mean in (0.0, 0.25))
    assert welch(slow, quick).p < 1e-4
    found_by_chance = 0
    for _ in range(300):
        ones, others = ([chooser.gauss(0.0, 0.5) for _ in range(50)] for _ in range(2))
        found_by_chance += welch(ones, others).p < 0.05
    assert 5 <= found_by_chance <= 27, "one in twenty"
