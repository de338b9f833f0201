"""Ensembles, sequences and the response cache in an engine's process, and what its death leaves of them."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from maitred.config import MachineShare
from maitred.core.clock import WallClock
from maitred.core.errors import InvalidRequest
from maitred.decisions.files import log_runs, read_frames
from maitred.decisions.replay import first_difference
from maitred.engine.client import EngineClient
from maitred.tensor.arrays import array_of
from tests.tensor.ensembles import write_diamond
from tests.tensor.test_engine import IN_PROCESS, start_of
from tests.tensor.test_ensembles import ask as ask_diamond
from tests.tensor.test_sequences import ask, sums, value
from tests.waiting import until_async


async def opened(repository, **kwargs):
    start = start_of(repository, IN_PROCESS, **kwargs)
    share = MachineShare(result_cache_bytes=1 << 20, result_cache_ttl_s=60.0)
    client = EngineClient(replace(start, config=replace(start.config, share=share)), WallClock())
    client.begin()
    await asyncio.to_thread(client.wait)
    client.attach(asyncio.get_running_loop())
    return client


def test_an_ensemble_and_its_cached_step_answer_and_the_log_of_their_lanes_replays(tmp_path):
    write_diamond(tmp_path / "models", cached=True)
    log = tmp_path / "log"

    async def story():
        client = await opened(tmp_path / "models", decision_log=str(log))
        try:
            for at in range(3):
                answer = await client.tensors.infer(ask_diamond(f"r{at}", 7, tenant="ann"))
                assert array_of(answer.outputs[0])[0, 0] == 35
            (double,) = client.tensors.statistics("double")
            assert (double.inference_count, double.cache_miss[0], double.cache_hit[0]) == (1, 1, 2)
            (whole,) = client.tensors.statistics("diamond")
            assert whole.success[0] == 3
            for name in ("double", "triple", "zsum"):
                (step,) = client.tensors.statistics(name)
                assert (step.success[0], step.queue[0], step.fail[0]) == (3, 3, 0), "a step is a request of its model"
        finally:
            await client.close()

    asyncio.run(story())
    (parts,) = log_runs(log)
    assert first_difference(read_frames(parts)) is None


def test_a_sequence_ends_with_its_engine_and_the_next_request_is_told_so(tmp_path):
    sums(tmp_path)

    async def story():
        client = await opened(tmp_path)
        try:
            assert value(await client.tensors.infer(ask("a", 1, 5, start=True))) == 1
            assert value(await client.tensors.infer(ask("b", 2, 5))) == 3
            killed = client.supervisor.pid
            os.kill(killed, signal.SIGKILL)
            await until_async(lambda: client.supervisor.ready and client.supervisor.pid != killed)
            with pytest.raises(InvalidRequest, match="must specify the START flag"):
                await client.tensors.infer(ask("c", 3, 5))
            assert value(await client.tensors.infer(ask("d", 4, 5, start=True, end=True))) == 4
        finally:
            await client.close()

    asyncio.run(story())
