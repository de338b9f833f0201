"""The engine's process is killed under a real server: clients see a pause, or an error that says why, never silence."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from maitred.config import EngineConfig, ModelConfig, ProcessConfig, SchedulerConfig
from maitred.engine import child_process
from maitred.engine import restarts as supervisor
from maitred.engine.child_process import in_child_process
from maitred.engine.client import EngineClient
from maitred.engine.starting import StartingEngine
from maitred.engine.supervisor import Start
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.storage.ledger import Ledger
from tests.engine.fake_child import Gate, command
from tests.fakes_api import RunningServer, running_server
from tests.reliability.streams import Stream
from tests.waiting import HANGS_S, joined, until

BODY = {"model": "demo", "prompt": "one soup", "max_tokens": 60, "ignore_eos": True, "seed": 5, "temperature": 1.0}


@dataclass
class House:
    """A server, and the engine's process behind it."""

    server: RunningServer
    engine: EngineClient

    gate: Gate

    def kill(self, number: int = signal.SIGKILL, *, then: int = 10**9) -> None:
        """And wait until that was noticed; the next engine's gate is open further."""
        until(lambda: self.engine.supervisor.ready)
        before = self.engine.state().num_restarts
        os.kill(self.pid(), number)
        until(lambda: self.engine.state().num_restarts > before or self.engine.supervisor.over)
        self.gate.open_to(then)

    def pid(self) -> int:
        child = self.engine.supervisor._child
        assert child is not None
        return child.pid

    def post(self, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.server.url}/v1/completions", json={**BODY, **fields}, timeout=HANGS_S)

    def stream(self, **fields: Any) -> Stream:
        return Stream(self.server.url, {**BODY, "stream_options": {"include_usage": True}, **fields})

    def begun(self) -> list[str]:
        """Ids of those that have tokens, and have not ended."""
        return [id_ for id_, live in list(self.engine._live.items()) if live.output_token_ids]

    def all_begin(self, count: int) -> None:
        """Return when so many requests are at work. The gate was shut before they came, and opens token by token."""
        until(lambda: len(self.engine._live) == count)
        limits = itertools.chain(range(10, 290), itertools.repeat(290))  # none of them ends: they ask for 300
        until(lambda: self.gate.open_to(next(limits)) or len(self.begun()) == count)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.server.url + path, timeout=HANGS_S)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Open, until a test shuts it."""
    return Gate(tmp_path, 10**9)


@contextmanager
def house(
    gate: Gate, habits: str = "", *, ledger: Ledger | None = None, model: str | None = None, **process: Any
) -> Iterator[House]:
    start = Start(
        config=EngineConfig(model=ModelConfig(model=model), scheduler=SchedulerConfig(max_num_seqs=32)),
        process=ProcessConfig(**process),
        open=in_child_process(command(f"{gate.habit},{habits}")),
    )
    running = StartingEngine(start, on_admitted=ledger.opened if ledger is not None else None).wait()
    try:
        with running_server(running.replica, running.model, admission=running.admission, ledger=ledger) as server:
            yield House(server, running.replica, gate)
    finally:
        running.replica.stop()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(child_process, "LAST_LINE_S", HANGS_S)
    monkeypatch.setattr(child_process, "STOP_S", 0.3)


def _with_windows(folder: Path) -> str:
    """The built-in model, all of whose layers see the last 24 tokens alone."""
    shutil.copytree(BUILTIN_FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}
    (folder / "config.json").write_text(json.dumps(config | mistral))
    return str(folder)


@pytest.mark.parametrize("windows", [False, True])
def test_a_stream_pauses_and_goes_on_token_for_token(gate: Gate, windows: bool, tmp_path: Path):
    """R4, R5 for one engine; and the answer says the same as one that nothing happened to. Also where layers keep what
    their windows see."""
    n = 3
    with house(gate, model=_with_windows(tmp_path / "demo") if windows else None) as at:
        calm = at.post(n=n).json()
        gate.open_to(10)
        stream = at.stream(n=n)
        until(lambda: stream.num_chunks >= 10)
        at.kill(then=30)
        until(lambda: stream.num_chunks >= 30)
        at.kill()
        stream.join()
        assert (stream.errors, stream.whole) == ([], True)
        assert stream.texts == {choice["index"]: choice["text"] for choice in calm["choices"]}
        assert set(stream.finishes.values()) == {"length"}
        assert stream.usage["completion_tokens"] == calm["usage"]["completion_tokens"] == 60 * n
        assert at.engine.state().num_restarts == 2
        page = at.get("/metrics").text
        assert "maitred_engine_restarts_total 2.0" in page
        assert f"maitred_requests_resumed_total {float(2 * n)}" in page


def test_a_stop_string_that_spans_a_death_is_found(gate: Gate):
    """Text never left the HTTP process: half of the stop string came from an engine that is dead."""
    with house(gate) as at:
        begun = at.post(max_tokens=10).json()["choices"][0]["text"]
        whole = at.post().json()["choices"][0]["text"]
        cut = len(begun) - 2
        stop = whole[cut : cut + 4]
        assert whole.find(stop) == cut
        gate.open_to(10)
        stream = at.stream(stop=[stop])
        until(lambda: [len(live.output_token_ids) for live in list(at.engine._live.values())] == [10])
        at.kill()
        stream.join()
        assert (stream.texts[0], stream.finishes[0], stream.errors) == (whole[:cut], "stop", [])


def test_many_clients_and_two_deaths_lose_nothing(gate: Gate):
    """R4: 8 clients, streamed and not, and every sum is still exact."""
    with house(gate) as at:
        calm = [at.post(seed=seed, max_tokens=300).json()["choices"][0]["text"] for seed in range(8)]
        gate.open_to(0)
        whole: dict[int, httpx.Response] = {}
        threads = [
            threading.Thread(target=lambda seed=seed: whole.update({seed: at.post(seed=seed, max_tokens=300)}))
            for seed in range(4)
        ]
        for thread in threads:
            thread.start()
        streams = [at.stream(seed=seed, max_tokens=300) for seed in range(4, 8)]
        at.all_begin(8)
        at.kill(then=250)
        at.kill(signal.SIGSEGV)
        joined(*threads)
        for stream in streams:
            stream.join()
        assert [whole[seed].json()["choices"][0]["text"] for seed in range(4)] == calm[:4]
        assert [stream.texts[0] for stream in streams] == calm[4:]
        assert at.engine.state().num_generated_tokens == 16 * 300


def test_what_cannot_go_on_ends_with_an_error_that_says_why(gate: Gate):
    gate.open_to(0)
    with house(gate, "deterministic=0") as at:
        started = at.stream(max_tokens=300)
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(at.post(max_tokens=300)))
        asking.start()
        at.all_begin(2)
        at.kill()
        joined(asking)
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "engine_dead"
        assert "killed by SIGKILL" in answers[0].json()["error"]["message"]
        started.join()
        assert started.whole
        assert started.errors[0]["code"] == "engine_dead"
        assert "see --resume" in started.errors[0]["message"]
        assert at.post().status_code == 200, "and the next one is served"


def test_health_and_readiness_follow_the_engine(gate: Gate):
    with house(gate) as at:
        assert [at.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
        gate.shut()
        at.kill(then=-1)
        statuses = {path: at.get(path) for path in ("/health", "/ready")}
        assert [answer.status_code for answer in statuses.values()] == [503, 503]
        assert "killed by SIGKILL" in statuses["/health"].json()["error"]["message"]
        gate.open()
        until(lambda: at.get("/ready").status_code == 200)
        assert at.get("/health").status_code == 200


def test_an_engine_that_falls_silent_is_told_and_loses_no_request_when_it_speaks_again(gate: Gate):
    """R6: stopped, not dead."""
    with house(gate) as at:
        calm = at.post().json()
        gate.open_to(10)
        stream = at.stream()
        until(lambda: stream.num_chunks >= 10)
        os.kill(at.pid(), signal.SIGSTOP)
        until(lambda: at.get("/health").status_code == 503)
        assert "has been silent" in at.get("/health").json()["error"]["message"]
        os.kill(at.pid(), signal.SIGCONT)
        until(lambda: at.get("/health").status_code == 200)
        gate.open()
        stream.join()
        assert (stream.errors, stream.whole, stream.texts[0]) == ([], True, calm["choices"][0]["text"])
        assert at.engine.state().num_restarts == 0


def test_an_engine_that_is_given_up_leaves_a_server_that_says_so(gate: Gate):
    gate.open_to(10)
    with house(gate, max_restarts=0) as at:
        stream = at.stream()
        until(lambda: stream.num_chunks > 3)
        at.kill()
        stream.join()
        assert stream.errors[0]["code"] == "engine_dead"
        assert stream.whole
        for path in ("/health", "/ready", "/health/decode"):
            assert at.get(path).status_code == 503, path
        assert "killed by SIGKILL" in at.get("/health").json()["error"]["message"]
        assert "maitred_engine_up 0.0" in at.get("/metrics").text


def test_the_ledger_stays_exact_over_a_death(tmp_path: Path, gate: Gate):
    gate.open_to(0)
    ledger = Ledger(tmp_path / "ledger.sqlite", model="demo")
    try:
        with house(gate, ledger=ledger) as at:
            stream = at.stream(n=3, max_tokens=300)
            at.all_begin(3)
            at.kill()
            stream.join()
            ledger.flush()
            state = at.engine.state()
            rows = _rows(tmp_path / "ledger.sqlite")
            assert [row[0] for row in rows] == ["length"] * 3
            assert sum(row[1] for row in rows) == state.num_prompt_tokens == stream.usage["prompt_tokens"]
            assert sum(row[2] for row in rows) == state.num_generated_tokens == 900
    finally:
        ledger.close()


def _rows(path: Path) -> list[tuple[str, int, int]]:
    with sqlite3.connect(path) as db:
        return db.execute("SELECT status, prompt_tokens, generated_tokens FROM request").fetchall()
