"""Settings of the HTTP server, and of admission."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from maitred.config.field_checks import one_of, require_at_least, require_between, require_choices
from maitred.core.errors import ConfigError
from maitred.core.objectives import parse_slo

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
METRICS_COMPAT = ("none", "vllm", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Admission: limits of the queue, and the time that admitted requests may take."""

    max_queued_requests: int = 4096
    """Most samples that wait for their first token; for more the least urgent is shed, or the newcomer answered 503."""
    max_queued_tokens: int | None = None
    """Most prompt tokens that wait for their first token; None is no limit."""
    max_queued_by_priority: Mapping[str, int] = field(default_factory=dict)
    """PRIORITY=COUNT: most waiting samples of this priority and those less urgent, to keep room for the others."""
    ttft_objective_s: float | None = None
    """A request that would wait longer (s) for a first token is answered 503 at once. Requests may ask for less."""
    queue_timeout_s: float | None = None
    """A request in no step after this (s) is answered 503. Requests may ask for less."""
    request_timeout_s: float | None = None
    """A request not done after this (s) is ended, with 504 if nothing was sent yet. Requests may ask for less."""

    def __post_init__(self) -> None:
        require_at_least("max_queued_requests", self.max_queued_requests, 1)
        require_at_least("max_queued_tokens", self.max_queued_tokens, 1)
        for name in ("ttft_objective_s", "queue_timeout_s", "request_timeout_s"):
            require_at_least(name, getattr(self, name), 0.001)
        for priority, cap in self.max_queued_by_priority.items():
            if not priority.isdecimal() or not isinstance(cap, int) or cap < 0:
                raise ConfigError(f"max_queued_by_priority has {priority}={cap}; write PRIORITY=COUNT, such as 1=100")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server: address, keys, limits, time-outs, TLS, logs and traces."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: int = 8000
    """TCP port; 0 lets the system choose."""
    grpc_port: int | None = None
    """TCP port for gRPC, where tensor models are served: KServe v2 and TF Serving; 0 lets the system choose."""
    server_id: str = "maitred"
    """Name of this server in KServe's metadata."""
    api_keys: tuple[str, ...] = ()
    """Keys that clients may send as `Authorization: Bearer KEY`; empty leaves the server open."""
    served_model_names: tuple[str, ...] = ()
    """Names under which the model answers, the first is canonical; empty uses the model's own name."""
    cors_origins: tuple[str, ...] = ()
    """Origins a browser page may call from; none by default."""
    strict_fields: bool = False
    """Refuse a request with an unknown field (400); else it is served, and the header
    x-maitred-ignored-fields names the field.
    """
    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body in bytes. One of 8 MiB can keep other requests waiting for 0.1 s."""
    result_cache_bytes: int = 0
    """Memory for answers that are given again to the same request of the same tenant, byte by byte; only those with
    temperature 0 or a seed. 0 keeps none."""
    result_cache_ttl_s: float = 3600.0
    """An answer in the result cache is given again for this long (s)."""
    result_cache_semantic: str | None = None
    """MODEL:COSINE, such as minilm:0.97: an answer in the result cache is also given where the last text of the user is
    so near to the one it was given to, by the vectors that this served model makes at /v1/embeddings, and all else of
    the request is the same. For tenants that say `semantic_cache: true`; without tenants for all."""
    result_cache_check: float = 0.05
    """This share of those answers is computed all the same; when over 1% of the computed ones are less near than COSINE
    to what the cache had, similar prompts are answered from the cache no more, and the log says so."""
    state_dir: str | None = None
    """Folder in which stored responses, files and batches outlive the server; None keeps them in memory, 256 MiB, the
    oldest forgotten first. One server at a time uses it."""
    max_file_bytes: int = 200 * 1024 * 1024
    """Largest file that a client may leave here (POST /v1/files), in bytes."""
    sse_keep_alive_s: float = 15.0
    """A comment is sent on a silent stream this often (s), so that proxies keep it open; 0 is never."""
    default_max_n: int = 16
    """Largest n a request may ask for, at most 128."""
    max_concurrent_requests: int = 10_000
    """Requests held at once, queued ones included; more are answered 503."""
    max_connections: int = 16_384
    """Connections held at once, idle ones included; more are answered 503, and so are those that would take one of the
    last 64 descriptors (ulimit -n, raised to its hard limit at the start)."""
    header_timeout_s: float = 10.0
    """A client that connects must send a request's head within this (s); 0.1 to 600."""
    body_timeout_s: float = 10.0
    """And its body within this (s), plus a second for each 16 KiB that came; 0.1 to 600."""
    send_timeout_s: float = 60.0
    """A client that takes nothing of an answer for this long (s) is dropped, and its request with it."""
    ssl_certfile: str | None = None
    """PEM file with the certificate chain; with it the server speaks HTTPS (TLS 1.2 and later). When the file changes,
    or at SIGHUP, it is read again, and no connection ends."""
    ssl_keyfile: str | None = None
    """PEM file with the certificate's key; None is the certificate's own file."""
    fleet_token_file: str | None = None
    """File with the secret that a router and its replicas share: its holder may listen to this server's events, and is
    believed about a request's tenant.
    """
    drain_timeout_s: float = 30.0
    """After SIGTERM, requests in flight may take this long (s); then, or at a second signal, they end with an error."""
    decode_timeout_s: float = 10.0
    """GET /health/decode waits this long (s) for its one token."""
    otlp_endpoint: str | None = None
    """OpenTelemetry receiver (OTLP over HTTP) for traces, such as http://127.0.0.1:4318; needs the extra `otel`."""
    metrics_compat: str = one_of(METRICS_COMPAT, "none")
    """none, vllm or triton: /metrics shows the same figures under their names besides, for dashboards that know those;
    triton is of tensor models (nv_inference_*)."""
    slo: tuple[str, ...] = ()
    """Objective of requests, such as ttft:1s, itl:80ms, tpot:50ms or e2e:20s, written and judged as `bench serve --slo`
    does; maitred_requests_in_objective_total counts those that met it. Workers that hand over are chosen so that ttft
    and tpot are kept.
    """
    price_per_hour: float | None = None
    """What an hour of computing costs, in any currency: GET /v1/organization/usage/completions tells the cost of what
    each tenant, key or model computed. None tells none."""
    start_budget_s: float = 30.0
    """A start that takes longer (s) names its longest phase in the log, and has an alert."""
    announce_fd: int | None = None
    """For a launcher: a socket that this process inherits. The address goes there as a line of JSON, another follows
    when the engine has loaded, and when the other end closes, the server ends at once."""
    log_level: str = one_of(LOG_LEVELS, "info")
    """debug, info, warning or error."""
    log_format: str = one_of(LOG_FORMATS, "text")
    """text or json (one object a line)."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_between("port", self.port, 0, 65535)
        require_between("default_max_n", self.default_max_n, 1, 128)
        require_at_least("max_body_bytes", self.max_body_bytes, 1)
        require_at_least("max_file_bytes", self.max_file_bytes, 1)
        require_at_least("max_concurrent_requests", self.max_concurrent_requests, 1)
        require_at_least("max_connections", self.max_connections, 1)
        for name in ("header_timeout_s", "body_timeout_s", "send_timeout_s"):
            require_between(name, getattr(self, name), 0.1, 600.0)
        if self.otlp_endpoint is not None and not re.match(r"https?://[^/]", self.otlp_endpoint):
            raise ConfigError(f"otlp_endpoint is {self.otlp_endpoint!r}; it must look like http://127.0.0.1:4318")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile is given without ssl_certfile; give both, or a certificate that has its key")
        for text in self.slo:
            parse_slo(text)
        require_at_least("start_budget_s", self.start_budget_s, 0)
        require_between("result_cache_check", self.result_cache_check, 0.0, 1.0)
        if self.result_cache_semantic is not None:
            semantic_of(self.result_cache_semantic)
            if not self.result_cache_bytes:
                raise ConfigError("result_cache_semantic looks into the result cache; give it result_cache_bytes too")
        require_between("price_per_hour", self.price_per_hour or 0.0, 0.0, 1e9)
        require_at_least("announce_fd", self.announce_fd, 3)
        require_at_least("result_cache_bytes", self.result_cache_bytes, 0)
        require_at_least("result_cache_ttl_s", self.result_cache_ttl_s, 0.001)
        require_at_least("sse_keep_alive_s", self.sse_keep_alive_s, 0)
        require_at_least("drain_timeout_s", self.drain_timeout_s, 0)
        require_at_least("decode_timeout_s", self.decode_timeout_s, 0.001)


def semantic_of(text: str) -> tuple[str, float]:
    """The encoder and the least cosine of `MODEL:COSINE`. Raises ConfigError."""
    model, _, bound = text.rpartition(":")
    try:
        cosine = float(bound)
    except ValueError:
        cosine = 0.0
    if not model or not 0.5 <= cosine <= 1.0:
        raise ConfigError(
            f"result_cache_semantic is {text!r}; write MODEL:COSINE with a cosine from 0.5 to 1, as minilm:0.97"
        )
    return model, cosine
