"""A replica is told to end while it streams: the router has its streams go on elsewhere, and nobody notices."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.api.read_stream import client_has
from tests.conftest import ServerProcess
from tests.fleet.test_end_to_end import RealFleet, real_fleet
from tests.fleet.test_failover import num_resumed, without_what_differs
from tests.waiting import HANGS_S, until

LONG = {
    "prompt": "Once upon",
    "max_tokens": 1500,
    "n": 4,
    "seed": 7,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    """The first has a second for what it has in the end, the others all the time."""
    drains = [("--drain-timeout", seconds) for seconds in ("1", "600", "600")]
    with real_fleet(tmp_path_factory.mktemp("fleet"), drains, "--balance", "hash") as running:
        yield running


def session_at(fleet: RealFleet, replica: ServerProcess) -> dict[str, str]:
    """Headers of a conversation that this one has."""
    short = LONG | {"max_tokens": 1, "n": 1, "stream": False, "stream_options": None}
    for number in range(1000):
        session = {"x-session-id": f"{replica.url} {number}"}
        answer = fleet.client.post("/v1/completions", json=short, headers=session)
        if answer.headers["x-maitred-replica"] in replica.url:
            return session
    raise AssertionError("it gets nobody")


@pytest.mark.parametrize("num_signals", [1, 2], ids=["deadline", "second signal"])
def test_its_streams_go_on_elsewhere_when_its_time_is_over(fleet: RealFleet, num_signals: int):
    leaving = fleet.replicas[num_signals - 1]
    undisturbed = client_has(fleet.client.post("/v1/completions", json=LONG).content)
    headers, before = session_at(fleet, leaving), num_resumed(fleet)
    with fleet.client.stream("POST", "/v1/completions", json=LONG, headers=headers) as answer:
        pieces = answer.iter_bytes()
        first = next(pieces)
        leaving.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in fleet.states)
        fresh = fleet.client.post("/v1/completions", json=LONG | {"max_tokens": 1}, headers=headers)
        assert fresh.headers["x-maitred-replica"] not in leaving.url
        if num_signals == 2:
            leaving.process.send_signal(signal.SIGTERM)
        had = first + b"".join(pieces)
    assert without_what_differs(client_has(had)) == without_what_differs(undisturbed)
    assert num_resumed(fleet) == before + 1
    assert leaving.process.wait(HANGS_S) == 0
