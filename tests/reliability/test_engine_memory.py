"""What the engine's process holds besides weights and KV cache: bounded, and nothing of what others read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import ServerProcess, start_server
from tests.model.checkpoints import make_checkpoint
from tests.reliability.test_served_engine import engine_of
from tests.waiting import HANGS_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
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


def test_besides_weights_and_kv_cache_it_holds_less_than_150_mb(worked: ServerProcess):
    (held,) = httpx.get(f"{worked.url}/admin/models", timeout=HANGS_S).json()["models"]
    taken = psutil.Process(engine_of(worked).pid).memory_info().rss
    others = taken - held["weights_bytes"] - held["kv_bytes"]
    assert others < MOST_BYTES, f"{taken / 1e6:.0f} MB, of which {others / 1e6:.0f} are neither weights nor KV cache"


def test_it_has_closed_the_checkpoint_and_reads_no_text(worked: ServerProcess):
    mapped = Path(f"/proc/{engine_of(worked).pid}/maps").read_text()
    assert "_native" in mapped
    assert ".safetensors" not in mapped
    for library in ("tokenizers", "markupsafe", "libtorch", "uvloop", "httptools"):
        assert library not in mapped
