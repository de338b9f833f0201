"""The language model asked in tensors, by Triton's own client: infer and streams, the tokens of /v1/completions."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest

pytest.importorskip("grpc", reason="the extra tensor brings it")
client = pytest.importorskip("tritonclient.grpc.aio", reason="tritonclient is not installed (make dev has it)")

from tritonclient.grpc import InferInput, InferRequestedOutput  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402

from maitred.api.dialects.kserve.routes import kserve_routes  # noqa: E402
from maitred.api.grpc.build import grpc_server  # noqa: E402
from maitred.api.routes import make_routes  # noqa: E402
from maitred.api.serving import create_app  # noqa: E402
from maitred.api.tensor.classes import Labels  # noqa: E402
from maitred.api.tensor.extensions import Extensions  # noqa: E402
from maitred.config import ServerConfig  # noqa: E402
from maitred.tensor.control import ControlMode  # noqa: E402
from maitred.tensor.local import LocalTensorService  # noqa: E402
from tests.api.test_generate import PROMPT, SAMPLING, countdown  # noqa: E402
from tests.api.test_grpc import CONFIG  # noqa: E402
from tests.api.test_grpc import inputs as added  # noqa: E402
from tests.api.test_tenants import table_of  # noqa: E402
from tests.fakes_api import FakeReplica, FakeTenants, make_model  # noqa: E402
from tests.tensor.models import write_model  # noqa: E402
from tests.waiting import until_async  # noqa: E402

TEXTS = {"temperature": "0.5", "top_p": "0.9", "max_tokens": "12"}  # as the sample client of Triton's backend has them


@asynccontextmanager
async def served(folder, replica=None, *, model=None, tenants=None):
    """Triton's client by gRPC, a client by HTTP, and the app that both ask."""
    replica = replica or FakeReplica(countdown)
    replica.tensors = LocalTensorService(folder, ControlMode.NONE)
    await replica.tensors.start(())
    extensions = Extensions("maitred", Labels(folder))
    routes = make_routes(more=kserve_routes(extensions))
    asgi = create_app(replica, model or make_model(), ServerConfig(), routes=routes, tenants=tenants)
    server = grpc_server(extensions, asgi.app)
    port = await server.start("127.0.0.1", 0)
    try:
        async with (
            client.InferenceServerClient(f"127.0.0.1:{port}") as triton,
            httpx.AsyncClient(transport=httpx.ASGITransport(asgi), base_url="http://test") as http,
        ):
            http.headers["accept-encoding"] = "identity"
            yield triton, http, asgi.app
    finally:
        await server.stop(0)
        await replica.tensors.close()
        asgi.app.close()


def said(text=PROMPT, *, stream=None, sampling=None, exclude=None):
    """Inputs of the language model."""
    values = {"text_input": text, "stream": stream, "sampling_parameters": sampling, "exclude_input_in_output": exclude}
    made = []
    for name, value in values.items():
        if value is None:
            continue
        is_flag = isinstance(value, bool)
        content = value if is_flag or isinstance(value, str | bytes) else json.dumps(value)
        one = InferInput(name, [1], "BOOL" if is_flag else "BYTES")
        one.set_data_from_numpy(np.array([content], bool if is_flag else object))
        made.append(one)
    return made


def text_of(result):
    return b"".join(result.as_numpy("text_output")).decode()


async def completed(http, prompt=PROMPT, **sampling):
    return (await http.post("/v1/completions", json={"prompt": prompt, **sampling})).json()["choices"][0]["text"]


async def test_infer_gives_what_a_completion_gives(tmp_path):
    async with served(tmp_path) as (triton, http, app):
        whole, wanted = await completed(http, **SAMPLING), app.replica.submitted[-1]
        answers = [
            await triton.infer("tiny", said(sampling=SAMPLING, exclude=True), request_id="mine"),
            await triton.infer("tiny", said(exclude=True), model_version="1", parameters={**TEXTS, "seed": 7}),
            await triton.infer("tiny", said(sampling=SAMPLING, exclude=True, stream=False), parameters=TEXTS),
        ]
        assert [text_of(each) for each in answers] == [whole] * 3
        assert text_of(await triton.infer("tiny", said(sampling=SAMPLING))) == PROMPT + whole
        told = answers[0].get_response()
        assert (told.id, told.model_name, told.model_version) == ("mine", "tiny", "1")
        first, second, third, fourth = app.replica.submitted[1:]
        assert all(each.prompt_token_ids == wanted.prompt_token_ids for each in (first, second, third, fourth))
        assert first.sampling == third.sampling == fourth.sampling == wanted.sampling
        assert (second.sampling.temperature, second.sampling.top_p, second.max_tokens) == (0.5, 0.9, 12)
        answer = await triton.infer("tiny", said(sampling={"n": 2}, exclude=True))
        assert answer.as_numpy("text_output").shape == (2,)


async def test_infer_over_http_is_the_same_in_json_and_binary(tmp_path):
    async with served(tmp_path, model=make_model(names=("org/tiny",))) as (_, http, _app):
        inputs = [
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]},
            {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [True]},
        ]
        body = {"id": "mine", "inputs": inputs, "parameters": {"max_tokens": 5}}
        told = (await http.post("/v2/models/org/tiny/infer", json=body)).json()
        whole = await completed(http, max_tokens=5)
        output = {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [whole]}
        assert told == {"id": "mine", "model_name": "org/tiny", "model_version": "1", "outputs": [output]}
        body["parameters"]["binary_data_output"] = True
        answer = await http.post("/v2/models/org/tiny/versions/1/infer", json=body)
        at = int(answer.headers["Inference-Header-Content-Length"])
        assert answer.content[at + 4 :].decode() == whole
        spoken = await http.post("/v2/models/org/tiny/generate", json={"text_input": PROMPT, "max_tokens": 5})
        assert spoken.json()["text_output"] == PROMPT + whole


async def test_a_model_that_speaks_no_text_is_told_apart_from_one_that_is_not_there(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)
    async with served(tmp_path) as (_, http, _app):
        for model, status, says in (("add", 400, "post to /v2/models/add/infer"), ("other", 404, "not served here")):
            answer = await http.post(f"/v2/models/{model}/generate", json={"text_input": PROMPT})
            assert (answer.status_code, says in answer.json()["error"]) == (status, True)


async def test_a_stream_tells_pieces_as_they_come_and_which_is_the_last(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)

    async def requests():
        yield {"model_name": "tiny", "inputs": said(stream=True, sampling=SAMPLING), "request_id": "pieces"}
        yield {"model_name": "add", "inputs": added(1), "request_id": "tensors"}
        yield {"model_name": "tiny", "inputs": said(exclude=False, stream=True), "request_id": "wrong"}
        yield {"model_name": "tiny", "inputs": said(sampling=SAMPLING, exclude=True), "request_id": "whole"}

    async with served(tmp_path) as (triton, http, _):
        whole = await completed(http, **SAMPLING)
        told, errors = {}, []
        async for result, error in triton.stream_infer(requests()):
            if error is not None:
                errors.append(str(error))
                continue
            response = result.get_response()
            told.setdefault(response.id, []).append((response.parameters["triton_final_response"].bool_param, result))
        for name in ("pieces", "whole"):
            assert "".join(text_of(result) for _, result in told[name]) == whole
            assert [is_last for is_last, _ in told[name]] == [False] * (len(told[name]) - 1) + [True]
        assert len(told["pieces"]) > 2
        assert (len(told["whole"]), len(told["tensors"])) == (1, 1)
        assert len(errors) == 1
        assert "exclude_input_in_output" in errors[0]


async def test_the_model_is_described_by_either_protocol(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)
    async with served(tmp_path) as (triton, http, _):
        assert await triton.is_model_ready("tiny")
        assert await triton.is_model_ready("tiny", "1")
        assert not await triton.is_model_ready("tiny", "2")
        assert await triton.is_model_ready("add")
        config = (await triton.get_model_config("tiny")).config
        assert (config.model_transaction_policy.decoupled, config.max_batch_size) == (True, 0)
        told = await triton.get_model_metadata("tiny", as_json=True)
        assert told["inputs"][:2] == [
            {"name": "text_input", "datatype": "BYTES", "shape": ["1"]},
            {"name": "stream", "datatype": "BOOL", "shape": ["1"]},
        ]
        assert (told["versions"], told["outputs"][0]["name"]) == (["1"], "text_output")
        over_http = (await http.get("/v2/models/tiny")).json()
        assert [each["name"] for each in over_http["inputs"]] == [each["name"] for each in told["inputs"]]
        assert (await http.get("/v2/models/tiny/ready")).status_code == 200
        assert (await http.get("/v2/models/tiny/versions/3/config")).status_code == 404


def bad(name, value, kind="BYTES"):
    one = InferInput(name, list(value.shape), kind)
    one.set_data_from_numpy(value)
    return one


WRONG = [
    (said(stream=True), {}, "INVALID_ARGUMENT", "by a stream"),
    (said()[:0], {}, "INVALID_ARGUMENT", "text_input is missing"),
    ([bad("text_input", np.array([b"a", b"b"], object))], {}, "INVALID_ARGUMENT", r"BYTES \[1\]"),
    ([bad("text_input", np.array([b"\xff"], object))], {}, "INVALID_ARGUMENT", "no UTF-8"),
    ([*said(), bad("stream", np.array([1], np.int32), "INT32")], {}, "INVALID_ARGUMENT", r"BOOL \[1\], not INT32"),
    ([*said(), bad("image", np.array([b"a"], object))], {}, "INVALID_ARGUMENT", "no input 'image'"),
    (said(sampling={"temprature": 1}), {}, "INVALID_ARGUMENT", "temperature"),
    (said(sampling="nothing"), {}, "INVALID_ARGUMENT", "sampling_parameters is no object"),
    (said(sampling={"use_beam_search": True}), {}, "UNIMPLEMENTED", "use_beam_search"),
    (said(), {"parameters": {"temprature": 1}}, "INVALID_ARGUMENT", "temperature"),
    (said(), {"model_version": "2"}, "NOT_FOUND", "version 1"),
    (said(), {"sequence_id": 3, "sequence_start": True}, "INVALID_ARGUMENT", "keeps no sequences"),
    (said(), {"outputs": [InferRequestedOutput("logprobs")]}, "INVALID_ARGUMENT", "no output 'logprobs'"),
]


@pytest.mark.parametrize(("inputs", "more", "code", "says"), WRONG)
async def test_what_the_client_does_wrong_has_its_status(tmp_path, inputs, more, code, says):
    async with served(tmp_path) as (triton, _, app):
        with pytest.raises(InferenceServerException, match=says) as raised:
            await triton.infer("tiny", inputs, **more)
        assert raised.value.status() == f"StatusCode.{code}"
        assert not app.replica.submitted


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_frees_its_place(tmp_path, is_stream):
    replica = FakeReplica(lambda request: [ord("x")] * 10_000, token_s=0.01)

    async def requests():
        yield {"model_name": "tiny", "inputs": said(stream=True, sampling={"max_tokens": 9_000})}
        await asyncio.Event().wait()

    async def asked(triton):
        if is_stream:
            return [each async for each in triton.stream_infer(requests())]
        return await triton.infer("tiny", said(sampling={"max_tokens": 9_000}))

    async with served(tmp_path, replica, model=make_model(max_model_len=20_000)) as (triton, _, app):
        asking = asyncio.ensure_future(asked(triton))
        await until_async(lambda: replica.live)
        assert app.gate.num_in_flight == 1
        asking.cancel()
        with pytest.raises((asyncio.CancelledError, InferenceServerException)):
            await asking
        await until_async(lambda: replica.aborted and not replica.live and not app.gate.num_in_flight)


async def test_the_limits_of_a_key_hold_and_its_tokens_are_its_tenants(tmp_path):
    tenants = FakeTenants(table_of({"one": {"requests_per_minute": 1, "priorities": [0, 5]}}))
    key = {"authorization": "Bearer one"}
    async with served(tmp_path, tenants=tenants) as (triton, _, app):
        assert text_of(await triton.infer("tiny", said(), headers=key, priority=2, timeout=5_000_000))
        (asked,) = app.replica.submitted
        assert (asked.tenant, asked.priority, round(asked.start_by - asked.arrived_at, 3)) == ("one", 2, 5.0)
        with pytest.raises(InferenceServerException) as raised:
            await triton.infer("tiny", said(), headers=key)
        assert raised.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        with pytest.raises(InferenceServerException) as raised:
            await triton.infer("tiny", said())
        assert raised.value.status() == "StatusCode.UNAUTHENTICATED"
