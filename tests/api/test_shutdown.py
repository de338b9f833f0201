"""The end of a server process: what is in flight finishes, the exit code is 0, nothing is cut without a word."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.api.conftest import MESSAGES
from tests.reliability.gated_server import ANSWER, GatedServer
from tests.waiting import HANGS_S, joined, until

BODY = {"model": "tiny", "messages": MESSAGES}


class Client:
    """One request in a thread of its own."""

    def __init__(self, url: str, *, stream: bool) -> None:
        self.text, self.status = "", 0
        self._url, self._stream = url, stream
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        body = {**BODY, "stream": self._stream}
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=HANGS_S) as answer:
            self.status = answer.status_code
            for text in answer.iter_text():
                self.text += text

    @property
    def begun(self) -> bool:
        return '"x' in self.text


@contextmanager
def server(drain_timeout_s: float = 600.0) -> Iterator[GatedServer]:
    child = GatedServer(drain_timeout_s=drain_timeout_s)
    try:
        yield child
    finally:
        child.kill()


def in_flight(child: GatedServer, num_streams: int, num_whole: int) -> tuple[list[Client], list[Client]]:
    """So many requests, each of them at work and none of them done."""
    streams = [Client(child.url, stream=True) for _ in range(num_streams)]
    whole = [Client(child.url, stream=False) for _ in range(num_whole)]
    until(lambda: all(client.begun for client in streams))
    expected = f"maitred_requests_running {float(num_streams + num_whole)}"
    until(lambda: expected in httpx.get(f"{child.url}/metrics", timeout=HANGS_S).text)
    return streams, whole


def wait_for(clients: list[Client]) -> None:
    joined(*(client.thread for client in clients))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_in_flight_finishes_newcomers_are_sent_away_and_the_exit_code_is_zero(number: int):
    """R7."""
    with server() as child:
        streams, whole = in_flight(child, 20, 2)
        child.signal(number)
        until(lambda: child.status("/ready") == 503)
        assert child.status("/health") == 200, "it is not ill"
        newcomer = httpx.post(f"{child.url}/v1/chat/completions", json=BODY, timeout=HANGS_S)
        assert newcomer.status_code == 503
        assert int(newcomer.headers["retry-after"]) >= 1
        assert newcomer.headers["connection"] == "close"
        assert newcomer.json()["error"]["code"] == "server_unavailable"
        child.open()
        wait_for([*streams, *whole])
        assert child.end() == (0, "ended\n")
    for client in streams:
        assert client.text.endswith("data: [DONE]\n\n")
        assert "error" not in client.text
        assert client.text.count('"content":"x"') == len(ANSWER)
    assert all(f'"content":"{ANSWER}"' in client.text for client in whole)


def _second_signal(child: GatedServer) -> None:
    child.signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("drain_timeout_s", "then"), [(600.0, _second_signal), (0.2, lambda child: None)], ids=["signal", "deadline"]
)
def test_a_second_signal_or_the_deadline_ends_everything_with_error_objects(
    drain_timeout_s: float, then: Callable[[GatedServer], None]
):
    """R7."""
    with server(drain_timeout_s) as child:
        streams, whole = in_flight(child, 20, 2)
        child.signal(signal.SIGTERM)
        until(lambda: child.status("/ready") != 200)
        then(child)
        wait_for([*streams, *whole])
        assert child.end() == (0, "ended\n")
    for client in streams:
        assert client.status == 200
        assert '"code":"server_unavailable"' in client.text
        assert client.text.endswith("data: [DONE]\n\n")
    for client in whole:
        assert client.status == 503
        assert '"code":"server_unavailable"' in client.text


def test_an_idle_server_ends_at_once():
    with server() as child:
        assert child.status("/health") == 200
        child.signal(signal.SIGTERM)
        assert child.end() == (0, "ended\n")
