"""Three questions: is it there, is it welcome to ask, and can it still decode."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from maitred.config import AdmissionConfig
from maitred.core.replica import ReplicaState
from maitred.gate.admission import AdmissionController
from maitred.tenancy.tenant import LEAST_URGENT
from tests.fakes_api import FakeReplica, RunningServer, running_server
from tests.waiting import HANGS_S, joined, until


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
        assert ready.status_code == 503
        assert ready.json()["error"]["message"] == "no decode worker is there yet"


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


def test_an_engine_that_is_silent_is_not_healthy():
    replica = MoodyReplica(mood=ReplicaState(alive=False, error="the engine's process has been silent for 7 s"))
    with running_server(replica) as server:
        answer = get(server, "/health")
        assert answer.status_code == 503
        assert "silent for 7 s" in answer.json()["error"]["message"]


def test_one_token_through_the_scheduler_as_the_least_urgent_request():
    with running_server() as server:
        answer = get(server, "/health/decode")
        assert answer.status_code == 200
        assert answer.json()["status"] == "ok"
        assert answer.json()["seconds"] >= 0
        (request,) = server.replica.submitted
        assert (request.terms.priority, request.max_tokens, request.num_prompt_tokens) == (LEAST_URGENT, 1, 1)
        assert not server.replica.live, "nothing stays behind"


def test_an_engine_that_gives_no_token_in_time_is_told_apart():
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


def test_decoding_takes_a_key_where_there_are_keys_and_health_does_not():
    with running_server(api_keys=("secret",)) as server:
        assert get(server, "/health/decode").status_code == 401
        assert get(server, "/health/decode", headers={"authorization": "Bearer secret"}).status_code == 200
        assert [get(server, path).status_code for path in ("/health", "/ready")] == [200, 200]


def test_a_gate_that_lets_nobody_of_that_class_in_says_overloaded():
    admission = AdmissionController(AdmissionConfig(max_queued_by_priority={"0": 0}), max_num_seqs=4)
    with running_server(admission=admission) as server:
        answer = get(server, "/health/decode")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")


def test_the_state_of_a_replica_in_this_process_has_no_heartbeat():
    with running_server() as server:
        page = get(server, "/metrics").text
    assert "maitred_engine_heartbeat_age_seconds 0.0" in page
    assert "maitred_engine_restarts_total 0.0" in page
