"""Wires one engine: checkpoint, text, memory plan, executor, scheduler, core; the only place that knows them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from maitred.clock import Clock, WallClock
from maitred.config import EngineConfig
from maitred.engine.async_engine import AsyncEngine
from maitred.engine.core import EngineCore
from maitred.engine.executors import BuiltExecutor, ExecutorPlan, plan_executor
from maitred.engine.intake import Footprint, ServedModel
from maitred.engine.memory import (
    MemoryPlan,
    available_memory_bytes,
    format_bytes,
    plan_memory,
    swap_bytes,
)
from maitred.engine.running import Engine
from maitred.engine.store import DecisionLogFile
from maitred.engine.swap_meter import SwapMeter
from maitred.engine.timeline import Timeline
from maitred.errors import CheckpointError, ConfigError, InvalidRequest
from maitred.kvcache.manager import KVCacheManager
from maitred.kvcache.prefix_cache import TokenHasher
from maitred.model.checkpoint import Checkpoint, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.spec import DecoderSpec
from maitred.request import Request, SamplingParams
from maitred.scheduler.admission import PRIORITY_FIRST, AdmissionController
from maitred.scheduler.decision_log import Recorder
from maitred.scheduler.log_codec import Header
from maitred.scheduler.policies import POLICIES, policy_for
from maitred.scheduler.policy import PolicyFactory
from maitred.scheduler.scheduler import Scheduler
from maitred.text import ChatTemplate, Tokenizer

OnEvent = Callable[[str], None]

# generation_config.json's names for our sampling parameters
_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(slots=True)
class EngineParts:
    """A wired engine that nobody steps yet."""

    core: EngineCore
    model: ServedModel
    spec: DecoderSpec
    memory_plan: MemoryPlan
    text_folder: Path  # with the tokenizer's files
    start_phases: Mapping[str, float]  # s, in order
    deterministic: bool = False  # the executor says that tokens do not depend on what shares the batch
    decision_log: DecisionLogFile | None = None

    def close(self) -> None:
        """Give back memory and threads."""
        self.core.close()
        if self.decision_log is not None:
            self.decision_log.close()


def build_engine(
    config: EngineConfig,
    *,
    served_model_names: Sequence[str] = (),
    on_event: OnEvent | None = None,
    on_admitted: Callable[[Request], None] | None = None,
    policies: Mapping[str, PolicyFactory] = POLICIES,
) -> Engine:
    """Load everything and start the engine's thread; `on_event` gets a line per phase, the memory plan among them.

    `on_admitted` is told of every request, in the engine's thread: `Ledger.opened` is one such. `policies` is what
    `config.scheduler.policy` may name, now and when it is changed.
    """
    clock = WallClock()
    parts = build_parts(
        config, served_model_names=served_model_names, on_event=on_event, clock=clock, policies=policies
    )
    admission = AdmissionController(
        config.admission,
        max_num_seqs=config.scheduler.max_num_seqs,
        priority_first=config.scheduler.policy in PRIORITY_FIRST,
    )
    replica = AsyncEngine(parts.core, clock, on_close=parts.close, on_admitted=on_admitted, admission=admission)
    return Engine(replica, parts.model, parts.memory_plan, admission, start_phases=parts.start_phases)


def build_parts(
    config: EngineConfig,
    *,
    served_model_names: Sequence[str] = (),
    on_event: OnEvent | None = None,
    clock: Clock | None = None,
    policies: Mapping[str, PolicyFactory] = POLICIES,
) -> EngineParts:
    """Load and wire; raises CheckpointError, ConfigError or OutOfMemory before anything large is allocated."""
    tell = on_event or (lambda line: None)
    clock = clock or WallClock()
    timeline = Timeline(clock)
    _check_overrides(config.model.generation_config)
    policy_for(config.scheduler, policies)  # before anything is loaded
    checkpoint = open_checkpoint(config.model.model, config.model.revision)
    spec = spec_from_config(checkpoint.config)
    timeline.end("checkpoint")
    tokenizer = Tokenizer.from_folder(checkpoint.tokenizer_file().parent)
    timeline.end("tokenizer")
    tell(f"model   {checkpoint.name}: {spec.architecture}, {spec.num_parameters() / 1e6:,.1f} M parameters")
    executor_plan = plan_executor(config, checkpoint, spec, tell)
    plan = plan_memory(
        available_bytes=executor_plan.available_bytes(available_memory_bytes()),
        weights_bytes=executor_plan.weights_bytes,
        bytes_per_block=executor_plan.bytes_per_block,
        model_context=spec.max_position_embeddings,
        pinned_context=config.model.max_model_len,
        cache=config.cache,
        scheduler=config.scheduler,
    )
    tell(executor_plan.describe())
    tell(plan.describe())
    model = _served_model(config, checkpoint, spec, tokenizer, plan, served_model_names)
    model = replace(model, footprint=_footprint(spec, executor_plan, plan))
    num_host_blocks = _num_host_blocks(config, executor_plan, plan)
    timeline.end("plan")

    def on_phase(phase: str, story: str) -> None:
        timeline.end(phase)
        if story:
            tell(f"{phase:7} {story} in {timeline.phases[phase]:.2f} s")

    executor = executor_plan.build(
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        num_host_blocks=num_host_blocks,
        on_phase=on_phase,
    )
    timeline.end("executor")
    swap_meter = _swap_meter(executor, plan, num_host_blocks, tell)
    scheduler = Scheduler(
        config.scheduler,
        KVCacheManager(
            num_blocks=plan.num_blocks,
            block_size=config.cache.block_size,
            hasher=TokenHasher(config.cache.block_size, checkpoint.identity),
            enable_prefix_caching=config.cache.enable_prefix_caching,
            num_host_blocks=num_host_blocks,
        ),
        policies=policies,
    )
    log = _decision_log(config, plan, num_host_blocks) if config.decision_log is not None else None
    core = EngineCore(
        scheduler,
        executor,
        clock,
        Recorder(log.write) if log is not None else None,
        swap_meter.observe if swap_meter is not None else None,
    )
    timeline.end("scheduler")
    tell(f"ready   in {timeline.total_s:.2f} s")
    return EngineParts(
        core=core,
        model=model,
        spec=spec,
        memory_plan=plan,
        text_folder=checkpoint.folder,
        start_phases=timeline.phases,
        deterministic=bool(getattr(executor, "deterministic", False)),
        decision_log=log,
    )


def _num_host_blocks(config: EngineConfig, executor_plan: ExecutorPlan, plan: MemoryPlan) -> int:
    on_gpu = executor_plan.on_gpu
    num_bytes = swap_bytes(
        config.cache.swap_memory_bytes,
        on_gpu=on_gpu,
        available_host_bytes=available_memory_bytes(),
        host_bytes_planned=0 if on_gpu else plan.weights_bytes + plan.kv_bytes,
    )
    return num_bytes // plan.bytes_per_block


def _swap_meter(executor: BuiltExecutor, plan: MemoryPlan, num_host_blocks: int, tell: OnEvent) -> SwapMeter | None:
    bandwidth = executor.measure_swap()
    if bandwidth is None:
        return None
    tell(
        f"swap    {format_bytes(num_host_blocks * plan.bytes_per_block)} of host memory = {num_host_blocks:,} blocks; "
        f"{bandwidth.out_bytes_per_s / 1e9:.1f} GB/s out, {bandwidth.in_bytes_per_s / 1e9:.1f} GB/s in"
    )
    return SwapMeter(
        bytes_per_block=plan.bytes_per_block,
        out_bytes_per_s=bandwidth.out_bytes_per_s,
        in_bytes_per_s=bandwidth.in_bytes_per_s,
    )


def _decision_log(config: EngineConfig, plan: MemoryPlan, num_host_blocks: int) -> DecisionLogFile:
    header = Header(
        config=config.scheduler,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_host_blocks=num_host_blocks,
    )
    return DecisionLogFile(
        Path(config.decision_log or ""),
        header,
        max_bytes=config.decision_log_max_bytes,
        max_files=config.decision_log_max_files,
    )


def _served_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    tokenizer: Tokenizer,
    plan: MemoryPlan,
    names: Sequence[str],
) -> ServedModel:
    generation = {**checkpoint.generation_config, **config.model.generation_config}
    return ServedModel(
        names=tuple(names) or (checkpoint.name,),
        tokenizer=tokenizer,
        chat_template=_chat_template(config.model.chat_template, checkpoint.folder),
        max_model_len=plan.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=_eos_token_ids(checkpoint.config, generation, tokenizer),
        generation_defaults=_generation_defaults(generation),
        created=int(time.time()),
        root=config.model.model or checkpoint.name,
        revision=checkpoint.identity,
        block_size=config.cache.block_size,
    )


def _footprint(spec: DecoderSpec, executor_plan: ExecutorPlan, plan: MemoryPlan) -> Footprint:
    return Footprint(
        architecture=spec.architecture,
        num_parameters=spec.num_parameters(),
        executor=executor_plan.name,
        device=executor_plan.device_name,
        dtype=executor_plan.dtype_name,
        kv_dtype=executor_plan.kv_dtype_name,
        weights_bytes=plan.weights_bytes,
        kv_bytes=plan.kv_bytes,
    )


def _check_overrides(overrides: Mapping[str, Any]) -> None:
    """Raise ConfigError for what is not served or out of range; a checkpoint's own file may hold anything."""
    unknown = sorted(set(overrides) - {*_GENERATION_FIELDS, "eos_token_id"})
    if unknown:
        raise ConfigError(
            f"generation_config has {unknown[0]!r}; choose from {', '.join(sorted(_GENERATION_FIELDS))}, eos_token_id"
        )
    try:
        SamplingParams(**cast("dict[str, Any]", _generation_defaults(overrides)))
    except InvalidRequest as error:
        raise ConfigError(f"generation_config: {error}") from None


def _chat_template(override: str | None, folder: Path) -> ChatTemplate | None:
    if override is None:
        return ChatTemplate.from_folder(folder)
    try:
        text = Path(override).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the chat template {override}: {error.strerror}") from None
    return ChatTemplate.from_folder(folder, override=text)


def _eos_token_ids(
    model_config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[int, ...]:
    """generation_config.json's, else config.json's, and always the tokenizer's own."""
    listed = generation.get("eos_token_id", model_config.get("eos_token_id"))
    ids = {} if listed is None else dict.fromkeys(listed if isinstance(listed, list) else [listed])
    if tokenizer.eos_token_id is not None:
        ids[tokenizer.eos_token_id] = None
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(f"eos_token_id is {listed!r}; it must be a token id or a list of them")
    return tuple(ids)


def _generation_defaults(generation: Mapping[str, Any]) -> dict[str, float | int]:
    return {
        ours: generation[theirs] for theirs, ours in _GENERATION_FIELDS.items() if generation.get(theirs) is not None
    }
