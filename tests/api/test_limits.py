"""Time limits of requests, and what a client hears when they run out or the server is full."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from maitred.api.dialects.openai.schemas import CompletionRequest
from maitred.api.generate.dialect import time_limits
from maitred.config import AdmissionConfig
from maitred.core.clock import ManualClock, WallClock
from maitred.core.errors import InvalidRequest
from maitred.core.request import FinishReason
from maitred.core.step import ModelOutput, SchedulerOutput
from maitred.engine.client import EngineClient
from maitred.gate.admission import AdmissionController
from maitred.gate.gate import TimeLimits
from maitred.scheduler.engine_core import EngineCore
from tests.engine.worlds import client_of
from tests.fakes import MODEL, FakeExecutor, GatedExecutor, make_scheduler
from tests.fakes_api import FakeReplica, make_model, running_server
from tests.waiting import HANGS_S, joined, until

PATH = "/v1/completions"


def asked(headers: dict[str, str] | None = None, **fields: Any) -> TimeLimits:
    body = CompletionRequest(model="tiny", prompt="x", **fields)
    return time_limits(body, {name.encode(): value.encode() for name, value in (headers or {}).items()})


def test_limits_come_from_fields_or_headers_and_reach_the_engine():
    assert asked() == TimeLimits(None, None, None)
    assert asked(ttft_slo_ms=500, queue_timeout_ms=1000, timeout_ms=2000) == TimeLimits(0.5, 1.0, 2.0)
    headers = {"x-slo-ttft-ms": "250", "x-queue-timeout-ms": "1e3", "x-request-timeout-ms": "1500.5"}
    assert asked(headers) == TimeLimits(0.25, 1.0, 1.5005)
    assert asked(headers, timeout_ms=700).timeout_s == 0.7
    replica = FakeReplica()
    with running_server(replica) as server:
        complete(server.url, {"x-slo-ttft-ms": "400"}, timeout_ms=5000, queue_timeout_ms=1000)
    (request,) = replica.submitted
    assert request.terms.ttft_slo_s == 0.4
    assert request.terms.start_by == pytest.approx(request.arrived_at + 1.0)
    assert request.terms.finish_by == pytest.approx(request.arrived_at + 5.0)


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "86400001", "\xb2", "9" * 400])
def test_a_header_must_be_milliseconds(value: str):
    with pytest.raises(InvalidRequest, match="x-slo-ttft-ms") as refused:
        time_limits(CompletionRequest(model="m", prompt="x"), {b"x-slo-ttft-ms": value.encode("latin-1")})
    assert refused.value.param == "x-slo-ttft-ms"


class Place(NamedTuple):
    """A server that serves one request at a time; its steps are let pass and its clock is turned by the test."""

    url: str
    steps: GatedExecutor
    admission: AdmissionController
    clock: ManualClock


@contextmanager
def one_slot(**config: Any) -> Iterator[Place]:
    clock, executor = ManualClock(1000.0), GatedExecutor(lambda request_id, position: ord("a"))
    admission = AdmissionController(AdmissionConfig(**config), max_num_seqs=1)
    scheduler = make_scheduler(max_num_seqs=1, num_blocks=4096, max_num_batched_tokens=512)
    engine = client_of(EngineCore(scheduler, executor, clock), clock=clock)
    model = make_model(revision=MODEL, block_size=4, max_model_len=16_000)
    try:
        with running_server(engine, model, admission=admission, clock=clock) as server:
            yield Place(server.url, executor, admission, clock)
    finally:
        executor.open()
        engine.stop()


def complete(url: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "ignore_eos": True, **fields}
    return httpx.post(url + PATH, json=body, headers=headers, timeout=HANGS_S)


@contextmanager
def one_in_the_slot(place: Place) -> Iterator[None]:
    """An answer under way, of which one token came and no more will; ends when the block does."""
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 15_000, "stream": True}
    place.steps.let(1)
    with httpx.stream("POST", place.url + PATH, json=body, timeout=HANGS_S) as response:
        lines = response.iter_lines()  # closing it would close the stream
        assert next(line for line in lines if not line.startswith(":"))  # a slow machine keeps it alive by comments
        assert (place.admission.num_inside, place.admission.num_waiting) == (1, 0)
        yield


def begun(pool: ThreadPoolExecutor, place: Place, *asked: Any, **fields: Any) -> Future[httpx.Response]:
    """A request that got its first token and stands in its second step."""
    num_begun = place.steps.num_begun
    answer = pool.submit(complete, place.url, *asked, max_tokens=15_000, **fields)
    place.steps.let(1)
    until(lambda: place.steps.num_begun > num_begun + 1)
    return answer


def test_a_request_that_waited_too_long_may_come_again():
    with one_slot() as place, ThreadPoolExecutor() as pool, one_in_the_slot(place):
        late = pool.submit(complete, place.url, queue_timeout_ms=30)
        until(lambda: place.admission.num_inside == 2)  # it came before the clock goes on
        place.clock.advance(0.031)
        until(lambda: place.steps.let(1) or late.done())
        answer = late.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-should-retry"] == "true"


def test_a_request_that_took_too_long_need_not_come_again():
    with one_slot() as place, ThreadPoolExecutor() as pool:
        late = begun(pool, place, {"x-request-timeout-ms": "50"})
        place.clock.advance(0.051)
        place.steps.let(1)
        answer = late.result(HANGS_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
        assert answer.headers["x-should-retry"] == "false"
        place.steps.open()
        assert complete(place.url).status_code == 200, "its slot is free again"
        page = httpx.get(place.url + "/metrics").text
    assert 'maitred_requests_finished_total{reason="timeout"} 1.0' in page


def test_a_stream_that_took_too_long_ends_with_an_error_clients_raise():
    with one_slot() as place, ThreadPoolExecutor() as pool:
        late = begun(pool, place, stream=True, timeout_ms=50)
        place.clock.advance(0.051)
        place.steps.let(1)
        lines = late.result(HANGS_S).text.split("\n\n")
        assert lines[-2] == "data: [DONE]"
        assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "request_timeout"
        client = openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0)
        place.steps.let(1)
        stream = client.completions.create(
            model="tiny", prompt="hi", max_tokens=15_000, stream=True, extra_body={"timeout_ms": 50}
        )
        next(iter(stream))
        place.clock.advance(0.051)
        place.steps.open()
        with pytest.raises(openai.APIError, match="not done after"):
            list(stream)


def test_who_finds_the_queue_full_hears_it_at_once_and_when_to_come_again():
    with one_slot(max_queued_requests=1) as place, ThreadPoolExecutor() as pool, one_in_the_slot(place):
        waiting = pool.submit(complete, place.url)
        until(lambda: place.admission.num_waiting == 1)
        answer = complete(place.url)  # at once: no step passes before it is there
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
        assert answer.headers["x-should-retry"] == "true"
        assert 1 <= int(answer.headers["retry-after"]) <= 120
        page = httpx.get(place.url + "/metrics").text
        assert 'maitred_admission_refused_total{reason="requests"} 1.0' in page
        place.steps.open()
        assert waiting.result(HANGS_S).status_code == 200


def test_who_is_shed_for_a_more_urgent_one_hears_it_and_may_come_again():
    with one_slot(max_queued_requests=1) as place, ThreadPoolExecutor() as pool, one_in_the_slot(place):
        low = pool.submit(complete, place.url, priority=5)
        until(lambda: place.admission.num_waiting == 1)
        urgent = pool.submit(complete, place.url, priority=0)
        until(lambda: place.steps.let(1) or low.done())
        answer = low.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
        assert "made room for a more urgent one" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "true"
        place.steps.open()
        assert urgent.result(HANGS_S).status_code == 200


@pytest.mark.parametrize("fields", [{"timeout_ms": 0}, {"ttft_slo_ms": -5}, {"queue_timeout_ms": 1e12}])
def test_limits_out_of_range_are_refused_with_the_field(fields: dict[str, float]):
    with running_server() as server:
        answer = complete(server.url, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(fields))


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


def complete_in_thread(
    http: httpx.Client, priority: int, max_tokens: int, answers: list[httpx.Response]
) -> threading.Thread:
    body = {"model": "tiny", "prompt": "one soup", "max_tokens": max_tokens, "priority": priority, "ignore_eos": True}
    thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body)))
    thread.start()
    return thread


def queue_of(http: httpx.Client, num_waiting: int) -> dict:
    views: list[dict] = []
    until(lambda: views.append(http.get("/admin/queue").json()) or views[-1]["num_waiting"] == num_waiting)
    return views[-1]


@contextmanager
def one_answering(http: httpx.Client) -> Iterator[None]:
    """An answer of two minutes at least is under way, until the block ends."""
    body = {"model": "tiny", "prompt": "one soup", "max_tokens": 25_000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("data:"))  # a slow one is kept open by comments
        yield


def test_the_queue_shows_place_class_age_cost_reason_and_score(server: httpx.Client):
    answers: list[httpx.Response] = []
    with one_answering(server):
        threads = [complete_in_thread(server, 2, 5, answers)]
        queue_of(server, 1)
        threads.append(complete_in_thread(server, 1, 6, answers))
        view = queue_of(server, 2)
        page = server.get("/admin/queue", params={"offset": 1, "limit": 1}).json()
    assert (view["num_running"], view["max_num_seqs"], view["policy"]) == (1, 1, "priority")
    first, second = view["waiting"]
    assert (first["position"], first["priority"], second["position"], second["priority"]) == (0, 1, 1, 2)
    assert second["age_s"] >= first["age_s"] > 0
    assert first["num_prompt_tokens"] == 8
    assert 8 < first["predicted_cost_tokens"] <= 14
    assert first["reason"] == "first in line: all 1 slots are taken"
    assert (second["reason"], first["terms"]["priority_s"]) == ("behind 1 other by policy priority", AGEING_S)
    assert [w["request_id"] for w in page["waiting"]] == [second["request_id"]]
    joined(*threads)
    assert [answer.status_code for answer in answers] == [200] * 2


def test_a_policy_changes_under_load_and_nobody_is_lost(server: httpx.Client):
    answers: list[httpx.Response] = []
    with one_answering(server):
        threads = [complete_in_thread(server, i % 3, 10, answers) for i in range(12)]
        queue_of(server, 12)
        for name, ageing_s in (("fcfs", 1.0), ("priority", 7.5), ("fcfs", 3.0)):
            changed = server.post("/admin/policy", json={"policy": name, "ageing_s": ageing_s})
            assert changed.status_code == 200
            assert changed.json() == server.get("/admin/policy").json()
            assert (changed.json()["policy"], changed.json()["parameters"]["ageing_s"]) == (name, ageing_s)
    joined(*threads)
    assert [answer.status_code for answer in answers] == [200] * 12, answers[0].text
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["a" * 10] * 12


def test_a_policys_arguments_come_and_go_with_it_and_a_key_is_needed(server: httpx.Client):
    asked = {"policy": "sjf", "policy_args": {"kv_block_weight": 2, "ageing_tokens_per_s": 50}}
    view = server.post("/admin/policy", json=asked).json()
    assert view["parameters"]["policy_args"] == {"kv_block_weight": 2, "ageing_tokens_per_s": 50}
    assert view["arguments"] == {"ageing_tokens_per_s": 50.0, "output_token_weight": 2.0, "kv_block_weight": 2.0}
    by_name = server.post("/admin/policy", json={"ageing_tokens_per_s": 70.0}).json()
    assert by_name["arguments"]["ageing_tokens_per_s"] == 70.0
    assert by_name["arguments"]["kv_block_weight"] == 2.0
    assert server.post("/admin/policy", json={"policy": "fcfs"}).json()["arguments"] == {}
    assert server.post("/admin/policy", json={"policy": "fcfs"}).status_code == 200
    answers: list[httpx.Response] = []
    joined(complete_in_thread(server, 2, 1, answers))
    assert answers[0].status_code == 200, answers[0].text
    for path in ("/admin/queue", "/admin/policy"):
        assert httpx.get(f"{server.base_url}{path}").status_code == 401


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
        joined(complete_in_thread(http, 2, 1, answers))
        http.post("/admin/policy", json={"policy": "edf"})
        joined(complete_in_thread(http, 2, 1, answers))
    engine.stop()
    assert [answer.status_code for answer in answers] == [400, 200]
    error = answers[0].json()["error"]
    assert error["param"] == "priority"
    assert "the policy in force, sjf, heeds none" in error["message"]
    assert error["message"].endswith(" --policy edf, interactive, least_slack, priority")


@pytest.mark.parametrize(("body", "said"), [
    ({"policy": "best"}, "choose one of "),
    ({"polcy": "fcfs"}, "choose from ageing_s"),
    ({"max_num_seqs": 7}, "no setting of a policy"),
    ({"policy_args": {"speed": 1}}, "the policy priority has no argument 'speed'; choose from ageing_s"),
    ({"policy_args": {"ageing_s": -1}}, "must be from 0.001 to 1e+09"),
    ({"ageing_s": "long"}, "Expected `float`"),
    ({"ageing_s": -1}, "it must be from"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_the_choices_and_changes_nothing(server: httpx.Client, body: dict, said: str):
    before = server.get("/admin/policy").json()
    refused = server.post("/admin/policy", json=body)
    assert refused.status_code == 400
    assert said in refused.json()["error"]["message"]
    assert server.get("/admin/policy").json() == before


@pytest.mark.parametrize("query", ["limit=1001", "limit=x", "offset=-1", "offset=99999999999999", "limit="])
def test_a_page_that_cannot_be_is_refused(server: httpx.Client, query: str):
    assert server.get(f"/admin/queue?{query}").status_code == 400


def test_a_replica_without_an_engine_says_so_and_a_stopped_one_answers_503():
    with running_server(FakeReplica()) as running:
        answer = httpx.get(f"{running.url}/admin/queue")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
    engine = make_engine()
    with running_server(engine, make_model(block_size=4)) as running:
        loop = running.server.servers[0].get_loop()  # which listens to the engine until it is told that it ends
        asyncio.run_coroutine_threadsafe(engine.close(), loop).result(HANGS_S)
        assert httpx.get(f"{running.url}/admin/queue").status_code == 503
    assert engine.state().num_finished[FinishReason.ERROR] == 0
