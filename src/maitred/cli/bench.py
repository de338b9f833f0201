"""`maitred bench`: load generators for any OpenAI server, and for any KServe v2 server, Triton's too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from maitred.cli.command import Command, deferred
from maitred.cli.flags import option
from maitred.config.field_checks import require_at_least, require_choices, require_over_0
from maitred.core.errors import ConfigError

ENDPOINTS = ("completions", "chat")
PROMPT_FORMS = ("auto", "tokens", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Where to send"""

    url: str = option("http://127.0.0.1:8000", metavar="URL")
    """The server, with or without /v1."""
    model: str | None = option(None, metavar="NAME")
    """Model to ask for; None takes the first that /v1/models lists."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """Key sent as `Authorization: Bearer KEY`."""
    endpoint: str = option("completions", choices=ENDPOINTS)
    """Route to load: /v1/completions or /v1/chat/completions."""
    timeout_s: float = option(600.0, metavar="SECONDS", name="--timeout")
    """Longest a request may take in seconds before it counts as failed."""

    def __post_init__(self) -> None:
        require_choices(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """When to send"""

    num_requests: int | None = None
    """Requests to send; None is 100, or as many as come within --duration, or the whole trace."""
    duration_s: float | None = option(None, metavar="SECONDS", name="--duration")
    """Send for this many seconds, then wait for the answers."""
    rate: float | None = option(None, metavar="PER_SECOND")
    """Open loop: requests per second on average, sent whatever the server does; `inf` sends all at once."""
    burstiness: float = option(1.0, metavar="SHAPE")
    """Shape of the gamma distribution of gaps: 1 is Poisson, below 1 comes in bursts, above 1 is more even."""
    concurrency: int | None = option(None, metavar="REQUESTS")
    """Closed loop: so many requests in flight, the next sent when one ends; None, without --rate or --trace, is 8."""
    warmup: int = option(0, metavar="REQUESTS")
    """Requests sent one after another before the measurement, not counted."""
    seed: int | None = None
    """Same seed, same load; None draws a new one, so that an earlier run's prefix cache is no help."""

    def __post_init__(self) -> None:
        require_over_0(self, "num_requests", "duration_s", "rate", "burstiness", "concurrency")
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("--rate (open loop) and --concurrency (closed loop) exclude each other; drop one")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What to send"""

    input_len: str = option("128", metavar="LENGTH")
    """Prompt tokens: N, uniform:LOW,HIGH, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA, zipf:EXPONENT,LONGEST or
    choice:A,B,..."""
    output_len: str = option("64", metavar="LENGTH")
    """Tokens to ask for, in the same forms."""
    shared_prefix_len: int = 0
    """Tokens that begin every prompt alike, before --input-len unique ones."""
    num_prefixes: int = option(1, metavar="N")
    """Different shared prefixes, chosen at random for each request."""
    trace: str | None = option(None, metavar="FILE")
    """Replay JSON lines with timestamp (ms), input_length, output_length and hash_ids (of 512-token blocks)."""
    rate_scale: float = option(1.0, metavar="FACTOR")
    """Replay the trace this many times as fast."""
    length_scale: float = option(1.0, metavar="FACTOR")
    """Multiply the trace's lengths by this, for models of a shorter context."""
    prompt_form: str = option("auto", choices=PROMPT_FORMS)
    """Prompts as token ids or as words; auto is tokens for completions, text for chat."""
    token_ids: str = option("100:1000", metavar="LOW:HIGH")
    """Token ids that prompts are made of; all must be in the model's vocabulary."""
    ignore_eos: bool = True
    """Ask for exactly the output length (a field of vLLM and maitred); turn off for servers that refuse it."""
    continuous_usage: bool = True
    """Ask for token counts in each chunk (a field of vLLM and maitred); without it a chunk counts as one token."""
    temperature: float | None = 0.0
    """Sampling temperature; 0 is greedy."""
    extra_body: Mapping[str, object] = field(default_factory=dict)
    """Further fields of each request's JSON body."""

    def __post_init__(self) -> None:
        if self.prompt_form not in PROMPT_FORMS:
            raise ConfigError(f"prompt_form is {self.prompt_form!r}; choose one of {', '.join(PROMPT_FORMS)}")
        require_at_least("shared_prefix_len", self.shared_prefix_len, 0)
        require_at_least("num_prefixes", self.num_prefixes, 1)
        require_over_0(self, "rate_scale", "length_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What to report"""

    slo: tuple[str, ...] = option((), metavar="NAME:TIME")
    """Objective a request must meet to count as goodput: ttft:200ms, itl:50ms (99% of its gaps), tpot:40ms, e2e:2s."""
    json: str | None = option(None, metavar="FILE")
    """Write the result as JSON; - is standard output."""
    records: str | None = option(None, metavar="FILE")
    """Write one JSON line for each request, with the time of each chunk."""
    plot: str | None = option(None, metavar="FILE")
    """Draw the distributions and a timeline, as .png or .svg."""


SERVE = Command(
    path="bench serve",
    summary="Load any OpenAI server and measure TTFT, ITL, TPOT, E2E, throughput and goodput.",
    run=deferred("maitred.cli.bench_session:run_bench"),
    parts=(TargetOptions, LoadOptions, PromptOptions, ReportOptions),
    first=(
        "url",
        "model",
        "api_key",
        "endpoint",
        "num_requests",
        "duration_s",
        "rate",
        "concurrency",
        "input_len",
        "output_len",
        "trace",
        "slo",
        "json",
    ),
    examples=(
        "maitred bench serve --rate 4 --num-requests 200 --slo ttft:200ms --slo itl:50ms",
        "maitred bench serve --concurrency 32 --duration 60 --input-len lognormal:200,0.8 --plot run.svg",
        "maitred bench serve --trace trace.jsonl --rate-scale 0.5 --json result.json",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferOptions:
    """What is asked of which server, and how often"""

    url: str = option("http://127.0.0.1:8000", metavar="URL")
    """Where the server is; for gRPC HOST:PORT."""
    model: str = option(metavar="NAME")
    """The model; what it takes is asked of the server."""
    protocol: str = option("http", choices=("http", "grpc"))
    """http (binary tensor data) or grpc."""
    shm: bool = False
    """The inputs go by shared memory, which the server must be able to map; it takes an administrator's key."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """Key sent as `Authorization: Bearer KEY`."""
    rows: int = 1
    """Of each request, where the model takes batches."""
    length: int = 16
    """Of dimensions of any length."""
    concurrency: int | None = option(None, metavar="N")
    """So many clients, each asking again once it was answered (1 without --rate)."""
    rate: float | None = option(None, metavar="R")
    """Requests that come a second, whatever becomes of those before; gaps are exponential."""
    num_requests: int | None = option(None, metavar="N")
    """So many, or for as long as --duration."""
    duration_s: float = option(10.0, metavar="SECONDS", name="--duration")
    """At most."""
    seed: int = 0
    """Of the gaps."""
    json: bool = False
    """Print what was measured as JSON."""

    def __post_init__(self) -> None:
        require_choices(self)
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("rate and concurrency are two ways to load a server; give one of them")
        require_over_0(self, "rows", "length", "concurrency", "rate", "num_requests", "duration_s")


INFER = Command(
    path="bench infer",
    summary="Load any KServe v2 server, Triton's too, and measure a model's latency and throughput.",
    run=deferred("maitred.cli.load_tensors:run_infer"),
    parts=(InferOptions,),
    first=("url", "model", "protocol", "shm", "rows", "length", "concurrency", "rate", "num_requests", "json"),
    examples=(
        "maitred bench infer --model resnet --concurrency 16",
        "maitred bench infer --url 127.0.0.1:8001 --protocol grpc --model encoder --length 64 --rate 200",
    ),
)
