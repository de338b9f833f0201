"""A client that goes away takes its samples with it, however it goes and whatever they were doing."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import httpx
import pytest

from tests.api.conftest import MESSAGES
from tests.fakes_api import EOS, FakeReplica, RunningServer, make_model, running_server
from tests.waiting import HANGS_S, until

FOREVER = 100_000  # at 10 ms a token, a quarter of an hour


def endless(request: Any) -> list[int]:
    return [ord("x")] * FOREVER


def close(connection: socket.socket) -> None:
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def send(server: RunningServer, path: str, body: dict[str, Any]) -> socket.socket:
    payload = json.dumps({"model": "tiny", **body}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANGS_S)
    connection.sendall(
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
        % (path.encode(), len(payload), payload)
    )
    return connection


@pytest.fixture(scope="module", params=["queued", "decoding"])
def stuck(request):
    """A replica whose requests never end by themselves."""
    replica = FakeReplica(endless, token_s=0.01, queued=request.param == "queued")
    with running_server(replica, make_model(max_model_len=2 * FOREVER)) as server:
        yield server


@pytest.mark.parametrize("leave", [close, reset, half_close])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_leaving_ends_every_sample_at_once(stuck, leave, stream, n):
    replica = stuck.replica
    replica.aborted.clear()
    connection = send(stuck, "/v1/chat/completions", {"messages": MESSAGES, "stream": stream, "n": n})
    until(lambda: len(replica.live) == n)
    if stream and not replica.queued:
        connection.recv(100)
    leave(connection)
    until(lambda: not replica.live)
    assert len(replica.aborted) == n
    connection.close()


HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + b"x" * 200_000


@pytest.mark.parametrize("ahead", [HEALTH, HEALTH * 16, HEALTH[:9], LARGE[:100_000], LARGE + HEALTH])
@pytest.mark.parametrize("stream", [False, True])
def test_requests_sent_ahead_do_not_hide_that_the_client_left(stuck, ahead, stream, caplog):
    replica, metrics = stuck.replica, stuck.server.app.observer.metrics
    num_cancelled = metrics.num_cancelled
    connection = send(stuck, "/v1/chat/completions", {"messages": MESSAGES, "stream": stream, "n": 4})
    until(lambda: len(replica.live) == 4)
    connection.sendall(ahead)
    half_close(connection)  # what was sent still comes; closing could make it a reset, which overtakes it
    until(lambda: not replica.live)
    until(lambda: not stuck.server.server_state.tasks)
    connection.close()
    assert metrics.num_cancelled == num_cancelled + 1
    assert not [record for record in caplog.records if record.exc_info]


def test_leaving_ends_all_prompts_of_a_list(stuck):
    replica = stuck.replica
    connection = send(stuck, "/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 400})
    until(lambda: len(replica.live) == 6)
    connection.close()
    until(lambda: not replica.live)


def test_a_client_that_stops_reading_and_leaves_is_noticed():
    """The answer fills every buffer, the server waits to write, and still hears that nobody is left."""
    replica = FakeReplica(endless, tokens_per_item=100)
    with running_server(replica, make_model(max_model_len=2 * FOREVER), sse_keep_alive_s=0.0) as server:
        body = {"prompt": "a" * 100, "stream": True, "logprobs": 20, "max_tokens": FOREVER}  # 100 MB to send
        connections = [send(server, "/v1/completions", body) for _ in range(4)]
        for connection in connections:
            connection.recv(100)  # the answer began, and nobody reads on
        for connection in connections:
            reset(connection)
        until(lambda: not replica.live)
        assert len(replica.aborted) == 4


def test_leaving_while_the_body_is_sent_leaves_nothing_behind(served):
    before, num_cancelled = len(served.replica.submitted), served.server.app.observer.metrics.num_cancelled
    with socket.create_connection(("127.0.0.1", served.port), timeout=HANGS_S) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'content-length: 1000\r\n\r\n{"model":'
        )
    until(lambda: served.server.app.observer.metrics.num_cancelled > num_cancelled)
    assert (len(served.replica.submitted), httpx.get(f"{served.url}/health").status_code) == (before, 200)


def test_a_server_survives_two_hundred_clients_with_no_patience():
    replica = FakeReplica(endless, token_s=0.01)
    with running_server(replica, make_model(max_model_len=2 * FOREVER)) as server:
        connections = [
            send(server, "/v1/chat/completions", {"messages": MESSAGES, "stream": index % 2 == 0, "n": 1 + index % 2})
            for index in range(200)
        ]
        until(lambda: len(replica.live) == 300)
        for connection in connections:
            connection.close()
        until(lambda: not replica.live)
        until(lambda: not server.server.server_state.tasks)
        replica.answer = lambda request: [ord("y"), EOS]
        answer = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert answer.json()["choices"][0]["text"] == "y"
        page = httpx.get(f"{server.url}/metrics").text
        app = server.server.app
        assert (app.gate.num_in_flight, app.in_flight.num_watched) == (0, 0)
    assert "maitred_requests_cancelled_total 200.0" in page
    assert 'maitred_http_requests_total{route="/v1/chat/completions",status="499"} 200.0' in page
    assert "maitred_http_requests_in_flight 1.0" in page, "only the one that asks"
