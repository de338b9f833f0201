"""Every setting, one frozen dataclass per part, checked once where it enters and handed on in slices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from maitred.errors import ConfigError, did_you_mean
from maitred.objectives import parse_slo

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EXECUTORS = ("auto", "torch", "native")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "int8", "int4")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8")
LM_HEAD_DTYPES = DTYPES
INT4_GROUP_SIZES = (32, 64, 128)
DTYPE_ALIASES = {"bf16": "bfloat16", "fp32": "float32"}
HALF = ("half", "float16", "fp16", "f16")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
METRICS_COMPAT = ("none", "vllm")
BIND_THREADS = ("auto", "on", "off")
SPECULATIVE = ("auto", "off", "ngram", "draft", "mtp")
MAX_SPECULATIVE_TOKENS = 16
POLICY_NAMES = ("fcfs", "priority", "interactive", "sjf", "srpt", "rr", "mlfq", "edf", "least_slack", "vtc", "lpm")
"""Ours; packages may bring more."""
PREDICTOR_NAMES = ("max_tokens", "quantile", "ranker")
SIMULATED_PREDICTOR_NAMES = ("oracle", *PREDICTOR_NAMES, "adversarial")


def _one_of(choices: tuple[str, ...], default: str) -> str:
    """A field that takes one of `choices`, which the command line reads too."""
    chosen: str = field(default=default, metadata={"choices": choices})
    return chosen


def _require_choices(config: DataclassInstance) -> None:
    """Of every field made by `_one_of`."""
    for f in fields(config):
        value, choices = getattr(config, f.name), f.metadata.get("choices", ())
        if choices and value not in choices:
            raise ConfigError(
                f"{f.name} is {value!r}{did_you_mean(value, choices)}; choose one of {', '.join(choices)}"
            )


def _require_at_least(name: str, value: float | None, low: float) -> None:
    if value is not None and not value >= low:
        raise ConfigError(f"{name} is {value}; it must be at least {low}")


def _require_between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; it must be from {low:g} to {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, and how its numbers are held."""

    model: str | None = None
    """Folder in Hugging Face layout, or hub id; None is the built-in model."""
    revision: str | None = None
    """Hub branch, tag or commit; None is the default branch."""
    executor: str = _one_of(EXECUTORS, "auto")
    """auto, torch or native."""
    device: str = _one_of(DEVICES, "auto")
    """auto, cpu or cuda; auto takes a GPU when PyTorch sees one."""
    dtype: str = _one_of(DTYPES, "auto")
    """Weights and activations; auto is the checkpoint's own dtype where the device is fast at it, else float32. int8
    and int4 are quantised at load, by the native executor."""
    lm_head_dtype: str = _one_of(LM_HEAD_DTYPES, "auto")
    """Output matrix and embedding (native executor); auto is as `dtype`, but int8 where that is int4."""
    int4_group_size: int = 32
    """Weights that share a scale when dtype is int4: 32, 64 or 128. Smaller is more exact and reads more bytes."""
    kv_dtype: str = _one_of(KV_DTYPES, "auto")
    """KV cache; auto is the weights' dtype, and bfloat16 where that is int8 or int4."""
    max_model_len: int | None = None
    """Context in tokens, prompt and output; None is the model's own, reduced to what memory holds."""
    weight_cache: str = "auto"
    """Folder that keeps packed weights, so that later starts map them; auto is maitred/weights in XDG_CACHE_HOME
    (~/.cache), off keeps none. Native executor, weights from 64 MiB."""
    weight_cache_max_bytes: int = 32 * 2**30
    """Most bytes in that folder; what was used longest ago goes first."""
    num_threads: int | None = None
    """CPU threads of the executor, at most the physical cores this process may use; None is these cores, or one below
    30 M parameters, and the native executor uses fewer of them as long as measured steps are faster so. With ranks it
    is threads of each, and None shares the cores among them."""
    tensor_parallel: int = 1
    """Ranks: processes that compute each step together, each with its own part of the weights, near its processors
    (native executor). The tokens are those of one process."""
    bind_threads: str = _one_of(BIND_THREADS, "auto")
    """Whether the native executor's threads keep to a processor each, where they are as many as this process may use:
    on, off, or auto, which is on in an engine's own process, as under maitred serve."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the model's chat template."""
    tool_format: str | None = None
    """How the model writes calls of tools, by name; None reads it off the chat template."""
    allow_special_tokens_in_content: bool = False
    """Read `<|im_end|>` and the like in a message as the token, so that whoever wrote it can end the turn and begin one
    of any role; else they are plain text."""
    forced_tokens: bool = True
    """Tokens that a grammar leaves no choice for are taken without computing logits for them. The text is the same."""
    generation_config: Mapping[str, float | int | None] = field(default_factory=dict)
    """Overrides of the model's generation_config.json (temperature, top_p, top_k, ...)."""

    def __post_init__(self) -> None:
        for name in ("dtype", "lm_head_dtype", "kv_dtype"):
            if (dtype := getattr(self, name)) in HALF:
                raise ConfigError(f"{name} is {dtype!r}; float16 is not computed here, bfloat16 takes as many bytes")
            object.__setattr__(self, name, DTYPE_ALIASES.get(dtype, dtype))
        _require_choices(self)
        if self.model is not None and not self.model.strip():
            raise ConfigError(f"model is {self.model!r}; name a folder or a hub id, or none for the built-in model")
        if self.int4_group_size not in INT4_GROUP_SIZES:
            raise ConfigError(f"int4_group_size is {self.int4_group_size}; choose one of 32, 64, 128")
        _require_at_least("max_model_len", self.max_model_len, 2)
        _require_at_least("num_threads", self.num_threads, 1)
        _require_at_least("tensor_parallel", self.tensor_parallel, 1)
        _require_at_least("weight_cache_max_bytes", self.weight_cache_max_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    """Tokens in a block. Smaller wastes less memory and shares shorter prefixes, larger costs less bookkeeping."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for keys and values; None takes what max_num_seqs full contexts need, bounded by free memory."""
    enable_prefix_caching: bool = True
    """Keep blocks of finished requests and share them with requests that begin alike."""
    swap_memory_bytes: int | None = None
    """Host memory for keys and values of preempted requests, used where copying beats computing again; None is 4 GiB
    (at most a quarter of what is free) with a GPU, and 0 on a CPU: there a larger KV cache serves better."""

    def __post_init__(self) -> None:
        _require_at_least("block_size", self.block_size, 1)
        _require_at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        _require_at_least("swap_memory_bytes", self.swap_memory_bytes, 0)


DEFAULT_TOKEN_BUDGET = 512
UNMEASURED_AGEING = 200.0  # tokens/s
SCHEDULER_RANGES: dict[str, tuple[float, float]] = {
    "ageing_s": (0.001, 1e9),
    "ageing_tokens_per_s": (0.001, 1e9),
    "output_token_weight": (1.0, 1e6),
    "quantum_tokens": (1, 2**31),
    "mlfq_levels": (1, 32),
    "default_ttft_slo_s": (0.0, 1e9),
    "prefill_tokens_per_s": (0.001, 1e12),
}
"""Lowest and highest: what a policy computes with must be finite."""

PolicyArg = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: tokens are made up and checked several at a time; the output stays the same to the bit."""

    speculative: str = _one_of(SPECULATIVE, "auto")
    """Who makes tokens up: a draft model, mtp (a head that reads the model's own states, as EAGLE-3), ngram (what
    followed the last tokens when they were there before), off, or auto, which is a head where there is one, else a
    draft model, else ngram. How many is decided by measurement, down to none."""
    speculative_model: str | None = None
    """Folder or hub id of a draft model with the same vocabulary, or of a head for this model; None is what lies beside
    the served model under its name and -mtp or -draft, as with the built-in one."""
    num_speculative_tokens: int = 5
    """Most tokens that are made up for a request in one step, 1 to 16."""

    def __post_init__(self) -> None:
        _require_choices(self)
        _require_between("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        if self.speculative_model is not None and self.speculative not in ("auto", "draft", "mtp"):
            raise ConfigError(
                f"speculative_model is {self.speculative_model!r}, and speculative is {self.speculative!r}; a draft "
                "model is for speculative=draft, or auto, and a head for speculative=mtp, or auto"
            )

    @property
    def num_drafts(self) -> int:
        """Most of a request in a step, where anybody drafts."""
        return 0 if self.speculative == "off" else self.num_speculative_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA adapters, served beside the model under names of their own (native executor)."""

    lora: Mapping[str, str] = field(default_factory=dict)
    """NAME=DIR: an adapter as PEFT saves it, which answers as the model NAME. May be repeated."""
    lora_dir: str | None = None
    """Folder whose adapters may be loaded and unloaded while the server runs (/v1/load_lora_adapter); None allows
    none."""
    max_lora_rank: int = 64
    """Adapters of higher rank are refused."""
    lora_memory_bytes: int = 2**30
    """Most memory for adapters; those not in use go when others need the room, and come back when asked
    for."""

    def __post_init__(self) -> None:
        _require_between("max_lora_rank", self.max_lora_rank, 1, 1024)
        _require_at_least("lora_memory_bytes", self.lora_memory_bytes, 1)
        for name, path in self.lora.items():
            if not isinstance(path, str) or not name or "@" in name:
                raise ConfigError(f"lora has {name}={path}; write NAME=DIR, and no @ in the name")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler: who is served next, and how much in one step."""

    max_num_batched_tokens: int | None = None
    """Most tokens in one step. Larger raises throughput and inter-token latency. None is what suits the executor: 64 a
    thread, at least 128, where the native one runs, twice that with AMX, and 512 at most and with PyTorch; never below
    max_num_seqs."""
    max_num_seqs: int = 64
    """Most requests in one step."""
    policy: str = "fcfs"
    """Order of the queue: fcfs, priority, interactive, sjf, srpt, rr, mlfq, edf, least_slack, vtc, lpm, or an installed
    one; `maitred policies` tells what each does."""
    policy_args: Mapping[str, PolicyArg] = field(default_factory=dict)
    """Arguments of the policy, an installed one's too; `maitred policies` lists them. For those that have a setting of
    their own, such as ageing_s, this is another spelling, which goes before it."""
    ageing_s: float = 30.0
    """Waiting this long (s) outweighs one level of priority (priority, interactive, edf, least_slack) or of mlfq, and
    any cached prefix (lpm), so nobody starves."""
    ageing_tokens_per_s: float | None = None
    """sjf, srpt, interactive, lpm: waiting a second outweighs this many tokens of expected work or cached prefix. None
    is 1/128 of the prompt tokens that this device computes in a second, as its steps show; 200 until they do."""
    output_token_weight: float = 2.0
    """sjf, srpt, interactive, vtc: an output token costs as much as this many input tokens."""
    quantum_tokens: int = 128
    """rr, mlfq: output tokens after which a request makes room for those that wait; doubled with each level of mlfq."""
    mlfq_levels: int = 6
    """mlfq: number of levels."""
    default_ttft_slo_s: float = 1.0
    """edf, least_slack: objective (s) from arrival to first token of a request of priority 0 that names none; each
    level of priority adds ageing_s."""
    prefill_tokens_per_s: float = 2000.0
    """least_slack: prompt tokens computed in a second, to know how long before its deadline a request must start."""
    predictor: str = _one_of(PREDICTOR_NAMES, "ranker")
    """How output lengths are guessed: max_tokens, quantile (history) or ranker (learns from words of the prompt)."""

    def __post_init__(self) -> None:
        _require_choices(self)
        _require_at_least("max_num_seqs", self.max_num_seqs, 1)
        for name, (low, high) in SCHEDULER_RANGES.items():
            if getattr(self, name) is not None:
                _require_between(name, getattr(self, name), low, high)
        if self.token_budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}), so a full decode batch would not fit; raise the first or lower the second"
            )

    @property
    def token_budget(self) -> int:
        """Most tokens in one step, where no executor has been asked."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(DEFAULT_TOKEN_BUDGET, self.max_num_seqs)

    @property
    def ageing_rate(self) -> float:
        """`ageing_tokens_per_s`, in whose place stands a guess until the device was measured."""
        return UNMEASURED_AGEING if self.ageing_tokens_per_s is None else self.ageing_tokens_per_s

    def settled(self, token_budget: int) -> SchedulerConfig:
        """With the executor's budget where none was given."""
        if self.max_num_batched_tokens is not None:
            return self
        return replace(self, max_num_batched_tokens=max(token_budget, self.max_num_seqs))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Admission: who is refused, and how long the others may take."""

    max_queued_requests: int = 4096
    """Most samples that wait for their first token; for more the least urgent is shed, or the newcomer answered 503."""
    max_queued_tokens: int | None = None
    """Most prompt tokens that wait for their first token; None is no limit."""
    max_queued_by_priority: Mapping[str, int] = field(default_factory=dict)
    """PRIORITY=COUNT: most waiting samples of this priority and those less urgent, to keep room for the others."""
    ttft_objective_s: float | None = None
    """Who would wait longer (s) for a first token is answered 503 at once. Requests may ask for less."""
    queue_timeout_s: float | None = None
    """A request in no step after this (s) is answered 503. Requests may ask for less."""
    request_timeout_s: float | None = None
    """A request not done after this (s) is ended, with 504 if nothing was sent yet. Requests may ask for less."""

    def __post_init__(self) -> None:
        _require_at_least("max_queued_requests", self.max_queued_requests, 1)
        _require_at_least("max_queued_tokens", self.max_queued_tokens, 1)
        for name in ("ttft_objective_s", "queue_timeout_s", "request_timeout_s"):
            _require_at_least(name, getattr(self, name), 0.001)
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
    api_keys: tuple[str, ...] = ()
    """Keys that clients may send as `Authorization: Bearer KEY`; empty leaves the server open."""
    served_model_names: tuple[str, ...] = ()
    """Names under which the model answers, the first is canonical; empty uses the model's own name."""
    cors_origins: tuple[str, ...] = ()
    """Origins a browser page may call from; none by default."""
    strict_fields: bool = False
    """Refuse a request with a field that nobody knows (400); else it is served, and the header
    x-maitred-ignored-fields names the field."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body in bytes. One of 8 MiB can keep other requests waiting for 0.1 s."""
    result_cache_bytes: int = 0
    """Memory for answers that are given again to the same request of the same tenant, byte by byte; only those with
    temperature 0 or a seed. 0 keeps none."""
    result_cache_ttl_s: float = 3600.0
    """An answer in the result cache is given again for this long (s)."""
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
    """File with the secret that a router and its replicas share: who shows it may listen to this server's events, and
    is believed what it says of a request's tenant."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, requests in flight may take this long (s); then, or at a second signal, they end with an error."""
    decode_timeout_s: float = 10.0
    """GET /health/decode waits this long (s) for its one token."""
    otlp_endpoint: str | None = None
    """OpenTelemetry receiver (OTLP over HTTP) for traces, such as http://127.0.0.1:4318; needs the extra `otel`."""
    metrics_compat: str = _one_of(METRICS_COMPAT, "none")
    """none, or vllm: /metrics shows the same figures under vLLM's names besides, for dashboards that know those."""
    slo: tuple[str, ...] = ()
    """Objective of requests, such as ttft:1s, itl:80ms, tpot:50ms or e2e:20s, written and judged as `bench serve --slo`
    does; maitred_requests_in_objective_total counts who met it."""
    start_budget_s: float = 30.0
    """A start that takes longer (s) names its longest phase in the log, and has an alert."""
    announce_fd: int | None = None
    """For a launcher: a socket that this process inherits. The address goes there as a line of JSON, another follows
    when the engine has loaded, and when the other end closes, the server ends at once."""
    log_level: str = _one_of(LOG_LEVELS, "info")
    """debug, info, warning or error."""
    log_format: str = _one_of(LOG_FORMATS, "text")
    """text or json (one object a line)."""

    def __post_init__(self) -> None:
        _require_choices(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be from 0 to 65535")
        if not 1 <= self.default_max_n <= 128:
            raise ConfigError(f"default_max_n is {self.default_max_n}; it must be from 1 to 128")
        _require_at_least("max_body_bytes", self.max_body_bytes, 1)
        _require_at_least("max_concurrent_requests", self.max_concurrent_requests, 1)
        _require_at_least("max_connections", self.max_connections, 1)
        for name in ("header_timeout_s", "body_timeout_s", "send_timeout_s"):
            _require_between(name, getattr(self, name), 0.1, 600.0)
        if self.otlp_endpoint is not None and not re.match(r"https?://[^/]", self.otlp_endpoint):
            raise ConfigError(f"otlp_endpoint is {self.otlp_endpoint!r}; it must look like http://127.0.0.1:4318")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile is given without ssl_certfile; give both, or a certificate that has its key")
        for text in self.slo:
            parse_slo(text)
        _require_at_least("start_budget_s", self.start_budget_s, 0)
        _require_at_least("announce_fd", self.announce_fd, 3)
        _require_at_least("result_cache_bytes", self.result_cache_bytes, 0)
        _require_at_least("result_cache_ttl_s", self.result_cache_ttl_s, 0.001)
        _require_at_least("sse_keep_alive_s", self.sse_keep_alive_s, 0)
        _require_at_least("drain_timeout_s", self.drain_timeout_s, 0)
        _require_at_least("decode_timeout_s", self.decode_timeout_s, 0.001)


RESUME_RULES = ("exact", "always", "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """The engine's own process, and what happens when it dies."""

    in_process: bool = False
    """Run the engine in a thread of the server instead, for debugging: one process, and both die together."""
    step_timeout_s: float = 120.0
    """A step that takes longer (s), or as long a silence, counts as stuck: the engine is killed and started again. With
    --in-process, /health tells it while it lasts."""
    max_restarts: int = 5
    """Restarts in a row before the engine is given up; one that lived for ten seconds ends the row. A kill from outside
    weighs a tenth."""
    resume: str = _one_of(RESUME_RULES, "exact")
    """What a request that has tokens does when the engine died: exact goes on where the executor gives the same tokens
    as if nothing had happened, and else ends with an error; always goes on; never ends with an error."""
    sleep_after_s: float | None = None
    """Without a request for so long (s), the engine's process ends and gives its memory back; the server stays, and the
    next request starts the engine and waits for it. None never sleeps by itself."""

    def __post_init__(self) -> None:
        _require_choices(self)
        _require_at_least("step_timeout_s", self.step_timeout_s, 0.1)
        _require_at_least("max_restarts", self.max_restarts, 0)
        _require_at_least("sleep_after_s", self.sleep_after_s, 0.1)
        if self.in_process and self.sleep_after_s is not None:
            raise ConfigError(
                "sleep_after_s needs an engine in a process of its own, whose end gives the memory back; "
                "leave in_process out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: model, cache, scheduler, and who drafts."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    decision_log: str | None = None
    """Folder for the log of every step's inputs and plan (hashes, never prompt tokens); None keeps none."""
    decision_log_max_bytes: int = 64 * 1024 * 1024
    """A file of the decision log is followed by the next when it is this large."""
    decision_log_max_files: int = 16
    """Of a run, this many files of the decision log are kept, the newest."""

    def __post_init__(self) -> None:
        _require_at_least("decision_log_max_bytes", self.decision_log_max_bytes, 4096)
        _require_at_least("decision_log_max_files", self.decision_log_max_files, 1)
