"""`maitred serve --mixed-workers 2` as people run it: chats come back, a worker is killed, sums stay exact."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from maitred.decisions.files import log_runs
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.spec import DecoderSpec
from tests.conftest import ServerProcess, start_server
from tests.model.adapters import random_tensors, write_adapter
from tests.reliability.streams import Stream
from tests.waiting import HANGS_S, is_gone, until

MODEL = "maitred-mini"
STORY = "The maître d' decides who is seated next, keeps every table full, and knows the regulars. " * 3
TENANTS = ("a", "b", "boss")


@dataclass
class House:
    """A server with two workers, tenants and a ledger."""

    server: ServerProcess
    ledger: Path

    def post(self, path: str, tenant: str = "boss", **body: Any) -> httpx.Response:
        body = {"model": MODEL, "temperature": 0, **body}
        return httpx.post(self.server.url + path, json=body, headers=key_of(tenant), timeout=HANGS_S)

    def stream(self, body: dict[str, Any]) -> Stream:
        """One that has begun."""
        stream = Stream(self.server.url, {"model": MODEL, **body}, key_of("a"))
        until(lambda: stream.num_chunks)
        return stream

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.server.url + path, headers=key_of("boss"), timeout=HANGS_S)

    @property
    def workers(self) -> list[dict[str, Any]]:
        return self.get("/admin/roles").json()["workers"]

    def pids_at(self, stream: Stream) -> list[int]:
        """Of the worker that makes it; none where it came to its end meanwhile."""
        busy: list[int] = []
        until(lambda: busy.extend(w["pid"] for w in self.workers if w["num_running"]) or busy or stream.whole)
        return busy

    def num_restarts(self) -> int:
        return sum(worker["num_restarts"] for worker in self.workers)

    def is_idle(self) -> bool:
        return not any(worker["num_running"] + worker["num_waiting"] for worker in self.workers)

    def counters(self, *names: str) -> tuple[float, ...]:
        """Of all workers; those of `sums` unless named."""
        names = names or ("prompt_tokens", "prefix_cache_hit_tokens", "generation_tokens")
        page = self.get("/metrics").text
        return tuple(float(page.split(f"\nmaitred_{name}_total ")[1].split("\n")[0]) for name in names)

    def rows(self, sql: str) -> list[sqlite3.Row]:
        with sqlite3.connect(self.ledger) as db:
            db.row_factory = sqlite3.Row
            return db.execute(sql).fetchall()

    def sums(self) -> tuple[float, ...]:
        columns = ", ".join(f"TOTAL({name}_tokens)" for name in ("prompt", "cached", "generated"))
        return tuple(self.rows(f"SELECT {columns} FROM request")[0])


def builtin_spec() -> DecoderSpec:
    with open_checkpoint(None) as checkpoint:
        return spec_from_config(checkpoint.config)


def key_of(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-{tenant}"}


@contextmanager
def running_house(folder: Path) -> Iterator[House]:
    digests = {name: hashlib.sha256(f"key-{name}".encode()).hexdigest() for name in TENANTS}
    keys = {name: {"id": f"k-{name}", "sha256": digests[name], "admin": name == "boss"} for name in TENANTS}
    table = {"tenants": {name: {"keys": [keys[name]], "adapters": ["*"]} for name in TENANTS}}
    (folder / "tenants.yaml").write_text(json.dumps(table))
    for number, name in enumerate("xy"):
        write_adapter(folder / "lora" / name, random_tensors(builtin_spec(), 4, seed=number), rank=4)
    files = {"--tenants": "tenants.yaml", "--ledger": "ledger.sqlite", "--decision-log": "log", "--lora-dir": "lora"}
    words = [word for flag, name in files.items() for word in (flag, str(folder / name))]
    words += ["--lora", f"x={folder / 'lora' / 'x'}"]
    made = House(start_server("--mixed-workers", "2", *words), folder / "ledger.sqlite")
    until(lambda: all(worker["alive"] for worker in made.workers))
    yield made
    if made.server.process.poll() is None:
        made.server.stop()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("house")) as made:
        yield made


def sampled(n: int, **fields: Any) -> dict[str, Any]:
    seeded = {"seed": 42, "temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1} if n > 1 else {}
    return {"prompt": STORY, "max_tokens": 120, "ignore_eos": True, "n": n, "temperature": 0, **seeded, **fields}


def choices(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_turns_of_a_conversation_come_back_to_the_worker_that_has_it(house: House):
    def talk(number: int) -> tuple[int, int]:
        tenant = "ab"[number % 2]
        messages = [{"role": "user", "content": f"{number}{number} guests. {STORY}"}]
        first = house.post("/v1/chat/completions", tenant, messages=messages, max_tokens=8).json()
        messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        second = house.post("/v1/chat/completions", tenant, messages=messages, max_tokens=8).json()
        return first["usage"]["prompt_tokens"], second["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(6) as people:
        for prompt, cached in people.map(talk, range(6)):
            assert cached >= prompt - 16
    until(lambda: all(worker["num_blocks_cached"] for worker in house.workers))


def test_answers_are_those_of_one_engine(house: House, server: ServerProcess):
    letters = {"structured_outputs": {"regex": "[a-f]{40}"}}
    for body in (sampled(1), sampled(4), sampled(4, stop=["seat"], max_tokens=60), sampled(2, **letters)):
        alone = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, **body}, timeout=HANGS_S)
        assert choices(house.post("/v1/completions", **body)) == choices(alone)


def test_a_stream_outlives_its_worker_and_nobody_notices(house: House):
    body = sampled(4, max_tokens=400)
    for asked in ("logprobs", "prompt_logprobs"):
        body.pop(asked, None)
    alone = [choice["text"] for choice in choices(house.post("/v1/completions", **body))]
    server, resumed = psutil.Process(house.server.process.pid), house.counters("requests_resumed")
    num_children, num_restarts = len(server.children()), house.num_restarts()
    while house.counters("requests_resumed") == resumed:  # else the stream was over before its worker was killed
        stream = house.stream(body)
        for pid in house.pids_at(stream):
            os.kill(pid, signal.SIGKILL)
        assert house.get("/health").status_code == house.get("/ready").status_code == 200
        assert stream.end() == dict(enumerate(alone))
        until(lambda: all(worker["alive"] for worker in house.workers) and house.is_idle())
    assert house.num_restarts() > num_restarts
    until(lambda: len(server.children()) == num_children)


def test_adapters_are_every_worker_s_also_of_one_that_was_started_again(house: House):
    def texts(adapter: str) -> set[str]:
        body = sampled(1, max_tokens=24) | {"model": adapter}
        with ThreadPoolExecutor(4) as people:
            answers = people.map(lambda _: house.post("/v1/completions", **body), range(4))
        return {choices(answer)[0]["text"] for answer in answers}

    loaded = house.post("/v1/load_lora_adapter", lora_name="y", lora_path="y")
    assert loaded.status_code == 200, loaded.text
    before = {name: texts(name) for name in (MODEL, "x", "y")}
    assert {name: len(told) for name, told in before.items()} == {MODEL: 1, "x": 1, "y": 1}
    assert len(set.union(*before.values())) == 3
    num_restarts = house.num_restarts()
    for worker in house.workers:
        os.kill(worker["pid"], signal.SIGKILL)
    until(lambda: sum(worker["num_restarts"] * worker["alive"] for worker in house.workers) == num_restarts + 2)
    assert {name: texts(name) for name in before} == before
    assert house.post("/v1/unload_lora_adapter", lora_name="y").status_code == 200
    assert house.post("/v1/completions", model="y", prompt=STORY).status_code == 404


def test_who_leaves_or_is_late_takes_nothing_along(house: House):
    with httpx.stream(
        "POST",
        f"{house.server.url}/v1/completions",
        json={"model": MODEL, "stream": True, **sampled(4, max_tokens=1500)},
        headers=key_of("b"),
        timeout=HANGS_S,
    ) as left:
        next(left.iter_lines())
    assert house.post("/v1/completions", "b", **sampled(1, timeout_ms=5, max_tokens=1500)).status_code == 504
    until(lambda: house.is_idle() and not sum(worker["num_blocks_used"] for worker in house.workers))


def test_sums_are_the_ledger_s_and_the_end_is_in_order(tmp_path: Path):
    with running_house(tmp_path) as house:
        for tenant, n in (("a", 1), ("b", 4), ("a", 1)):
            house.post("/v1/completions", tenant, **sampled(n))
        until(lambda: house.sums() == house.counters() and all(house.sums()))
        changed = httpx.post(f"{house.server.url}/admin/policy", json={"policy": "sjf"}, headers=key_of("boss"))
        assert changed.json()["policy"] == "sjf"
        assert house.get("/admin/queue").json()["max_num_seqs"] == 128
        assert 'maitred_worker_up{role="mixed",worker="1"} 1.0' in house.get("/metrics").text
        processes = psutil.Process(house.server.process.pid).children()
        alone = choices(house.post("/v1/completions", **sampled(1, max_tokens=400)))[0]["text"]
        stream = house.stream(sampled(1, max_tokens=400))
        assert house.server.stop() == 0
        assert stream.end() == {0: alone}
        until(lambda: all(map(is_gone, processes)))
        assert len(log_runs(tmp_path / "log")) == 2, "one of each worker"
        assert [run["closed_at"] is not None for run in house.rows("SELECT closed_at FROM run")] == [True]
