"""`maitred serve --prefill-workers 1 --decode-workers 1` as people run it: KV is handed over, and no token is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from maitred.cli.main import main
from maitred.config import CacheConfig, ProcessConfig
from maitred.core.errors import ConfigError
from tests.conftest import ServerProcess, start_server
from tests.reliability.test_workers import MODEL, STORY, House, key_of
from tests.waiting import HANGS_S, until

LONG = {"max_tokens": 400, "ignore_eos": True}
"""A shorter answer may end on a busy machine where its prompt was computed, before it is handed over."""
SLO = ("--slo", "ttft:9s", "--slo", "tpot:1s")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": STORY, "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    "seeded": {"prompt": STORY + "Then", "max_tokens": 40, "temperature": 0.9, "seed": 5, "n": 4, "ignore_eos": True},
    "logprobs": {"prompt": STORY + "But", "max_tokens": 8, "temperature": 0, "logprobs": 3},
    "prompt logprobs": {"prompt": STORY + "Or", "max_tokens": 4, "temperature": 0, "prompt_logprobs": 1},
    "a stop string": {"prompt": STORY, "max_tokens": 60, "temperature": 0, "stop": ["a"]},
    "one token": {"prompt": STORY + "So", "max_tokens": 1, "temperature": 0},
    "short": {"prompt": "Hello", "max_tokens": 8, "temperature": 0},
}


def started(folder: Any, *words: str) -> House:
    digest = hashlib.sha256(b"key-boss").hexdigest()
    table = {"tenants": {"boss": {"keys": [{"id": "k-boss", "sha256": digest, "admin": True}]}}}
    table["tenants"]["a"] = {"keys": [{"id": "k-a", "sha256": hashlib.sha256(b"key-a").hexdigest()}]}
    (folder / "tenants.yaml").write_text(json.dumps(table))
    ledger = folder / "ledger.sqlite"
    server = start_server("--tenants", str(folder / "tenants.yaml"), "--ledger", str(ledger), *words)
    return House(server, ledger)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    words = ("--prefill-workers", "1", "--decode-workers", "1", "--handover", "always", *SLO)
    house = started(tmp_path_factory.mktemp("apart"), *words)
    until(lambda: all(worker["alive"] for worker in house.workers))
    yield house
    if house.server.process.poll() is None:
        house.server.stop()


@pytest.fixture(scope="module")
def alone(server: ServerProcess) -> House:
    return House(server, Path("it keeps none"))


def handovers(house: House) -> dict[str, float]:
    lines = house.get("/metrics").text.splitlines()
    told = [line for line in lines if line.startswith("maitred_handovers_total{")]
    return {line.split('"')[1]: float(line.split(" ")[1]) for line in told}


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_that_of_a_lone_engine(apart: House, alone: House, kind: str):
    answers = [house.post("/v1/completions", **KINDS[kind]).json() for house in (apart, alone)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["completion_tokens"] == answers[1]["usage"]["completion_tokens"]


def test_kv_moves_from_the_prefill_worker_to_the_decode_worker(apart: House):
    before = handovers(apart).get("moved", 0)
    body = {"prompt": "Another story. " + STORY, "n": 2} | LONG
    assert apart.post("/v1/completions", **body).json()["usage"]["handover"] == "moved"
    until(lambda: handovers(apart).get("moved", 0) > before)
    roles = {worker["role"]: worker for worker in apart.workers}
    assert set(roles) == {"prefill", "decode"}
    assert roles["decode"]["num_blocks_cached"] > 0
    until(lambda: apart.sums() == apart.counters())


@pytest.mark.parametrize("n", [1, 2])
def test_why_tells_which_way_was_chosen_and_its_terms(apart: House, capsys: pytest.CaptureFixture[str], n: int):
    answer = apart.post("/v1/completions", prompt=f"Why {n}? " + STORY, max_tokens=4, n=n).json()
    assert main(["why", answer["id"], "--url", apart.server.url, "--api-key", "key-boss"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("attempt 1: sent to 1, after 0.")
    assert told[1].split() == ["WAY", "COST", "TTFT", "TPOT", "FETCH", "TRANSFER", "HARM"]
    assert told[2].split()[:4] == ["->", "0", ">", "1"]


def test_nobody_else_is_told_why(apart: House):
    asked = f"{apart.server.url}/admin/fleet/choices/x"
    assert httpx.get(asked, headers=key_of("a"), timeout=HANGS_S).status_code == 403
    assert apart.get("/admin/fleet/choices/x").status_code == 404


def test_metrics_tell_what_was_moved_how_and_who_kept_its_promise(apart: House):
    def told(metric: str, **labels: str) -> float:
        families = text_string_to_metric_families(apart.get("/metrics").text)
        found = [sample for family in families for sample in family.samples if sample.name == f"maitred_{metric}"]
        return sum(sample.value for sample in found if labels.items() <= sample.labels.items())

    def shared(role: str, objective: str) -> float:
        return told("requests_in_objective_total", role=role, objective=objective)

    names = ("handover_wait_seconds_count", "kv_transfer_bytes_total")
    kinds = (("prefill", "ttft"), ("decode", "tpot"), ("mixed", "all"), ("mixed", "ttft"))
    before, promises = [told(name) for name in names], [shared(*kind) for kind in kinds]
    apart.post("/v1/completions", prompt="What is counted. " + STORY, **LONG)
    until(lambda: told(names[0]) > before[0])  # those of earlier requests may be told late
    assert told(names[1], transport="shm") == told(names[1]) > before[1]
    assert [shared(*kind) - was for kind, was in zip(kinds, promises, strict=True)] == [1, 1, 1, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_what_became_of_the_kv_where_workers_hand_it_over(apart: House, alone: House, stream: bool):
    asked = {"n": 2, "temperature": 0, "stream": stream} | LONG
    said = f"{stream} {STORY}"
    chat = {"messages": [{"role": "user", "content": said}]} | asked
    assert handover_told(apart, "/v1/chat/completions", chat) == "moved"
    assert handover_told(apart, "/v1/completions", {"prompt": said} | asked) == "moved"
    ends_with_its_first_token = {"prompt": said} | asked | {"max_tokens": 1}
    assert handover_told(apart, "/v1/completions", ends_with_its_first_token) == "local"
    assert handover_told(alone, "/v1/completions", ends_with_its_first_token) is None


def handover_told(house: House, path: str, body: dict[str, Any]) -> str | None:
    if not body["stream"]:
        usage = house.post(path, **body).json()["usage"]
    else:
        streamed = house.post(path, **body, stream_options={"include_usage": True}).text
        *_, last, _ = (line.removeprefix("data: ") for line in streamed.splitlines() if line)
        usage = json.loads(last)["usage"]
    told: str | None = usage.get("handover")
    return told


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_that_is_killed_in_mid_stream_costs_no_token(apart: House, alone: House, role: str):
    body = {"prompt": f"The {role} worker. {STORY}", "max_tokens": 400, "temperature": 0.8, "seed": 3, "n": 2}
    body |= {"ignore_eos": True}
    expected = alone.post("/v1/completions", **body).json()["choices"]
    stream = apart.stream(body)
    (victim,) = [worker for worker in apart.workers if worker["role"] == role]
    os.kill(victim["pid"], signal.SIGKILL)
    assert stream.end() == {choice["index"]: choice["text"] for choice in expected}
    until(lambda: all(worker["alive"] for worker in apart.workers))
    again = apart.post("/v1/completions", **KINDS["greedy"]).json()["choices"]
    assert again == alone.post("/v1/completions", **KINDS["greedy"]).json()["choices"]


def test_a_client_that_leaves_leaves_nothing_behind(apart: House):
    for number in range(3):
        with httpx.stream(
            "POST",
            f"{apart.server.url}/v1/completions",
            json={"model": MODEL, "stream": True, "prompt": f"{number} {STORY}", "max_tokens": 1500, "n": 2},
            headers=key_of("a"),
            timeout=HANGS_S,
        ) as left:
            next(left.iter_lines())
    until(apart.is_idle)
    until(lambda: all(worker["num_blocks_used"] == 0 for worker in apart.workers))


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"prefill_workers": 1}, "give decode_workers or mixed_workers too"),
        ({"prefill_workers": 1, "decode_workers": 1, "in_process": True}, "leave in_process out"),
        ({"decode_workers": -1}, "decode_workers"),
        ({"handover": "sometimes"}, "handover"),
        ({"kv_transport": "smoke"}, "choose one of auto, shm, tcp, nixl"),
        ({"kv_lease_s": 0.0}, "at least 0.1"),
    ],
)
def test_workers_that_cannot_serve_are_refused_with_a_remedy(settings: dict[str, Any], remedy: str):
    kind = CacheConfig if next(iter(settings)).startswith("kv_") else ProcessConfig
    with pytest.raises(ConfigError, match=remedy):
        kind(**settings)


def test_another_tenant_finds_nothing_of_what_was_handed_over(apart: House):
    body = {"prompt": "Whose is this? " + STORY, "max_tokens": 8, "ignore_eos": True}

    def cached(tenant: str) -> int:
        usage = apart.post("/v1/completions", tenant, **body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("a"), cached("a") > 0, cached("boss"), cached("boss") > 0] == [0, True, 0, True]
