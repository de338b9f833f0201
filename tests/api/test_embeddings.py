"""/v1/embeddings by OpenAI's own client, against ONNX encoders that really run; numpy says what their vectors are."""

from __future__ import annotations

import asyncio
import base64
import json
import sqlite3
from contextlib import asynccontextmanager, closing

import httpx
import numpy as np
import openai
import pytest

pytest.importorskip("onnxruntime", reason="the extra tensor brings it")

from maitred.api.dialects.openai.embeddings import embedding_routes
from maitred.api.routes import make_routes
from maitred.api.serving import create_app
from maitred.config import ServerConfig
from tests.api.conftest import with_tensors
from tests.api.test_tenants import table_of
from tests.conftest import start_server
from tests.fakes_api import FakeReplica, FakeTenants, make_model
from tests.tensor.encoders import WIDTH, alone, encoder_model, ids_of, parameters, write_encoder, write_sentence_folder
from tests.tensor.models import write_model

TEXTS = ["w1", "w2 w3 w4", "w5 unknown w7 w8 w9 w10", " ".join(f"w{at}" for at in range(30)), "w11 w12"]


@asynccontextmanager
async def served(folder, **fields):
    """OpenAI's client, the bare one, and the App."""
    async with with_tensors(folder, routes=make_routes(embedding_routes()), **fields) as (asgi, http):
        http.base_url = "http://test/v1"
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="a", http_client=http, max_retries=0), http, asgi


def vectors(answer):
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return [each.embedding for each in answer.data]


async def test_a_batch_alone_and_numpy_give_the_same_vectors(tmp_path):
    write_encoder(tmp_path, "texts")
    async with served(tmp_path) as (client, _, asgi):
        together = await client.embeddings.create(model="texts", input=TEXTS)
        expected = [alone(ids_of(text)) for text in TEXTS]
        for vector, numpy_alone in zip(vectors(together), expected, strict=True):
            np.testing.assert_allclose(vector, numpy_alone, atol=1e-5)
        num_tokens = sum(len(ids_of(text)) for text in TEXTS)
        assert (together.usage.prompt_tokens, together.usage.total_tokens) == (num_tokens, num_tokens)
        assert (together.model, together.object, together.data[0].object) == ("texts", "list", "embedding")
        for text, vector in zip(TEXTS, vectors(together), strict=True):
            one = await client.embeddings.create(model="texts", input=text, encoding_format="float")
            np.testing.assert_allclose(vectors(one)[0], vector, atol=1e-5)
        assert asgi.app.gate.num_in_flight == 0


async def test_texts_of_several_clients_share_a_batch(tmp_path):
    waits = "max_batch_size: 16 dynamic_batching { max_queue_delay_microseconds: 600000000 }"
    write_encoder(tmp_path, "texts", config=parameters() + waits)
    async with served(tmp_path) as (client, _, asgi):
        asked = [[f"w{at} w{at + 1}", "w1"] for at in range(8)]
        answers = await asyncio.gather(*(client.embeddings.create(model="texts", input=texts) for texts in asked))
        for texts, answer in zip(asked, answers, strict=True):
            np.testing.assert_allclose(vectors(answer), [alone(ids_of(text)) for text in texts], atol=1e-5)
        (told,) = asgi.app.tensors.statistics("texts")
        assert (told.inference_count, told.execution_count) == (16, 1)


async def test_token_ids_base64_and_dimensions_are_taken_as_they_are_asked(tmp_path):
    write_encoder(tmp_path, "texts")
    async with served(tmp_path) as (client, http, _asgi):
        text = await client.embeddings.create(model="texts", input=TEXTS[1])
        tokens = await client.embeddings.create(model="texts", input=ids_of(TEXTS[1]))
        lists = await client.embeddings.create(model="texts", input=[ids_of(TEXTS[1]), [7]])
        bare = await client.embeddings.create(model="texts", input="w3", extra_body={"add_special_tokens": False})
        assert vectors(text)[0] == vectors(tokens)[0]
        np.testing.assert_allclose(vectors(lists), [vectors(text)[0], vectors(bare)[0]], atol=1e-5)
        bodies = [{"input": "w1 w2", "encoding_format": form} for form in ("float", "base64")]
        floats, packed = [(await http.post("/embeddings", json=body)).json()["data"][0] for body in bodies]
        assert np.frombuffer(base64.b64decode(packed["embedding"]), "<f4").tolist() == floats["embedding"]
        answer = await client.embeddings.create(model="texts", input="w1 w2", dimensions=3)
        np.testing.assert_allclose(vectors(answer)[0], alone(ids_of("w1 w2"), num_dimensions=3), atol=1e-5)
        with pytest.raises(
            openai.BadRequestError, match=f"dimensions is {WIDTH + 1}; it must be at least 1, and at most {WIDTH}"
        ):
            await client.embeddings.create(model="texts", input="w1", dimensions=WIDTH + 1)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
async def test_pooling_is_as_the_config_says(tmp_path, pooling):
    write_encoder(tmp_path, "texts", config=parameters(pooling=pooling, normalize="false"))
    async with served(tmp_path) as (client, _, _asgi):
        answer = await client.embeddings.create(model="texts", input=TEXTS)
    for text, vector in zip(TEXTS, vectors(answer), strict=True):
        np.testing.assert_allclose(vector, alone(ids_of(text), pooling, normalize=False), atol=1e-5)


@pytest.mark.parametrize("made", [{"pooled": True}, {"length": 40}])
async def test_graphs_that_pool_or_have_one_length_serve_too(tmp_path, made):
    write_encoder(tmp_path, "texts", config=parameters(normalize="true"), model=encoder_model(**made))
    async with served(tmp_path) as (client, _, _asgi):
        answer = await client.embeddings.create(model="texts", input=TEXTS)
    for text, vector in zip(TEXTS, vectors(answer), strict=True):
        np.testing.assert_allclose(vector, alone(ids_of(text)), atol=1e-5)


async def test_what_sentence_transformers_saved_is_served_and_listed(tmp_path):
    write_sentence_folder(tmp_path, "mini")
    write_model(tmp_path, "add")
    async with served(tmp_path) as (client, http, _asgi):
        answer = await client.embeddings.create(model="mini", input=TEXTS[:3])
        for text, vector in zip(TEXTS, vectors(answer), strict=False):
            np.testing.assert_allclose(vector, alone(ids_of(text)), atol=1e-5)
        cards = (await http.get("/models")).json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards[2:]] == [("mini", 20)]
        anthropics = (await http.get("/models?limit=1", headers={"anthropic-version": "2023-06-01"})).json()
        assert (len(anthropics["data"]), anthropics["has_more"], anthropics["data"][0]["type"]) == (1, True, "model")
        with pytest.raises(openai.BadRequestError, match="has 32 tokens, and this model takes 20") as refused:
            await client.embeddings.create(model="mini", input=["w1", TEXTS[3]])
        assert (refused.value.param, refused.value.code) == ("input[1]", "context_length_exceeded")
        cut = await client.embeddings.create(
            model="mini", input=["w1", TEXTS[3]], extra_body={"truncate_prompt_tokens": -1}
        )
        np.testing.assert_allclose(vectors(cut)[1], alone([*ids_of(TEXTS[3])[:19], ids_of(TEXTS[3])[-1]]), atol=1e-5)


BAD = [
    ({"input": "w1", "model": "other"}, 404, "is no encoder of texts that is served here; choose one of texts"),
    ({"input": "w1", "model": "add"}, 404, "choose one of texts"),
    ({"input": []}, 400, "input has 0 prompts"),
    ({"input": [[]]}, 400, "input has no tokens"),
    ({"input": [5, 64]}, 400, "token 1 is 64; the vocabulary has ids 0 to 63"),
    ({"input": ["w1", 7]}, 400, "input"),
    ({"input": {"text": "w1"}}, 400, "input must be a text"),
    ({"input": [[5]] * 2049}, 400, "input has 2049 prompts; it must have 1 to 2048"),
    ({"input": [5] * 513}, 400, "input has 513 tokens, and this model takes 512"),
    ({"input": "w1", "dimensions": 0}, 400, "dimensions is 0"),
    ({"input": "w1", "encoding_format": "hex"}, 400, "hex"),
    ({"input": "\ud800"}, 400, "not valid JSON"),
    ({"input": "w1", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens is 0"),
    ({"input": "w1", "priority": -1}, 400, "priority is -1"),
    ({"input": "w1", "timeout_ms": -1}, 400, "timeout_ms is -1"),
    ({}, 400, "input"),
]


async def test_bad_input_is_told_and_takes_nothing(tmp_path):
    write_encoder(tmp_path, "texts")
    write_model(tmp_path, "add")
    async with served(tmp_path) as (_, http, asgi):
        for body, status, told in BAD:
            sent = {"content": json.dumps(body), "headers": {"content-type": "application/json"}}
            answer = await http.post("/embeddings", **sent)
            assert (answer.status_code, told in answer.json()["error"]["message"]) == (status, True), answer.text
            assert asgi.app.gate.num_in_flight == 0
            assert (await http.post("/embeddings", json={"input": "w1"})).status_code == 200


@pytest.mark.parametrize("sent", ["w1 w20", [5, 20]])
async def test_a_token_without_a_row_in_the_encoders_embedding_is_refused(tmp_path, sent):
    (write_encoder(tmp_path, "texts") / "config.json").write_text('{"vocab_size": 20}')
    async with served(tmp_path) as (_, http, _asgi):
        answer = await http.post("/embeddings", json={"input": sent})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input"), answer.text
        assert "0 to 19" in answer.json()["error"]["message"]
        assert (await http.post("/embeddings", json={"input": "w1"})).status_code == 200


async def test_without_an_encoder_that_can_be_read_the_route_says_what_to_set(tmp_path):
    write_model(tmp_path, "add")
    async with served(tmp_path) as (client, _, _asgi):
        with pytest.raises(openai.NotFoundError, match='"task" = "embedding"'):
            await client.embeddings.create(model="add", input="w1")
    asgi = create_app(FakeReplica(), make_model(), ServerConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(asgi), base_url="http://test/v1") as http:
        assert "--model-repository" in (await http.post("/embeddings", json={"input": "a"})).json()["error"]["message"]
    asgi.app.close()


async def test_a_broken_tokenizer_keeps_its_model_from_being_served(tmp_path):
    (write_encoder(tmp_path, "texts") / "tokenizer.json").write_text("{}")
    async with served(tmp_path) as (_, http, asgi):
        assert (await http.post("/embeddings", json={"input": "w1"})).status_code == 404
        (entry,) = asgi.app.tensors.index()
        assert "tokenizer.json cannot be read" in entry.reason


async def test_prompt_tokens_count_against_the_tenants_limits(tmp_path):
    write_encoder(tmp_path, "texts")
    table = table_of({"a": {"tokens_per_minute": 10, "requests_per_minute": 3}})
    async with served(tmp_path, tenants=FakeTenants(table)) as (client, _, asgi):
        assert (await client.embeddings.create(model="texts", input=["w1", "w2 w3"])).usage.total_tokens == 7
        with pytest.raises(openai.RateLimitError, match="has 3 left of 10 in a minute"):
            await client.embeddings.create(model="texts", input="w1 w2")
        assert (await client.embeddings.create(model="texts", input="w1")).usage.total_tokens == 3
        with pytest.raises(openai.RateLimitError, match="may send 3 requests in a minute"):
            await client.embeddings.create(model="texts", input=[5])
        assert asgi.app.gate.num_in_flight == 0


class Held:
    """A TensorModels whose models never answer."""

    def __init__(self, tensors):
        self._tensors, self.asked, self.left = tensors, [], []
        self.has_two = asyncio.Event()

    def __getattr__(self, name):
        return getattr(self._tensors, name)

    async def infer(self, request):
        self.asked.append(request)
        if len(self.asked) == 2:
            self.has_two.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.append(request.request_id)


async def test_a_client_that_leaves_frees_all_its_places(tmp_path):
    write_encoder(tmp_path, "texts")
    table = table_of({"a": {"weight": 2.0, "priorities": [0, 5], "default_priority": 4}})
    async with served(tmp_path, tenants=FakeTenants(table), wrap=Held) as (client, _, asgi):
        asking = asyncio.create_task(client.embeddings.create(model="texts", input=["w1", "w2 w3"], timeout=None))
        held = asgi.app.tensors
        await held.has_two.wait()
        assert [(each.terms.tenant, each.terms.weight, each.num_tokens) for each in held.asked] == [
            ("a", 2.0, 3),
            ("a", 2.0, 4),
        ]
        assert asgi.app.gate.num_in_flight == 2
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert sorted(held.left) == sorted(each.request_id for each in held.asked)
        assert asgi.app.gate.num_in_flight == 0


def test_a_server_without_a_language_model_embeds_and_bills_the_tokens(tmp_path):
    repository = tmp_path / "models"
    write_sentence_folder(repository, "mini")
    ledger = tmp_path / "ledger.sqlite"
    running = start_server("none", "--model-repository", str(repository), "--ledger", str(ledger))
    try:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["mini"]
        answer = client.embeddings.create(model="mini", input=TEXTS[:3])
        for text, vector in zip(TEXTS, vectors(answer), strict=False):
            np.testing.assert_allclose(vector, alone(ids_of(text)), atol=1e-5)
    finally:
        assert running.stop() == 0
    with closing(sqlite3.connect(ledger)) as db:
        rows = db.execute("SELECT model, prompt_tokens, rows, status FROM request ORDER BY prompt_tokens").fetchall()
    assert rows == [("mini", 3, 1, "stop"), ("mini", 5, 1, "stop"), ("mini", 8, 1, "stop")]
    assert answer.usage.prompt_tokens == 16
