"""/v1/embeddings, /v1/rerank and /v1/score by started servers: OpenAI's own client, and transformers as the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import ollama
import openai
import pytest

from maitred.decisions.files import log_parts, read_frames
from maitred.decisions.replay import first_difference
from tests.conftest import ServerProcess, start_server
from tests.model.encoders import make_encoder, states_of, unit, write_modules

TEXTS = ["w1 w2 bread", "sky", "w3 w4 w5 w6 w7 " * 9]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, object, Path]]:
    folder, log = tmp_path_factory.mktemp("encoder"), tmp_path_factory.mktemp("log")
    model = make_encoder("Bert", folder)
    write_modules(folder, "mean_tokens", prompts={"query": "w9 "})
    server = start_server("--model", str(folder), "--decision-log", str(log), "--served-model-name", "texts")
    yield server, model, log
    assert server.stop() == 0
    (run,) = [list(read_frames(log_parts(log)))]
    assert first_difference(run) is None


def test_embeddings_by_openais_client_are_those_of_transformers(served):
    server, model, _ = served
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        ids = [httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
        expected = np.stack([unit(states_of(model, each).mean(0)) for each in ids])
        answer = client.embeddings.create(model="texts", input=TEXTS)
        np.testing.assert_allclose([each.embedding for each in answer.data], expected, atol=2e-6)
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        by_ids = client.embeddings.create(model="texts", input=ids, encoding_format="float")
        assert [each.embedding for each in by_ids.data] == [each.embedding for each in answer.data]
        fewer = client.embeddings.create(model="texts", input=TEXTS[0], dimensions=7).data[0].embedding
        np.testing.assert_allclose(fewer, unit(expected[0][:7]), atol=2e-6)
        with pytest.raises(openai.BadRequestError, match="takes 75") as long:
            client.embeddings.create(model="texts", input=["w1", "w1 " * 99])
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "input[1]")
        with pytest.raises(openai.BadRequestError, match="encoder, which generates nothing"):
            client.chat.completions.create(model="texts", messages=[{"role": "user", "content": "Hi"}])
        assert httpx.get(f"{server.url}/health/decode").json()["status"] == "ok"


def test_ollamas_client_has_the_same_vectors(served):
    server, _, _ = served
    openai_vectors = httpx.post(f"{server.url}/v1/embeddings", json={"input": TEXTS}).json()
    client = ollama.Client(server.url)
    told = client.embed("texts:latest", TEXTS)
    assert told.embeddings == [each["embedding"] for each in openai_vectors["data"]]
    assert (told.prompt_eval_count, told.model) == (openai_vectors["usage"]["prompt_tokens"], "texts:latest")
    assert client.embeddings("texts", TEXTS[1]).embedding == told.embeddings[1]
    assert len(client.embed("texts", TEXTS[0], dimensions=7).embeddings[0]) == 7
    assert client.embed("texts", "w1 " * 99).embeddings == client.embed("texts", "w1 " * 73).embeddings, (
        "as Ollama cuts"
    )
    with pytest.raises(ollama.ResponseError, match=r"input\[1\] has 101 tokens, and this model takes 75"):
        client.embed("texts", ["w1", "w1 " * 99], truncate=False)
    assert client.show("texts").capabilities == ["embedding"]


async def test_texts_of_many_clients_share_steps_and_give_the_same_bits(served):
    server, _, _ = served
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

        async def vector(text: str) -> list[float]:
            answer = await http.post("/v1/embeddings", json={"input": text})
            return answer.json()["data"][0]["embedding"]

        texts = [f"w{at} w{at + 3} bread" * (1 + at % 4) for at in range(24)]
        alone = [await vector(text) for text in texts]
        assert await asyncio.gather(*map(vector, texts)) == alone


def test_documents_are_ranked_and_pairs_scored_by_the_cosine_of_their_vectors(served):
    server, model, _ = served
    documents = ["w1 w2", "sky", "w9 bread w1"]
    with httpx.Client(base_url=server.url, timeout=60) as http:
        ids = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in ("w9 bread", *documents)]
        query, *others = [unit(states_of(model, each).mean(0)) for each in ids]  # the query has its prompt
        cosines = [float(query @ each) for each in others]
        body = {"query": "bread", "documents": [documents[0], {"text": documents[1]}, documents[2]]}
        ranked = http.post("/v1/rerank", json=body | {"top_n": 2}).json()
        best = sorted(range(3), key=lambda at: -cosines[at])[:2]
        assert [each["index"] for each in ranked["results"]] == best
        assert [each["document"] for each in ranked["results"]] == [{"text": documents[at]} for at in best]
        np.testing.assert_allclose(
            [each["relevance_score"] for each in ranked["results"]], [cosines[at] for at in best], atol=2e-6
        )
        assert ranked["usage"]["total_tokens"] == sum(map(len, ids))
        for first, second in (("text_1", "text_2"), ("queries", "documents")):
            scored = http.post("/v1/score", json={first: "bread", second: documents}).json()
            np.testing.assert_allclose([each["score"] for each in scored["data"]], cosines, atol=2e-6)
        bare = http.post("/v1/rerank", json=body | {"return_documents": False}).json()
        assert all("document" not in each for each in bare["results"])
        for wrong, param in (
            ({"text_1": "a"}, "text_1"),
            ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
            ({"queries": "a", "documents": []}, "documents"),
            ({"queries": "a", "documents": ["b", "w1 " * 99]}, "documents[1]"),
            ({"queries": "a", "documents": "b", "instruction": "c"}, "instruction"),
        ):
            refused = http.post("/v1/score", json=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        assert (
            http.post("/v1/rerank", json=body | {"max_tokens_per_doc": 3}).json()["error"]["param"]
            == "max_tokens_per_doc"
        )
        assert http.post("/v1/rerank", json=body | {"model": "other"}).status_code == 404
