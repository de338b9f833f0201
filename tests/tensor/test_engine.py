"""Tensor models in an engine's process: asked through its client, alone, killed and begun again."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import numpy as np
import pytest

from maitred.api.dialects.tfserving.routes import ROUTES
from maitred.api.ops.metrics_page import TRITON_NAMES, EdgeMetrics
from maitred.api.routes import make_routes
from maitred.api.serving import create_app
from maitred.cli.why import explain
from maitred.config import EngineConfig, ProcessConfig, ServerConfig, TensorConfig
from maitred.config import ModelConfig as LanguageModelConfig
from maitred.core import metrics as m
from maitred.core.clock import WallClock
from maitred.core.errors import InvalidRequest, ModelNotFound, QueueTimeout
from maitred.core.request import SamplingParams
from maitred.decisions.codec import read_log
from maitred.decisions.files import log_runs, read_frames
from maitred.decisions.log import Dispatched
from maitred.decisions.replay import first_difference
from maitred.engine.build import load_engine
from maitred.engine.child_process import in_child_process
from maitred.engine.client import EngineClient
from maitred.engine.engine_thread import in_thread
from maitred.engine.intake import ServedModel, make_requests
from maitred.engine.supervisor import Start
from maitred.engine.tensors import TensorCounts
from maitred.storage.ledger import Ledger
from maitred.tenancy.usage import UsageQuery
from maitred.tensor.arrays import array_of
from maitred.tensor.config import ModelConfig
from maitred.tensor.host import COMMAND, with_tensors
from tests.api.test_tenants import table_of
from tests.fakes_api import FakeTenants, make_model
from tests.tensor.models import add_model, write_model
from tests.tensor.test_local import BATCHED, request, rows
from tests.waiting import until_async

IN_PROCESS = in_child_process(COMMAND)
IN_THREAD = in_thread(with_tensors(lambda *_: pytest.fail("no language model is to be loaded")))


class Batches(TensorCounts):
    """Counts that keep the times of every batch."""

    def __init__(self, took):
        super().__init__()
        self.took = took

    def ran(self, times):
        self.took.append(times)


def start_of(repository, transport, *, mode="none", decision_log=None):
    tensors = TensorConfig(model_repository=str(repository), model_control_mode=mode)
    config = EngineConfig(model=LanguageModelConfig(model="none"), tensors=tensors, decision_log=decision_log)
    return Start(config=config, process=ProcessConfig(), open=transport, read_config=ModelConfig.FromString)


@asynccontextmanager
async def engine(repository, transport=IN_PROCESS, on_admitted=None, **kwargs):
    client = EngineClient(start_of(repository, transport, **kwargs), WallClock(), on_admitted=on_admitted)
    client.begin()
    await asyncio.to_thread(client.wait)
    client.attach(asyncio.get_running_loop())
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize("transport", [IN_PROCESS, IN_THREAD], ids=["process", "thread"])
def test_an_engine_without_a_language_model_infers_and_counts(tmp_path, transport):
    write_model(tmp_path, "add", config=BATCHED)

    async def ask():
        async with engine(tmp_path, transport) as client:
            tensors = client.tensors
            assert [(entry.name, entry.version) for entry in tensors.index(ready_only=True)] == [("add", 1)]
            assert tensors.config("add").max_batch_size == 8
            asked = [tensors.infer(request(f"r{at}", rows(at), rows(10 * at))) for at in range(4)]
            answers = await asyncio.gather(*asked)
            assert [array_of(one.outputs[0])[0, 0] for one in answers] == [0, 11, 22, 33]
            with pytest.raises(InvalidRequest, match="unexpected shape"):
                await tensors.infer(request("wrong", rows(1, width=3), rows(1)))
            with pytest.raises(ModelNotFound):
                tensors.config("none")
            (told,) = tensors.statistics()
            assert (told.inference_count, told.execution_count, told.success[0]) == (4, 1, 4)

    asyncio.run(ask())


def test_a_lone_file_is_a_model_of_its_name(tmp_path):
    file = write_model(tmp_path, "add") / "1" / "model.onnx"

    async def ask():
        async with engine(file.rename(tmp_path / "add.onnx"), IN_THREAD) as client:
            answer = await client.tensors.infer(request("r", rows(1), rows(2)))
            assert array_of(answer.outputs[0])[0, 0] == 3

    asyncio.run(ask())


def test_models_are_loaded_as_an_administrator_asks(tmp_path):
    write_model(tmp_path, "add")

    async def ask():
        async with engine(tmp_path, mode="explicit") as client:
            tensors = client.tensors
            with pytest.raises(ModelNotFound):
                await tensors.infer(request("early", rows(1), rows(1)))
            with pytest.raises(ModelNotFound):
                await tensors.load("nothing")
            await tensors.load("add")
            assert tensors.versions("add") == [1]
            assert array_of((await tensors.infer(request("r", rows(1), rows(2)))).outputs[0])[0, 0] == 3
            await tensors.unload("add")
            assert tensors.versions("add") == ()

    asyncio.run(ask())


def test_requests_of_an_engine_that_is_killed_run_again(tmp_path):
    write_model(tmp_path, "add", config=BATCHED)

    async def ask():
        async with engine(tmp_path) as client:
            three = [
                asyncio.ensure_future(client.tensors.infer(request(f"r{at}", rows(at), rows(at)))) for at in range(3)
            ]
            await asyncio.sleep(0)
            killed = client.supervisor.pid
            os.kill(killed, signal.SIGKILL)
            await until_async(lambda: client.supervisor.ready and client.supervisor.pid != killed)
            last = await client.tensors.infer(request("r3", rows(3), rows(3)))
            answers = [*await asyncio.gather(*three), last]
            assert [array_of(one.outputs[0])[0, 0] for one in answers] == [0, 2, 4, 6]

    asyncio.run(ask())


def test_the_next_engine_has_the_models_that_were_asked_for(tmp_path):
    write_model(tmp_path, "add")

    async def ask():
        async with engine(tmp_path, mode="explicit") as client:
            await client.tensors.load("add")
            killed = client.supervisor.pid
            os.kill(killed, signal.SIGKILL)
            await until_async(lambda: client.supervisor.pid != killed)
            answer = await client.tensors.infer(request("r", rows(1), rows(2)))
            assert array_of(answer.outputs[0])[0, 0] == 3

    asyncio.run(ask())


def test_who_leaves_or_is_late_gives_up_its_place_in_the_engine(tmp_path):
    write_model(tmp_path, "add", config=BATCHED)

    async def ask():
        async with engine(tmp_path) as client:
            gone = asyncio.ensure_future(client.tensors.infer(request("gone", rows(1), rows(1))))
            await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(QueueTimeout, match="Request timeout expired"):
                await client.tensors.infer(request("late", rows(1), rows(1), start_by=WallClock().now() + 0.05))
            four = [client.tensors.infer(request(f"r{at}", rows(at), rows(at))) for at in range(4)]
            assert [array_of(one.outputs[0])[0, 0] for one in await asyncio.gather(*four)] == [0, 2, 4, 6]
            assert not client.tensors.num_unanswered()

    asyncio.run(ask())


def test_large_tensors_cross_as_they_are(tmp_path):
    write_model(tmp_path, "add", model=add_model(shape=("batch", "length")))

    async def ask():
        async with engine(tmp_path) as client:
            large = np.random.default_rng(0).random((1, 2**20), np.float32)
            answer = await client.tensors.infer(request("large", large, large))
            assert np.array_equal(array_of(answer.outputs[0]), large + large)

    asyncio.run(ask())


def test_the_decision_log_of_tensor_models_replays_and_tells_why(tmp_path, capsys):
    write_model(tmp_path / "models", "add", config=BATCHED)
    log = tmp_path / "log"

    async def ask():
        async with engine(tmp_path / "models", decision_log=str(log)) as client:
            await asyncio.gather(*[client.tensors.infer(request(f"r{at}", rows(at), rows(at))) for at in range(8)])

    asyncio.run(ask())
    (parts,) = log_runs(log)
    assert first_difference(read_frames(parts)) is None
    _, steps = read_log(read_frames(parts))
    events = [event for step in steps for event in step.events]
    assert sum(len(event.batches) for event in events if isinstance(event, Dispatched)) == 2
    assert explain("r3", str(log)) == 0
    told = capsys.readouterr().out
    assert "1 row for add version 1" in told
    assert "in a batch of 4 requests, 4 rows, on instance 0" in told
    assert "stop, it has its answer" in told


def test_a_batch_runs_while_a_step_of_the_language_model_is_under_way(tmp_path):
    write_model(tmp_path, "add")
    step, end_step = threading.Event(), threading.Event()

    def build(*words):
        loaded = load_engine(*words)
        executor = loaded.core._executor
        execute = executor.execute

        def slow(plan):
            step.set()
            end_step.wait()
            return execute(plan)

        executor.execute = slow
        return loaded

    async def ask():
        start = start_of(tmp_path, in_thread(with_tensors(build)))
        start = replace(start, config=replace(start.config, model=LanguageModelConfig()))
        client = EngineClient(start, WallClock())
        client.begin()
        facts = (await asyncio.to_thread(client.wait)).facts
        client.attach(asyncio.get_running_loop())
        (spec,) = make_requests(
            ServedModel.of(facts), "Once", SamplingParams(max_tokens=2), request_id="chat", now=WallClock().now()
        )
        chat = client.submit(spec)[0]
        await asyncio.to_thread(step.wait)
        answer = await client.tensors.infer(request("r", rows(1), rows(2)))
        assert array_of(answer.outputs[0])[0, 0] == 3
        assert not end_step.is_set()
        end_step.set()
        assert [item.finish_reason async for item in chat][-1] is not None
        await client.close()

    asyncio.run(ask())


def test_the_ledger_holds_all_that_batches_took_also_of_who_left(tmp_path):
    at_once = BATCHED.replace("60000000", "200000")  # the first four may be a batch before one of them leaves
    write_model(tmp_path / "models", "add", config=at_once)
    ledger, took = Ledger(tmp_path / "ledger.sqlite"), []

    async def ask():
        async with engine(tmp_path / "models", on_admitted=ledger.opened) as client:
            tensors = client.tensors
            tensors.counts = Batches(took)
            names = ("a", "b", "a", "b")
            asked = [
                asyncio.ensure_future(tensors.infer(request(f"r{at}", rows(at), rows(at), tenant=name)))
                for at, name in enumerate(names)
            ]
            await asyncio.sleep(0)
            asked[0].cancel()
            asked += [asyncio.ensure_future(tensors.infer(request("last", rows(1), rows(1), tenant="a")))]
            await asyncio.gather(*asked[1:])
            await until_async(lambda: not tensors.num_unanswered())

    asyncio.run(ask())
    ledger.close()
    query = UsageQuery(start=0, end=2**33, width_s=2**33, group_by=("tenant", "model"))
    usage = {key[:3:2]: amount for _, key, amount in ledger.usage(query)}
    assert {key: amount.num_requests for key, amount in usage.items()} == {("a", "add"): 3, ("b", "add"): 2}
    whole_us = sum((one.input_ns + one.infer_ns + one.output_ns) // 1000 for one in took)
    assert sum(amount.compute_us for amount in usage.values()) == whole_us > 0
    assert sum(amount.rows for amount in usage.values()) >= 4


def test_people_see_lanes_in_the_queue_and_what_batches_took_on_the_metrics_page(tmp_path):
    write_model(tmp_path, "add", config=BATCHED)

    async def ask():
        async with engine(tmp_path) as client:
            three = [
                asyncio.ensure_future(client.tensors.infer(request(f"r{at}", rows(at), rows(at)))) for at in range(3)
            ]
            await asyncio.sleep(0)
            (lane,) = (await client.queue_view(offset=0, limit=10)).lanes
            assert (lane.model, lane.num_waiting, lane.num_waiting_rows) == ("add", 3, 3)
            assert lane.reason == "for others to share its batch"
            await asyncio.gather(*three, client.tensors.infer(request("r3", rows(3), rows(3))))
            samples = client.tensors.counts.samples()
            assert samples[m.TENSOR_ROWS] == {("add",): 4.0}
            assert samples[m.TENSOR_REQUESTS] == {("add", "stop"): 4.0}
            assert samples[m.TENSOR_COMPUTE]["add",] > 0

    asyncio.run(ask())


def test_a_tenant_whose_minute_of_computing_is_used_up_is_told_when_to_come_again(tmp_path):
    write_model(tmp_path, "add", config="max_batch_size: 8")
    table = table_of({"shop": {"compute_ms_per_minute": 1}, "boss": {}})
    body = {"instances": [{"INPUT0": [1.5] * 16, "INPUT1": [2] * 16}]}

    async def ask():
        async with engine(tmp_path) as client:
            asgi = create_app(
                client, make_model(), ServerConfig(), tenants=FakeTenants(table), routes=make_routes(ROUTES)
            )
            async with httpx.AsyncClient(transport=httpx.ASGITransport(asgi), base_url="http://test") as http:

                async def predict(tenant):
                    headers = {"authorization": f"Bearer {tenant}"}
                    return await http.post("/v1/models/add:predict", json=body, headers=headers)

                answers = [await predict("shop")]
                while answers[-1].status_code == 200:
                    answers.append(await predict("shop"))
                took_us = client.tensors.counts.compute_us["add"]
                assert took_us >= 1000
                refused = answers[-1]
                assert (refused.status_code, int(refused.headers["x-ratelimit-remaining-compute-ms"])) == (429, 0)
                assert 0 < int(refused.headers["retry-after"]) <= 61
                assert f"did for {took_us / 1000:.0f} ms" in refused.text
                assert (await predict("boss")).status_code == 200
            asgi.app.close()

    asyncio.run(ask())


@pytest.mark.parametrize("compat", ["triton", "vllm"])
def test_the_metrics_page_has_tritons_names_only_when_asked(tmp_path, compat):
    write_model(tmp_path, "add", config=BATCHED)

    async def ask():
        async with engine(tmp_path, IN_THREAD) as client:
            page = EdgeMetrics(client, version="1", compat=compat)
            waiting = asyncio.ensure_future(client.tensors.infer(request("r0", rows(0), rows(0))))
            await asyncio.sleep(0)
            before = page.page("")[0].decode()
            await asyncio.gather(waiting, *(client.tensors.infer(request(f"r{at}", rows(0), rows(0))) for at in "123"))
            return before, page.page("")[0].decode()

    before, after = (figures(page) for page in asyncio.run(ask()))
    if compat != "triton":
        assert not [name for name in after if name.startswith("nv_")]
        return
    assert set(TRITON_NAMES) < set(after)
    assert (before["nv_inference_pending_request_count"], after["nv_inference_pending_request_count"]) == (1.0, 0.0)
    names = ("request_success", "count", "exec_count", "request_failure")
    assert [after[f"nv_inference_{name}"] for name in names] == [4.0, 4.0, 1.0, 0.0]
    assert after["nv_inference_request_duration_us"] >= after["nv_inference_queue_duration_us"] > 0


def figures(page):
    """Of the samples of version 1 of `add`, by name."""
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("nv_"))
    ours = '{model="add",version="1"}'
    return {sample.removesuffix(ours): float(value) for sample, value in lines if sample.endswith(ours)}
