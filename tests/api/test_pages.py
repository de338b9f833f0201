"""Pages for machines: metrics, their documentation, the OpenAPI document, version, log lines."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse

import maitred
from maitred.api.http.logs import MAX_KEPT_CHARS, JsonFormatter, LogStream, TextFormatter
from maitred.api.ops.metrics_page import VLLM_NAMES
from maitred.api.ops.openapi import openapi_document
from maitred.api.routes import make_routes
from maitred.core.metrics import METRICS, MetricKind, metrics_document
from maitred.core.objectives import broken_by, met, new_pace, percentile
from maitred.core.request import FinishReason, RequestSpec
from maitred.core.step import RequestProgress
from tests.api.conftest import MESSAGES
from tests.cli.running import maitred_thread
from tests.fakes_api import FakeReplica, RunningServer, running_server, says
from tests.waiting import HANGS_S, until

ROUTES = make_routes()

DOCS = Path(__file__).resolve().parents[2] / "docs"


def page_of(url: str, accept: str = "") -> str:
    return httpx.get(f"{url}/metrics", headers={"accept": accept} if accept else {}).text


def test_every_metric_is_on_the_page_in_both_forms_and_in_the_documentation(served):
    families = {family.name: family for family in text_string_to_metric_families(page_of(served.url))}
    for metric in METRICS:
        family = families.pop(metric.name.removesuffix("_total"))
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
    assert not families
    page = page_of(served.url, "application/openmetrics-text; version=1.0.0")
    assert page.endswith("# EOF\n")
    assert list(parse_openmetrics(page))
    assert (DOCS / "metrics.md").read_text() == metrics_document(), "python -m maitred.core.metrics > docs/metrics.md"


def test_names_follow_the_prometheus_rules():
    for metric in METRICS:
        assert re.fullmatch(r"maitred_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert not re.search(r"_(ms|millis|us|minutes|percent|kb|mb)(_|$)", metric.name), "base units only"
        assert metric.help.endswith(".")
        if metric.unit in ("seconds", "ratio"):
            assert f"_{metric.unit}" in metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
        if metric.kind is MetricKind.HISTOGRAM:
            assert not metric.name.endswith(("_count", "_sum", "_bucket", "_info"))
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_gauges_show_the_engine_and_histograms_the_requests():
    replica = FakeReplica(says("abc"))
    with running_server(replica) as server:
        for _ in range(3):
            httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "ab", "n": 2})
        page = page_of(server.url)
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert values["maitred_requests_running",] == values["maitred_kv_blocks_used",] == 0
    assert values["maitred_kv_blocks_capacity",] == 100
    assert values["maitred_requests_finished_total", "stop"] == 3
    assert values["maitred_http_requests_total", "/v1/completions", "200"] == 3
    assert values["maitred_request_ttft_seconds_count",] == values["maitred_request_e2e_seconds_count",] == 6
    assert values["maitred_request_generation_tokens_sum",] == 6 * 4
    assert values["maitred_request_prompt_tokens_bucket", "2.0"] == 6
    assert values["maitred_request_inter_token_latency_seconds_count",] == 6 * 3
    assert values["maitred_info", "tiny", maitred.__version__] == 1


def test_unknown_paths_make_no_new_series_and_two_apps_live_in_one_process(served):
    for index in range(20):
        httpx.get(f"{served.url}/made-up-{index}")
    page = page_of(served.url)
    assert "made-up" not in page
    assert 'route="other",status="404"' in page
    with running_server() as one, running_server() as other:
        httpx.get(f"{one.url}/version")
        assert 'route="/version"' in page_of(one.url)
        assert 'route="/version"' not in page_of(other.url)


def test_the_openapi_document_names_every_route_and_its_schemas_hold_the_answers(http):
    document = http.get("/openapi.json").json()
    assert document == json.loads(msgspec.json.encode(openapi_document(ROUTES)))
    assert document["openapi"].startswith("3.1")
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert described == {(route.method, route.template) for route in ROUTES.routes}
    schemas = document["components"]["schemas"]
    for reference in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)):
        assert reference in schemas
    error = schemas["ErrorObject"]
    assert sorted(error["required"]) == ["code", "message", "param", "type"]
    ids = {document["paths"][route.template][route.method.lower()]["operationId"] for route in ROUTES.routes}
    assert len(ids) == len(ROUTES.routes)
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES}).json()
    assert set(schemas["ChatCompletion"]["required"]) <= set(answer) <= set(schemas["ChatCompletion"]["properties"])
    text = http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}).json()
    assert set(schemas["Completion"]["required"]) <= set(text) <= set(schemas["Completion"]["properties"])
    assert http.get("/version").json()["version"] == maitred.__version__


def captured(formatter: logging.Formatter) -> tuple[io.StringIO, logging.Handler]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logging.getLogger("maitred").addHandler(handler)
    logging.getLogger("maitred").setLevel(logging.INFO)
    return stream, handler


def access_lines(formatter: logging.Formatter, path: str, body: dict[str, object] | None) -> list[str]:
    stream, handler = captured(formatter)
    try:
        with running_server() as server:
            httpx.request("POST" if body else "GET", server.url + path, json=body, headers={"x-request-id": "id-1"})
    finally:
        logging.getLogger("maitred").removeHandler(handler)
        logging.getLogger("maitred").setLevel(logging.NOTSET)
    return stream.getvalue().splitlines()


def test_one_json_object_is_logged_per_request_without_the_prompt():
    body = {"model": "tiny", "prompt": "my secret", "max_tokens": 3, "user": "someone"}
    (line,) = access_lines(JsonFormatter(), "/v1/completions", body)
    entry = json.loads(line)
    assert {name: entry[name] for name in ("event", "method", "path", "status", "request_id", "level")} == {
        "event": "access", "method": "POST", "path": "/v1/completions", "status": 200, "request_id": "id-1",
        "level": "info",
    }  # fmt: skip
    assert (entry["prompt_tokens"], entry["completion_tokens"], entry["model"]) == (9, 3, "tiny")
    assert "secret" not in line
    assert "Hel" not in line
    assert "someone" not in line


def test_files_that_the_page_asks_for_are_no_news_unless_they_fail():
    """A visit is one line, not thirty."""
    assert access_lines(TextFormatter(), "/static/main.js", None) == []
    (visit,) = access_lines(TextFormatter(), "/", None)
    (missing,) = access_lines(TextFormatter(), "/static/missing.js", None)
    assert "status=200" in visit
    assert "status=404" in missing


def test_a_path_cannot_forge_a_log_line():
    for formatter in (TextFormatter(), JsonFormatter()):
        (line,) = access_lines(formatter, "/x%0a12:00:00%20INFO%20forged%1b[31m%E2%80%AE", None)
        assert ("\x1b" not in line and "\u202e" not in line) or isinstance(formatter, JsonFormatter)
        assert line.count("\n") == 0
        assert "404" in line


LINE = "x" * 999 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_what_is_written_is_read_in_order_and_a_part_of_a_line_after_a_flush(pipe):
    reader, writer = pipe
    stream = LogStream(writer)
    for text in ("one\n", "tw", "o", "\nthree\n\udc80", "\n"):
        stream.write(text)
    assert stream.drain(HANGS_S)
    assert (os.read(reader, 1000), stream.num_dropped) == (b"one\ntwo\nthree\n\\udc80\n", 0)
    reader, writer = pipe
    stream = LogStream(writer)
    stream.write("packing: 50%")
    stream.flush()
    assert os.read(reader, 1000) == b"packing: 50%"


def test_nobody_waits_for_a_reader_that_does_not_read_and_it_hears_what_it_missed(pipe, caplog):
    reader, writer = pipe
    stream = LogStream(writer)
    num_lines = 3 * MAX_KEPT_CHARS // len(LINE)
    for _ in range(num_lines):
        stream.write(LINE)
    assert not stream.drain(0.01)
    num_dropped = stream.num_dropped
    assert num_lines / 2 < num_dropped < num_lines
    num_read = 0
    while num_read < (num_lines - num_dropped) * len(LINE):
        num_read += len(os.read(reader, 1 << 16))
    until(lambda: f"{num_dropped} of its lines were dropped" in caplog.text)
    stream.write("and on\n")
    assert (os.read(reader, 1000), stream.num_dropped) == (b"and on\n", num_dropped)


def test_a_reader_that_left_is_no_error(pipe):
    reader, writer = pipe
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, reader)  # the pipe has no reader any more
    os.close(null)
    stream = LogStream(writer)
    stream.write("lost\n")
    assert stream.drain(HANGS_S)
    assert stream.num_dropped == 1


ASK = {"model": "tiny", "prompt": "hello"}


Page = dict[str, list[tuple[dict[str, str], float]]]


def page_at(url: str) -> Page:
    families = parse(httpx.get(f"{url}/metrics").text)
    return {family.name: [(s.labels, s.value) for s in family.samples] for family in families}


def families_of(**config: object) -> Page:
    with running_server(**config) as server:
        httpx.post(f"{server.url}/v1/completions", json=ASK).raise_for_status()
        return page_at(server.url)


@contextmanager
def in_flight(server: RunningServer, count: int) -> Iterator[None]:
    """So many samples of a client that leaves when the block ends."""
    body = json.dumps({**ASK, "n": count}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head % len(body) + body)
        until(lambda: len(server.replica.live) == count)
        yield


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
@pytest.mark.parametrize(("queued", "load"), [(False, (0.06, 0, 3)), (True, (0, 3, 0))], ids=["running", "waiting"])
def test_a_balancer_that_asks_is_told_the_load_as_text(path: str, queued: bool, load: tuple[float, int, int]):
    replica = FakeReplica(held=True, queued=queued)
    with running_server(replica) as server, in_flight(server, 3):
        told = httpx.get(server.url + path, headers={"endpoint-load-metrics-format": "TEXT"}).headers
    assert told["endpoint-load-metrics"] == (
        "TEXT named_metrics.kv_cache_usage_perc={}, named_metrics.num_requests_waiting={}, "
        "named_metrics.num_requests_running={}".format(*load)
    )


def test_and_as_json_with_the_answer_to_a_request():
    with running_server() as server:
        told = httpx.post(
            f"{server.url}/v1/completions", json=ASK, headers={"endpoint-load-metrics-format": "json"}
        ).headers["endpoint-load-metrics"]
    form, _, body = told.partition(" ")
    assert form == "JSON"
    assert set(json.loads(body)["named_metrics"]) == {
        "kv_cache_usage_perc",
        "num_requests_waiting",
        "num_requests_running",
    }


@pytest.mark.parametrize("form", ["", "BIN", "TEXT\tx"])
def test_a_form_nobody_knows_is_passed_over(form: str):
    with running_server() as server:
        answer = httpx.get(f"{server.url}/health", headers={"endpoint-load-metrics-format": form})
    assert answer.status_code == 200
    assert "endpoint-load-metrics" not in answer.headers


def test_those_who_do_not_ask_are_told_nothing():
    with running_server() as server:
        assert "endpoint-load-metrics" not in httpx.get(f"{server.url}/health").headers


def test_the_page_has_vllms_names_only_when_asked():
    assert not [name for name in families_of() if name.startswith("vllm")]
    page = families_of(metrics_compat="vllm")
    assert set(VLLM_NAMES.values()) <= set(page)
    assert {metric.name.removesuffix("_total") for metric in METRICS} <= set(page), "ours stay"


def test_aliases_say_the_same_with_vllms_labels():
    page = families_of(metrics_compat="vllm")
    assert ({"model_name": "tiny", "engine": "0", "finished_reason": "stop"}, 3.0) in page["vllm:request_success"]
    ours = {labels["le"]: value for labels, value in page["maitred_request_ttft_seconds"] if "le" in labels}
    theirs = {labels["le"]: value for labels, value in page["vllm:time_to_first_token_seconds"] if "le" in labels}
    assert (theirs, max(theirs.values())) == (ours, 1)


@pytest.mark.parametrize(("queued", "load"), [(False, (0.06, 0, 3)), (True, (0, 3, 0))], ids=["running", "waiting"])
def test_a_gateway_finds_queue_running_and_cache(queued: bool, load: tuple[float, int, int]):
    replica = FakeReplica(held=True, queued=queued)
    with running_server(replica) as server, in_flight(server, 3):
        page = page_at(server.url)
    names = ("maitred_kv_usage_ratio", "maitred_requests_waiting", "maitred_requests_running")
    assert [page[name] for name in names] == [[({}, value)] for value in load]
    assert page["maitred_cache_config_info"] == [({"block_size": "16", "num_blocks": "100"}, 1.0)]


SLOS = {"ttft": 2.0, "itl": 10.0, "tpot": 10.0, "e2e": 20.0}
LOAD = "--endpoint chat --num-requests 40 --concurrency 40 --input-len 8 --output-len 8"
WORDS = [word for name, bound in SLOS.items() for word in ("--slo", f"{name}:{bound}s")]


class Uneven(FakeReplica):
    """Of four requests one has its first token too late, and one fails."""

    async def _progress(self, request: RequestSpec) -> AsyncIterator[RequestProgress]:
        number = self.submitted.index(request)
        if number % 4 == 1:
            await asyncio.sleep(1.5 * SLOS["ttft"])
        if number % 4 == 3:
            yield RequestProgress(request.request_id, finish_reason=FinishReason.ERROR, error="logits are NaN")
            return
        async for progress in super()._progress(request):
            yield progress


def counted(url: str) -> dict[tuple[str, bool], float]:
    """By objective, and whether it was met."""
    page = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = next(family for family in page if family.name == "maitred_requests_in_objective").samples
    return {(sample.labels["objective"], sample.labels["met"] == "true"): sample.value for sample in samples}


async def test_the_server_counts_as_its_load_test_does(tmp_path: Path):
    path = tmp_path / "run.json"
    with running_server(Uneven(), slo=tuple(f"{name}:{bound}s" for name, bound in SLOS.items())) as server:
        words = ("bench", "serve", "--url", server.url, "--json", str(path), *LOAD.split(), *WORDS)
        assert await maitred_thread(*words) == 0
        counts = counted(server.url)
    result = json.loads(path.read_text())["result"]
    assert 0 < result["num_good"] < 40
    assert sum(counts["all", was_met] for was_met in (True, False)) == 40
    assert counts["all", True] / 40 == pytest.approx(result["num_good"] / 40, abs=0.02)
    assert counts["ttft", False] == counts["itl", False] + 10  # who failed met none; who was late has other merits


def test_what_the_client_did_wrong_counts_for_nobody():
    with running_server(FakeReplica(), slo=("ttft:10s",)) as server:
        for body in ({"model": "tiny"}, {"model": "nobody's", "prompt": "x"}):
            assert httpx.post(f"{server.url}/v1/completions", json=body).is_client_error
        assert counted(server.url) == {}
        httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x"}).raise_for_status()
        assert counted(server.url) == {
            ("ttft", True): 1, ("ttft", False): 0, ("all", True): 1, ("all", False): 0
        }  # fmt: skip


def test_an_objective_bounds_what_the_load_test_measures():
    pace = new_pace(keeps_gaps=True)
    for now, num_tokens in ((10.5, 2), (10.6, 1), (10.9, 3)):
        pace.came(now, num_tokens)
    gaps = [0.1, 0.1, 0.1, 0.1]
    assert pace.itl_p99_s() == pytest.approx(percentile(gaps, 99))
    assert pace.tpot_s() == pytest.approx(0.1)
    bounds = {"ttft": 0.4, "itl": 0.11, "tpot": 0.09, "e2e": 1.0}
    assert met(bounds, [pace], 10.0) == {"ttft": False, "itl": True, "tpot": False, "e2e": True}


@pytest.mark.parametrize(("gone_after_s", "objectives"), [(0.5, set()), (1.5, {"ttft"}), (9.0, {"ttft", "e2e"})])
def test_who_waited_longer_than_promised_and_left_was_not_served(gone_after_s: float, objectives: set[str]):
    for paces in ([], [new_pace(keeps_gaps=False)]):
        broken = broken_by({"ttft": 1.0, "e2e": 5.0}, paces, 0.0, gone_after_s)
        assert {name for name, is_broken in broken.items() if is_broken} == objectives
