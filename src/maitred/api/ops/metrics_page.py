"""The metrics of one app: counts what the server sees, reads the engine's state, renders both for Prometheus."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from maitred.api.http.errors import CLIENT_GONE_STATUS
from maitred.api.http.exchange import Exchange
from maitred.core import metrics as m
from maitred.core.errors import RateLimited
from maitred.core.metrics import Metric, MetricKind
from maitred.core.objectives import broken_by, met, parse_slo
from maitred.core.replica import DraftCounts, ReplicaState, TierFigures, WorkerView
from maitred.core.request import FinishReason
from maitred.core.step import RequestTiming
from maitred.engine.adapter_book import AtWork
from maitred.engine.replica import Replica
from maitred.engine.tensors import TensorModels
from maitred.gate.admission import AdmissionController
from maitred.storage.capture import Capture
from maitred.tenancy.quota import TenantQuota

if TYPE_CHECKING:
    from maitred.api.http.results import Results
    from maitred.engine.intake import ServedModel

ALL = "all"  # the label of all objectives together: the goodput
ROLES = {"ttft": "prefill", "itl": "decode", "tpot": "decode"}  # that did the work, where two workers shared it
CLIENTS_FAULT = range(400, 499)  # refused for what it asked, or past its own limits: no promise was made


class Promises:
    """The objectives of `--slo`, and how they were kept. Belongs to the event loop."""

    def __init__(self, slos: Sequence[str]) -> None:
        """`slos` are as `--slo` is written. Raises ConfigError."""
        self._bounds_s = dict(map(parse_slo, slos))
        self.is_empty, self.keeps_gaps = not self._bounds_s, "itl" in self._bounds_s
        self._counts: Counter[tuple[str, str, str, str]] = Counter()

    def ended(self, exchange: Exchange, began_at: float) -> None:
        """Judge a request that began then (s, monotonic) and is over now: answered, failed or left by its client."""
        if exchange.status == CLIENT_GONE_STATUS or exchange.status is None:
            self._client_gone(exchange, began_at)
        elif exchange.status not in CLIENTS_FAULT:
            has_failed = "error" in exchange.log or exchange.status >= 500
            kept = met(self._bounds_s, exchange.paces, began_at)
            self._count(exchange, dict.fromkeys(kept, False) if has_failed else kept)

    def _client_gone(self, exchange: Exchange, began_at: float) -> None:
        """A client that left counts only where a promise was broken by then; what would have come is unknown."""
        broken = broken_by(self._bounds_s, exchange.paces, began_at, time.monotonic())
        if any(broken.values()):
            self._count(exchange, {name: not is_broken for name, is_broken in broken.items()})

    def _count(self, exchange: Exchange, kept: Mapping[str, bool]) -> None:
        tenant = exchange.caller.tenant.name if hasattr(exchange, "caller") else ""
        roles = ROLES if exchange.is_handed_over else {}
        for objective, was_met in {**kept, ALL: all(kept.values())}.items():
            role = roles.get(objective, "mixed")
            self._counts[objective, "true" if was_met else "false", tenant, role] += 1
            self._counts[objective, "false" if was_met else "true", tenant, role] += 0  # there from the first one on

    def samples(self) -> dict[tuple[str, ...], float]:
        """Samples of the metric, by its labels."""
        return {labels: float(count) for labels, count in self._counts.items()}


# ours -> vLLM 0.32's, without the _total that a counter's samples get
VLLM_NAMES: Mapping[Metric, str] = {
    m.REQUESTS_RUNNING: "vllm:num_requests_running",
    m.REQUESTS_WAITING: "vllm:num_requests_waiting",
    m.KV_USAGE: "vllm:kv_cache_usage_perc",
    m.PREFIX_QUERIED: "vllm:prefix_cache_queries",
    m.PREFIX_HIT: "vllm:prefix_cache_hits",
    m.PREEMPTIONS: "vllm:num_preemptions",
    m.PROMPT_TOKENS: "vllm:prompt_tokens",
    m.GENERATION_TOKENS: "vllm:generation_tokens",
    m.DRAFTED_ROWS: "vllm:spec_decode_num_drafts",
    m.DRAFT_TOKENS: "vllm:spec_decode_num_draft_tokens",
    m.ACCEPTED_TOKENS: "vllm:spec_decode_num_accepted_tokens",
    m.ACCEPTED_AT_POSITION: "vllm:spec_decode_num_accepted_tokens_per_pos",
    m.REQUESTS_FINISHED: "vllm:request_success",
    m.CACHE_INFO: "vllm:cache_config_info",
    m.TTFT: "vllm:time_to_first_token_seconds",
    m.INTER_TOKEN_LATENCY: "vllm:inter_token_latency_seconds",
    m.E2E: "vllm:e2e_request_latency_seconds",
    m.QUEUE: "vllm:request_queue_time_seconds",
    m.PREFILL: "vllm:request_prefill_time_seconds",
    m.DECODE: "vllm:request_decode_time_seconds",
    m.REQUEST_PROMPT_TOKENS: "vllm:request_prompt_tokens",
    m.REQUEST_GENERATION_TOKENS: "vllm:request_generation_tokens",
}
_LABELS = {"reason": "finished_reason", "num_blocks": "num_gpu_blocks"}

# Triton's, of ModelStatistics; durations in microseconds. Source: triton-inference-server/core, src/metrics.cc
TRITON_NAMES: Mapping[str, tuple[str, Callable[[Any], float]]] = {
    "nv_inference_request_success": ("Requests that were answered.", lambda s: s.success[0]),
    "nv_inference_request_failure": ("Requests that failed.", lambda s: s.fail[0]),
    "nv_inference_count": ("Rows of batches.", lambda s: s.inference_count),
    "nv_inference_exec_count": ("Batches.", lambda s: s.execution_count),
    "nv_inference_request_duration_us": ("Whole time of requests.", lambda s: _us(s.success[1])),
    "nv_inference_queue_duration_us": ("Time that requests waited.", lambda s: _us(s.queue[1])),
    "nv_inference_compute_input_duration_us": ("Time of joining inputs.", lambda s: _us(s.compute_input[1])),
    "nv_inference_compute_infer_duration_us": ("Time of inference.", lambda s: _us(s.compute_infer[1])),
    "nv_inference_compute_output_duration_us": ("Time of splitting outputs.", lambda s: _us(s.compute_output[1])),
    "nv_cache_num_hits_per_model": ("Answers from the cache.", lambda s: s.cache_hit[0]),
    "nv_cache_num_misses_per_model": ("Answers that were not in the cache.", lambda s: s.cache_miss[0]),
    "nv_cache_hit_duration_per_model": ("Time of finding answers.", lambda s: _us(s.cache_hit[1])),
    "nv_cache_miss_duration_per_model": ("Time of looking, and of keeping answers.", lambda s: _us(s.cache_miss[1])),
}
TRITON_PENDING = "nv_inference_pending_request_count"


def _us(ns: int) -> float:
    return ns // 1000


def triton_families(tensors: TensorModels) -> Iterator[Family]:
    """Triton's metrics of tensor models, by model and version."""
    told = tensors.statistics()
    for name, (help_, figure) in TRITON_NAMES.items():
        family = Family(name, help_, "unknown")
        for each in told:
            family.add_sample(name, _of_version(each.model, each.version), float(figure(each)))
        yield family
    pending, unanswered = Family(TRITON_PENDING, "Requests without an answer.", "gauge"), tensors.num_unanswered()
    for each in told:
        number = unanswered.get((each.model, each.version), 0)
        pending.add_sample(TRITON_PENDING, _of_version(each.model, each.version), float(number))
    yield pending


def _of_version(model: str, version: int) -> dict[str, str]:
    return {"model": model, "version": str(version)}


def vllm_families(families: Iterable[Family], model: str) -> Iterator[Family]:
    """The families that vLLM has too, renamed, with its labels model_name and engine."""
    names = {ours.name.removesuffix("_total"): theirs for ours, theirs in VLLM_NAMES.items()}
    for family in families:
        if family.name in names:
            yield _renamed(family, names[family.name], {"model_name": model, "engine": "0"})


def lora_family(work: AtWork, max_num_seqs: int, unix_s: float) -> Family:
    """vLLM's gauge of adapters at work, whose labels are what gateways read; its value is the time. Any number may
    be in one batch here, so at most as many as requests.

    Source: vllm/v1/metrics/loggers.py, and the model server protocol of gateway-api-inference-extension.
    """
    labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
    family = GaugeMetricFamily("vllm:lora_requests_info", "Running stats on lora requests.", labels=labels)
    family.add_metric((str(max_num_seqs), ",".join(work.waiting), ",".join(work.running)), unix_s)
    return family


def _renamed(family: Family, name: str, more_labels: dict[str, str]) -> Family:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    renamed = kinds[family.type](name, family.documentation) if family.type in kinds else None
    renamed = renamed or Family(name, family.documentation, family.type)
    for sample in family.samples:
        labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
        renamed.add_sample(name + sample.name.removeprefix(family.name), labels | more_labels, sample.value)
    return renamed


_STATE: Mapping[Metric, Callable[[ReplicaState], float]] = {
    m.ENGINE_UP: lambda s: float(s.alive),
    m.ENGINE_ASLEEP: lambda s: float(s.asleep),
    m.REQUESTS_RUNNING: lambda s: s.num_running,
    m.REQUESTS_WAITING: lambda s: s.num_waiting,
    m.BACKGROUND_RUNNING: lambda s: s.num_background_running,
    m.BACKGROUND_WAITING: lambda s: s.num_background_waiting,
    m.KV_BLOCKS_CAPACITY: lambda s: s.num_blocks,
    m.KV_BLOCKS_USED: lambda s: s.num_blocks_used,
    m.KV_BLOCKS_CACHED: lambda s: s.num_blocks_cached,
    m.STATE_SNAPSHOTS: lambda s: s.num_state_snapshots,
    m.EXPERT_LOAD_RATIO: lambda s: s.expert_load_ratio,
    m.KV_USAGE: lambda s: s.num_blocks_used / s.num_blocks if s.num_blocks else 0.0,
    m.LAST_STEP_AGE: lambda s: s.last_step_age_s,
    m.HEARTBEAT_AGE: lambda s: s.heartbeat_age_s,
    m.RESTARTS: lambda s: s.num_restarts,
    m.SLEEPS: lambda s: s.num_sleeps,
    m.WAKE_SECONDS: lambda s: s.wake_s,
    m.RESUMED: lambda s: s.num_resumed,
    m.ADAPTER_BYTES: lambda s: s.adapter_bytes,
    m.ADAPTER_LOADS: lambda s: s.adapter_loads,
    m.ADAPTER_EVICTIONS: lambda s: s.adapter_evictions,
    m.WRONG_FRAMES: lambda s: s.num_wrong_frames,
    m.STEPS: lambda s: s.num_steps,
    m.EXECUTE_SECONDS: lambda s: s.execute_s,
    m.HOST_SECONDS: lambda s: s.host_s,
    m.SCHEDULED_TOKENS: lambda s: s.num_scheduled_tokens,
    m.BACKGROUND_TOKENS: lambda s: s.num_background_tokens,
    m.PROMPT_TOKENS: lambda s: s.num_prompt_tokens,
    m.GENERATION_TOKENS: lambda s: s.num_generated_tokens,
    m.PREEMPTIONS: lambda s: s.num_preemptions,
    m.SWAPPED_OUT_BLOCKS: lambda s: s.num_swapped_out_blocks,
    m.SWAPPED_IN_BLOCKS: lambda s: s.num_swapped_in_blocks,
    m.PREFIX_QUERIED: lambda s: s.num_prefix_queried_tokens,
    m.PREFIX_HIT: lambda s: s.num_prefix_hit_tokens,
    m.STATE_EVICTIONS: lambda s: s.num_state_evictions,
}


MAX_ADAPTER_LABELS = 100
PREDICTION = "prediction"  # the proposer that a request's own prediction counts as
_DRAFTS: Mapping[Metric, Callable[[DraftCounts], dict[tuple[str, ...], float]]] = {
    m.DRAFTED_ROWS: lambda d: {(): float(d.num_rows)},
    m.DRAFT_TOKENS: lambda d: {(): float(d.num_tokens)},
    m.ACCEPTED_TOKENS: lambda d: {(): float(d.num_accepted)},
    m.ACCEPTED_AT_POSITION: lambda d: {(str(place),): float(count) for place, count in enumerate(d.accepted)},
}


_WORKER: Mapping[Metric, Callable[[WorkerView], float]] = {
    m.WORKER_UP: lambda w: float(w.alive),
    m.WORKER_RUNNING: lambda w: w.num_running,
    m.WORKER_WAITING: lambda w: w.num_waiting,
    m.WORKER_KV_USAGE: lambda w: w.num_blocks_used / w.num_blocks if w.num_blocks else 0.0,
}


_TIERS: Mapping[Metric, Callable[[TierFigures], dict[tuple[str, ...], float]]] = {
    m.KV_TIER_HITS: lambda t: {(): float(t.hit_tokens)},
    m.KV_TIER_BYTES: lambda t: {(): float(t.num_bytes)},
    m.KV_DROPPED: lambda t: {(reason,): float(count) for reason, count in t.dropped.items()},
}


_ADMISSION: Mapping[Metric, Callable[[AdmissionController], dict[tuple[str, ...], float]]] = {
    m.ADMISSION_REFUSED: lambda a: {(reason,): float(count) for reason, count in a.num_refused.items()},
    m.ADMISSION_WAITING: lambda a: {(): float(a.num_waiting)},
    m.ADMISSION_DRAIN_RATE: lambda a: {(): a.drain_per_s},
    m.ADMISSION_WAIT: lambda a: {(): a.foretold_wait_s()},
}


class Histogram:
    """Counts per bucket. Touched by the event loop alone, hence without a lock."""

    def __init__(self, metric: Metric, counts: list[int] | None = None, total: float = 0.0) -> None:
        self._metric, self._bounds = metric, metric.buckets
        self._counts = counts or [0] * (len(self._bounds) + 1)
        self._sum = total

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self) -> HistogramMetricFamily:
        """The histogram: by upper bound how many values are at most that large, and the sum of all."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((str(floatToGoString(bound)), float(total)))  # type: ignore[no-untyped-call]
        return HistogramMetricFamily(self._metric.name, self._metric.help, buckets=buckets, sum_value=self._sum)


class TenantCounts:
    """Counts of what tenants did and were refused; by names of the table alone, so clients cannot make labels."""

    def __init__(self, num_file_failures: Callable[[], int]) -> None:
        self._num_file_failures = num_file_failures
        self._counts: dict[Metric, dict[tuple[str, ...], float]] = {metric: {} for metric in m.TENANT_METRICS}
        self._quotas: dict[str, TenantQuota] = {}
        self.capture: Capture | None = None

    def _add(self, metric: Metric, labels: tuple[str, ...], amount: float) -> None:
        counts = self._counts[metric]
        counts[labels] = counts.get(labels, 0.0) + amount

    def entered(self, quota: TenantQuota) -> None:
        """An HTTP request of this tenant was let in."""
        self._quotas[quota.name] = quota
        self._add(m.TENANT_REQUESTS, (quota.name,), 1)

    def left(self, quota: TenantQuota, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """Count the tokens of a request that is done."""
        self._add(m.TENANT_TOKENS, (quota.name, "prompt"), num_prompt_tokens)
        self._add(m.TENANT_TOKENS, (quota.name, "generated"), num_generated_tokens)

    def refused(self, tenant: str, error: RateLimited) -> None:
        self._add(m.TENANT_REFUSALS, (tenant, error.limit), 1)

    def samples(self, metric: Metric) -> dict[tuple[str, ...], float]:
        if metric is m.TENANT_IN_FLIGHT:
            return {(name,): float(quota.num_in_flight) for name, quota in self._quotas.items()}
        if metric is m.TENANT_WAITING:
            return {(name,): float(quota.num_waiting) for name, quota in self._quotas.items()}
        if metric is m.TENANTS_FILE_FAILURES:
            return {(): float(self._num_file_failures())}
        if self.capture is not None and metric is m.CAPTURED_ANSWERS:
            return {(outcome,): float(count) for outcome, count in self.capture.counts.items()}
        if self.capture is not None and metric is m.CAPTURE_BYTES:
            return {(): float(self.capture.num_bytes)}
        return self._counts[metric]


class AdapterCounts:
    """Counts of LoRA adapters' requests, by name; of more than MAX_ADAPTER_LABELS the later ones are `other`."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}  # requests, prompt tokens, generated tokens

    def ended(self, adapter: str, num_prompt_tokens: int, num_tokens: int) -> None:
        if adapter not in self._counts and len(self._counts) >= MAX_ADAPTER_LABELS:
            adapter = "other"
        counts = self._counts.setdefault(adapter, [0, 0, 0])
        for place, more in enumerate((1, num_prompt_tokens, num_tokens)):
            counts[place] += more

    def requests(self) -> dict[tuple[str, ...], float]:
        return {(name,): float(counts[0]) for name, counts in self._counts.items()}

    def tokens(self) -> dict[tuple[str, ...], float]:
        kinds = enumerate(("prompt", "generated"), 1)
        return {(name, kind): float(counts[i]) for i, kind in kinds for name, counts in self._counts.items()}


class HttpMetrics(Collector):
    """Counts of a server's or a router's HTTP requests, and the page. Nothing is global, so two may live in one
    process.
    """

    def __init__(self, promises: Promises | None, num_tenants_file_failures: Callable[[], int]) -> None:
        self.promises = promises or Promises(())
        self.num_in_flight = self.num_cancelled = 0
        self.num_log_lines_dropped: Callable[[], int] = lambda: 0
        self.results: Results | None = None
        self.num_batches, self.batch_lines = 0, {"answered": 0, "failed": 0}
        self.tenants = TenantCounts(num_tenants_file_failures)
        self._answered: Counter[tuple[str, ...]] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def http_answered(self, route: str, status: int) -> None:
        self._answered[route, str(status)] += 1

    def page(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, in the format `accept` asks for. Called in the event loop."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def http_samples(self) -> dict[Metric, dict[tuple[str, ...], float]]:
        return {
            m.HTTP_IN_FLIGHT: {(): float(self.num_in_flight)},
            m.LOOP_TASKS: {(): float(len(asyncio.all_tasks()))},
            m.HTTP_REQUESTS: {labels: float(count) for labels, count in self._answered.items()},
            m.REQUESTS_IN_OBJECTIVE: self.promises.samples(),
            m.REQUESTS_CANCELLED: {(): float(self.num_cancelled)},
            m.LOG_LINES_DROPPED: {(): float(self.num_log_lines_dropped())},
            m.BATCHES: {(): float(self.num_batches)},
            m.BATCH_LINES: {(outcome,): float(count) for outcome, count in self.batch_lines.items()},
            **result_cache_samples(self.results),
        }


class EdgeMetrics(HttpMetrics):
    """One server's counts, and what its engine tells."""

    def __init__(
        self,
        replica: Replica,
        *,
        version: str,
        compat: str = "none",
        start_phases: Mapping[str, float] | None = None,
        start_budget_s: float = 0.0,
        promises: Promises | None = None,
        num_tenants_file_failures: Callable[[], int] = int,
    ) -> None:
        super().__init__(promises, num_tenants_file_failures)
        self._replica = replica
        self._admission: AdmissionController | None = None
        self._start_phases = start_phases if start_phases is not None else {}
        self._start_budget_s = start_budget_s
        self._version, self._compat = version, compat
        self._model: str | None = None
        self._block_size = self._max_num_seqs = 0
        self._proposer = ""
        self.histograms = {metric: Histogram(metric) for metric in m.EDGE_METRICS if metric.buckets}
        self._inter_token = self.histograms[m.INTER_TOKEN_LATENCY]
        self.adapters = AdapterCounts()
        self.releases: dict[Metric, dict[tuple[str, ...], float]] = {m.RELEASE_VERSION: {}, m.RELEASE_CHANGES: {}}
        self.state_of: Callable[[Replica], ReplicaState] = lambda replica: replica.state()

    def engine_came(self, replica: Replica, model: ServedModel, admission: AdmissionController | None) -> None:
        """Show the engine on the page from now on."""
        self._replica, self._admission = replica, admission
        self._model, self._block_size, self._max_num_seqs = model.name, model.block_size, model.max_num_seqs
        self._proposer = model.footprint.proposer if model.footprint is not None else ""

    def tokens_came(self, gap_s: float, num_tokens: int) -> None:
        """`num_tokens` tokens of one sample, each `gap_s` after the one before."""
        self._inter_token.observe(gap_s, num_tokens)

    def sample_finished(self, timing: RequestTiming | None, *, num_prompt_tokens: int, num_tokens: int) -> None:
        """A sample reached its end, whatever that was."""
        self.histograms[m.REQUEST_PROMPT_TOKENS].observe(num_prompt_tokens)
        self.histograms[m.REQUEST_GENERATION_TOKENS].observe(num_tokens)
        if timing is not None:
            self.histograms[m.TTFT].observe(timing.ttft_s)
            self.histograms[m.E2E].observe(timing.total_s)
            self.histograms[m.QUEUE].observe(timing.queue_s)
            self.histograms[m.PREFILL].observe(timing.prefill_s)
            self.histograms[m.DECODE].observe(timing.decode_s)

    def collect(self) -> Iterator[Family]:
        """Called by the registry for each page."""
        families = list(self._families())
        yield from families
        if self._compat == "vllm":
            yield from vllm_families(families, self._model or "")
            if (adapters := self._replica.adapters) is not None and adapters.is_used:
                yield lora_family(adapters.at_work(), self._max_num_seqs, time.time())

        if self._compat == "triton" and (tensors := self._replica.tensors) is not None:
            yield from triton_families(tensors)

    def _families(self) -> Iterator[Family]:
        state = self.state_of(self._replica)
        for metric in m.METRICS:
            if metric in self.histograms:
                yield self.histograms[metric].family()
            elif metric is m.HANDOVER_WAIT:
                yield Histogram(metric, state.handovers.waits, state.handovers.waited_s).family()
            else:
                yield family_of(metric, self._samples(metric, state))

    def _samples(self, metric: Metric, state: ReplicaState) -> dict[tuple[str, ...], float]:
        if metric in _STATE:
            return {(): float(_STATE[metric](state))}
        if metric in _DRAFTS:
            return self._draft_samples(_DRAFTS[metric], state)
        if metric is m.HANDOVERS:
            return {(outcome,): float(count) for outcome, count in state.handovers.outcomes.items()}
        if metric is m.KV_TRANSFER_BYTES:
            return {(name,): float(num_bytes) for name, num_bytes in state.handovers.num_bytes.items()}
        if metric in _TIERS:
            named = {name: _TIERS[metric](figures) for name, figures in state.kv_tiers.tiers.items()}
            if metric is m.KV_DROPPED:
                named["peer"] = {(reason,): float(count) for reason, count in state.handovers.dropped.items()}
            if metric is m.KV_TIER_HITS and state.handovers.outcomes:
                named["peer"] = {(): float(state.handovers.num_tokens)}
            return {(name, *labels): value for name, counts in named.items() for labels, value in counts.items()}
        if metric is m.REQUESTS_FINISHED:
            return {(reason.value,): float(state.num_finished.get(reason, 0)) for reason in FinishReason}
        if metric in _ADMISSION:
            return _ADMISSION[metric](self._admission) if self._admission is not None else {}
        if metric in _WORKER:
            return worker_samples(metric, self._replica)
        if metric in m.TENANT_METRICS:
            return self.tenants.samples(metric)
        own: dict[Metric, dict[tuple[str, ...], float]] = {
            m.CACHE_INFO: {(str(self._block_size), str(state.num_blocks)): 1.0},
            m.INFO: {(self._version, self._model): 1.0} if self._model is not None else {},
            m.START_SECONDS: {(phase,): seconds for phase, seconds in self._start_phases.items()},
            m.ADAPTER_REQUESTS: self.adapters.requests(),
            m.ADAPTER_TOKENS: self.adapters.tokens(),
            m.START_BUDGET: {(): self._start_budget_s},
            **self.releases,
            **self.http_samples(),
            **tensor_samples(self._replica),
        }
        return own[metric]

    def _draft_samples(
        self, samples: Callable[[DraftCounts], dict[tuple[str, ...], float]], state: ReplicaState
    ) -> dict[tuple[str, ...], float]:
        """Samples by proposer: the engine's, and texts that requests predicted; none without a proposer."""
        if not self._proposer:
            return {}
        proposers = {self._proposer: state.drafts, PREDICTION: state.predicted_drafts}
        named = {name: samples(counts) for name, counts in proposers.items()}
        return {(name, *labels): value for name, counts in named.items() for labels, value in counts.items()}


def worker_samples(metric: Metric, replica: Replica) -> dict[tuple[str, ...], float]:
    """Samples by worker; none for a server with one engine, which has metrics without that label."""
    workers = replica.workers()
    told = _WORKER[metric]
    return {_labels(metric, worker): float(told(worker)) for worker in workers} if len(workers) > 1 else {}


def _labels(metric: Metric, worker: WorkerView) -> tuple[str, ...]:
    return tuple(str(getattr(worker, label)) for label in metric.labels)


def tensor_samples(replica: Replica) -> Mapping[Metric, dict[tuple[str, ...], float]]:
    """Samples of TENSOR_METRICS; none for a server without tensor models."""
    tensors = replica.tensors
    if tensors is None:
        return {metric: {} for metric in m.TENSOR_METRICS}
    samples: Mapping[Metric, dict[tuple[str, ...], float]] = tensors.counts.samples()
    return samples


def result_cache_samples(results: Results | None) -> dict[Metric, dict[tuple[str, ...], float]]:
    """Samples of RESULT_CACHE_METRICS; none for a server without a result cache."""
    if results is None or not results.cache.max_bytes:
        return {metric: {} for metric in m.RESULT_CACHE_METRICS}
    counts: dict[tuple[str, ...], float] = {("hit",): float(results.num_hits), ("miss",): float(results.num_misses)}
    checks: dict[tuple[str, ...], float] = {}
    is_on: dict[tuple[str, ...], float] = {}
    similar = results.similar
    if similar is not None:
        counts |= {("hit",): float(results.num_hits - results.num_similar), ("similar",): float(results.num_similar)}
        checks = {("alike",): float(similar.num_checked - similar.num_wrong), ("not_alike",): float(similar.num_wrong)}
        is_on = {(): float(similar.is_on)}
    return {
        m.RESULT_CACHE_REQUESTS: counts,
        m.RESULT_CACHE_CHECKS: checks,
        m.RESULT_CACHE_SIMILAR: is_on,
        m.RESULT_CACHE_BYTES: {(): float(results.cache.num_bytes)},
    }


def family_of(metric: Metric, samples: Mapping[tuple[str, ...], float]) -> Family:
    """A gauge or counter with its values by labels."""
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family
