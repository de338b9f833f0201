"""Every metric, declared once: name, kind, unit, labels, meaning. `api/ops/metrics_page.py` renders them.

Names follow the Prometheus rules (base units, counters end in _total), so `promtool check metrics` has nothing to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class MetricKind(str, Enum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # a key that is hashed for each request
class Metric:
    """One line of the metrics page, before it has a value."""

    name: str
    kind: MetricKind
    unit: str  # of what: seconds, tokens, requests, blocks, replicas, keys, ratio, bool and the like
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, without +Inf


_declared: list[Metric] = []  # of no group yet


def _declare(
    name: str, kind: MetricKind, unit: str, text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
) -> Metric:
    _declared.append(Metric(name=name, kind=kind, unit=unit, help=text, labels=labels, buckets=buckets))
    return _declared[-1]


def _gauge(name: str, unit: str, text: str, labels: tuple[str, ...] = ()) -> Metric:
    return _declare(f"maitred_{name}", MetricKind.GAUGE, unit, text, labels)


def _counter(name: str, unit: str, text: str, labels: tuple[str, ...] = ()) -> Metric:
    return _declare(f"maitred_{name}_total", MetricKind.COUNTER, unit, text, labels)


def _histogram(name: str, unit: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return _declare(f"maitred_{name}", MetricKind.HISTOGRAM, unit, text, buckets=buckets)


def _group() -> tuple[Metric, ...]:
    """All that were declared since the last one."""
    group = tuple(_declared)
    _declared.clear()
    return group


# A laptop's first token may take a minute and a warm one a millisecond: three steps a decade over that range.
LATENCY_BUCKETS_S = (1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0, 1200.0)
TOKEN_GAP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0)
TOKEN_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)

# the engine: read from ReplicaState when the page is asked for
ENGINE_UP = _gauge("engine_up", "bool", "1 while the engine can take requests, 0 when it died.")
ENGINE_ASLEEP = _gauge(
    "engine_asleep", "bool", "1 while there is no engine on purpose: it sleeps, and the next request wakes it."
)
REQUESTS_RUNNING = _gauge("requests_running", "requests", "Samples in the running batch.")
REQUESTS_WAITING = _gauge("requests_waiting", "requests", "Samples that wait to be scheduled, preempted ones included.")
BACKGROUND_RUNNING = _gauge("background_requests_running", "requests", "Those of them of the class background.")
BACKGROUND_WAITING = _gauge("background_requests_waiting", "requests", "Those of that class that wait.")
KV_BLOCKS_CAPACITY = _gauge("kv_blocks_capacity", "blocks", "Blocks of the KV cache; pages where layers have windows.")
KV_BLOCKS_USED = _gauge("kv_blocks_used", "blocks", "Those that requests hold; cached but free ones do not count.")
KV_BLOCKS_CACHED = _gauge("kv_blocks_cached", "blocks", "Blocks findable by prefix, in use or free.")
STATE_SNAPSHOTS = _gauge("state_snapshots", "slots", "States of recurrent layers kept for prompts that begin alike.")
EXPERT_LOAD_RATIO = _gauge(
    "expert_load_ratio",
    "ratio",
    "Tokens of a layer's busiest expert over the mean of its experts, since the start, where it is largest; 0 without.",
)
CACHE_INFO = _gauge("cache_config_info", "bool", "Always 1; how the KV cache is cut.", ("block_size", "num_blocks"))
KV_USAGE = _gauge("kv_usage_ratio", "ratio", "Share of the KV cache held by requests, 0 to 1.")
LAST_STEP_AGE = _gauge("engine_last_step_age_seconds", "seconds", "Time since a step last ended; 0 when idle.")
HEARTBEAT_AGE = _gauge(
    "engine_heartbeat_age_seconds",
    "seconds",
    "Time since the engine's process said that it is there; 0 in one process.",
)
RESTARTS = _counter("engine_restarts", "restarts", "Times the engine's process died and was started again.")
SLEEPS = _counter("engine_sleeps", "sleeps", "Times the engine's process was ended for want of requests.")
WAKE_SECONDS = _gauge("engine_wake_seconds", "seconds", "What the last start of the engine out of sleep took.")
RESUMED = _counter("requests_resumed", "requests", "Samples that went on, or began anew, with another engine process.")
WRONG_FRAMES = _counter(
    "engine_wrong_frames",
    "frames",
    "Messages between the server and the engine's process that were none, or too large, and were dropped; a stranger's "
    "connection counts as one.",
)
STEPS = _counter("engine_steps", "steps", "Steps of the engine.")
EXECUTE_SECONDS = _counter("engine_execute_seconds", "seconds", "Time spent in the executor.")
HOST_SECONDS = _counter("engine_host_seconds", "seconds", "Time of steps outside the executor.")
SCHEDULED_TOKENS = _counter("scheduled_tokens", "tokens", "Tokens computed, prompt and output, recomputed ones too.")
BACKGROUND_TOKENS = _counter("background_tokens", "tokens", "Of them, those of the class background.")
PROMPT_TOKENS = _counter("prompt_tokens", "tokens", "Prompt tokens of requests admitted to a first step.")
GENERATION_TOKENS = _counter("generation_tokens", "tokens", "Tokens generated.")
DRAFTED_ROWS = _counter("drafts", "requests", "Times that tokens were made up for a request in a step.", ("proposer",))
DRAFT_TOKENS = _counter("draft_tokens", "tokens", "Tokens made up for the model to check.", ("proposer",))
ACCEPTED_TOKENS = _counter("draft_tokens_accepted", "tokens", "Of them, those that became output.", ("proposer",))
ACCEPTED_AT_POSITION = _counter(
    "draft_tokens_accepted_at_position",
    "tokens",
    "Of those too, by their place among the tokens made up for a request in a step; the first is 0.",
    ("proposer", "position"),
)
ADAPTER_BYTES = _gauge("lora_adapter_bytes", "bytes", "LoRA adapters in memory, or on their way there.")
ADAPTER_LOADS = _counter("lora_adapter_loads", "loads", "Times a LoRA adapter was read into memory.")
ADAPTER_EVICTIONS = _counter("lora_adapter_evictions", "adapters", "LoRA adapters that made room for others.")
ADAPTER_REQUESTS = _counter(
    "lora_requests", "requests", "Samples that ended, by the LoRA adapter they named; 100 have labels.", ("adapter",)
)
ADAPTER_TOKENS = _counter("lora_tokens", "tokens", "Tokens of them.", ("adapter", "kind"))
PREEMPTIONS = _counter("preemptions", "requests", "Times a running request had to give up its blocks.")
SWAPPED_OUT_BLOCKS = _counter("swapped_out_blocks", "blocks", "KV blocks of preempted requests copied to the host.")
SWAPPED_IN_BLOCKS = _counter(
    "swapped_in_blocks", "blocks", "KV blocks of preempted requests copied back from the host."
)
HANDOVERS = _counter(
    "handovers",
    "requests",
    "Requests whose KV another worker had: moved, recomputed, or local where it was here already.",
    ("outcome",),
)
HANDOVER_WAIT = _histogram(
    "handover_wait_seconds",
    "seconds",
    "Time that a request waited for KV of another worker, from blocks reserved for it to KV arrived, or given up.",
    LATENCY_BUCKETS_S,
)
KV_TRANSFER_BYTES = _counter("kv_transfer_bytes", "bytes", "KV that was pulled from other workers.", ("transport",))
KV_TIER_HITS = _counter(
    "kv_tier_hit_tokens", "tokens", "Tokens whose KV was fetched from a tier in place of computing them.", ("tier",)
)
KV_TIER_BYTES = _gauge("kv_tier_bytes", "bytes", "What a KV tier holds.", ("tier",))
KV_DROPPED = _counter(
    "kv_dropped", "blocks", "KV blocks that a tier, or a peer, could not keep or give back.", ("tier", "reason")
)
PREFIX_QUERIED = _counter("prefix_cache_queried_tokens", "tokens", "Prompt tokens looked up in the prefix cache.")
PREFIX_HIT = _counter("prefix_cache_hit_tokens", "tokens", "Prompt tokens found in the prefix cache.")
STATE_EVICTIONS = _counter("state_snapshot_evictions", "slots", "State snapshots that made room for others.")
REQUESTS_FINISHED = _counter("requests_finished", "requests", "Samples that ended, by finish reason.", ("reason",))
ENGINE_METRICS = _group()

# the edge: counted as it happens
INFO = _gauge("info", "bool", "Always 1; the labels say what is served.", ("version", "model"))
START_SECONDS = _gauge(
    "start_seconds", "seconds", "What the start of the server took, by phase; they add up to the whole.", ("phase",)
)
START_BUDGET = _gauge("start_budget_seconds", "seconds", "What the start of the server may take (--start-budget-s).")
HTTP_IN_FLIGHT = _gauge("http_requests_in_flight", "requests", "HTTP requests being answered.")
LOOP_TASKS = _gauge("event_loop_tasks", "tasks", "Tasks of the server's event loop; as few as before without requests.")
HTTP_REQUESTS = _counter(
    "http_requests", "requests", "HTTP requests answered; 499 is a client that went away.", ("route", "status")
)
REQUESTS_CANCELLED = _counter("requests_cancelled", "requests", "HTTP requests whose client went away before the end.")
LOG_LINES_DROPPED = _counter(
    "log_lines_dropped", "lines", "Lines of the log that were not read in time, or that could not be written."
)
BATCHES = _gauge("batches", "batches", "Batches of /v1/batches that are not finished.")
BATCH_LINES = _counter("batch_lines", "lines", "Lines of batches, answered or failed, once stored.", ("outcome",))
TTFT = _histogram("request_ttft_seconds", "seconds", "Arrival to first token, per sample.", LATENCY_BUCKETS_S)
INTER_TOKEN_LATENCY = _histogram(
    "request_inter_token_latency_seconds",
    "seconds",
    "Time between tokens as the server sends them.",
    TOKEN_GAP_BUCKETS_S,
)
E2E = _histogram("request_e2e_seconds", "seconds", "Arrival to last token, per sample.", LATENCY_BUCKETS_S)
QUEUE = _histogram("request_queue_seconds", "seconds", "Arrival to first step, per sample.", LATENCY_BUCKETS_S)
PREFILL = _histogram("request_prefill_seconds", "seconds", "First step to first token, per sample.", LATENCY_BUCKETS_S)
DECODE = _histogram("request_decode_seconds", "seconds", "First token to last, per sample.", LATENCY_BUCKETS_S)
REQUEST_PROMPT_TOKENS = _histogram("request_prompt_tokens", "tokens", "Prompt length by sample.", TOKEN_BUCKETS)
REQUEST_GENERATION_TOKENS = _histogram("request_generation_tokens", "tokens", "Output length by sample.", TOKEN_BUCKETS)

REQUESTS_IN_OBJECTIVE = _counter(
    "requests_in_objective",
    "requests",
    "Requests that generate, by objective of --slo (ttft, itl, tpot, e2e, and all together) and by whether they met "
    "it; what failed met none, what was the client's fault (4xx) does not count. Where a prompt was computed by "
    "another worker than its answer, the role is prefill for ttft and decode for itl and tpot; else it is mixed.",
    ("objective", "met", "tenant", "role"),
)
RELEASE_VERSION = _gauge("release_version", "version", "Version of the shelf that newcomers get; none without a shelf.")
RELEASE_CHANGES = _counter(
    "release_changes", "versions", "Versions that came into service, and those that were refused.", ("outcome",)
)
EDGE_METRICS = _group()

# admission: refusals before the queue
ADMISSION_REFUSED = _counter(
    "admission_refused",
    "requests",
    "Requests turned away, by what was exceeded: requests, tokens, class or objective.",
    ("reason",),
)
ADMISSION_WAITING = _gauge("admission_waiting_requests", "requests", "Samples let in that have no first token yet.")
ADMISSION_DRAIN_RATE = _gauge(
    "admission_drain_tokens_per_second",
    "tokens",
    "Speed at which work leaves while there is a queue: output tokens, and prompt tokens at a quarter; 0 is unknown.",
)
ADMISSION_WAIT = _gauge(
    "admission_wait_seconds", "seconds", "Time to the first token foretold to one that came now; 0 while unknown."
)
ADMISSION_METRICS = _group()

# tensor models
TENSOR_REQUESTS = _counter(
    "tensor_requests", "requests", "Requests for tensor models that ended, by how.", ("model", "reason")
)
TENSOR_COMPUTE = _counter(
    "tensor_compute_seconds", "seconds", "Time of their batches; the ledger's rows add up to it.", ("model",)
)
TENSOR_ROWS = _counter("tensor_rows", "rows", "Rows of batches that ran.", ("model",))
TENSOR_BATCHES = _counter("tensor_batches", "batches", "Batches that ran.", ("model",))
TENSOR_PADDING = _gauge(
    "tensor_padding_ratio", "ratio", "Of what batches of length buckets computed, what was padding.", ("model",)
)
TENSOR_METRICS = _group()

# the result cache; a router in front of many has it too
RESULT_CACHE_REQUESTS = _counter(
    "result_cache_requests",
    "requests",
    "Requests that could be answered from the result cache, hit, miss or similar.",
    ("result",),
)
RESULT_CACHE_CHECKS = _counter(
    "result_cache_checks",
    "requests",
    "Answers to similar prompts that were computed all the same: alike, or not.",
    ("result",),
)
RESULT_CACHE_SIMILAR = _gauge(
    "result_cache_similar_on",
    "bool",
    "1 while similar prompts are answered from the cache, 0 once it turned itself off.",
)
RESULT_CACHE_BYTES = _gauge("result_cache_bytes", "bytes", "Memory that the result cache holds.")
RESULT_CACHE_METRICS = _group()

# Redis that routers share
REDIS_UP = _gauge("redis_up", "bool", "1 while Redis answers, 0 while the router goes on without it.")
REDIS_DROPPED = _counter(
    "redis_dropped_writes", "requests", "Writes to Redis given up, because it was gone or could not keep up."
)
REDIS_CORRUPT = _counter(
    "redis_corrupt_entries", "requests", "Entries of the result cache in Redis that were damaged, and deleted."
)
REDIS_METRICS = _group()

# tenants: only those of the tenants file, so there are as many label values as lines in it
TENANT_REQUESTS = _counter("tenant_requests", "requests", "HTTP requests let in at the tenant's limits.", ("tenant",))
TENANT_REFUSALS = _counter(
    "tenant_refusals", "requests", "HTTP requests refused for a limit of the tenant's own.", ("tenant", "limit")
)
TENANT_TOKENS = _counter(
    "tenant_tokens", "tokens", "Tokens used, by kind: prompt or generated; the ledger is exact.", ("tenant", "kind")
)
TENANT_IN_FLIGHT = _gauge("tenant_samples_in_flight", "requests", "Samples in flight, waiting ones too.", ("tenant",))
TENANT_WAITING = _gauge("tenant_samples_waiting", "requests", "Samples without a first token.", ("tenant",))
TENANTS_FILE_FAILURES = _counter(
    "tenants_file_failures",
    "looks",
    "Looks at the changed tenants file, one a second, that could not take it; the keys of before are in force.",
)
CAPTURED_ANSWERS = _counter(
    "captured_answers",
    "answers",
    "Answers of --capture, by outcome: written, or dropped because the disk was behind or full.",
    ("outcome",),
)
CAPTURE_BYTES = _gauge("capture_bytes", "bytes", "What the folder of --capture holds.")
TENANT_METRICS = _group()

# the fleet: of a router, read from its core when the page is asked for
FLEET_STATES = ("starting", "ready", "warm", "asleep", "draining", "ejected")
FLEET_REPLICAS = _gauge("fleet_replicas", "replicas", "Replicas by state.", ("state",))
FLEET_ORIGINS = ("warm", "asleep", "cold")
FLEET_STARTS = _counter(
    "fleet_starts",
    "starts",
    "Replicas of the router's own that were begun (cold), woken (asleep) or taken into rotation (warm).",
    ("from",),
)
FLEET_REQUESTS = _counter(
    "fleet_requests",
    "requests",
    "Requests that are over, by the replica that had them last and by how: answered, failed or cancelled.",
    ("replica", "outcome"),
)
FLEET_ATTEMPTS = _counter(
    "fleet_attempts",
    "requests",
    "Requests sent to a replica, repeated ones too (sent), and those that failed there: reset, silent, full, limited, "
    "error.",
    ("outcome",),
)
FLEET_RESUMES = _counter("fleet_resumes", "requests", "Answers that another replica went on with.")
FLEET_ESCALATED = _counter("fleet_escalations", "requests", "Answers not sent, as the next tier was asked instead.")
FLEET_FELL_BACK = _counter("fleet_escalations_failed", "requests", "Of these, those that no later tier answered.")
FLEET_HELD = _gauge("fleet_held_requests", "requests", "Requests that wait for a replica with room.")
FLEET_OLDEST_HELD = _gauge("fleet_oldest_held_seconds", "seconds", "Age of the oldest of those that wait; 0 is none.")
FLEET_QUEUE_WAIT = _histogram(
    "fleet_queue_wait_seconds", "seconds", "Time that a request waited for a replica.", LATENCY_BUCKETS_S
)
FLEET_PREFIX_KEYS = _counter(
    "fleet_prefix_keys",
    "keys",
    "Prefix keys of requests sent to a replica: those that it was thought to have (hit), and the others (miss).",
    ("outcome",),
)
FLEET_LOAD_RATIO = _gauge(
    "fleet_load_ratio", "ratio", "Requests in flight to the busiest of the replicas that are ready, beside their mean."
)
FLEET_CONNECTIONS = _counter(
    "fleet_upstream_connections",
    "connections",
    "Requests sent to a replica on a new connection, or on one that was kept.",
    ("kind",),
)
FLEET_METRICS = _group()

# workers, of a server with several
WORKER_UP = _gauge("worker_up", "bool", "1 while the worker's engine is there.", ("worker", "role"))
WORKER_RUNNING = _gauge("worker_requests_running", "requests", "Samples in the worker's batch.", ("worker",))
WORKER_WAITING = _gauge("worker_requests_waiting", "requests", "Samples that wait in the worker.", ("worker",))
WORKER_KV_USAGE = _gauge(
    "worker_kv_usage_ratio", "ratio", "Share of the worker's KV blocks that requests hold.", ("worker",)
)

WORKER_METRICS = _group()

METRICS: tuple[Metric, ...] = (
    *ENGINE_METRICS,
    *WORKER_METRICS,
    *TENSOR_METRICS,
    *EDGE_METRICS,
    *ADMISSION_METRICS,
    *RESULT_CACHE_METRICS,
    *TENANT_METRICS,
)


def metrics_document() -> str:
    """Return docs/metrics.md: one table row per metric."""
    return "\n".join(
        [
            "# Metrics",
            "",
            "```sh",
            "curl localhost:8000/metrics | grep maitred_requests_running",
            "```",
            "",
            "Use it when you write a dashboard or an alert. `GET /metrics` answers in the Prometheus text format",
            "(OpenMetrics when asked for). A sample is one of the `n` answers to one prompt. This page is made from",
            "`src/maitred/core/metrics.py`:",
            "`python -m maitred.core.metrics > docs/metrics.md`.",
            "",
            *_table("The engine", ENGINE_METRICS),
            *_table("Workers, of a server with several", WORKER_METRICS),
            *_table("Tensor models", TENSOR_METRICS),
            *_table("The HTTP server", EDGE_METRICS),
            *_table("Admission", ADMISSION_METRICS),
            *_table("The result cache", RESULT_CACHE_METRICS),
            *_table("Redis, of routers", REDIS_METRICS),
            *_table("Tenants", TENANT_METRICS),
            *_table("The router", FLEET_METRICS),
        ]
    )


def _table(title: str, metrics: Sequence[Metric]) -> list[str]:
    lines = [f"## {title}", "", "| metric | kind | unit | labels | meaning |", "| --- | --- | --- | --- | --- |"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind.value} | {metric.unit} | {labels} | {metric.help} |")
    histograms = [metric for metric in metrics if metric.buckets]
    if histograms:
        lines += ["", "Upper bounds of the buckets:", ""]
        lines += [f"- `{m.name}`: {', '.join(f'{bound:g}' for bound in m.buckets)}" for m in histograms]
    return [*lines, ""]


if __name__ == "__main__":
    import sys

    sys.stdout.write(metrics_document())
