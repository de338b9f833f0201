"""The queue and the policy over HTTP, with a real engine behind a slow executor."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from maitred.config import AdmissionConfig
from maitred.core.clock import WallClock
from maitred.core.request import FinishReason
from maitred.core.step import ModelOutput, SchedulerOutput
from maitred.engine.client import EngineClient
from maitred.gate.admission import AdmissionController
from maitred.scheduler.engine_core import EngineCore
from tests.engine.worlds import client_of
from tests.fakes import FakeExecutor, make_scheduler
from tests.fakes_api import FakeReplica, make_model, running_server
from tests.waiting import HANGS_S, joined, until

HEADERS = {"authorization": "Bearer key"}
AGEING_S = 1000.0  # a class is worth more than any pause between two requests


class SlowExecutor(FakeExecutor):
    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        time.sleep(0.005)
        return super().execute(plan)


def make_engine(policy: str = "priority") -> EngineClient:
    scheduler = make_scheduler(max_num_seqs=1, num_blocks=10_000, policy=policy, ageing_s=AGEING_S)
    return client_of(EngineCore(scheduler, SlowExecutor(lambda *_: ord("a")), WallClock()))


@pytest.fixture
def server() -> Iterator[httpx.Client]:
    engine = make_engine()
    with (
        running_server(engine, make_model(block_size=4, max_model_len=30_000), api_keys=("key",)) as running,
        httpx.Client(base_url=running.url, headers=HEADERS, timeout=HANGS_S) as http,
    ):
        yield http
    engine.stop()


def complete(http: httpx.Client, priority: int, max_tokens: int, answers: list[httpx.Response]) -> threading.Thread:
    body = {"model": "tiny", "prompt": "one soup", "max_tokens": max_tokens, "priority": priority, "ignore_eos": True}
    thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body)))
    thread.start()
    return thread


def queue_of(http: httpx.Client, num_waiting: int) -> dict:
    views: list[dict] = []
    until(lambda: views.append(http.get("/admin/queue").json()) or views[-1]["num_waiting"] == num_waiting)
    return views[-1]


@contextmanager
def one_in_the_slot(http: httpx.Client) -> Iterator[None]:
    """An answer of two minutes at least is under way, until the block ends."""
    body = {"model": "tiny", "prompt": "one soup", "max_tokens": 25_000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("data:"))  # a slow one is kept open by comments
        yield


def test_the_queue_shows_place_class_age_cost_reason_and_score(server: httpx.Client):
    answers: list[httpx.Response] = []
    with one_in_the_slot(server):
        threads = [complete(server, 2, 5, answers)]
        queue_of(server, 1)
        threads.append(complete(server, 1, 6, answers))
        view = queue_of(server, 2)
        page = server.get("/admin/queue", params={"offset": 1, "limit": 1}).json()
    assert (view["num_running"], view["max_num_seqs"], view["policy"]) == (1, 1, "priority")
    first, second = view["waiting"]
    assert (first["position"], first["priority"], second["position"], second["priority"]) == (0, 1, 1, 2)
    assert second["age_s"] >= first["age_s"] > 0
    assert first["num_prompt_tokens"] == 8
    assert 8 < first["predicted_cost_tokens"] <= 14
    assert first["reason"] == "first in line: all 1 slots are taken"
    assert second["reason"] == "behind 1 other by policy priority"
    assert first["terms"]["priority_s"] == AGEING_S
    assert [w["request_id"] for w in page["waiting"]] == [second["request_id"]]
    joined(*threads)
    assert [answer.status_code for answer in answers] == [200] * 2


def test_a_policy_changes_under_load_and_nobody_is_lost(server: httpx.Client):
    answers: list[httpx.Response] = []
    with one_in_the_slot(server):
        threads = [complete(server, i % 3, 10, answers) for i in range(12)]
        queue_of(server, 12)
        for name, ageing_s in (("fcfs", 1.0), ("priority", 7.5), ("fcfs", 3.0)):
            changed = server.post("/admin/policy", json={"policy": name, "ageing_s": ageing_s})
            assert changed.status_code == 200
            assert changed.json() == server.get("/admin/policy").json()
            assert (changed.json()["policy"], changed.json()["parameters"]["ageing_s"]) == (name, ageing_s)
    joined(*threads)
    assert [answer.status_code for answer in answers] == [200] * 12, answers[0].text
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["a" * 10] * 12


def test_a_policys_arguments_come_and_go_with_it(server: httpx.Client):
    asked = {"policy": "sjf", "policy_args": {"kv_block_weight": 2, "ageing_tokens_per_s": 50}}
    view = server.post("/admin/policy", json=asked).json()
    assert view["parameters"]["policy_args"] == {"kv_block_weight": 2, "ageing_tokens_per_s": 50}
    assert view["arguments"] == {"ageing_tokens_per_s": 50.0, "output_token_weight": 2.0, "kv_block_weight": 2.0}
    by_name = server.post("/admin/policy", json={"ageing_tokens_per_s": 70.0}).json()
    assert by_name["arguments"]["ageing_tokens_per_s"] == 70.0
    assert by_name["arguments"]["kv_block_weight"] == 2.0
    assert server.post("/admin/policy", json={"policy": "fcfs"}).json()["arguments"] == {}


def test_a_priority_that_was_heeded_is_no_error_after_a_change_of_policy(server: httpx.Client):
    assert server.post("/admin/policy", json={"policy": "fcfs"}).status_code == 200
    answers: list[httpx.Response] = []
    joined(complete(server, 2, 1, answers))
    assert answers[0].status_code == 200, answers[0].text


def test_admission_heeds_the_policy_in_force():
    admission, engine = AdmissionController(AdmissionConfig(), max_num_seqs=1), make_engine("fcfs")
    with running_server(engine, make_model(block_size=4), admission=admission) as running:
        for policy, heeded in (("priority", True), ("vtc", False)):
            assert httpx.post(f"{running.url}/admin/policy", json={"policy": policy}).status_code == 200
            assert admission._priority_first is heeded
    engine.stop()


def test_where_no_priority_was_ever_heeded_one_is_refused_with_the_policy_and_those_that_heed_it():
    engine = make_engine("sjf")
    with (
        running_server(engine, make_model(block_size=4), policy="sjf") as running,
        httpx.Client(base_url=running.url, timeout=HANGS_S) as http,
    ):
        answers: list[httpx.Response] = []
        joined(complete(http, 2, 1, answers))
        http.post("/admin/policy", json={"policy": "edf"})
        joined(complete(http, 2, 1, answers))
    engine.stop()
    assert [answer.status_code for answer in answers] == [400, 200]
    error = answers[0].json()["error"]
    assert error["param"] == "priority"
    assert "the policy in force, sjf, heeds none" in error["message"]
    assert error["message"].endswith(" --policy edf, interactive, least_slack, priority")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"policy": "best"}, "choose one of "),
        ({"polcy": "fcfs"}, "choose from ageing_s"),
        ({"max_num_seqs": 7}, "no setting of a policy"),
        ({"policy_args": {"speed": 1}}, "the policy priority has no argument 'speed'; choose from ageing_s"),
        ({"policy_args": {"ageing_s": -1}}, "must be from 0.001 to 1e+09"),
        ({"ageing_s": "long"}, "Expected `float`"),
        ({"ageing_s": -1}, "it must be from"),
    ],
)
def test_what_cannot_be_is_refused_with_the_choices_and_changes_nothing(server: httpx.Client, body: dict, said: str):
    before = server.get("/admin/policy").json()
    refused = server.post("/admin/policy", json=body)
    assert refused.status_code == 400
    assert said in refused.json()["error"]["message"]
    assert server.get("/admin/policy").json() == before


@pytest.mark.parametrize("query", ["limit=1001", "limit=x", "offset=-1", "offset=99999999999999", "limit="])
def test_a_page_that_cannot_be_is_refused(server: httpx.Client, query: str):
    assert server.get(f"/admin/queue?{query}").status_code == 400


def test_a_key_is_needed(server: httpx.Client):
    for path in ("/admin/queue", "/admin/policy"):
        assert httpx.get(f"{server.base_url}{path}").status_code == 401


def test_a_replica_without_an_engine_of_its_own_says_so():
    with running_server(FakeReplica()) as running:
        answer = httpx.get(f"{running.url}/admin/queue")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")


def test_a_stopped_engine_answers_503():
    engine = make_engine()
    with running_server(engine, make_model(block_size=4)) as running:
        loop = running.server.servers[0].get_loop()  # which listens to the engine until it is told that it ends
        asyncio.run_coroutine_threadsafe(engine.close(), loop).result(HANGS_S)
        assert httpx.get(f"{running.url}/admin/queue").status_code == 503
    assert engine.state().num_finished[FinishReason.ERROR] == 0
