"""The language model among models of tensors, as Triton's client sees it: described, and asked by generate alone."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
import pytest

pytest.importorskip("grpc", reason="the extra tensor brings it")
client = pytest.importorskip("tritonclient.grpc.aio", reason="tritonclient is not installed (make dev has it)")

from tritonclient.utils import InferenceServerException  # noqa: E402

from maitred.api.dialects.kserve.routes import kserve_routes  # noqa: E402
from maitred.api.grpc.server import grpc_server  # noqa: E402
from maitred.api.routes import make_routes  # noqa: E402
from maitred.api.serving import create_app  # noqa: E402
from maitred.api.tensor.extensions import Extensions, Labels  # noqa: E402
from maitred.config import ServerConfig  # noqa: E402
from maitred.tensor.host import LocalTensorService  # noqa: E402
from maitred.tensor.served_models import ControlMode  # noqa: E402
from tests.api.test_generate import PROMPT, countdown  # noqa: E402
from tests.api.test_grpc import CONFIG  # noqa: E402
from tests.api.test_grpc import inputs as added  # noqa: E402
from tests.fakes_api import FakeReplica, make_model  # noqa: E402
from tests.tensor.models import write_model  # noqa: E402


@asynccontextmanager
async def served(folder, model=None):
    """Triton's client by gRPC, a client by HTTP, and the app that both ask."""
    replica = FakeReplica(countdown)
    replica.tensors = LocalTensorService(folder, ControlMode.NONE)
    await replica.tensors.start(())
    extensions = Extensions("maitred", Labels(folder))
    routes = make_routes(kserve_routes(extensions))
    asgi = create_app(replica, model or make_model(), ServerConfig(), routes=routes)
    server = grpc_server(extensions, asgi.app)
    port = await server.start("127.0.0.1", 0)
    try:
        async with (
            client.InferenceServerClient(f"127.0.0.1:{port}") as triton,
            httpx.AsyncClient(transport=httpx.ASGITransport(asgi), base_url="http://test") as http,
        ):
            http.headers["accept-encoding"] = "identity"
            yield triton, http
    finally:
        await server.stop(0)
        await replica.tensors.close()
        asgi.app.close()


async def test_a_model_that_speaks_no_text_is_told_apart_from_one_that_is_not_there(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)
    async with served(tmp_path) as (_, http):
        for model, status, says in (("add", 400, "post to /v2/models/add/infer"), ("other", 404, "not served here")):
            answer = await http.post(f"/v2/models/{model}/generate", json={"text_input": PROMPT})
            assert (answer.status_code, says in answer.json()["error"]) == (status, True)


async def test_the_model_is_described_by_either_protocol(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)
    async with served(tmp_path) as (triton, http):
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
            yield {"model_name": model, "inputs": added(1), "request_id": model}

    async with served(tmp_path, make_model(names=("org/tiny",))) as (triton, http):
        refused = await http.post("/v2/models/org/tiny/versions/1/infer", json={"inputs": []})
        assert (refused.status_code, "/v2/models/org/tiny/generate" in refused.json()["error"]) == (400, True)
        with pytest.raises(InferenceServerException, match="/v2/models/org/tiny/generate") as raised:
            await triton.infer("org/tiny", added(1))
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
        (nothing, refusal), (result, error) = [told async for told in triton.stream_infer(requests())]
        assert (nothing, "/v2/models/org/tiny/generate" in str(refusal)) == (None, True)
        assert (result.get_response().id, error) == ("add", None)
        spoken = await http.post("/v2/models/org/tiny/generate", json={"text_input": PROMPT, "max_tokens": 5})
        assert spoken.json()["text_output"].startswith(PROMPT)
