"""The whole server in this process: OpenAI's client, the edge, the engine, the built-in model."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maitred.config import CacheConfig, EngineConfig, ModelConfig, ProcessConfig, SchedulerConfig
from maitred.core.step import ModelOutput, SchedulerOutput
from maitred.engine.build import load_engine
from maitred.engine.engine_thread import in_thread
from maitred.engine.loop import LoadedEngine
from maitred.engine.starting import Engine, StartingEngine
from maitred.engine.supervisor import Start
from maitred.scheduler.engine_core import EngineCore
from tests.api.conftest import strict_client
from tests.api.other_clients import CLIENTS
from tests.api.test_completions import complete, streamed
from tests.conftest import ServerProcess
from tests.fakes_api import RunningServer, running_server
from tests.waiting import HANGS_S, until

OPEN = "The"  # of its chat answers the model is sure; here it may say anything
QUESTION = [{"role": "user", "content": "I would like two soups and a tea, please."}]
SENTENCE = "The maître d' decides who is seated next, keeps every table full, and knows the regulars. "


@pytest.fixture(scope="module")
def cores() -> list[EngineCore]:
    """Those that the engine's thread has begun with: one, unless it broke."""
    return []


@pytest.fixture(scope="module")
def engine(cores: list[EngineCore]) -> Iterator[Engine]:
    config = EngineConfig(
        model=ModelConfig(num_threads=1),
        cache=CacheConfig(kv_cache_memory_bytes=64 * 2**20),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )

    def build(*words: Any) -> LoadedEngine:
        loaded = load_engine(*words)
        cores.append(loaded.core)
        return loaded

    start = Start(config=config, process=ProcessConfig(), served_model_names=("mini",), open=in_thread(build))
    built = StartingEngine(start).wait()
    yield built
    built.replica.stop()
    assert len(cores) == 1, "nothing ended it"


@pytest.fixture(scope="module")
def real(engine: Engine) -> Iterator[RunningServer]:
    with running_server(engine.replica, engine.model) as server:
        yield server


@pytest.fixture(scope="module")
def web(real: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url, timeout=HANGS_S) as client:
        yield client


def chat(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "mini", "messages": QUESTION, "temperature": 0, "max_tokens": 24, **fields}
    )


def blocks_used(server: RunningServer) -> int:
    return server.replica.state().num_blocks_used


def test_a_stream_says_what_the_whole_answer_says_and_logprobs_describe_the_greedy_choice(real):
    client = strict_client(real.url)
    whole = chat(client)
    assert whole.choices[0].message.content
    stream = chat(client, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
    answer = chat(strict_client(real.url), logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for at in content:
        assert at.logprob <= 0
        assert at.top_logprobs[0].token == at.token, "greedy takes the likeliest"
        assert [top.logprob for top in at.top_logprobs] == sorted((t.logprob for t in at.top_logprobs), reverse=True)


def test_the_same_seed_gives_the_same_text_alone_and_in_company(real):
    client = strict_client(real.url)

    def ask(seed: int) -> str:
        fields = {"model": "mini", "prompt": OPEN, "temperature": 1.5, "max_tokens": 24, "seed": seed}
        return client.completions.create(**fields).choices[0].text

    alone = [ask(seed) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together == alone
    assert len(set(alone)) > 1


def test_a_prediction_changes_no_token_and_is_on_no_bill(real):
    client = strict_client(real.url)
    fields = {"temperature": 0.7, "seed": 5, "max_tokens": 100, "extra_body": {"ignore_eos": True}, "logprobs": True}
    alone = chat(client, **fields)
    text = alone.choices[0].message.content
    before = real.replica.state()
    for content in (text, text[:30] + " something else " + text[40:], "never said"):
        answer = chat(client, **fields, prediction={"type": "content", "content": content})
        assert answer.choices[0] == alone.choices[0]
        details = answer.usage.completion_tokens_details
        assert answer.usage.completion_tokens == 100 > details.accepted_prediction_tokens
    assert real.replica.state().num_generated_tokens - before.num_generated_tokens == 300
    for _ in range(30):  # on a busy machine drafts may seem to cost more than they bring, for a while
        predicted = real.replica.state().predicted_drafts
        if predicted.num_accepted > before.predicted_drafts.num_accepted:
            break
        chat(client, **fields, prediction={"type": "content", "content": text})
    assert predicted.num_accepted > before.predicted_drafts.num_accepted
    assert predicted.num_accepted <= predicted.num_tokens


def test_a_repeated_prompt_comes_from_the_cache_and_is_scored_as_the_first(real, web):
    fields = {"model": "mini", "prompt": SENTENCE * 5, "temperature": 0}
    first = complete(web, **fields)
    again = complete(web, **fields)
    salted = complete(web, **fields, cache_salt="other")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
    fields = {"model": "mini", "prompt": SENTENCE * 6, "echo": True, "logprobs": 0, "max_tokens": 0}
    first = complete(web, **fields)["choices"][0]["logprobs"]["token_logprobs"]
    again = complete(web, **fields)["choices"][0]["logprobs"]["token_logprobs"]
    assert first == again, "whatever the prefix cache holds"


@pytest.mark.parametrize("n", [1, 3])
def test_an_echo_is_scored_token_by_token(web, n):
    fields = {"model": "mini", "prompt": SENTENCE, "echo": True, "logprobs": 2, "n": n, "seed": 3, "max_tokens": 4}
    whole = complete(web, **fields)["choices"]
    for choice in whole:
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(SENTENCE)
        assert logprobs["token_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith(("bytes:", "<")):
                assert choice["text"].startswith(token, offset)
    stream = streamed(web, **fields)
    for choice in whole:
        assert stream[choice["index"]]["logprobs"]["tokens"] == choice["logprobs"]["tokens"]


def test_a_stop_string_cuts_the_text_and_frees_the_request(real):
    client = strict_client(real.url)
    text = chat(client).choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = chat(client, stop=stop).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[: text.index(stop)], "stop")
    until(lambda: blocks_used(real) == 0)


def test_a_prompt_over_the_context_is_refused_and_one_within_it_fills_it(real, web, engine):
    limit = engine.model.max_model_len
    answer = web.post("/v1/completions", json={"model": "mini", "prompt": SENTENCE * limit})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert str(limit) in answer.json()["error"]["message"]
    whole = complete(web, model="mini", prompt=[5] * (limit - 3), max_tokens=3, ignore_eos=True)
    assert whole["usage"]["total_tokens"] == limit


@pytest.fixture
def paced(engine: Engine, cores: list[EngineCore]) -> Iterator[None]:
    """A step takes 20 ms at least, so that what is asked for takes much longer than the test."""
    (core,) = cores
    executor = core._executor

    class Paced:
        def execute(self, plan: SchedulerOutput) -> ModelOutput:
            time.sleep(0.02)
            return executor.execute(plan)

    core._executor = Paced()
    yield
    core._executor = executor


def test_the_gauges_tell_what_the_engine_does(real, paced):
    def running() -> float:
        page = httpx.get(f"{real.url}/metrics").text
        return float(page.split("\nmaitred_requests_running ")[1].split("\n")[0])

    body = {"model": "mini", "prompt": "x", "n": 4, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{real.url}/v1/completions", json=body, timeout=HANGS_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        until(lambda: running() == 4)
    until(lambda: running() == 0)
    page = httpx.get(f"{real.url}/metrics").text
    assert "maitred_requests_running 0.0" in page
    assert "maitred_kv_blocks_used 0.0" in page
    assert "maitred_requests_waiting 0.0" in page


PYTHON = os.environ.get("MAITRED_OTHER_CLIENTS", "")
SCRIPT = Path(__file__).with_name("other_clients.py")


@pytest.mark.soak
@pytest.mark.skipif(not PYTHON, reason="MAITRED_OTHER_CLIENTS names no interpreter: make soak installs the clients")
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_has_its_schema_and_its_tool_whole_and_streamed(server: ServerProcess, client: str):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [PYTHON, str(SCRIPT), client, f"{server.url}/v1"], env=environment, capture_output=True, text=True,
        timeout=2 * HANGS_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
