"""Our metrics under other servers' names, for dashboards and gateways that know those (`--metrics-compat`).

Off by default: names with a colon, as vLLM's, are kept for recording rules, and `promtool check metrics` complains of
every one. Triton's counters lack `_total`, so that their type is not told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from maitred.core import metrics as m
from maitred.core.metrics import Metric
from maitred.engine.adapter_book import AtWork

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


def triton_families(tensors: Any) -> Iterator[Family]:
    """Triton's metrics of an `engine.tensors.TensorModels`, by model and version."""
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
