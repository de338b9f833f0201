"""`maitred serve` as people run it: who holds the weights, who dies with whom, and what comes back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import ServerProcess, start_server
from tests.model.checkpoints import make_checkpoint
from tests.waiting import HANGS_S, is_gone, until

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


def test_both_processes_end_together_and_leave_nothing(served: ServerProcess):
    engine = engine_of(served)
    assert served.stop() == 0
    until(lambda: is_gone(engine))


def test_in_process_is_one_process():
    server = start_server("--in-process")
    assert complete(server).status_code == 200
    assert psutil.Process(server.process.pid).children() == []
    assert server.stop() == 0


MOST_BYTES = 150e6  # besides weights and KV cache
VOCAB = 4096


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of random weights that has had all its slots and its largest steps."""
    folder = make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), vocab_size=VOCAB)
    flags = ("--kv-cache-memory-bytes", "8MiB", "--executor", "native", "--served-model-name", "small")
    server = start_server(str(folder), *flags)
    prompts = [[(7 * i + j) % 200 for j in range(60)] for i in range(32)]
    body = {"model": "small", "prompt": prompts, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    yield server
    server.stop()


@on_linux
def test_besides_weights_and_kv_cache_it_holds_less_than_150_mb(worked: ServerProcess):
    (held,) = httpx.get(f"{worked.url}/admin/models", timeout=HANGS_S).json()["models"]
    taken = psutil.Process(engine_of(worked).pid).memory_info().rss
    others = taken - held["weights_bytes"] - held["kv_bytes"]
    assert others < MOST_BYTES, f"{taken / 1e6:.0f} MB, of which {others / 1e6:.0f} are neither weights nor KV cache"


@on_linux
def test_it_has_closed_the_checkpoint_and_reads_no_text(worked: ServerProcess):
    mapped = Path(f"/proc/{engine_of(worked).pid}/maps").read_text()
    assert "_native" in mapped
    assert ".safetensors" not in mapped
    for library in ("tokenizers", "markupsafe", "libtorch", "uvloop", "httptools"):
        assert library not in mapped
