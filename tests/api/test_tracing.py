"""OpenTelemetry traces: one span a request, one a stage, parents from and to W3C headers; and the split of the time."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Thread

import httpx
import openai
import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.fakes_api import FakeReplica, running_server
from tests.page.worlds import serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def collector() -> Iterator[tuple[str, list[Span]]]:
    """An OTLP/HTTP receiver on loopback, and the spans that reached it."""
    spans: list[Span] = []

    class Receive(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receive)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Span) -> dict[str, object]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def traced(replica: FakeReplica | None = None, **fields: object) -> tuple[list[Span], httpx.Response]:
    """All spans of one chat request, sent before the server has closed."""
    with collector() as (endpoint, spans):
        with running_server(replica, otlp_endpoint=endpoint) as server:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=ASK | fields, headers=headers)
        return spans, answer


def test_a_request_is_a_span_below_the_callers_with_the_conventions_names():
    spans, answer = traced(temperature=0.5, max_tokens=50)
    (request,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert (request.name, request.trace_id.hex(), request.parent_span_id.hex()) == ("chat tiny", TRACE, PARENT)
    told = attributes(request)
    assert (told["gen_ai.operation.name"], told["gen_ai.request.temperature"]) == ("chat", 0.5)
    assert told["gen_ai.request.max_tokens"] == 50
    assert told["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert told["http.response.status_code"] == 200
    assert "error.type" not in told
    assert answer.headers["traceparent"] == f"00-{TRACE}-{request.span_id.hex()}-01"


def test_each_sample_has_its_stages_in_order_inside_the_request():
    """Of a real engine, for one that answers at once has nothing but a queue."""
    with collector() as (endpoint, spans):
        with serving("Good evening.", otlp_endpoint=endpoint) as server:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=ASK | {"n": 2})
        assert answer.status_code == 200
    (request,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    stages = [span for span in spans if span is not request]
    assert {span.parent_span_id for span in stages} == {request.span_id}
    for index in (0, 1):
        own = [span for span in stages if attributes(span)["gen_ai.choice.index"] == index]
        assert [span.name for span in own] == ["queue", "prefill", "decode"]
        assert all(span.end_time_unix_nano > span.start_time_unix_nano for span in own)
        assert all(before.end_time_unix_nano == after.start_time_unix_nano for before, after in pairwise(own))
        assert request.start_time_unix_nano <= own[0].start_time_unix_nano
        assert own[-1].end_time_unix_nano <= request.end_time_unix_nano


def test_a_failure_is_an_error_with_its_type_and_a_refused_request_has_no_stages():
    spans, answer = traced(FakeReplica(fail_after=2))
    (request,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert answer.status_code == 500
    assert attributes(request)["error.type"] == answer.json()["error"]["code"]
    assert request.status.code == request.status.STATUS_CODE_ERROR
    spans, answer = traced(n=0)
    assert (answer.status_code, [span.name for span in spans]) == (400, ["chat"])


def test_no_receiver_hinders_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")  # s; after that a stopping server gives its spans up
    with running_server(otlp_endpoint="http://127.0.0.1:9") as server:
        assert httpx.post(f"{server.url}/v1/chat/completions", json=ASK).status_code == 200


def test_the_split_of_the_time_is_in_usage_and_a_header_also_without_traces():
    with running_server() as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=ASK)
    split = answer.json()["usage"]["timing_ms"]
    assert 0 <= split.pop("ttft") <= sum(split.values())
    assert set(split) == {"queue", "schedule", "prefill", "decode", "stall"}
    told = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert {name: float(ms) for name, ms in told.items()} == pytest.approx(split, rel=1e-3)
    with running_server() as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        chunks = list(
            client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
        )
    split = chunks[-1].usage.model_extra["timing_ms"]
    assert set(split) == {"queue", "schedule", "prefill", "decode", "stall", "ttft"}
    with running_server() as server:
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json=ASK, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}
        )
    assert "traceparent" not in answer.headers
