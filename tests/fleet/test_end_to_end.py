"""`maitred route` in front of two of `maitred serve`, all processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from maitred.cli.main import main
from tests.conftest import ROOT, SERVE, ServerProcess, start_server
from tests.waiting import HANGS_S, until

CHAT = "/v1/chat/completions"
SHORT = {"max_tokens": 12, "temperature": 0.0}


@dataclass(slots=True)
class RealFleet:
    replicas: list[ServerProcess]
    router: ServerProcess
    client: httpx.Client

    def view(self) -> dict[str, Any]:
        return self.client.get("/admin/fleet").json()

    @property
    def states(self) -> list[str]:
        return sorted(replica["state"] for replica in self.view()["replicas"])


def start_router(*arguments: str) -> ServerProcess:
    process = subprocess.Popen(
        [sys.executable, "-m", "maitred", "route", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    running = ServerProcess(process)
    assert process.stdout is not None
    for line in process.stdout:
        running.lines.append(line)
        if found := re.search(r" on (http://[\w.]+:\d+)", line):
            running.url = found[1]
            break
    else:
        raise AssertionError("the router did not start:\n" + "".join(running.lines))
    threading.Thread(target=running.lines.extend, args=(process.stdout,), daemon=True).start()
    return running


@contextmanager
def real_fleet(
    folder: Path, replicas: Sequence[Sequence[str]], *router_flags: str, command: Sequence[str] = SERVE
) -> Iterator[RealFleet]:
    """A router before servers with these flags each, all ready; `folder` is for the token that they share."""
    token = folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    flags = ("--fleet-token-file", str(token))
    with ThreadPoolExecutor() as pool:
        started = list(pool.map(lambda own: start_server(*flags, *own, command=command), replicas))
    router = start_router(*(replica.url for replica in started), *flags, *router_flags)
    with httpx.Client(base_url=router.url, timeout=HANGS_S) as client:
        running = RealFleet(started, router, client)
        until(lambda: running.states == ["ready"] * len(started))
        yield running
    assert router.stop() == 0
    for replica in started:
        replica.stop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with real_fleet(tmp_path_factory.mktemp("fleet"), [("--max-num-seqs", "8")] * 2) as running:
        yield running


def body(text: str = "Tell me of the sea.", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **SHORT, **fields}


def without_steps(told: bytes) -> bytes:
    """Nor how many tokens came at once, where a stream tells text alone: the engine decides that by what steps take."""
    told = without_names(told)
    if b'"logprobs":{' in told or not told.startswith(b"data:"):
        return told
    pieces = re.findall(rb'"delta":{"content":"((?:[^"\\\\]|\\\\.)*)"}', told)
    first = told.index(b'"delta":{"content"')
    last = told.index(b'"delta":{}')
    return told[:first].rpartition(b"data:")[0] + b"".join(pieces) + told[last:]


def without_names(told: bytes) -> bytes:
    """Nor times, nor what was cached by then."""
    return re.sub(rb'"(id|created|cached_tokens|timing_ms|engine_ms)":("[^"]*"|[\d.]+|{[^}]*})', b"", told)


def test_the_router_knows_its_replicas_and_other_paths_and_models_are_answered(fleet):
    for replica in fleet.view()["replicas"]:
        assert (replica["kind"], replica["slots"]) == ("maitred", 8)
        assert replica["models"]
    model = fleet.client.get("/v1/models").json()["data"][0]["id"]
    assert fleet.client.get(f"/v1/models/{model}").json()["id"] == model
    assert fleet.client.post("/tokenize", json={"model": model, "prompt": "a b"}).json()["count"] > 0
    assert fleet.client.get("/version").json()["name"] != "maitred"


def test_answers_and_errors_are_those_of_a_replica_byte_for_byte(fleet):
    direct = fleet.replicas[0].url
    for fields in (
        {},
        {"n": 2, "seed": 5, "temperature": 1.0},
        {"logprobs": True, "top_logprobs": 2},
        {"stream": True},
    ):
        asked = body(**fields)
        told, expected = fleet.client.post(CHAT, json=asked), httpx.post(direct + CHAT, json=asked)
        assert told.status_code == expected.status_code == 200
        assert without_steps(told.content) == without_steps(expected.content)
        assert told.headers["content-type"] == expected.headers["content-type"]
        assert told.headers["x-maitred-replica"] in {r["name"] for r in fleet.view()["replicas"]}
    wrong = body(max_tokens=-1)
    told, expected = fleet.client.post(CHAT, json=wrong), httpx.post(fleet.replicas[0].url + CHAT, json=wrong)
    assert (told.status_code, told.content) == (expected.status_code, expected.content) != 200
    assert fleet.client.post(CHAT, content=b"{nonsense").status_code == 415
    headers = {"content-type": "application/json"}
    assert fleet.client.post(CHAT, content=b"{nonsense", headers=headers).json()["error"]["code"] == "invalid_json"


def test_equal_prefixes_go_where_they_are(fleet):
    def replica_of(text: str) -> str:
        return fleet.client.post(CHAT, json=body(text)).headers["x-maitred-replica"]

    def known() -> int:
        return sum(replica["prefix_keys"] for replica in fleet.view()["replicas"])

    before, story = known(), "The old captain looked at the sea and said nothing. " * 20
    first = replica_of(story)
    until(lambda: known() > before)
    assert {replica_of(story + f" What was number {number}?") for number in range(4)} == {first}


def test_many_at_once_are_all_served_within_the_slots(fleet):
    with ThreadPoolExecutor(48) as pool:
        told = list(pool.map(lambda i: fleet.client.post(CHAT, json=body(f"number {i}", max_tokens=4)), range(48)))
    assert {answer.status_code for answer in told} == {200}
    assert (len({answer.headers["x-maitred-replica"] for answer in told}), fleet.view()["held"]) == (2, 0)


def test_who_leaves_frees_a_slot_of_the_replica(fleet):
    with fleet.client.stream("POST", CHAT, json=body(stream=True, n=8, max_tokens=300, ignore_eos=True)) as told:
        pieces = told.iter_bytes()
        assert next(pieces)
    until(lambda: 'outcome="cancelled"' in fleet.client.get("/metrics").text)
    until(lambda: not sum(replica["in_flight"] for replica in fleet.view()["replicas"]))
    for replica in fleet.replicas:
        until(lambda url=replica.url: "maitred_requests_running 0.0" in httpx.get(url + "/metrics").text)


def test_one_that_is_killed_costs_no_request_that_had_no_byte_and_one_that_hangs_neither(fleet):
    doomed = fleet.replicas[1]
    os.kill(doomed.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(8) as pool:
        told = [pool.submit(fleet.client.post, CHAT, json=body(f"{n}", max_tokens=4)) for n in range(8)]
        assert {answer.result().status_code for answer in told} == {200}
    until(lambda: fleet.states == ["ejected", "ready"])
    os.kill(doomed.process.pid, signal.SIGCONT)
    until(lambda: fleet.states == ["ready", "ready"])
    with ThreadPoolExecutor(8) as pool:
        told = [pool.submit(fleet.client.post, CHAT, json=body(f"{n}", max_tokens=40)) for n in range(8)]
        os.kill(doomed.process.pid, signal.SIGKILL)
        assert {answer.result().status_code for answer in told} == {200}
    assert fleet.client.post(CHAT, json=body()).status_code == 200
    until(lambda: fleet.states == ["ejected", "ready"])


def test_wrong_words_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def error(*words: str) -> str:
        assert main(["route", *words]) in (1, 2)
        return capsys.readouterr().err

    assert "a router needs a replica" in error()
    assert "no URL of a server" in error("localhost:8000")
    assert "given twice" in error("http://a:1", "http://a:1=2")
    assert "did you mean" in error("http://a:1", "--balance", "prefx")
    assert "setting of replicas" in error("http://a:1", "--max-num-seqs", "4")
    assert "setting of replicas" in error("http://a:1", "--strict-fields")
    assert "cannot read the fleet's token" in error("http://a:1", "--fleet-token-file", str(tmp_path / "none"))
