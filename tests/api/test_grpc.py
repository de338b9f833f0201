"""KServe v2 over gRPC, asked by Triton's own client, against models that really run."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest

grpc = pytest.importorskip("grpc", reason="the extra tensor brings it")
client = pytest.importorskip("tritonclient.grpc.aio", reason="tritonclient is not installed (make dev has it)")

from tritonclient.grpc import InferInput, InferRequestedOutput  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402

from maitred.api.dialects.kserve.routes import kserve_routes  # noqa: E402
from maitred.api.grpc.calls import PUSHBACK, grpc_error  # noqa: E402
from maitred.api.grpc.inference import InferenceService  # noqa: E402
from maitred.api.grpc.server import HealthService, ModelService, PredictionService, grpc_server  # noqa: E402  # noqa: E402
from maitred.api.routes import make_routes  # noqa: E402
from maitred.api.tensor.extensions import NAMES, Extensions, Labels  # noqa: E402
from maitred.config import ServerConfig  # noqa: E402
from maitred.core.errors import Overloaded, RateLimited  # noqa: E402
from maitred.tensor.protocol_fields import HEALTH_MESSAGES, MESSAGES  # noqa: E402
from maitred.tensor.served_models import ControlMode  # noqa: E402
from tests.api.conftest import with_tensors  # noqa: E402
from tests.api.test_generate import PROMPT, countdown  # noqa: E402
from tests.api.test_tenants import table_of  # noqa: E402
from tests.fakes_api import FakeReplica, FakeTenants, make_model  # noqa: E402
from tests.tensor.models import write_model  # noqa: E402
from tests.waiting import HANGS_S, until_async  # noqa: E402

CONFIG = "max_batch_size: 8"
WAITS = "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 60000000 }"
KEY = {"authorization": "Bearer secret"}


@asynccontextmanager
async def served_both(folder, **fields):
    """Its address by gRPC, the App, and a client by HTTP."""
    extensions = Extensions("maitred", Labels(folder))
    routes = make_routes(kserve_routes(extensions))
    async with with_tensors(folder, routes=routes, **fields) as (asgi, http):
        server = grpc_server(extensions, asgi.app)
        port = await server.start("127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{port}", asgi.app, http
        finally:
            await server.stop(0)


@asynccontextmanager
async def served(folder, **fields):
    async with served_both(folder, **fields) as (address, app, _):
        yield address, app


@asynccontextmanager
async def asked(folder, **fields):
    async with served_both(folder, **fields) as (address, app, _), client.InferenceServerClient(address) as triton:
        yield triton, app


def inputs(value, rows=1, *, contents=True):
    made = []
    for name in ("INPUT0", "INPUT1"):
        one = InferInput(name, [rows, 16], "FP32")
        if contents:
            one.set_data_from_numpy(np.full((rows, 16), value, np.float32))
        made.append(one)
    return made


async def test_tritons_client_sees_health_metadata_and_config(tmp_path):
    write_model(tmp_path, "add", config=CONFIG, versions=(1, 3))
    async with asked(tmp_path) as (triton, _):
        assert await triton.is_server_live()
        assert await triton.is_server_ready()
        assert await triton.is_model_ready("add")
        assert await triton.is_model_ready("add", "3")
        assert not await triton.is_model_ready("add", "1")
        assert not await triton.is_model_ready("other")
        server = await triton.get_server_metadata()
        assert (server.name, list(server.extensions)) == ("maitred", [*NAMES])
        told = await triton.get_model_metadata("add", as_json=True)
        assert told["versions"] == ["3"]
        assert told["inputs"][0] == {"name": "INPUT0", "datatype": "FP32", "shape": ["-1", "16"]}
        config = (await triton.get_model_config("add")).config
        assert (config.name, config.max_batch_size, config.input[0].dims) == ("add", 8, [16])


async def test_raw_and_typed_contents_give_the_same_answer_and_statistics_count_both(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)
    async with served(tmp_path) as (address, _), client.InferenceServerClient(address) as triton:
        answer = await triton.infer("add", inputs(2, rows=3), request_id="mine", priority=0, timeout=5_000_000)
        assert answer.get_response().id == "mine"
        assert np.array_equal(answer.as_numpy("OUTPUT"), np.full((3, 16), 4, np.float32))
        typed = MESSAGES["ModelInferRequest"](model_name="add", model_version="1")
        for name in ("INPUT0", "INPUT1"):
            one = typed.inputs.add(name=name, datatype="FP32", shape=[1, 16])
            one.contents.fp32_contents.extend([2.0] * 16)
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            told = MESSAGES["ModelInferResponse"].FromString(await call(typed.SerializeToString()))
        assert told.raw_output_contents[0] == answer.as_numpy("OUTPUT")[:1].tobytes()
        (stats,) = (await triton.get_inference_statistics("add")).model_stats
        assert (stats.inference_count, stats.inference_stats.success.count) == (4, 2)
        assert stats.inference_stats.success.ns > 0


@pytest.mark.parametrize(("change", "code", "says"), [
    ({"model_name": "nothing"}, "NOT_FOUND", "nothing"),
    ({"model_version": "two"}, "INVALID_ARGUMENT", "no model version"),
    ({"parameters": {"sequence_start": 3}}, "INVALID_ARGUMENT", "sequence_start"),
    ({"parameters": {"priority": -1}}, "INVALID_ARGUMENT", "priority"),
    ({"parameters": {"triton_mine": 1}}, "INVALID_ARGUMENT", "Triton's own"),
    ({"shape": [1 << 62, 1 << 62]}, "INVALID_ARGUMENT", "INPUT0"),
    ({"contents": 0}, "INVALID_ARGUMENT", "raw_input_contents"),
    ({"region": "none"}, "NOT_FOUND", "none"),
])  # fmt: skip
async def test_what_the_client_does_wrong_has_its_status(tmp_path, change, code, says):
    write_model(tmp_path, "add", config=CONFIG)
    message = MESSAGES["ModelInferRequest"](model_name=change.get("model_name", "add"))
    message.model_version = change.get("model_version", "")
    for name, value in change.get("parameters", {}).items():
        message.parameters[name].int64_param = value
    for name in ("INPUT0", "INPUT1"):
        one = message.inputs.add(name=name, datatype="FP32", shape=change.get("shape", [1, 16]))
        if "region" in change:
            one.parameters["shared_memory_region"].string_param = change["region"]
            one.parameters["shared_memory_byte_size"].int64_param = 64
    message.raw_input_contents.extend([b"\0" * 64] * (1 if "contents" in change else 0 if "region" in change else 2))
    async with served(tmp_path) as (address, _), grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.aio.AioRpcError, match=says) as raised:
            await call(message.SerializeToString())
        assert raised.value.code().name == code
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be decoded") as raised:
            await call(b"\x3a\xff\xff\xff\xff\x0f")
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_answers_in_order_and_an_error_is_of_its_request_alone(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)

    async def requests():
        for value in range(3):
            yield {"model_name": "add" if value != 1 else "nothing", "inputs": inputs(value), "request_id": str(value)}

    async with asked(tmp_path) as (triton, _):
        told = [each async for each in triton.stream_infer(requests())]
        assert [error is None for _, error in told] == [True, False, True]
        assert [result.as_numpy("OUTPUT")[0, 0] for result, error in told if error is None] == [0, 4]
        assert told[0][0].get_response().parameters["triton_final_response"].bool_param
        assert "nothing" in str(told[1][1])


async def test_models_are_loaded_with_a_config_and_unloaded(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)
    async with asked(tmp_path, mode=ControlMode.EXPLICIT) as (triton, _):
        assert not await triton.is_model_ready("add")
        await triton.load_model("add", config=json.dumps({"maxBatchSize": 4}))
        assert (await triton.get_model_config("add")).config.max_batch_size == 4
        index = (await triton.get_model_repository_index()).models
        assert [each.name for each in index] == ["tiny", "tiny-alias", "add"]
        assert {(each.version, each.state) for each in index} == {("1", "READY")}
        with pytest.raises(InferenceServerException, match="not uploaded"):
            await triton.load_model("add", files={"file:1/model.onnx": b""}, config="{}")
        await triton.unload_model("add")
        assert not await triton.is_model_ready("add")


@contextmanager
def shared(size):
    memory = SharedMemory(create=True, size=size)
    try:
        yield memory
    finally:
        memory.close()
        memory.unlink()


async def test_regions_hold_inputs_and_outputs_and_cuda_has_none(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)
    with shared(256) as memory:
        memory.buf[:64] = np.arange(16, dtype=np.float32).tobytes()
        async with asked(tmp_path) as (triton, _):
            await triton.register_system_shared_memory("mine", f"/{memory.name}", 192)
            status = await triton.get_system_shared_memory_status(as_json=True)
            assert status["regions"]["mine"] == {"name": "mine", "key": f"/{memory.name}", "byte_size": "192"}
            given = inputs(0, contents=False)
            for each in given:
                each.set_shared_memory("mine", 64)
            output = InferRequestedOutput("OUTPUT")
            output.set_shared_memory("mine", 64, offset=64)
            answer = await triton.infer("add", given, outputs=[output])
            assert answer.get_output("OUTPUT").parameters["shared_memory_offset"].int64_param == 64
            assert np.frombuffer(bytes(memory.buf[64:128]), np.float32).tolist() == [2.0 * at for at in range(16)]
            for size, offset, says in ((8, 64, "64 bytes"), (64, 160, "which has 192")):
                output.set_shared_memory("mine", size, offset=offset)
                with pytest.raises(InferenceServerException, match=says):
                    await triton.infer("add", given, outputs=[output])
            await triton.unregister_system_shared_memory()
            with pytest.raises(InferenceServerException, match="mine"):
                await triton.infer("add", given)
            assert not (await triton.get_cuda_shared_memory_status()).regions
            with pytest.raises(InferenceServerException) as raised:
                await triton.register_cuda_shared_memory("gpu", b"AAAA", 0, 64)
            assert raised.value.status() == "StatusCode.UNIMPLEMENTED"


@pytest.mark.parametrize(("key", "offset", "size", "says"), [
    ("/../../etc/passwd", 0, 64, "needs"), ("/absent-region", 0, 64, "cannot be opened"),
    (None, 0, 1 << 63, "are registered"), (None, (1 << 64) - 1, 64, "are registered"), (None, 0, 0, "byte_size"),
])  # fmt: skip
async def test_a_region_is_checked_against_its_memory(tmp_path, key, offset, size, says):
    with shared(64) as memory:
        async with asked(tmp_path) as (triton, _):
            with pytest.raises(InferenceServerException, match=says) as raised:
                await triton.register_system_shared_memory("mine", key or memory.name, size, offset=offset)
            assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"


async def test_trace_and_log_settings_are_told_and_the_level_of_the_log_changed(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with asked(tmp_path) as (triton, _):
        traced = await triton.get_trace_settings(as_json=True)
        assert traced["settings"]["trace_level"] == {"value": ["OFF"]}
        with pytest.raises(InferenceServerException, match="otlp-endpoint"):
            await triton.update_trace_settings(settings={"trace_rate": "5"})
        logged = await triton.update_log_settings({"log_info": False})
        assert not logged.settings["log_info"].bool_param
        assert logging.getLogger().level == logging.WARNING
        assert (await triton.update_log_settings({"log_verbose_level": 1})).settings["log_info"].bool_param
        with pytest.raises(InferenceServerException, match="log_format cannot be changed"):
            await triton.update_log_settings({"log_format": "ISO8601"})


async def test_the_largest_of_an_output_come_as_classes_with_their_labels(tmp_path):
    config = CONFIG + ' output { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 16 ] label_filename: "labels.txt" }'
    folder = write_model(tmp_path, "add", config=config)
    (folder / "labels.txt").write_text("".join(f"class {at}\n" for at in range(3)))
    given = inputs(0)
    given[0].set_data_from_numpy(np.array([[0.25, 0.75, 0.5] + [0.5] + [0.0] * 12], np.float32))
    async with asked(tmp_path) as (triton, _):
        answer = await triton.infer("add", given, outputs=[InferRequestedOutput("OUTPUT", class_count=3)])
        told = answer.as_numpy("OUTPUT")
        assert told.tolist() == [[b"0.750000:1:class 1", b"0.500000:2:class 2", b"0.500000:3"]]


async def test_live_and_ready_need_no_key_and_everything_else_does(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)
    async with asked(tmp_path, config=ServerConfig(api_keys=("secret",))) as (triton, _):
        assert await triton.is_server_live()
        assert await triton.is_server_ready()
        with pytest.raises(InferenceServerException) as raised:
            await triton.infer("add", inputs(1))
        assert raised.value.status() == "StatusCode.UNAUTHENTICATED"
        assert (await triton.infer("add", inputs(1), headers=KEY)).as_numpy("OUTPUT")[0, 0] == 2


async def test_the_health_service_tells_of_the_server_and_of_each_service(tmp_path):
    async with served(tmp_path) as (address, app), grpc.aio.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        ask, told = HEALTH_MESSAGES["HealthCheckRequest"], HEALTH_MESSAGES["HealthCheckResponse"]
        for service in ("", "inference.GRPCInferenceService"):
            assert told.FromString(await check(ask(service=service).SerializeToString())).status == 1
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await check(ask(service="other").SerializeToString())
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        watching = watch(ask().SerializeToString())
        assert told.FromString(await watching.read()).status == 1
        app.in_flight.drain(10)
        assert told.FromString(await watching.read()).status == 2
        watching.cancel()


def waiting_message():
    message = MESSAGES["ModelInferRequest"](model_name="add", raw_input_contents=[b"\0" * 64] * 2)
    for name in ("INPUT0", "INPUT1"):
        message.inputs.add(name=name, datatype="FP32", shape=[1, 16])
    return message.SerializeToString()


LEAVINGS = ("cancels", "is late", "closes the channel", "sends no more and cancels", "cancels at once")


@asynccontextmanager
async def left(address, path, content, how, late_s=0.02):
    """A call, on a channel of its own, that its client leaves after the block. Both streams carry one message."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(path)(metadata=(*KEY.items(),), timeout=late_s if how == "is late" else None)
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError):
            if how != "cancels at once":
                await call.write(content)
        yield
        if how == "sends no more and cancels":
            await call.done_writing()
        if how == "closes the channel":
            await channel.close()
        elif how == "is late":
            await call.code()
        else:
            call.cancel()


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("how", LEAVINGS)
async def test_a_client_that_leaves_frees_its_place_at_once(tmp_path, caplog, method, how):
    caplog.set_level(logging.INFO, logger="maitred.access")
    write_model(tmp_path, "add", config=WAITS)
    table = table_of({"secret": {}})
    async with served(tmp_path, tenants=FakeTenants(table)) as (address, app):
        runner = app.tensors.runner

        def ended():
            told = [each.fields for each in caplog.records if each.message == "access"]
            return [fields for fields in told if fields["path"].endswith(method)]

        async with left(address, f"/inference.GRPCInferenceService/{method}", waiting_message(), how, late_s=0.1):
            if how != "cancels at once":
                await until_async(lambda: len(runner) or ended())
        await until_async(lambda: not len(runner) and not app.gate.num_in_flight)
        if how != "cancels at once":
            await until_async(ended)
        async with client.InferenceServerClient(address) as triton:
            assert await triton.is_server_live()
        assert {each["status"] for each in ended()} <= {"CANCELLED", "DEADLINE_EXCEEDED"}
        assert all(each["client"].startswith("ipv4:") for each in ended())


async def test_every_call_can_be_left_in_every_way(tmp_path):
    write_model(tmp_path, "add", config=WAITS)
    async with served(tmp_path) as (address, app), client.InferenceServerClient(address) as triton:
        services = (InferenceService(app, Extensions("", None)), PredictionService(app), ModelService(app))
        for service in (*services, HealthService(app, ())):
            for method in service.methods:
                content = waiting_message() if method in ("ModelInfer", "ModelStreamInfer") else b""
                for how in LEAVINGS:
                    async with left(address, f"/{service.name}/{method}", content, how):
                        pass
        assert await triton.is_server_live()
        await until_async(lambda: not len(app.tensors.runner) and not app.gate.num_in_flight)


def test_a_refusal_says_when_to_try_again():
    assert grpc_error(Overloaded("full", retry_after_s=0.25)).trailing == ((PUSHBACK, "250"),)
    assert grpc_error(Overloaded("full")).code is grpc.StatusCode.UNAVAILABLE
    never = RateLimited("over", limit="concurrency", retry_after_s=None)
    assert (grpc_error(never).code, grpc_error(never).trailing) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        ((PUSHBACK, "-1"),),
    )
    hidden = grpc_error(RuntimeError("/etc/passwd"))
    assert hidden.code is grpc.StatusCode.INTERNAL
    assert "passwd" not in hidden.message


async def test_a_compressed_message_is_bounded_by_what_it_holds(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)
    message = MESSAGES["ModelInferRequest"](model_name="add", raw_input_contents=[b"\0" * (1 << 22)])
    async with (
        served(tmp_path, config=ServerConfig(max_body_bytes=1 << 20)) as (address, _),
        grpc.aio.insecure_channel(address, compression=grpc.Compression.Gzip) as channel,
    ):
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(message.SerializeToString())
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        message.raw_input_contents[0] = b""
        with pytest.raises(grpc.aio.AioRpcError, match="raw_input_contents"):
            await call(message.SerializeToString())


async def test_a_tenants_terms_go_with_its_requests_and_its_limits_end_them(tmp_path):
    write_model(tmp_path, "add", config=WAITS)
    table = table_of({"narrow": {"concurrency": 1, "weight": 2.5}, "boss": {}})
    async with asked(tmp_path, tenants=FakeTenants(table)) as (triton, app):
        key = {"authorization": "Bearer narrow"}
        seen = []
        infer = app.tensors.infer
        app.tensors.infer = lambda request: seen.append(request) or infer(request)
        asking = asyncio.ensure_future(triton.infer("add", inputs(1), headers=key, client_timeout=60))
        await until_async(lambda: seen)
        assert (seen[0].terms.tenant, seen[0].terms.weight, seen[0].terms.key_id) == ("narrow", 2.5, "key_narrow")
        assert 0 < seen[0].terms.finish_by - seen[0].arrived_at < 60 + HANGS_S
        with pytest.raises(InferenceServerException, match="concurrency") as raised:
            await triton.infer("add", inputs(1), headers=key)
        assert raised.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        for refused in (triton.load_model("add", headers=key), triton.get_system_shared_memory_status(headers=key)):
            with pytest.raises(InferenceServerException) as raised:
                await refused
            assert raised.value.status() == "StatusCode.PERMISSION_DENIED"
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


# ---- the language model among them: described, and asked by generate alone


async def test_a_model_that_speaks_no_text_is_told_apart_from_one_that_is_not_there(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)
    async with served_both(tmp_path) as (_, _, http):
        for model, status, says in (("add", 400, "post to /v2/models/add/infer"), ("other", 404, "not served here")):
            answer = await http.post(f"/v2/models/{model}/generate", json={"text_input": PROMPT})
            assert (answer.status_code, says in answer.json()["error"]) == (status, True)


async def test_the_model_is_described_by_either_protocol(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)
    async with served_both(tmp_path) as (address, _, http), client.InferenceServerClient(address) as triton:
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


async def test_tensors_sent_to_it_are_told_where_text_is_taken(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)

    async def requests():
        for model in ("org/tiny", "add"):
            yield {"model_name": model, "inputs": inputs(1), "request_id": model}

    model = make_model(names=("org/tiny",))
    async with (
        served_both(tmp_path, model=model, replica=FakeReplica(countdown)) as (address, _, http),
        client.InferenceServerClient(address) as triton,
    ):
        refused = await http.post("/v2/models/org/tiny/versions/1/infer", json={"inputs": []})
        assert (refused.status_code, "/v2/models/org/tiny/generate" in refused.json()["error"]) == (400, True)
        with pytest.raises(InferenceServerException, match="/v2/models/org/tiny/generate") as raised:
            await triton.infer("org/tiny", inputs(1))
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
        (nothing, refusal), (result, error) = [told async for told in triton.stream_infer(requests())]
        assert (nothing, "/v2/models/org/tiny/generate" in str(refusal)) == (None, True)
        assert (result.get_response().id, error) == ("add", None)
        spoken = await http.post("/v2/models/org/tiny/generate", json={"text_input": PROMPT, "max_tokens": 5})
        assert spoken.json()["text_output"].startswith(PROMPT)
