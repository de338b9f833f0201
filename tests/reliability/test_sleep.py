"""A server whose engine sleeps: welcome, small, and awake for whoever comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from maitred.model.checkpoint import BUILTIN_FOLDER, open_checkpoint
from maitred.model.families import spec_from_config
from tests.conftest import ServerProcess, start_server
from tests.model.adapters import random_tensors, write_adapter
from tests.waiting import until

ASK = {"model": "maitred-mini", "prompt": "Once", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def sleeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("adapters")
    with open_checkpoint(str(BUILTIN_FOLDER)) as checkpoint:
        write_adapter(root / "sql", random_tensors(spec_from_config(checkpoint.config), 4), rank=4)
    running = start_server(
        *("--sleep-after-s", "600", "--sse-keep-alive-s", "0.15", "--api-key", "k", "--lora-dir", str(root))
    )
    yield running
    assert running.stop() == 0


@pytest.fixture
def client(sleeper: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=sleeper.url, headers={"authorization": "Bearer k"}) as client:
        yield client


def metric(client: httpx.Client, name: str) -> float:
    page = client.get("/metrics").text
    return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"maitred_{name} "))


def test_a_server_sleeps_stays_welcome_and_wakes_for_the_next_request(sleeper: ServerProcess, client: httpx.Client):
    before = client.post("/v1/completions", json=ASK).json()["choices"][0]["text"]
    assert client.post("/sleep", params={"level": 2}).status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert [client.get(path).status_code for path in ("/health", "/ready", "/v1/models")] == [200] * 3
    assert client.get("/health/decode").json() == {"seconds": 0.0, "status": "asleep"}
    assert (metric(client, "engine_asleep"), metric(client, "engine_up")) == (1, 1)
    server = psutil.Process(sleeper.process.pid)
    assert server.children() == []
    assert server.memory_info().rss < 150e6
    with client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
        lines = list(answer.iter_lines())
    assert lines.index(": keep-alive") < next(i for i, line in enumerate(lines) if line.startswith("data: "))
    assert lines[-2] == "data: [DONE]"
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert client.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == before
    assert (metric(client, "engine_sleeps_total"), metric(client, "engine_restarts_total")) == (1, 0)
    assert 0 < metric(client, "engine_wake_seconds") < 60


def test_wake_up_by_hand_and_wrong_words(client: httpx.Client):
    assert client.post("/sleep").status_code == 200
    assert client.post("/wake_up", params={"tags": ["weights", "kv_cache"]}).status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    wrong = client.post("/sleep", params={"level": "deep"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"] == "level is 'deep'; choose one of 0, 1, 2"
    assert client.post("/sleep", headers={"authorization": "Bearer wrong"}).status_code == 401


def test_sleep_that_ends_requests_answers_them_503(client: httpx.Client):
    long = {**ASK, "max_tokens": 400, "n": 8, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(client.post, "/v1/completions", json=long)
        with client.stream("POST", "/v1/completions", json={**long, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if line.startswith("data: "))
            until(lambda: metric(client, "requests_running") >= 16)
            assert client.post("/sleep", params={"mode": "abort"}).status_code == 200
            error = json.loads(next(line for line in lines if '"error"' in line).removeprefix("data: "))["error"]
        ended = whole.result()
    assert (ended.status_code, ended.headers["retry-after"], error["code"]) == (503, "1", ended.json()["error"]["code"])
    assert "send the request again" in error["message"]


def test_an_adapter_is_loaded_while_it_sleeps_and_stays_over_the_next_sleep(client: httpx.Client):
    body = {**ASK, "model": "sql"}
    assert client.post("/sleep").status_code == 200
    loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "sql"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text != client.post("/v1/completions", json=ASK).json()["choices"][0]["text"]
    assert client.post("/sleep").status_code == 200
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
    assert client.post("/sleep").status_code == 200
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.post("/v1/completions", json=body).status_code == 404


def test_a_server_falls_asleep_by_itself():
    server = start_server("--sleep-after-s", "0.3")
    try:
        until(lambda: httpx.get(f"{server.url}/is_sleeping").json()["is_sleeping"])
        assert httpx.post(f"{server.url}/v1/completions", json=ASK).status_code == 200
    finally:
        assert server.stop() == 0
