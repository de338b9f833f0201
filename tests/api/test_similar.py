"""`--result-cache-semantic`: one answer for prompts that are nearly alike, for who asked, as long as it is right."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra tensor brings it")

from maitred.api.dialects.openai.embeddings import embedding_routes
from maitred.api.http.similar import MAX_TEXTS, SimilarAnswers, spoken
from maitred.api.routes import make_routes
from maitred.config import ServerConfig
from maitred.core.errors import ConfigError
from maitred.storage.result_cache import CachedAnswer
from tests.api.conftest import with_tensors
from tests.fakes_api import FakeTenants, table_of
from tests.tensor.encoders import TASK, parameters, write_encoder

CHAT = "/v1/chat/completions"
LONG = " ".join(f"w{at}" for at in range(30))
NEAR, FAR = LONG.replace("w29", "w36"), "w3 w50"  # of cosine 0.992 and 0.90 to it


@asynccontextmanager
async def serving(folder, *, check=0.0, encoder=TASK, **of):
    write_encoder(folder, "texts", config=encoder)
    config = ServerConfig(result_cache_bytes=1 << 20, result_cache_semantic="texts:0.97", result_cache_check=check)
    async with with_tensors(folder, config=config, routes=make_routes(embedding_routes()), **of) as (asgi, http):
        yield asgi.app, http


async def ask(
    http: httpx.AsyncClient, text: str, key: str = "", cache_control: str = "", **fields: object
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    headers |= {"cache-control": cache_control} if cache_control else {}
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 20} | fields
    answer = await http.post(CHAT, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_similar_prompt_has_the_same_answer_and_another_has_its_own(tmp_path, stream):
    async with serving(tmp_path) as (_, http):
        first = await ask(http, LONG, stream=stream)
        near = await ask(http, NEAR, stream=stream)
        far = await ask(http, FAR, stream=stream)
        assert first.headers["x-maitred-cache"] == far.headers["x-maitred-cache"] == "miss"
        assert near.headers["x-maitred-cache"].startswith("similar; cosine=0.99")
        assert near.content == first.content
        assert (await ask(http, LONG, stream=stream)).headers["x-maitred-cache"] == "hit"
        assert (await ask(http, f"{NEAR} 4512")).headers["x-maitred-cache"] == "miss"
        assert (await ask(http, f"{NEAR} 4513")).headers["x-maitred-cache"] == "miss", "numbers are no words"
        other = [
            {"messages": [{"role": "system", "content": "w1"}, {"role": "user", "content": NEAR}]},
            {"max_tokens": 21},
        ]
        for fields in other:  # all else must be the same
            assert (await ask(http, NEAR, stream=stream, **fields)).headers["x-maitred-cache"] == "miss"
        assert (await ask(http, NEAR, cache_control="no-cache", stream=stream)).headers["x-maitred-cache"] == "miss"
        asked = [
            await http.post("/v1/responses", json={"input": text, "temperature": 0, "stream": stream})
            for text in (LONG, NEAR, LONG)
        ]
        assert [told.headers["x-maitred-cache"].partition(";")[0] for told in asked] == ["miss", "similar", "hit"]
        ids = [re.findall(r'"id":"resp_(\w+)"', told.text)[0] for told in asked]
        for id, told, text in zip(ids, asked, (LONG, NEAR, LONG), strict=True):  # each is kept by itself
            assert {*re.findall("[0-9a-f]{48}", told.text)} == {id}
            (item,) = (await http.get(f"/v1/responses/resp_{id}/input_items")).json()["data"]
            assert item["content"][0]["text"] == text
        assert len({*ids}) == 3
        page = (await http.get("/metrics")).text
        assert 'maitred_result_cache_requests_total{result="similar"} 2.0' in page
        assert "maitred_result_cache_similar_on 1.0" in page


async def test_it_is_for_tenants_that_ask_for_it_and_for_each_alone(tmp_path):
    tenants = FakeTenants(table_of({"ada": {"semantic_cache": True}, "bob": {"semantic_cache": True}, "eve": {}}))
    async with serving(tmp_path, tenants=tenants) as (_, http):
        for name, near in (("ada", "similar"), ("bob", "similar"), ("eve", "miss")):
            told = [(await ask(http, text, name)).headers["x-maitred-cache"] for text in (LONG, NEAR)]
            assert [each.partition(";")[0] for each in told] == ["miss", near]


async def test_checked_hits_are_computed_and_wrong_ones_turn_it_off(tmp_path):
    async with serving(tmp_path, check=1.0) as (app, http):
        await ask(http, LONG)
        for number in (33, 36, 39):
            near = await ask(http, LONG.replace("w29", f"w{number}"))
            assert near.headers["x-maitred-cache"] == "miss"
        await asyncio.sleep(0)
        answers = app.results.similar
        assert (answers.num_hits, answers.num_checked, answers.num_wrong) == (3, 3, 0), "the replica says the same"
        for _ in range(2):
            answers.checked(0.0)
        assert not answers.is_on
        assert (await ask(http, LONG.replace("w29", "w50"))).headers["x-maitred-cache"] == "miss"
        page = (await http.get("/metrics")).text
        assert "maitred_result_cache_similar_on 0.0" in page
        assert 'maitred_result_cache_checks_total{result="not_alike"} 2.0' in page


async def test_what_the_encoder_cannot_take_is_answered_as_ever(tmp_path):
    async with serving(tmp_path, encoder=parameters(max_length="8")) as (_, http):
        parts = [{"type": "text", "text": LONG}]
        for content in ("", parts, LONG, NEAR):
            told = await ask(http, "", messages=[{"role": "user", "content": content}])
            assert told.headers["x-maitred-cache"] == "miss"


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "one two"}}], "id": "a"}',
        b'data: {"choices": [{"index": 0, "text": "one "}]}\n\ndata: {"choices": [{"index": 0, "text": "two"}]}\n\n'
        b"data: [DONE]\n\n",
        b'event: content_block_delta\ndata: {"index": 0, "delta": {"type": "text_delta", "text": "one "}}\n\n'
        b'event: content_block_delta\ndata: {"index": 0, "delta": {"type": "text_delta", "text": "two"}}\n\n',
        b'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "one two"}\n\n',
        b'{"message": {"content": "one "}, "done": false}\n{"message": {"content": "two"}, "done": true}\n',
    ],
)
def test_what_an_answer_says_is_read_out_of_any_dialect(body):
    assert spoken(CachedAnswer(b"", body, 0.0)) == "one two"


@pytest.mark.parametrize("text", ["texts", "texts:0.2", ":0.97", "texts:1.01", "texts:near"])
def test_what_is_no_model_and_cosine_is_refused_at_the_start(text):
    with pytest.raises(ConfigError, match="MODEL:COSINE"):
        ServerConfig(result_cache_bytes=1, result_cache_semantic=text)
    with pytest.raises(ConfigError, match="result_cache_bytes"):
        ServerConfig(result_cache_semantic="texts:0.97")


# ---- the rule alone


def at(degrees: float) -> np.ndarray:
    return np.array([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], np.float32)


def test_the_nearest_within_the_bound_is_found_if_its_answer_is_kept():
    answers = SimilarAnswers(bound=0.97, check=0.0)  # 14 degrees
    for degrees, key in ((0, b"far"), (20, b"near"), (22, b"nearest")):
        answers.keep(b"rest", at(degrees), key)
    found = answers.find(b"rest", at(23), lambda key: True)
    assert found is not None
    assert found[0] == b"nearest"
    assert abs(found[1] - np.cos(np.radians(1))) < 1e-6
    gone = answers.find(b"rest", at(23), lambda key: key != b"nearest")
    assert gone is not None
    assert gone[0] == b"near"
    assert answers.find(b"rest", at(23), lambda key: key == b"far") is None
    assert answers.find(b"other", at(23), lambda key: True) is None


def test_a_request_computed_again_stands_once_and_the_oldest_go_first():
    answers = SimilarAnswers(bound=0.9999, check=0.0)
    for _ in range(2):
        answers.keep(b"rest", at(0), b"same")
    for number in range(MAX_TEXTS - 1):
        answers.keep(b"rest", at(90), b"%d" % number)
    assert answers.find(b"rest", at(0), lambda key: True) is not None
    answers.keep(b"rest", at(90), b"one more")
    assert answers.find(b"rest", at(0), lambda key: True) is None


def test_a_share_of_the_hits_is_computed_too():
    answers = SimilarAnswers(bound=0.97, check=0.05)
    checked = [answers.is_checked() for _ in range(100)]
    assert (sum(checked), checked[0], answers.num_hits) == (5, True, 100)
    assert not any(SimilarAnswers(bound=0.97, check=0.0).is_checked() for _ in range(100))


def test_over_one_percent_of_unlike_answers_turns_it_off():
    answers = SimilarAnswers(bound=0.97, check=1.0)
    answers.keep(b"rest", at(0), b"key")
    assert not answers.checked(0.5), "one of few is no share"
    assert not any(answers.checked(0.99) for _ in range(98))
    assert answers.find(b"rest", at(0), lambda key: True) is not None
    assert answers.checked(float("nan")), "the second of 100"
    assert answers.find(b"rest", at(0), lambda key: True) is None
    assert not answers.checked(0.1), "told once"
