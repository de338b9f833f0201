"""KServe v2 over HTTP against models that really run; Triton's own client where it is installed."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory

import httpx
import numpy as np
import psutil
import pytest

pytest.importorskip("onnxruntime", reason="the extra tensor brings it")

from onnx import TensorProto

from maitred.api.dialects.kserve.generate import accepted, deflated, inflated
from maitred.api.dialects.kserve.routes import kserve_routes
from maitred.api.routes import make_routes
from maitred.api.tensor.extensions import NAMES, Extensions, Labels
from maitred.config import ServerConfig
from maitred.core.errors import InvalidRequest, RequestTooLarge
from maitred.storage.key_files import make_key
from maitred.tenancy.tenant import read_tenants
from maitred.tensor.served_models import ControlMode
from tests.api.conftest import with_tensors
from tests.api.test_tenants import table_of
from tests.api.triton_cases import ANSWERS, CASES, MODELS
from tests.api.triton_cases import told as told_by
from tests.conftest import start_server
from tests.fakes_api import FakeTenants, make_model
from tests.tensor.models import helper, model_of, write_model
from tests.waiting import HANGS_S, until

BATCHED = "max_batch_size: 8"
NUMBERS = np.arange(16, dtype=np.float32)
LENGTH = "Inference-Header-Content-Length"


def echo(kind, shape=("n", 2)):
    value = [helper.make_tensor_value_info(name, kind, shape) for name in ("IN", "OUT")]
    return model_of(helper.make_graph([helper.make_node("Identity", ["IN"], ["OUT"])], "echo", value[:1], value[1:]))


def repository(folder):
    write_model(folder, "add", config=BATCHED, versions=(1, 3))
    write_model(folder, "text", config=BATCHED, model=echo(TensorProto.STRING))
    write_model(folder, "half", config=BATCHED, model=echo(TensorProto.FLOAT16))
    write_model(folder, "any", config=BATCHED, model=echo(TensorProto.FLOAT, ("n", "m")))
    return folder


@asynccontextmanager
async def served(folder, **fields):
    routes = make_routes(kserve_routes(Extensions("maitred", Labels(folder))))
    async with with_tensors(folder, routes=routes, **fields) as (_, http):
        http.base_url = "http://test/v2"
        yield http


def adding(rows=1, **fields):
    """A request of the model add, whose data stand in its JSON."""
    data = np.tile(NUMBERS, (rows, 1)).tolist()
    inputs = [{"name": f"INPUT{i}", "datatype": "FP32", "shape": [rows, 16], "data": data} for i in range(2)]
    return {"inputs": inputs, **fields}


def binary(parts, **fields):
    """Headers and body of a request whose inputs follow its JSON: (name, array) each."""
    kinds = {np.dtype(np.float32): "FP32", np.dtype(np.float16): "FP16"}
    inputs = [
        {"name": n, "datatype": kinds[a.dtype], "shape": a.shape, "parameters": {"binary_data_size": a.nbytes}}
        for n, a in parts
    ]
    head = json.dumps({"inputs": inputs, **fields}).encode()
    return {"headers": {LENGTH: str(len(head))}, "content": head + b"".join(a.tobytes() for _, a in parts)}


def parted(answer):
    """The JSON of an answer, and what follows it."""
    end = int(answer.headers[LENGTH])
    return json.loads(answer.content[:end]), answer.content[end:]


async def test_health_and_metadata_are_tritons(tmp_path):
    async with served(repository(tmp_path)) as http:
        for path in ("/health/live", "/health/ready", "/models/add/ready", "/models/add/versions/3/ready"):
            assert ((await http.get(path)).status_code, (await http.get(path)).content) == (200, b""), path
        assert (await http.get("/models/add/versions/1/ready")).status_code == 400
        assert (await http.get("/models/other/ready")).status_code == 400
        assert (await http.get("http://test/v2")).json()["extensions"] == [*NAMES]
        tensor = {"datatype": "FP32", "shape": [-1, 16]}
        assert (await http.get("/models/add")).json() == {
            "name": "add",
            "versions": ["3"],
            "platform": "onnxruntime_onnx",
            "inputs": [{"name": "INPUT0", **tensor}, {"name": "INPUT1", **tensor}],
            "outputs": [{"name": "OUTPUT", **tensor}],
        }
        config = (await http.get("/models/add/config")).json()
        assert (config["max_batch_size"], config["input"][0]["data_type"]) == (8, "TYPE_FP32")
        assert (await http.get("/models/other")).status_code == 404


async def test_requests_in_json_and_in_binary_are_counted(tmp_path):
    async with served(repository(tmp_path)) as http:
        assert (await http.post("/models/add/versions/3/infer", json=adding(2))).status_code == 200
        arrays = [("INPUT0", NUMBERS[None]), ("INPUT1", NUMBERS[None])]
        head, rest = parted(
            await http.post("/models/add/infer", **binary(arrays, parameters={"binary_data_output": True}))
        )
        assert (head["outputs"][0]["shape"], rest) == ([1, 16], (NUMBERS * 2).tobytes())
        stats = (await http.get("/models/add/stats")).json()["model_stats"]
        assert [(each["version"], each["inference_count"]) for each in stats] == [("3", 3)]
        assert stats[0]["inference_stats"]["success"]["count"] == 2
        batches = {each["batch_size"]: each["compute_infer"]["count"] for each in stats[0]["batch_stats"]}
        assert batches == {1: 1, 2: 1}
        assert len((await http.get("/models/stats")).json()["model_stats"]) == 4


WRONG = [
    (b"", 400, "no JSON"),
    (b"{", 400, "no JSON"),
    (b'{"inputs": [{"data": ' + b"[" * 100_000, 400, "no JSON"),
    (b'{"inputs": [], "id": NaN, "parameters": ' + b"[" * 100_000, 400, "no JSON"),
    (b"{}", 400, "inputs"),
    (b'{"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1]}]}', 400, "shape"),
    (b'{"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [36893488147419103232]}]}', 400, "shape"),
    (b'{"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16]}]}', 400, "it has 0"),
    (b'{"inputs": [{"name": "I", "datatype": "FP32", "shape": [1, 2], "data": [1]}]}', 400, "has 1 values"),
    (b'{"inputs": [{"name": "I", "datatype": "FP32", "shape": [1], "data": ["1"]}]}', 400, "not all of"),
    (b'{"inputs": [{"name": "I", "datatype": "FP9", "shape": [1], "data": [1]}]}', 400, "FP9"),
    (b'{"inputs": [{"name": "I", "datatype": "INT8", "shape": [1], "data": [300]}]}', 400, "no int8"),
    (b'{"inputs": [], "parameters": {"triton_mine": 1}}', 400, "Triton's own"),
    (b'{"inputs": [], "parameters": {"priority": -1}}', 400, "priority"),
    (b'{"inputs": []}', 400, "INPUT0"),
]


async def test_what_the_client_does_wrong_is_told(tmp_path):
    async with served(repository(tmp_path)) as http:
        for body, status, says in WRONG:
            told = await http.post("/models/add/infer", content=body)
            assert (told.status_code, says in told.json()["error"]) == (status, True), told.text
            assert (await http.post("/models/add/infer", json=adding())).status_code == 200


async def test_binary_data_must_be_as_long_as_it_is_said_to_be(tmp_path):
    arrays = [("INPUT0", NUMBERS[None]), ("INPUT1", NUMBERS[None])]
    sent = binary(arrays)
    async with served(repository(tmp_path)) as http:
        for content, says in ((sent["content"][:-1], "1 more bytes"), (sent["content"] + b"x", "no input takes")):
            told = await http.post("/models/add/infer", content=content, headers=sent["headers"])
            assert (told.status_code, says in told.json()["error"]) == (400, True)
        told = await http.post("/models/add/infer", content=sent["content"], headers={LENGTH: "9999"})
        assert (told.status_code, "from 0 to" in told.json()["error"]) == (400, True)


async def test_bodies_are_compressed_both_ways_and_bombs_are_refused(tmp_path):
    body = json.dumps(adding()).encode()
    async with served(repository(tmp_path), config=ServerConfig(max_body_bytes=1 << 20)) as http:
        for encoding, packed in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body))):
            headers = {"content-encoding": encoding, "accept-encoding": encoding}
            told = await http.post("/models/add/infer", content=packed, headers=headers)
            assert (told.status_code, told.headers["content-encoding"]) == (200, encoding)
            assert told.json()["outputs"][0]["data"] == (NUMBERS * 2).tolist()
        bomb = gzip.compress(bytes(8 << 20))
        told = await http.post("/models/add/infer", content=bomb, headers={"content-encoding": "gzip"})
        assert told.status_code == 413
        told = await http.post("/models/add/infer", content=body, headers={"content-encoding": "br"})
        assert told.status_code == 415


def test_encodings_are_those_that_the_client_likes_and_a_stream_that_ends_early_or_goes_on_is_refused():
    assert (accepted(b"gzip, deflate"), accepted(b"gzip;q=0.5, deflate; q=0.8")) == (b"gzip", b"deflate")
    assert (accepted(b"br, identity, gzip;q=0.1"), accepted(b"")) == (b"", b"")
    packed = deflated(b"x" * 100, b"gzip")
    assert inflated(packed, b"gzip", 100) == b"x" * 100
    for wrong in (packed[:-3], packed + b"more", b"not gzip"):
        with pytest.raises(InvalidRequest, match="gzip"):
            inflated(wrong, b"gzip", 100)
    with pytest.raises(RequestTooLarge):
        inflated(packed, b"gzip", 99)


async def test_models_are_loaded_and_unloaded_by_administrators_alone(tmp_path):
    tenants = FakeTenants(table_of({"user": {}, "boss": {}}))
    async with served(repository(tmp_path), mode=ControlMode.EXPLICIT, load=("any",), tenants=tenants) as http:
        ready = {"ready": True}
        http.headers["authorization"] = "Bearer user"
        for path in ("/repository/models/add/load", "/repository/models/any/unload", "/systemsharedmemory/unregister"):
            assert (await http.post(path)).status_code == 403
        http.headers["authorization"] = "Bearer boss"
        index = (await http.post("/repository/index", json=ready)).json()
        assert [each["name"] for each in index] == ["tiny", "tiny-alias", "any"]
        assert (await http.post("/repository/models/add/load")).status_code == 200
        index = (await http.post("/repository/index", json=ready)).json()
        assert index == [
            {"name": "tiny", "version": "1", "state": "READY"},
            {"name": "tiny-alias", "version": "1", "state": "READY"},
            {"name": "add", "version": "3", "state": "READY"},
            {"name": "any", "version": "1", "state": "READY"},
        ]
        config = json.dumps({"max_batch_size": 4})
        given = {"parameters": {"config": config}}
        assert (await http.post("/repository/models/add/load", json=given)).status_code == 200
        assert (await http.get("/models/add/config")).json()["max_batch_size"] == 4
        large = b'{"x": [' + b"[]," * (1 << 20) + b"[]]}"
        assert (await http.post("/repository/index", content=large)).status_code == 413
        uploaded = {"parameters": {"config": config, "file:1/model.onnx": "QQ=="}}
        assert (await http.post("/repository/models/add/load", json=uploaded)).status_code == 400
        assert (await http.post("/repository/models/add/unload")).status_code == 200
        assert (await http.get("/models/add/ready")).status_code == 400
        assert (await http.post("/repository/models/other/load")).status_code in (400, 404)


async def test_tensors_go_by_shared_memory(tmp_path):
    region = SharedMemory(create=True, size=256)
    try:
        region.buf[:128] = NUMBERS.tobytes() * 2
        async with served(repository(tmp_path)) as http:
            path = "/systemsharedmemory/region/mine"
            told = await http.post(f"{path}/register", json={"key": region.name, "offset": 0, "byte_size": 256})
            assert told.status_code == 200
            assert (await http.get(f"{path}/status")).json() == [
                {"name": "mine", "key": region.name, "offset": 0, "byte_size": 256}
            ]

            def at(offset):
                place = {"shared_memory_region": "mine", "shared_memory_byte_size": 64}
                return {"parameters": {**place, "shared_memory_offset": offset}}

            inputs = [{"name": f"INPUT{i}", "datatype": "FP32", "shape": [1, 16], **at(64 * i)} for i in range(2)]
            asked = {"inputs": inputs, "outputs": [{"name": "OUTPUT", **at(128)}]}
            told = await http.post("/models/add/infer", json=asked)
            assert told.json()["outputs"][0]["parameters"]["shared_memory_region"] == "mine"
            assert np.array_equal(np.frombuffer(bytes(region.buf[128:192]), np.float32), NUMBERS * 2)
            too_far = {"inputs": inputs, "outputs": [{"name": "OUTPUT", **at(250)}]}
            assert (await http.post("/models/add/infer", json=too_far)).status_code == 400
            assert (await http.post("/systemsharedmemory/unregister")).status_code == 200
            assert (await http.post("/models/add/infer", json=asked)).status_code == 404
            assert (await http.post("/cudasharedmemory/unregister")).status_code == 200
            assert (await http.post("/cudasharedmemory/region/x/register", json={})).status_code == 400
    finally:
        region.close()
        region.unlink()


def tenants_with(**keys):
    """Of each tenant these keys, whose secrets are their names; those that end in `boss` are administrators'."""
    tenants = {}
    for tenant, names in keys.items():
        made = [make_key(tenant, secret=name, admin=name.endswith("boss")).key for name in names]
        tenants[tenant] = {"keys": [{"id": key.id, "sha256": key.digest.hex(), "admin": key.admin} for key in made]}
    return FakeTenants(read_tenants({"tenants": tenants}, "tenants.yaml"))


async def test_a_region_is_found_by_keys_of_the_tenant_that_registered_it_alone(tmp_path):
    region = SharedMemory(create=True, size=64)
    region.buf[:64] = NUMBERS.tobytes()
    place = {"parameters": {"shared_memory_region": "mine", "shared_memory_byte_size": 64}}
    asked = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 16], **place}]}
    written = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    written["outputs"] = [{"name": "OUT", **place}]
    tenants = tenants_with(a=("a-boss", "a-user"), b=("b-boss", "b-user"))
    try:
        async with served(repository(tmp_path), tenants=tenants) as http:

            async def call(key, method, path, **body):
                return await http.request(method, path, headers={"authorization": f"Bearer {key}"}, **body)

            mine = {"json": {"key": region.name, "offset": 0, "byte_size": 64}}
            path = "/systemsharedmemory"
            assert (await call("a-user", "POST", f"{path}/region/mine/register", **mine)).status_code == 403
            assert (await call("a-boss", "POST", f"{path}/region/mine/register", **mine)).status_code == 200
            told = await call("a-user", "POST", "/models/any/infer", json=asked)
            assert told.json()["outputs"][0]["data"] == NUMBERS.tolist()
            for key in ("b-user", "b-boss"):
                for body in (asked, written):
                    told = await call(key, "POST", "/models/any/infer", json=body)
                    assert (told.status_code, told.json()["error"]) == (
                        404,
                        "no shared memory region 'mine' is registered",
                    )
            assert (await call("b-boss", "GET", f"{path}/status")).json() == []
            assert (await call("b-boss", "POST", f"{path}/unregister")).status_code == 200
            assert (await call("a-user", "POST", "/models/any/infer", json=written)).status_code == 200
            assert np.frombuffer(bytes(region.buf[:4]), np.float32)[0] == 1
            assert (await call("b-boss", "POST", f"{path}/region/mine/register", **mine)).status_code == 200
    finally:
        region.close()
        region.unlink()


async def test_settings_of_logs_and_traces_are_seen_by_administrators_alone(tmp_path):
    async with served(repository(tmp_path), tenants=tenants_with(a=("boss", "user"))) as http:
        for path in ("/logging", "/trace/setting", "/models/add/trace/setting"):
            for method in ("GET", "POST"):
                for key, status in (("user", 403), ("boss", 200)):
                    told = await http.request(method, path, headers={"authorization": f"Bearer {key}"})
                    assert told.status_code == status, (path, method)


async def test_values_that_the_runtime_refuses_are_the_clients_fault_in_one_line(tmp_path, caplog):
    table = helper.make_tensor("table", TensorProto.FLOAT, [4, 1], [0.0] * 4)
    asked, given = (
        helper.make_tensor_value_info("IN", TensorProto.INT64, ("n",)),
        helper.make_tensor_value_info("OUT", TensorProto.FLOAT, ("n", 1)),
    )
    node = helper.make_node("Gather", ["table", "IN"], ["OUT"])
    model = model_of(helper.make_graph([node], "rows", [asked], [given], initializer=[table]))
    write_model(tmp_path, "rows", config="max_batch_size: 0", model=model)
    async with served(tmp_path) as http:
        body = {"inputs": [{"name": "IN", "datatype": "INT64", "shape": [1, 1], "data": [99]}]}
        told = await http.post("/models/rows/infer", json=body)
        error = told.json()["error"]
        assert (told.status_code, "\n" in error) == (400, False)
        assert "idx=99 must be within" in error
        assert not [record for record in caplog.records if record.exc_info]


async def test_a_link_to_labels_outside_of_the_repository_is_not_followed(tmp_path):
    config = 'max_batch_size: 8 output { name: "OUTPUT" data_type: TYPE_FP32 dims: 16 label_filename: "labels.txt" }'
    folder = write_model(tmp_path / "repository", "add", config=config)
    secret = tmp_path / "secret"
    secret.write_text("\n".join(["root:x:0:0"] * 16))
    shared = tmp_path / "repository" / "shared.txt"
    shared.write_text("\n".join(["dish"] * 16))
    (folder / "labels.txt").symlink_to(shared)
    async with served(folder.parent) as http:
        body = adding(outputs=[{"name": "OUTPUT", "parameters": {"classification": 1}}])
        told = await http.post("/models/add/infer", json=body)
        assert told.json()["outputs"][0]["data"] == ["30.000000:15:dish"]
        (folder / "labels.txt").unlink()
        (folder / "labels.txt").symlink_to(secret)  # once it is loaded
        told = await http.post("/models/add/infer", json=body)
        assert told.json()["outputs"][0]["data"] == ["30.000000:15"]
    async with served(folder.parent) as http:
        (entry,) = [each for each in (await http.post("/repository/index")).json() if each["name"] == "add"]
        assert "labels.txt is a link to a file outside of the repository" in entry["reason"]


async def test_keys_are_asked_for_but_by_health_and_settings_by_administrators(tmp_path):
    config = ServerConfig(api_keys=("secret",))
    async with served(repository(tmp_path), config=config) as http:
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/health/ready")).status_code == 200
        for method, path in (
            ("GET", "http://test/v2"),
            ("GET", "/models/add"),
            ("POST", "/models/add/infer"),
            ("GET", "/logging"),
        ):
            told = await http.request(method, path)
            assert (told.status_code, set(told.json())) == (401, {"error"}), path
        http.headers["authorization"] = "Bearer secret"
        assert (await http.post("/models/add/infer", json=adding())).status_code == 200
        assert (await http.get("/trace/setting")).json()["trace_level"] == ["OFF"]
        assert (await http.post("/trace/setting", json={"trace_level": ["OFF"], "trace_rate": None})).status_code == 200
        assert (await http.get("/logging")).json()["log_format"] == "default"


def inferring(port, model):
    """A connection on which a request was sent, and nothing more."""
    payload = json.dumps(adding()).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=HANGS_S)
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
    connection.sendall(head.encode() + payload)
    return connection


def test_who_leaves_gives_up_its_place_at_once_and_an_engine_that_is_killed_loses_no_request(tmp_path):
    waits = "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 600000000 }"
    write_model(tmp_path, "add", config=waits)
    running = start_server("none", "--model-repository", str(tmp_path))

    def waiting():
        lanes = (
            httpx.get(f"{running.url}/admin/queue", timeout=HANGS_S).json().get("lanes", ())
        )  # none while it is gone
        return sum(lane["num_waiting"] for lane in lanes)

    try:
        port = int(running.url.rpartition(":")[2])
        left = inferring(port, "add")
        until(lambda: waiting() == 1)
        left.close()
        until(lambda: waiting() == 0)
        stays = inferring(port, "add")
        until(lambda: waiting() == 1)
        (engine,) = psutil.Process(running.process.pid).children()
        engine.kill()
        until(lambda: waiting() == 1 and not engine.is_running())
        told = httpx.post(f"{running.url}/v2/models/add/infer", json=adding(), timeout=HANGS_S)
        assert told.json()["outputs"][0]["data"] == (NUMBERS * 2).tolist()
        assert stays.recv(12) == b"HTTP/1.1 200"
        stays.close()
    finally:
        assert running.stop() == 0


def test_tritons_client_asks_a_server_without_a_language_model(tmp_path):
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed (make dev has it)")
    running = start_server("none", "--model-repository", str(repository(tmp_path)))
    try:
        client = triton.InferenceServerClient(running.url.removeprefix("http://"))
        assert client.is_server_ready()
        inputs = [triton.InferInput(f"INPUT{i}", [1, 16], "FP32") for i in range(2)]
        for each in inputs:
            each.set_data_from_numpy(NUMBERS[None])
        for pack in (None, "gzip", "deflate"):
            told = client.infer("add", inputs, request_compression_algorithm=pack, response_compression_algorithm=pack)
            assert np.array_equal(told.as_numpy("OUTPUT"), NUMBERS[None] * 2)
        assert client.get_model_metadata("add")["versions"] == ["3"]
        assert client.get_inference_statistics("add")["model_stats"][0]["inference_count"] == 3
        with pytest.raises(triton.InferenceServerException, match="other"):
            client.infer("other", inputs)
    finally:
        assert running.stop() == 0


# ---- beside a real Triton

OTHERWISE = {
    "another encoding": 415
}  # where our status is another on purpose: Triton's 501 for a fault of the client's
SAME_KEYS = ("config", "statistics of a model", "logging", "trace", "metadata", "metadata of a version")


def is_ours(case, theirs, mine):
    """A 500 of theirs for a fault of the client's is a 4xx here."""
    return mine == OTHERWISE.get(case.name, theirs) if theirs != 500 else 400 <= mine < 500


def in_order(answer):
    """JSON and what follows it; NaN is no object's equal, but its text is."""
    return json.dumps([answer["body"], answer["rest"]], sort_keys=True)


def keys(value):
    """The keys of an object, of what is in it too; of a list those of its first element."""
    if isinstance(value, dict):
        return {name: keys(inner) for name, inner in value.items()}
    return keys(value[0]) if isinstance(value, list) and value else None


async def test_answers_are_those_that_were_recorded_from_a_real_triton(tmp_path):
    recorded = json.loads(ANSWERS.read_text())
    lines = 'output { name: "OUT" data_type: TYPE_FP32 dims: [-1] label_filename: "labels.txt" }'
    folder = repository(tmp_path)
    write_model(folder, "scores", config=f"{BATCHED} {lines}", model=echo(TensorProto.FLOAT, ("n", "m")))
    (folder / "scores" / "labels.txt").write_text("cat\ndog\n")
    wrong = []
    alone = replace(make_model(), names=())
    async with served(folder, mode=ControlMode.EXPLICIT, load=tuple(MODELS), model=alone) as http:
        for case in CASES:
            theirs, mine = (
                recorded[case.name],
                told_by(await http.request(case.method, f"/{case.path}", content=case.body, headers=case.headers)),
            )
            if not is_ours(case, theirs["status"], mine["status"]):
                wrong.append((case.name, theirs["status"], mine))
            elif mine["status"] >= 400:
                assert isinstance(mine["body"], str) or set(mine["body"]) == {"error"}, case.name
                text = theirs["body"]["error"] if isinstance(theirs["body"], dict) else ""
                if text.startswith("Request for unknown model"):  # Triton's own clients look for it
                    assert mine["body"]["error"].startswith(text), case.name
            elif case.name in SAME_KEYS:
                mine["body"].pop("dynamic_batching", None)  # as Triton fills it in for ONNX models, not for Python's
                if keys(mine["body"]) != keys(theirs["body"]):
                    wrong.append((case.name, keys(theirs["body"]), keys(mine["body"])))
            elif in_order(mine) != in_order(theirs):
                wrong.append((case.name, theirs, mine))
    assert not wrong
