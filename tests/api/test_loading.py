"""While the engine loads the server says so, and turns from one to the other without refusing a connection."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from maitred.api.http.app import App
from maitred.api.http.asgi import TOLD_AGAIN_S, AsgiApp, Outage
from maitred.api.http.auth import Authenticator
from maitred.api.http.server import HttpServer
from maitred.api.ops.observer import Observer
from maitred.api.routes import make_routes
from maitred.config import AdmissionConfig, ServerConfig
from maitred.core.clock import ManualClock, WallClock
from maitred.core.errors import CheckpointError, EngineDead
from maitred.core.replica import ReplicaState
from maitred.engine.replica import Replica
from maitred.gate.admission import AdmissionController
from maitred.tenancy.tenant import LEAST_URGENT
from tests.fakes_api import FakeReplica, RunningServer, make_model, running_server
from tests.waiting import HANGS_S, joined, until

ASK = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}


@dataclass
class Came:
    replica: Replica
    model: Any = field(default_factory=make_model)
    admission: AdmissionController | None = None
    start_phases: dict[str, float] = field(default_factory=dict)


@dataclass
class HeldStart:
    """An engine that comes, or fails, when the test says so."""

    outcome: Came | Exception = field(default_factory=lambda: Came(FakeReplica()))
    may_end: threading.Event = field(default_factory=threading.Event)
    given_up: bool = False

    def wait(self) -> Came:
        assert self.may_end.wait(HANGS_S)
        if self.given_up:
            raise EngineDead("the engine was given up while it loaded")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def checked(self, engine: Came) -> None:
        """Nothing more is looked at."""

    def give_up(self) -> None:
        self.given_up = True
        self.may_end.set()


@dataclass
class Opening:
    url: str
    starting: HeldStart
    server: HttpServer
    thread: threading.Thread
    opened: threading.Event

    def get(self, path: str, **fields: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=HANGS_S, **fields)

    def post(self, path: str, body: dict[str, Any], **fields: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=HANGS_S, **fields)

    def load(self) -> None:
        self.starting.may_end.set()
        assert self.opened.wait(HANGS_S)


@contextmanager
def opening(starting: HeldStart | None = None, **config: Any) -> Iterator[Opening]:
    """A server that listens; its engine is on its way."""
    starting = starting if starting is not None else HeldStart()
    settings = ServerConfig(port=0, **config)
    clock = WallClock()
    app = App(settings, clock=clock, observer=Observer(settings, clock), authenticator=Authenticator(settings.api_keys))
    opened = threading.Event()
    server = HttpServer(
        AsgiApp(app, make_routes()), settings, starting=starting, on_open=lambda host, port: opened.set()
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # so that nobody who comes before the loop runs is refused
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield Opening(f"http://127.0.0.1:{port}", starting, server, thread, opened)
        finally:
            server.should_exit = True
            joined(thread)


def test_a_server_whose_engine_loads_lives_but_is_not_ready():
    with opening() as server:
        assert server.get("/health").status_code == 200
        for path in ("/ready", "/readyz"):
            answer = server.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_unavailable")
            assert "loading" in answer.json()["error"]["message"]
        assert not server.opened.is_set()
        server.load()
        assert [server.get(path).status_code for path in ("/health", "/ready", "/readyz")] == [200, 200, 200]


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", ASK),
    ("/v1/chat/completions", {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/v1/models", None),
    ("/health/decode", None),
    ("/admin/live", None),
    ("/nowhere", None),
])  # fmt: skip
def test_what_needs_the_model_is_told_when_to_come_again(path: str, body: dict[str, Any] | None):
    with opening() as server:
        answer = server.get(path) if body is None else server.post(path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (503, "server_error", "server_unavailable")
        assert error["message"] == "the engine is loading; try again"
        assert int(answer.headers["retry-after"]) >= 1


def test_a_connection_that_saw_it_load_is_served_on_and_metrics_count_on():
    with opening() as server, httpx.Client(base_url=server.url, timeout=HANGS_S) as client:
        assert client.post("/v1/completions", json=ASK).status_code == 503
        server.load()
        assert client.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == "Hell"
    with opening() as server:
        assert server.post("/v1/completions", ASK).status_code == 503
        before = server.get("/metrics").text
        assert "maitred_engine_up 0.0" in before
        assert "maitred_info{" not in before
        server.load()
        after = server.get("/metrics").text
        assert "maitred_engine_up 1.0" in after
        assert 'model="tiny"' in after
        assert 'maitred_http_requests_total{route="other",status="503"} 1.0' in after


def test_keys_count_before_the_engine_is_there():
    with opening(api_keys=("secret",)) as server:
        assert server.post("/v1/completions", ASK).status_code == 401
        assert server.get("/metrics").status_code == 401
        told = server.post("/v1/completions", ASK, headers={"authorization": "Bearer secret"})
        assert (told.status_code, server.get("/ready").status_code) == (503, 503)


def test_what_keeps_the_engine_from_loading_ends_the_server():
    starting = HeldStart(CheckpointError("config.json is no valid JSON; download it again"))
    with opening(starting) as server:
        assert server.get("/health").status_code == 200
        starting.may_end.set()
        joined(server.thread)
        assert server.server.failure is starting.outcome
        assert not server.opened.is_set()


def test_who_ends_the_server_while_it_loads_does_not_wait_for_the_engine():
    with opening() as server:
        assert server.get("/ready").status_code == 503
        server.server.servers[0].get_loop().call_soon_threadsafe(server.server._signalled, signal.SIGTERM)
        joined(server.thread)
        assert server.starting.given_up
        assert server.server.failure is None
        assert not server.opened.is_set()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record for record in caplog.records if record.name == "maitred.api" and record.levelno > logging.DEBUG]
    return [getattr(record, "fields", {})["error"] for record in told]


def test_who_polls_leaves_nothing_in_the_log_which_says_once_why_requests_are_sent_away(
    caplog: pytest.LogCaptureFixture,
):
    with opening() as server:
        for path in ("/ready", "/readyz") * 3:
            assert server.get(path).status_code == 503
    assert warnings_of(caplog) == []
    with opening() as server:
        for _ in range(5):
            assert server.post("/v1/completions", ASK).status_code == 503
        assert warnings_of(caplog) == ["the engine is loading; try again"]
        server.load()
        assert server.post("/v1/completions", ASK).status_code == 200
        server.server.app.in_flight.draining = True
        for _ in range(5):
            assert server.post("/v1/completions", ASK).status_code == 503
        server.server.app.in_flight.draining = False
    assert warnings_of(caplog) == ["the engine is loading; try again", "the server is shutting down; try again"]


def test_the_log_says_again_after_a_while_how_many_were_sent_away(caplog: pytest.LogCaptureFixture):
    clock = ManualClock()
    outage = Outage(clock)
    for _ in range(4):
        outage.tell("a", "the engine is loading")
    clock.advance(TOLD_AGAIN_S)
    outage.tell("b", "the engine is loading")
    told = [getattr(record, "fields", {}) for record in caplog.records if record.levelno == logging.WARNING]
    assert [(line["request_id"], line["others_before"]) for line in told] == [("a", None), ("b", 3)]


def get(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    return httpx.get(server.url + path, timeout=HANGS_S, **fields)


@dataclass
class MoodyReplica(FakeReplica):
    """Says of itself what a test wants."""

    mood: ReplicaState | None = None

    def state(self) -> ReplicaState:
        return self.mood if self.mood is not None else super().state()


def test_a_server_that_lacks_a_role_is_healthy_and_not_ready():
    with running_server(MoodyReplica(mood=ReplicaState(lacking="no decode worker is there yet"))) as server:
        assert get(server, "/health").status_code == 200
        ready = get(server, "/ready")
        assert (ready.status_code, ready.json()["error"]["message"]) == (503, "no decode worker is there yet")


def test_an_engine_that_loads_is_neither_healthy_nor_ready_and_says_so():
    replica = MoodyReplica(mood=ReplicaState(alive=False, loading=True, error="killed; it is being started again"))
    with running_server(replica) as server:
        health, ready = get(server, "/health"), get(server, "/ready")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "server_unavailable")
        assert "loading" in ready.json()["error"]["message"]
        assert ready.headers["retry-after"]
        replica.mood = None
        assert [get(server, path).status_code for path in ("/health", "/ready", "/readyz")] == [200, 200, 200]


def test_one_token_through_the_scheduler_as_the_least_urgent_and_none_in_time_is_told_apart():
    with running_server() as server:
        answer = get(server, "/health/decode")
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
        assert answer.json()["seconds"] >= 0
        (request,) = server.replica.submitted
        assert (request.terms.priority, request.max_tokens, request.num_prompt_tokens) == (LEAST_URGENT, 1, 1)
        assert not server.replica.live, "nothing stays behind"
    replica = FakeReplica(queued=True)
    with running_server(replica, decode_timeout_s=0.05) as server:
        answer = get(server, "/health/decode")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_unavailable")
        assert "no token in 0.05 s" in answer.json()["error"]["message"]
        assert not replica.live, "and it is not left in the queue"
        assert get(server, "/health").status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [({"dead": "cuda is gone"}, 503, "engine_dead"), ({"fail_after": 0}, 500, "generation_failed")],
)
def test_an_engine_that_cannot_decode_says_why(fields: dict[str, Any], status: int, code: str):
    with running_server(FakeReplica(**fields)) as server:
        answer = get(server, "/health/decode")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_flood_of_questions_is_one_request():
    replica = FakeReplica(queued=True)
    answers: list[httpx.Response] = []
    with running_server(replica, decode_timeout_s=HANGS_S) as server:
        threads = [threading.Thread(target=lambda: answers.append(get(server, "/health/decode"))) for _ in range(20)]
        for thread in threads:
            thread.start()
        until(lambda: "maitred_http_requests_in_flight 21.0" in get(server, "/metrics").text)
        until(lambda: replica.live)
        assert len(replica.submitted) == 1
        (request_id,) = replica.live
        server.server.servers[0].get_loop().call_soon_threadsafe(replica.abort, request_id)
        joined(*threads)
    assert {answer.status_code for answer in answers} == {503}  # somebody else ended it


def test_decoding_takes_a_key_and_a_gate_that_lets_nobody_in_says_overloaded():
    with running_server(api_keys=("secret",)) as server:
        assert get(server, "/health/decode").status_code == 401
        assert get(server, "/health/decode", headers={"authorization": "Bearer secret"}).status_code == 200
        assert [get(server, path).status_code for path in ("/health", "/ready")] == [200, 200]
    admission = AdmissionController(AdmissionConfig(max_queued_by_priority={"0": 0}), max_num_seqs=4)
    with running_server(admission=admission) as server:
        answer = get(server, "/health/decode")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
    with running_server() as server:
        page = get(server, "/metrics").text
    assert "maitred_engine_heartbeat_age_seconds 0.0" in page
    assert "maitred_engine_restarts_total 0.0" in page
