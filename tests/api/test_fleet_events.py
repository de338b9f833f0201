"""What a replica tells routers: which prefixes its cache holds, as they come and go, its load, and to whom."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest

import maitred
from maitred.api.http.fleet_headers import FleetToken
from maitred.api.ops import fleet_feed
from maitred.config import CacheConfig, EngineConfig, ModelConfig, ProcessConfig, SchedulerConfig
from maitred.core.errors import ConfigError
from maitred.core.request import SamplingParams
from maitred.engine import restarts
from maitred.engine.build import load_engine
from maitred.engine.engine_thread import in_thread
from maitred.engine.intake import make_requests
from maitred.engine.loop import LoadedEngine
from maitred.engine.starting import Engine, StartingEngine
from maitred.engine.supervisor import Start
from maitred.fleet.launch import TOKEN_VARIABLE
from maitred.fleet.prefix_index import Hit, PrefixIndex
from maitred.fleet.prefix_keys import prefix_keys, read_body
from maitred.fleet.stored_keys import KeyBlock, TokenLengths, ends_of_tokens, tokens_of_keys
from maitred.fleet.told import Began, FleetEvent, KeysChanged, Load
from maitred.scheduler.engine_core import EngineCore
from tests.api.test_tenants import table_of
from tests.fakes_api import FakeReplica, FakeTenants, RunningServer, running_server
from tests.fleet.routers import running_router
from tests.waiting import HANGS_S, joined, until

TOKEN = "0123456789abcdef-of-the-fleet"
CONFIG = EngineConfig(
    model=ModelConfig(num_threads=1, max_model_len=512),
    cache=CacheConfig(kv_cache_memory_bytes=4 * 2**20),
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256),
)


@dataclass
class Router:
    """Listens to one replica, and keeps an index of its keys as a router does."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    began: list[Began] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self._decode = msgspec.json.Decoder(FleetEvent).decode
        self._leaving = False
        self._thread = threading.Thread(target=self._listen, name="router")
        self._thread.start()

    def _listen(self) -> None:
        with httpx.stream("GET", f"{self.url}/fleet/events", headers=self.headers, timeout=HANGS_S) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.ended = True
                elif line.startswith("data: "):
                    self._hear(self._decode(line[6:]))
                if self._leaving:
                    return

    def _hear(self, event: FleetEvent) -> None:
        match event:
            case Began():
                self.index.forgot(0)
                self.began.append(event)
            case KeysChanged(stored, removed):
                self.index.removed(0, removed)
                self.index.stored(0, stored)
            case Load():
                self.loads.append(event)

    @property
    def keys(self) -> set[int]:
        return set(self.index._keys.get(0, ()))

    def beat(self) -> Load:
        """The next one."""
        before = len(self.loads)
        until(lambda: len(self.loads) > before)
        return self.loads[-1]

    def leave(self) -> None:
        self._leaving = True
        joined(self._thread)


@contextmanager
def listening(server: RunningServer, token: str = TOKEN) -> Iterator[Router]:
    """From the first beat on, which comes when all keys were told."""
    router = Router(server.url, {"x-maitred-fleet-token": token})
    try:
        until(lambda: router.loads)
        yield router
    finally:
        router.leave()


@pytest.fixture(scope="module")
def cores() -> list[EngineCore]:
    return []


@pytest.fixture(scope="module")
def engine(cores: list[EngineCore]) -> Iterator[Engine]:
    def build(*words: Any) -> LoadedEngine:
        loaded = load_engine(*words)
        cores.append(loaded.core)
        return loaded

    start = Start(config=CONFIG, process=ProcessConfig(), served_model_names=("mini",), open=in_thread(build))
    built = StartingEngine(start).wait()
    yield built
    built.replica.stop()


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("fleet") / "token"
    path.write_text(TOKEN + "\n")
    return str(path)


@pytest.fixture(scope="module")
def real(engine: Engine, token_file: str) -> Iterator[RunningServer]:
    with running_server(engine.replica, engine.model, fleet_token_file=token_file) as server:
        yield server


def words(seed: int, count: int = 120) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(["soup", "tea", "bread", "table", "salt", "guest", "evening"]) for _ in range(count))


def body_of(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"model": "mini", "messages": messages, "max_tokens": 2, "temperature": 0, **fields}


def post(server: RunningServer, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> Any:
    answer = httpx.post(server.url + path, content=json.dumps(body), headers={**JSON, **headers}, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


JSON = {"content-type": "application/json"}


def keys_of(body: dict[str, Any], salt: str = "") -> tuple[int, ...]:
    return prefix_keys(read_body(json.dumps(body).encode()), salt).keys


def held_of(engine: Engine, core: EngineCore, body: dict[str, Any]) -> set[int]:
    """The keys up to the last one whose block the cache holds: what a router should know."""
    model = engine.model
    sent = read_body(json.dumps(body).encode())
    prompt = model.chat_template.render(body["messages"])
    (spec,) = make_requests(
        model, prompt, SamplingParams(max_tokens=1), request_id="x", now=0.0, add_special_tokens=False
    )
    found, ids = prefix_keys(sent), spec.prompt_token_ids
    ends = ends_of_tokens(prompt, ids, TokenLengths(model.tokenizer.token_bytes))
    cached = set(core.scheduler.kv_cache._cache.hashes.values())
    depth = 0
    for number, count in enumerate(tokens_of_keys(sent, found, prompt, lambda: ends), start=1):
        num_blocks = count // model.block_size
        if num_blocks and spec.block_hashes[num_blocks - 1] in cached:
            depth = number
    return set(found.keys[:depth])


def test_the_events_say_just_what_the_cache_holds_while_it_evicts(real, engine, cores):
    shared = words(0, 60)
    bodies = [body_of(shared, words(seed, 40), words(seed + 100, 60)) for seed in range(1, 15)]
    with listening(real) as router:
        evicted = False
        for body in bodies:
            before = router.keys
            post(real, body)
            until(lambda: router.keys == set().union(*(held_of(engine, cores[0], each) for each in bodies)))
            assert held_of(engine, cores[0], body)
            evicted = evicted or not before <= router.keys
        assert evicted
        hits = router.index.hits(keys_of(bodies[-1]), 1)
        assert hits == [Hit(len(held_of(engine, cores[0], bodies[-1])), 1)]
        assert hits[0].num_keys >= len(keys_of(bodies[-1])) - 1


def test_a_second_router_and_one_that_comes_again_know_what_the_first_did(real, engine, cores):
    body = body_of(words(20), words(21), words(22, 20))
    with listening(real) as first:
        post(real, body)
        until(lambda: held_of(engine, cores[0], body) <= first.keys != set())
        with listening(real) as second:
            until(lambda: second.keys == first.keys)
            post(real, body_of(words(23)))
            until(lambda: second.keys == first.keys != set() and set(keys_of(body_of(words(23)))) & second.keys)
    body = body_of(words(30))
    with listening(real) as router:
        post(real, body)
        until(lambda: set(keys_of(body)) & router.keys)
        known = router.keys
    with listening(real) as again:
        assert again.keys == known


def test_nothing_is_kept_for_nobody(real, engine, cores, monkeypatch):
    monkeypatch.setattr(fleet_feed, "LINGER_S", 0.0)
    feed = real.server.config.app.app.fleet
    with listening(real):
        assert feed.is_on
        until(lambda: cores[0].block_changes is not None)
    until(lambda: not feed.is_on)
    until(lambda: cores[0].block_changes is None)
    post(real, body_of(words(40)))
    assert feed.keys.stored == set()


def test_a_beat_and_the_version_tell_load_speed_and_what_the_server_is(real, engine):
    with listening(real) as router:
        began = router.began[0].replica
        assert (began.name, began.models, began.slots, began.block_size) == ("maitred", ("mini",), 4, 16)
        assert began.fingerprint.revision == engine.model.revision
        assert began.fingerprint.isa
        assert router.beat().num_free_blocks == engine.replica.state().num_blocks
        post(real, body_of(words(50), max_tokens=40))
        until(lambda: router.beat().prefill_tokens_per_s > 0 and router.loads[-1].decode_tokens_per_s > 0)
        assert router.loads[-1].state == "ready"
    told = httpx.get(f"{real.url}/version").json()
    assert (told["version"], told["name"], told["models"], told["slots"]) == (
        maitred.__version__, "maitred", ["mini"], 4,
    )  # fmt: skip
    assert told["fingerprint"]["revision"] == engine.model.revision


def test_prompts_of_all_kinds_have_keys_salted_as_a_trusted_router_says(real):
    text = {"model": "mini", "prompt": words(60), "max_tokens": 1}
    tokens = {"model": "mini", "prompt": [7 + i % 90 for i in range(200)], "max_tokens": 1}
    several = {"model": "mini", "prompt": [words(61), words(62)], "max_tokens": 1}
    with listening(real) as router:
        for body in (text, tokens, several):
            post(real, body, "/v1/completions")
            until(lambda body=body: len(router.index.hits(keys_of(body), 1)) == 1)
    body = body_of(words(70))
    with listening(real) as router:
        post(real, body, **{"x-maitred-salt": "group", "x-maitred-fleet-token": TOKEN})
        until(lambda: set(keys_of(body, "group")) & router.keys)
        post(real, body, **{"x-maitred-salt": "forged"})
        until(lambda: set(keys_of(body)) & router.keys)
        assert not set(keys_of(body, "forged")) & router.keys


def test_only_the_token_or_an_administrator_opens_the_events(token_file):
    with running_server(FakeReplica(), api_keys=("key",), fleet_token_file=token_file) as server:

        def status(**headers: str) -> int:
            with httpx.stream("GET", f"{server.url}/fleet/events", headers=headers) as answer:
                return answer.status_code

        assert (status(), status(authorization="Bearer key")) == (401, 403)
        assert status(**{"x-maitred-fleet-token": "wrong"}) == 401
        assert status(**{"x-maitred-fleet-token": TOKEN}) == 200
        models = httpx.get(f"{server.url}/v1/models", headers={"x-maitred-fleet-token": TOKEN})
        assert models.status_code == 401  # it opens nothing of clients'
        version = httpx.get(f"{server.url}/version", headers={"x-maitred-fleet-token": TOKEN})
        assert version.json()["name"] == "maitred"
    tenants = FakeTenants(table_of({"cook": {}, "boss": {}}))
    with running_server(FakeReplica(), tenants=tenants) as server:
        for key, status in (("cook", 403), ("boss", 200)):
            headers = {"authorization": f"Bearer {key}"}
            with httpx.stream("GET", f"{server.url}/fleet/events", headers=headers) as answer:
                assert answer.status_code == status


def test_a_launched_replica_has_its_token_from_the_environment_and_tells_its_load(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with running_server(FakeReplica()) as server, listening(server) as router:
        assert router.beat().state == "ready"
    with running_server(FakeReplica()) as server, listening(server) as router:
        post(server, {**body_of("hi"), "model": "tiny"})
        assert router.beat().num_blocks == 100
        assert router.keys == set()


@pytest.mark.parametrize("content", [None, "", "short", "two lines of token\nand another line"])
def test_a_token_file_that_is_none_is_said_at_the_start(tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="token"), running_server(FakeReplica(), fleet_token_file=str(path)):
        pass


def test_the_events_go_on_when_the_engine_is_killed_and_begin_again_with_the_next(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    start = Start(config=CONFIG, process=ProcessConfig(), served_model_names=("mini",))
    built = StartingEngine(start).wait()
    try:
        with running_server(built.replica, built.model) as server, listening(server) as router:
            first, second = body_of(words(80)), body_of(words(81))
            post(server, first)
            until(lambda: set(keys_of(first)) & router.keys)
            os.kill(built.replica.supervisor._child.pid, signal.SIGKILL)
            until(lambda: not router.keys)
            until(lambda: router.loads[-1].state != "ready")
            post(server, second)
            until(lambda: set(keys_of(second)) & router.keys)
            assert not set(keys_of(first)) & router.keys
            until(lambda: router.beat().state == "ready")
            post(server, first)  # which it knows again at once
            until(lambda: set(keys_of(first)) & router.keys)
            assert len(router.began) == 1
    finally:
        built.replica.stop()


def test_a_router_hears_that_the_server_drains_and_the_end():
    with running_server(FakeReplica()) as server, listening(server) as router:
        app = server.server.config.app.app
        app.in_flight._empty.clear()  # somebody waits for an answer
        app.in_flight.draining = True
        until(lambda: router.beat().state == "draining")
        assert not router.ended
        app.in_flight._empty.set()
        until(lambda: router.ended)


def test_a_router_that_does_not_read_is_cut_and_gets_all_when_it_comes_again():
    with running_server(FakeReplica(), send_timeout_s=0.2) as server:
        keys, known = server.server.config.app.app.fleet.keys, range(2**63, 2**63 + 200_000)  # 4 MB to tell
        keys.blocks_changed([b"block"], [])
        keys.note([KeyBlock(key, b"block" if key == known[-1] else None) for key in known])
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", server.port))
            deaf.sendall(b"GET /fleet/events HTTP/1.1\r\nhost: x\r\n\r\n")
            until(lambda: keys.num_listeners)
            until(lambda: not keys.num_listeners)
        with listening(server) as again:
            assert len(again.keys) == len(known)


def test_a_router_holds_limits_of_computing_by_what_its_replicas_tell(real):
    tenants = FakeTenants(table_of({"few": {"compute_ms_per_minute": 1}, "many": {}}))
    body = body_of(words(70), max_tokens=8)
    with running_router(real.url, token=FleetToken(TOKEN.encode()), tenants=tenants) as router:
        until(lambda: router.states == ["ready"] and router.router.fleet.replicas[real.url[7:]].facts.has_beats)
        few, many = ({"authorization": f"Bearer {name}", **JSON} for name in ("few", "many"))

        def status(headers: dict[str, str]) -> int:
            asked = json.dumps(body).encode()
            return httpx.post(
                f"{router.url}/v1/chat/completions", content=asked, headers=headers, timeout=HANGS_S
            ).status_code

        assert status(few) == 200
        until(lambda: status(few) == 429)
        assert status(many) == 200
