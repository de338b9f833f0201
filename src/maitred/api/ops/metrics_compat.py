"""The same figures under vLLM's names, for dashboards and gateways that know those (`--metrics-compat vllm`).

Off by default: names with a colon are kept for recording rules, and `promtool check metrics` complains of every one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from maitred import metrics as m
from maitred.engine.adapter_book import AtWork
from maitred.metrics import Metric

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


def vllm_families(families: Iterable[Family], model: str) -> Iterator[Family]:
    """Those of `families` that vLLM has, renamed, with its labels model_name and engine."""
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
