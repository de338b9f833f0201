"""TF Serving's REST and gRPC against models that really run, by ovmsclient's stubs where it is installed."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest

grpc = pytest.importorskip("grpc", reason="the extra tensor brings it")

from onnx import TensorProto  # noqa: E402

from maitred.api.dialects.tfserving.routes import ROUTES  # noqa: E402
from maitred.api.grpc.server import (  # noqa: E402
    GrpcServer,
    ModelService,
    PredictionService,
)
from maitred.api.routes import make_routes  # noqa: E402
from maitred.config import ServerConfig  # noqa: E402
from maitred.tensor.tfs_fields import MESSAGES  # noqa: E402
from tests.api.conftest import with_tensors  # noqa: E402
from tests.tensor.models import helper, model_of, write_model  # noqa: E402

CONFIG = 'max_batch_size: 8 version_policy { all {} } parameters { key: "label.stable" value { string_value: "1" } }'
BATCHED = "max_batch_size: 8"


def tensor(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def echo(kind, output="text", shape=("n", 2)):
    nodes = [helper.make_node("Identity", ["IN"], [output])]
    return model_of(helper.make_graph(nodes, "echo", [tensor("IN", shape, kind)], [tensor(output, shape, kind)]))


def repository(folder):
    """add: two inputs, versions 1 and 2; text: BYTES; scores: one input of 3."""
    write_model(folder, "add", config=CONFIG, versions=(1, 2))
    write_model(folder, "text", config=BATCHED, model=echo(TensorProto.STRING))
    write_model(folder, "raw", config=BATCHED, model=echo(TensorProto.STRING, "text_bytes"))
    write_model(folder, "scores", config=BATCHED, model=echo(TensorProto.FLOAT, "scores", ("n", 3)))
    write_model(folder, "number", config=BATCHED, model=echo(TensorProto.FLOAT, "value", ("n", 1)))
    write_model(folder, "ints", config=BATCHED, model=echo(TensorProto.INT8, "OUT"))
    return folder


@asynccontextmanager
async def served(folder, config=None):
    """A client of REST, and the address of gRPC."""
    async with with_tensors(repository(folder), config=config, routes=make_routes(ROUTES)) as (asgi, http):
        http.base_url = "http://test/v1/models/"
        server = GrpcServer(asgi.app, [PredictionService(asgi.app), ModelService(asgi.app)])
        address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        try:
            yield http, address
        finally:
            await server.stop(0)


async def test_rows_and_columns_give_the_same_numbers(tmp_path):
    row = {"INPUT0": [1.5] * 16, "INPUT1": [2] * 16}
    async with served(tmp_path) as (http, _):
        rows = await http.post("/add:predict", json={"instances": [row, row], "signature_name": "serving_default"})
        assert rows.json() == {"predictions": [[3.5] * 16] * 2}
        columns = {name: [values, values] for name, values in row.items()}
        told = await http.post("/add/versions/2:predict", json={"inputs": columns})
        assert told.json() == {"outputs": [[3.5] * 16] * 2}
        assert (await http.post("/add/labels/stable:predict", json={"instances": [row]})).status_code == 200
        lone = await http.post("/number:predict", content=b'{"instances": [[NaN], [1.0]]}')
        assert lone.text == '{"predictions":[[NaN],[1.0]]}'


async def test_bytes_go_as_strings_or_in_base64(tmp_path):
    given = base64.b64encode("\xe9\0".encode()).decode()
    async with served(tmp_path) as (http, _):
        told = await http.post("/text:predict", json={"instances": [["a", {"b64": given}]]})
        assert told.json() == {"predictions": [["a", "\xe9\0"]]}
        told = await http.post("/raw:predict", json={"inputs": [["a", "b"]]})
        assert told.json() == {"outputs": [[{"b64": "YQ=="}, {"b64": "Yg=="}]]}


async def test_examples_are_classified_and_regressed(tmp_path):
    async with served(tmp_path) as (http, _):
        told = await http.post("/scores:classify", json={"examples": [{"IN": [0.5, 0.25, 0.25]}]})
        assert told.json() == {"result": [[["", 0.5], ["", 0.25], ["", 0.25]]]}
        told = await http.post("/number:regress", json={"context": {}, "examples": [{"IN": 2.0}, {"IN": [3.0]}]})
        assert told.json() == {"result": [2.0, 3.0]}
        told = await http.post("/scores:regress", json={"examples": [{"IN": [0.5, 0.25, 0.25]}]})
        assert (told.status_code, told.json()["error"]) == (
            400,
            "the model cannot regress: it has no output of shape [rows] or [rows, 1]",
        )


FAULTS = [
    ("other:predict", b'{"instances": [1]}', 404, "other"),
    ("add/versions/9:predict", b'{"instances": [1]}', 404, "version 9"),
    ("add/labels/beta:predict", b'{"instances": [1]}', 404, "beta"),
    ("add:predict", b'{"instances": [1]}', 400, "without names"),
    ("number:predict", b'{"instances": [1], "inputs": [1]}', 400, "either"),
    ("number:predict", b'{"instances": []}', 400, "at least one"),
    ("number:predict", b'{"instances": [[1], [2, 3]]}', 400, "no array"),
    ("number:predict", b'{"instances": [["1"]]}', 400, "not all of"),
    ("ints:predict", b'{"instances": [[1, 300]]}', 400, "no int8"),
    ("ints:predict", b'{"instances": [[1, 2.5]]}', 400, "not all of"),
    ("text:predict", b'{"instances": [["a", {"b64": "?"}]]}', 400, "no base64"),
    ("number:predict", b'{"signature_name": "mine", "instances": [[1]]}', 400, "mine"),
    ("number:predict", b"[" * 100_000, 400, "Parse error"),
    ("number:explain", b"{}", 404, ":predict"),
]


async def test_a_fault_is_told_as_tf_serving_does(tmp_path):
    async with served(tmp_path) as (http, _):
        for path, body, status, says in FAULTS:
            told = await http.post(f"/{path}", content=body)
            assert told.status_code == status
            assert says in told.json()["error"]


async def test_status_and_metadata_of_versions_and_labels(tmp_path):
    async with served(tmp_path) as (http, _):
        both = (await http.get("/add")).json()
        assert (both["id"], both["object"], both["owned_by"]) == ("add", "model", "maitred")
        assert [each["version"] for each in both["model_version_status"]] == ["1", "2"]
        labelled = (await http.get("/add/labels/stable")).json()
        fine = {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        assert labelled == {"model_version_status": [fine]}
        assert (await http.get("/add/versions/7")).status_code == 404
        told = (await http.get("/add/metadata")).json()
        assert told["model_spec"] == {"name": "add", "signature_name": "", "version": "2"}
        info = told["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"]["INPUT0"]
        assert info["dtype"] == "DT_FLOAT"
        assert [dim["size"] for dim in info["tensor_shape"]["dim"]] == ["-1", "16"]
        assert (await http.get("/tiny")).json()["id"] == "tiny"
        assert (await http.get("/other")).status_code == 404


async def test_a_page_of_another_origin_must_ask_its_browser_first(tmp_path):
    async with served(tmp_path) as (http, _):
        headers = {"origin": "http://evil", "content-type": "text/plain"}
        told = await http.post("/number:predict", content=b'{"instances": [[1]]}', headers=headers)
        assert told.status_code == 415


async def test_keys_are_asked_for(tmp_path):
    async with served(tmp_path, ServerConfig(api_keys=("secret",))) as (http, address):
        assert (await http.post("/number:predict", json={"instances": [[1]]})).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert (await http.post("/number:predict", json={"instances": [[1]]}, headers=key)).status_code == 200
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await called(channel, "PredictionService/Predict", MESSAGES["PredictRequest"](), "PredictResponse")
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def called(channel, method, message, answer):
    call = channel.unary_unary(f"/tensorflow.serving.{method}")
    return MESSAGES[answer].FromString(await call(message.SerializeToString()))


async def test_predict_by_content_by_values_and_by_one_value_for_all(tmp_path):
    request = MESSAGES["PredictRequest"](output_filter=["OUTPUT"])
    request.model_spec.name, request.model_spec.version_label = "add", "stable"
    for name in ("INPUT0", "INPUT1"):
        request.inputs[name].dtype = 1
        request.inputs[name].tensor_shape.dim.add(size=1)
        request.inputs[name].tensor_shape.dim.add(size=16)
    request.inputs["INPUT0"].tensor_content = np.arange(16, dtype=np.float32).tobytes()
    request.inputs["INPUT1"].float_val.append(0.5)
    async with served(tmp_path) as (_, address), grpc.aio.insecure_channel(address) as channel:
        told = await called(channel, "PredictionService/Predict", request, "PredictResponse")
        assert (told.model_spec.name, told.model_spec.version.value) == ("add", 1)
        sums = np.frombuffer(told.outputs["OUTPUT"].tensor_content, np.float32)
        assert sums.tolist() == (np.arange(16) + 0.5).tolist()
        request.inputs["INPUT1"].float_val.extend([1.0] * 3)
        with pytest.raises(grpc.aio.AioRpcError, match="has 4 values") as raised:
            await called(channel, "PredictionService/Predict", request, "PredictResponse")
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        request.model_spec.name = "other"
        del request.inputs["INPUT1"]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await called(channel, "PredictionService/Predict", request, "PredictResponse")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_ovmsclient_predicts_and_sees_status_and_metadata(tmp_path):
    """It never asks by HTTP here, and its version 0 is the default one."""
    ovmsclient = pytest.importorskip("ovmsclient", reason="not installed: pip install --no-deps ovmsclient")
    async with served(tmp_path) as (_, address):
        client = ovmsclient.make_grpc_client(address)
        given = np.ones((2, 16), np.float32)
        told = await asyncio.to_thread(client.predict, {"INPUT0": given, "INPUT1": given}, "add")
        assert np.array_equal(told, 2 * given)
        texts = await asyncio.to_thread(client.predict, {"IN": np.array([[b"a", b"b"]])}, "text")
        assert np.asarray(texts).tolist() == [[b"a", b"b"]]
        status = await asyncio.to_thread(client.get_model_status, "add")
        assert {version: each["state"] for version, each in status.items()} == {1: "AVAILABLE", 2: "AVAILABLE"}
        metadata = await asyncio.to_thread(client.get_model_metadata, "add")
        assert metadata["model_version"] == 2
        assert metadata["inputs"]["INPUT0"] == {"shape": [-1, 16], "dtype": "DT_FLOAT"}
        assert json.dumps(metadata)
