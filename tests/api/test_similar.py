"""`--result-cache-semantic`: one answer for prompts that are nearly alike, for who asked, as long as it is right."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

pytest.importorskip("onnxruntime", reason="the extra tensor brings it")

from maitred.config import ServerConfig
from maitred.core.errors import ConfigError
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
    async with with_tensors(folder, config=config, **of) as (asgi, http):
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
        page = (await http.get("/metrics")).text
        assert 'maitred_result_cache_requests_total{result="similar"} 1.0' in page
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
        answers = app.similar.answers
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


@pytest.mark.parametrize("text", ["texts", "texts:0.2", ":0.97", "texts:1.01", "texts:near"])
def test_what_is_no_model_and_cosine_is_refused_at_the_start(text):
    with pytest.raises(ConfigError, match="MODEL:COSINE"):
        ServerConfig(result_cache_bytes=1, result_cache_semantic=text)
    with pytest.raises(ConfigError, match="result_cache_bytes"):
        ServerConfig(result_cache_semantic="texts:0.97")
