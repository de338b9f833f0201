"""`maitred serve` as people run it: who holds the weights, who dies with whom, and what comes back."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import ServerProcess, start_server
from tests.waiting import HANGS_S, is_gone, joined, until

BODY = {"model": "maitred-mini", "prompt": "The maître d'", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def engines_of(server: ServerProcess) -> list[psutil.Process]:
    """Those that there are; waits for one."""
    parent = psutil.Process(server.process.pid)
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [child for child in parent.children() if "maitred.engine.child" in " ".join(_words(child))]
        return bool(found)

    until(is_there)
    return found


def engine_of(server: ServerProcess) -> psutil.Process:
    return engines_of(server)[0]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def complete(server: ServerProcess) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=HANGS_S)


def status(server: ServerProcess, path: str) -> int:
    return httpx.get(server.url + path, timeout=HANGS_S).status_code


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    server = start_server()
    yield server
    if server.process.poll() is None:
        server.stop()


@on_linux
def test_the_http_process_holds_no_weights_and_no_tensor_library(served: ServerProcess):
    assert complete(served).status_code == 200
    mapped = {
        "server": Path(f"/proc/{served.process.pid}/maps").read_text(),
        "engine": Path(f"/proc/{engine_of(served).pid}/maps").read_text(),
    }
    assert "libtorch" not in mapped["server"]
    assert ".safetensors" not in mapped["server"]
    assert "libtorch" in mapped["engine"] or "native" in mapped["engine"]


def test_a_killed_engine_is_replaced_and_says_in_one_line_what_happened(served: ServerProcess):
    before = complete(served).json()["choices"][0]["text"]
    engine = engine_of(served)
    engine.kill()
    until(lambda: status(served, "/health") == 503 or engine_of(served).pid != engine.pid)
    until(lambda: status(served, "/ready") == 200)
    assert status(served, "/health") == 200
    assert complete(served).json()["choices"][0]["text"] == before
    told = f"process {engine.pid} was killed by SIGKILL"
    until(lambda: any(told in line for line in served.lines))
    until(lambda: is_gone(engine))
    until(lambda: len(psutil.Process(served.process.pid).children()) == 1)  # no zombie is kept


@pytest.mark.parametrize(("n", "temperature"), [(1, 0.0), (3, 1.0)])
def test_a_stream_that_its_engine_leaves_goes_on_exactly_or_ends_with_a_reason(
    served: ServerProcess, n: int, temperature: float
):
    """The executor says which (the native one goes on, PyTorch's cannot promise to); never silence."""
    body = {**BODY, "max_tokens": 80, "n": n, "temperature": temperature, "seed": 42}
    calm = httpx.post(f"{served.url}/v1/completions", json=body, timeout=HANGS_S).json()
    texts, errors, ends = dict.fromkeys(range(n), ""), [], []
    begun = threading.Event()

    def read() -> None:
        streamed = {**body, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=streamed, timeout=HANGS_S) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ends.append(line)
                elif line.startswith("data: ") and "error" in (chunk := json.loads(line[6:])):
                    errors.append(chunk["error"]["code"])
                elif line.startswith("data: "):
                    for choice in chunk["choices"]:
                        texts[choice["index"]] += choice["text"]
                    begun.set()

    reading = threading.Thread(target=read)
    reading.start()
    assert begun.wait(HANGS_S)
    engine = engine_of(served)
    engine.kill()
    joined(reading)
    assert len(ends) == 1
    assert errors in ([], ["engine_dead"])
    if not errors:
        assert texts == {choice["index"]: choice["text"] for choice in calm["choices"]}
    until(lambda: engine_of(served).pid != engine.pid and status(served, "/ready") == 200)


def test_both_processes_end_together_and_leave_nothing(served: ServerProcess):
    engine = engine_of(served)
    assert served.stop() == 0
    until(lambda: is_gone(engine))


def test_a_server_that_is_killed_takes_its_engine_along():
    server = start_server()
    engine = engine_of(server)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(HANGS_S)
    until(lambda: is_gone(engine))


def test_in_process_is_one_process():
    server = start_server("--in-process")
    assert complete(server).status_code == 200
    assert psutil.Process(server.process.pid).children() == []
    assert server.stop() == 0
