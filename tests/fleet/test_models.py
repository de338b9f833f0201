"""Several models behind one address, live: loaded for requests, put out for others, one that cannot load, orders."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from ollama import Client

from maitred.cli.main import main
from tests.fleet.test_launched import launching_router
from tests.tensor.models import write_model
from tests.waiting import until

MODELS = """
models:
  a: {model: maitred-mini, aliases: [first, gpt-x], max_num_seqs: 4, keep_alive_s: 600}
  b: {model: maitred-mini, max_model_len: 512, max_num_seqs: 4}
  bad: {model: /nowhere/at-all}
"""


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, list[str]]]:
    """Memory for one of two models; a third is not there."""
    file = tmp_path_factory.mktemp("models") / "models.yaml"
    file.write_text(MODELS)
    with launching_router("--models", str(file), "--models-memory-bytes", "128MiB") as (client, _, lines):
        yield client, lines


def ask(client: httpx.Client, model: str | None, **fields: Any) -> httpx.Response:
    body = {"prompt": "Once upon", "max_tokens": 4, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body | ({"model": model} if model else {}))


def models(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {model["id"]: model for model in client.get("/admin/models").json()["models"]}


def states(client: httpx.Client) -> dict[str, str]:
    return {name: model["state"] for name, model in models(client).items()}


def starts(lines: list[str]) -> list[str]:
    return [line.split("replica=")[1].split()[0] for line in lines if "a replica starts" in line]


def test_models_are_listed_before_any_is_loaded_and_one_load_serves_all_that_wait(router):
    client, lines = router
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert list(cards) == ["a", "first", "gpt-x", "b", "bad"]
    assert (cards["a"]["state"], cards["a"]["aliases"], cards["first"]["alias_of"]) == (
        "unloaded",
        ["first", "gpt-x"],
        "a",
    )
    assert 0 < cards["b"]["memory_bytes"] < cards["a"]["memory_bytes"] < 128 * 2**20
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: ask(client, ("a", "gpt-x", None)[number % 3]), range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-maitred-replica"] for answer in answers} == {"a"}
    assert starts(lines) == ["a"]
    told = models(client)["a"]
    assert told["state"] == "ready"
    assert told["expires_at"] - told["since"] > 500


def test_another_model_puts_the_idle_one_out_and_only_what_waits_for_a_bad_one_fails(router):
    client, _ = router
    with ThreadPoolExecutor(2) as pool:
        good, bad = pool.submit(ask, client, "b"), pool.submit(ask, client, "bad")
    assert good.result().json()["model"] == "b"
    error = bad.result().json()["error"]["message"]
    assert bad.result().status_code == 503
    assert "the model 'bad' cannot be loaded" in error
    assert "there is no folder /nowhere/at-all" in error
    assert states(client) == {"a": "unloaded", "b": "ready", "bad": "unloaded"}
    assert "no folder" in models(client)["bad"]["error"]
    unknown = ask(client, "c")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


def test_administrators_load_and_unload_and_ps_shows_both(router):
    client, _ = router
    assert client.post("/admin/models/unload", json={"model": "b"}).status_code == 202
    until(lambda: states(client)["b"] == "unloaded")
    for keep_alive_s in (1e300, -1):  # longer than any date, and for ever
        asked = {"model": "first", "keep_alive_s": keep_alive_s}
        assert client.post("/admin/models/load", json=asked).status_code == 202
        until(lambda: states(client)["a"] == "ready")
        assert client.get("/api/ps").status_code == 200
    assert models(client)["a"]["expires_at"] is None
    ollama = Client(str(client.base_url))
    assert ollama.chat("first", [{"role": "user", "content": "hi"}], keep_alive="90s", options={"num_predict": 2}).done
    (running,) = ollama.ps().models
    assert (running.model, running.context_length) == ("a", 2048)
    assert 0 < (running.expires_at - datetime.now(UTC)).total_seconds() < 100
    for name in ("a", "b"):  # b is not loaded, nor is it for this
        assert ollama.pull(name).status == "success"
        assert ollama.generate(f"{name}:latest", keep_alive=0).done_reason == "unload"
        until(lambda: states(client) == {"a": "unloaded", "b": "unloaded", "bad": "unloaded"})
    assert ollama.chat("a", keep_alive=-1).done_reason == "load"
    assert (states(client)["a"], models(client)["a"]["expires_at"]) == ("ready", None)
    wrong = client.post("/admin/models/load", json={"model": "aa"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "model")
    assert client.get("/favicon.ico").status_code == 404, "what names no model loads none"
    with redirect_stdout(StringIO()) as out:
        assert main(["ps", str(client.base_url)]) == 0
    assert [line.split()[0] for line in out.getvalue().splitlines()[1:]] == ["a,", "b", "bad"]
    assert "unloaded" in out.getvalue()


@pytest.mark.soak
def test_a_killed_model_goes_on_and_a_tensor_model_is_swapped_in_beside(tmp_path: Path):
    write_model(tmp_path / "repository", "double")
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    file = tmp_path / "models.yaml"
    file.write_text(
        json.dumps(
            {"models": {"a": {"model": "maitred-mini"}, "t": {"model_repository": str(tmp_path / "repository")}}}
        )
    )
    with launching_router("--models", str(file), "--models-dir", str(tmp_path / "folder")) as (client, _, lines):
        assert any("folder/sub is left out" in line for line in lines)
        with client.stream(
            "POST", "/v1/completions", json={"model": "a", "prompt": "x", "max_tokens": 400, "stream": True}
        ) as stream:
            events = stream.iter_lines()
            next(events)
            (pid,) = [r["pid"] for r in client.get("/admin/fleet").json()["replicas"]]
            os.kill(pid, signal.SIGKILL)
            assert [line for line in events if line][-1] == "data: [DONE]"
        rows = [
            {"name": name, "shape": [1, 16], "datatype": "FP32", "data": list(range(16))}
            for name in ("INPUT0", "INPUT1")
        ]
        answer = client.post("/v2/models/double/infer", json={"inputs": rows})
        assert answer.status_code == 200, answer.text
        assert states(client) == {"a": "ready", "t": "ready"}
        assert "no language model" in ask(client, "t").json()["error"]["message"]


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("models: {a: {max_nun_seqs: 4}}", "no option 'max_nun_seqs' (did you mean max_num_seqs?)"),
        ("models: {a: {max_num_seqs: many}}", "max_num_seqs is 'many'; it must be an integer"),
        ("models: {a: {port: 1}}", "port is the router's"),
        ("models: {a: {model: maitred-mini, pinned: 3}}", "models: a: Expected `bool`, got `int` - at `$.pinned`"),
        ("models: {a: {model: maitred-mini, aliases: [b]}, b: {model: maitred-mini}}", "both answer to 'b'"),
        ("models: {a: {model: maitred-mini, kv_cache_memory_bytes: 1GiB}}", "kv_cache_memory_bytes"),
        ("model: {}", "has one key, `models`"),
        ("models: {}", "no model is in"),
        ("models: {~: {model: maitred-mini}}", "models: None is {'model': 'maitred-mini'}"),
        ("models: {'': {model: maitred-mini}}", "models: '' is"),
        ("models: {a: {model: maitred-mini}, a: {model: b}}", "'a' stands twice"),
        (f"models: {'[' * 3000}", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_at_the_start(tmp_path: Path, file: str, told: str, capsys):
    path = tmp_path / "models.yaml"
    path.write_text(file)
    assert main(["serve", "--models", str(path), "--models-memory-bytes", "256MiB", "--port", "0"]) in (1, 2)
    assert told in capsys.readouterr().err
