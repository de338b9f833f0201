"""Pages for machines: metrics, their documentation, the OpenAPI document, version, log lines."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path

import httpx
import msgspec
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

import maitred
from maitred.api.http.logs import JsonFormatter, TextFormatter
from maitred.api.ops.openapi import openapi_document
from maitred.api.routes import make_routes
from maitred.core.metrics import METRICS, MetricKind, metrics_document
from tests.api.conftest import MESSAGES
from tests.fakes_api import FakeReplica, running_server, says

ROUTES = make_routes()

DOCS = Path(__file__).resolve().parents[2] / "docs"


def page_of(url: str, accept: str = "") -> str:
    return httpx.get(f"{url}/metrics", headers={"accept": accept} if accept else {}).text


def test_every_declared_metric_is_on_the_page_with_its_kind(served):
    families = {family.name: family for family in text_string_to_metric_families(page_of(served.url))}
    for metric in METRICS:
        family = families.pop(metric.name.removesuffix("_total"))
        assert family.type == metric.kind.value
        assert family.documentation == metric.help
    assert not families


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


def test_openmetrics_is_spoken_when_asked_for(served):
    page = page_of(served.url, "application/openmetrics-text; version=1.0.0")
    assert page.endswith("# EOF\n")
    assert list(parse_openmetrics(page))


def test_the_documentation_is_the_declaration():
    assert (DOCS / "metrics.md").read_text() == metrics_document(), "python -m maitred.core.metrics > docs/metrics.md"


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


def test_unknown_paths_make_no_new_series(served):
    for index in range(20):
        httpx.get(f"{served.url}/made-up-{index}")
    page = page_of(served.url)
    assert "made-up" not in page
    assert 'route="other",status="404"' in page


def test_two_apps_live_in_one_process():
    with running_server() as one, running_server() as other:
        httpx.get(f"{one.url}/version")
        assert 'route="/version"' in page_of(one.url)
        assert 'route="/version"' not in page_of(other.url)


def test_the_openapi_document_names_every_route_and_resolves(http):
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


def test_the_schemas_hold_the_answers(http):
    """A cheap check without a validator: every required property is in a real answer, and no other is."""
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES}).json()
    assert set(schemas["ChatCompletion"]["required"]) <= set(answer) <= set(schemas["ChatCompletion"]["properties"])
    text = http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}).json()
    assert set(schemas["Completion"]["required"]) <= set(text) <= set(schemas["Completion"]["properties"])


def test_version(http):
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
        "event": "access",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "request_id": "id-1",
        "level": "info",
    }
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
