"""OpenTelemetry traces (extra `otel`): a server span for each outcome, and under it one span a stage and sample.

Names follow the gen_ai semantic conventions (open-telemetry/semantic-conventions-genai): `chat MODEL` with
gen_ai.request.*, gen_ai.response.* and gen_ai.usage.*; stages are queue, prefill and decode. Parents come in and go out
as W3C `traceparent`. This file alone imports opentelemetry, and is imported only when traces are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.http.errors import CLIENT_GONE_STATUS
from maitred.api.http.exchange import Exchange

NS = 1_000_000_000
_SAMPLING = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


class Stage(NamedTuple):
    """A part of a sample's stay, in seconds since its arrival."""

    name: str
    began_s: float
    ended_s: float


class Tracing:
    """Begins and ends spans; sends them in the background, and drops them rather than delay a request."""

    def __init__(self, exporter: SpanExporter, *, version: str) -> None:
        resource = Resource.create({"service.name": "maitred", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("maitred", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, exchange: Exchange) -> Span:
        """The span of one HTTP request, a child of the one that its `traceparent` names."""
        names = ("traceparent", "tracestate")
        sent = {
            name: exchange.headers[name.encode()].decode("latin-1")
            for name in names
            if name.encode() in exchange.headers
        }
        return self._tracer.start_span(
            exchange.scope["path"], context=self._propagator.extract(sent), kind=SpanKind.SERVER
        )

    def header_of(self, span: Span) -> tuple[bytes, bytes]:
        """`traceparent` for the answer."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return b"traceparent", carrier.get("traceparent", "").encode()

    def end(self, span: Span, operation: str, exchange: Exchange, now: float) -> None:
        """`now` is of the clock that requests' times are of. Names the span, ends it and those of its stages."""
        wall_ns = time.time_ns()
        status, outcome = exchange.status or CLIENT_GONE_STATUS, exchange.outcome
        model = exchange.log.get("model")
        span.update_name(f"{operation} {model}" if model else operation)
        span.set_attributes({"http.route": exchange.route_name, "http.response.status_code": status})
        routed = {f"maitred.{name}": exchange.log.get(name) for name in ("replica", "held_ms")}  # by a router
        span.set_attributes({name: value for name, value in routed.items() if value is not None})
        if outcome is not None:
            span.set_attributes(_attributes(operation, exchange, outcome))
            for sample in outcome.samples:
                self._stages(span, sample, wall_ns - int((now - sample.request.arrived_at) * NS))
        if status >= 500 or "error" in exchange.log:
            kind = str(exchange.log.get("error", status))
            span.set_attribute("error.type", kind)
            span.set_status(Status(StatusCode.ERROR, kind))
        span.end(wall_ns)

    def _stages(self, parent: Span, sample: Sample, arrived_ns: int) -> None:
        for stage in stages(sample):
            span = self._tracer.start_span(
                stage.name,
                context=set_span_in_context(parent),
                start_time=arrived_ns + int(stage.began_s * NS),
                attributes={"gen_ai.choice.index": sample.index},
            )
            span.end(arrived_ns + int(stage.ended_s * NS))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def stages(sample: Sample) -> Iterator[Stage]:
    """The stages of a sample, in order and without gaps; those it did not reach are left out."""
    timing = sample.timing
    if timing is None:
        return
    yield Stage("queue", 0.0, timing.queue_s)
    if timing.ttft_s > timing.queue_s:
        yield Stage("prefill", timing.queue_s, timing.ttft_s)
    if timing.total_s > timing.ttft_s:
        yield Stage("decode", timing.ttft_s, timing.total_s)


def _attributes(operation: str, exchange: Exchange, outcome: Outcome) -> dict[str, Any]:
    """gen_ai.* of the whole request; what was left open in it is left out."""
    usage, sampling = outcome.usage(), outcome.samples[0].request.sampling
    model = exchange.log.get("model")
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "maitred",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.stream": bool(exchange.log.get("stream")),
        "gen_ai.response.id": exchange.request_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [s.finish_reason.value for s in outcome.samples if s.finish_reason],
        "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.num_generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
    }
    attributes |= {f"gen_ai.request.{name}": getattr(sampling, name) for name in _SAMPLING}
    timing = outcome.timing()
    if timing is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = timing.ttft_s
        attributes |= {"maitred.stall_s": timing.stall_s, "maitred.schedule_s": timing.schedule_s}
    return {name: value for name, value in attributes.items() if value is not None}


def make_tracing(endpoint: str, *, version: str) -> Tracing:
    """Sends to an OTLP/HTTP receiver such as http://127.0.0.1:4318."""
    return Tracing(OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces"), version=version)
