"""An engine whose model several processes hold: any of them may be lost, and every stream goes on exactly."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from maitred.config import CacheConfig, EngineConfig, ModelConfig, ProcessConfig
from maitred.core.clock import WallClock
from maitred.core.request import RequestSpec
from maitred.engine.client import EngineClient
from maitred.engine.supervisor import Start
from tests.engine.clients import ask, follow, tokens
from tests.engine.test_client import pid_of
from tests.model.checkpoints import make_checkpoint
from tests.waiting import is_gone, until_async

LENGTH = 1500  # tokens: more than are made before a signal has come


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama_bias", tmp_path_factory.mktemp("ranks") / "model", max_position_embeddings=2048)


@asynccontextmanager
async def engine_of(model: Path, num_ranks: int, **process: float) -> AsyncIterator[EngineClient]:
    config = EngineConfig(
        model=ModelConfig(model=str(model), tensor_parallel=num_ranks, num_threads=1, dtype="float32"),
        cache=CacheConfig(kv_cache_memory_bytes=2**24),
    )
    client = EngineClient(Start(config=config, process=ProcessConfig(**process)), WallClock())
    client.start()
    try:
        yield client
    finally:
        await client.close()


def rank_of(engine: EngineClient) -> psutil.Process:
    (rank,) = [
        child
        for child in psutil.Process(pid_of(engine)).children()
        if "maitred.executor.rank_process" in child.cmdline()
    ]
    return rank


def request() -> RequestSpec:
    return ask(max_tokens=LENGTH, sampling={"temperature": 0.8, "seed": 3})


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param("rank 1", signal.SIGKILL, marks=pytest.mark.soak),
        pytest.param("rank 1", signal.SIGSEGV, marks=pytest.mark.soak),
        ("rank 1", signal.SIGSTOP),
        pytest.param("rank 0", signal.SIGKILL, marks=pytest.mark.soak),
    ],
)
async def test_a_stream_goes_on_exactly_when_a_rank_is_lost(victim: str, number: int, model: Path):
    async with engine_of(model, 1) as alone:
        expected = tokens(await follow(alone, request()))
    assert len(expected) == LENGTH
    lost: list[psutil.Process] = []
    async with engine_of(model, 2, step_timeout_s=2.0) as engine:

        async def lose() -> None:
            lost.extend((rank_of(engine), psutil.Process(pid_of(engine))))
            lost[0 if victim == "rank 1" else 1].send_signal(number)
            await until_async(lambda: engine.state().num_restarts == 1)

        assert tokens(await follow(engine, request(), {10: lose})) == expected
        assert all(is_gone(process) for process in lost)
        lost.append(rank_of(engine))
    assert is_gone(lost[-1])


async def test_an_idle_engine_is_begun_again_at_once_when_a_rank_dies(model: Path, caplog: pytest.LogCaptureFixture):
    async with engine_of(model, 2) as engine:
        await follow(engine, ask(max_tokens=2))
        rank_of(engine).kill()
        await until_async(lambda: engine.state().num_restarts == 1 and engine.supervisor.ready)
        assert "was killed by SIGKILL (by hand, or for want of memory): rank 1 was killed by SIGKILL" in caplog.text
