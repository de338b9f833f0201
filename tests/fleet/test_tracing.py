"""OpenTelemetry traces of a router: a span a request, above those of the replicas that worked on it."""

from __future__ import annotations

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.api.test_tracing import ASK, PARENT, TRACE, attributes, collector
from tests.fakes_api import FakeReplica, running_server
from tests.fleet.routers import asked, chat, client_of, completion, routed, running_router, says, whole
from tests.waiting import until

CHAT = "/v1/chat/completions"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
WELL = says(whole(completion()))


async def test_each_attempt_is_an_event_and_replicas_are_below_the_routers_span():
    with collector() as (endpoint, spans):
        traced = {"otlp_endpoint": endpoint}
        async with (
            routed(says(then="reset"), WELL, balance="round_robin", server=traced) as (running, fakes),
            client_of(running) as client,
        ):
            answers = [await client.post(CHAT, json=chat(), headers=HEADERS) for _ in range(2)]
            seen = [seen for fake in fakes for seen in asked(fake)]
            names = [fake.url.removeprefix("http://") for fake in fakes]
    twice = next(span for span in spans if len(span.events) == 2)
    assert (twice.name, twice.kind) == ("chat mini", Span.SPAN_KIND_SERVER)
    assert (twice.trace_id.hex(), twice.parent_span_id.hex()) == (TRACE, PARENT)
    assert [attributes(event)["maitred.replica"] for event in twice.events] == names
    assert [attributes(event)["maitred.attempt"] for event in twice.events] == [1, 2]
    told = attributes(twice)
    assert (told["maitred.replica"], told["http.response.status_code"]) == (names[1], 200)
    ours = {f"00-{TRACE}-{span.span_id.hex()}-01" for span in spans}
    assert {each.headers["traceparent"] for each in seen} == ours == {each.headers["traceparent"] for each in answers}
    assert {each.headers["tracestate"] for each in seen} == {"a=b"}


def test_what_a_replica_traces_is_a_child_of_what_the_router_traces():
    with (
        collector() as (endpoint, spans),
        running_server(FakeReplica(), otlp_endpoint=endpoint) as replica,
        running_router(replica.url, server={"otlp_endpoint": endpoint}) as router,
    ):
        until(lambda: router.states == ["ready"])
        assert httpx.post(f"{router.url}{CHAT}", json=ASK, headers=HEADERS).status_code == 200
    below, above = sorted((span for span in spans if span.name == "chat tiny"), key=lambda span: len(span.events))
    assert (below.trace_id, below.parent_span_id) == (above.trace_id, above.span_id)
    assert below.trace_id.hex() == TRACE


async def test_a_request_that_fails_everywhere_is_an_error_with_its_attempts():
    with collector() as (endpoint, spans):
        traced = {"otlp_endpoint": endpoint}
        async with (
            routed(says(then="reset"), server=traced, hold_timeout_s=0.2) as (running, _),
            client_of(running) as client,
        ):
            assert (await client.post(CHAT, json=chat())).status_code >= 500
    (span,) = spans
    assert span.events
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert attributes(span)["error.type"]


async def test_other_paths_have_no_span():
    with collector() as (endpoint, spans):
        async with routed(WELL, server={"otlp_endpoint": endpoint}) as (running, _), client_of(running) as client:
            await client.get("/v1/models")
            await client.post("/tokenize", json={"prompt": "a"})
    assert not spans
