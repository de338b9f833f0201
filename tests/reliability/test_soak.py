"""Mixed load, clients that leave and an engine that is killed; `make soak` does it for a minute, then for twenty."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.soak_server import Tally, holds_no_more_than, is_idle, load, sample
from tests.conftest import start_server
from tests.reliability.test_served_engine import on_linux
from tests.waiting import until


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "kill_after"), [(5, 2), pytest.param(60, 20, marks=pytest.mark.soak)])
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
