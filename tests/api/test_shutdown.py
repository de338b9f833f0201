"""The end of a server process: what is in flight finishes, the exit code is 0, nothing is cut without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import MESSAGES

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from maitred.api import server
from maitred.config import ServerConfig
from tests.fakes_api import FakeReplica, make_model, says

server.GRACE_S = float(sys.argv[1])
replica = FakeReplica(says("x" * 20), token_s=0.05)
server.serve(replica, make_model(), ServerConfig(port=0), on_listening=lambda host, port: print(port, flush=True))
print("ended", flush=True)
"""


class Child:
    """A server in a process of its own."""

    def __init__(self, grace_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(grace_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def ask(self, stream: bool) -> tuple[threading.Thread, list[httpx.Response]]:
        answers: list[httpx.Response] = []
        body = {"model": "tiny", "messages": MESSAGES, "stream": stream}
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=20))
        )
        thread.start()
        return thread, answers

    def end(self) -> tuple[int, str]:
        assert self.process.stdout is not None
        return self.process.wait(20), self.process.stdout.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_in_flight_finishes_and_the_exit_code_is_zero(number):
    child = Child(grace_s=10)
    (stream_thread, streamed), (whole_thread, whole) = child.ask(True), child.ask(False)
    time.sleep(0.4)
    child.process.send_signal(number)
    stream_thread.join()
    whole_thread.join()
    assert streamed[0].text.endswith("data: [DONE]\n\n")
    assert "error" not in streamed[0].text
    assert whole[0].json()["choices"][0]["message"]["content"] == "x" * 20
    assert child.end() == (0, "ended\n")


@pytest.mark.parametrize("signals", [1, 2])
def test_what_takes_too_long_ends_with_an_error_object(signals):
    child = Child(grace_s=0.2 if signals == 1 else 60)
    (stream_thread, streamed), (whole_thread, whole) = child.ask(True), child.ask(False)
    time.sleep(0.3)
    started_at = time.monotonic()
    for _ in range(signals):
        child.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    stream_thread.join()
    whole_thread.join()
    assert child.end()[0] == 0
    assert time.monotonic() - started_at < 4
    assert '"code":"server_unavailable"' in streamed[0].text
    assert streamed[0].text.endswith("data: [DONE]\n\n")
    assert whole[0].status_code == 503
    assert whole[0].headers["retry-after"]


def test_an_idle_server_ends_at_once():
    child = Child(grace_s=10)
    httpx.get(f"{child.url}/health")
    started_at = time.monotonic()
    child.process.terminate()
    assert child.end()[0] == 0
    assert time.monotonic() - started_at < 2
