"""Planning of one engine: which executor, how much memory for what, before anything large is allocated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from maitred.config import EngineConfig, SchedulerConfig
from maitred.engine.drafting import DraftPlan, plan_drafts
from maitred.engine.executors import ExecutorPlan, own_threads, plan_executor
from maitred.engine.memory import (
    HOST_KV_SHARE,
    MemoryPlan,
    available_memory_bytes,
    format_bytes,
    own_share,
    plan_memory,
    swap_bytes,
    usable_cores,
)
from maitred.model.checkpoint import Checkpoint
from maitred.model.families import spec_from_config
from maitred.model.packaged import remark
from maitred.model.spec import DecoderSpec

OnEvent = Callable[[str], None]


class EnginePlan(NamedTuple):
    """Choices settled before anything large is allocated."""

    spec: DecoderSpec
    executor: ExecutorPlan
    memory: MemoryPlan
    num_host_blocks: int
    drafts: DraftPlan | None
    scheduler: SchedulerConfig  # with the executor's token budget where none was given


def plan_engine(config: EngineConfig, checkpoint: Checkpoint, tell: OnEvent, files: ExitStack) -> EnginePlan:
    """Choose the executor, and how much memory for what; told line by line. Raises OutOfMemory for what cannot fit."""
    spec = spec_from_config(checkpoint.config)
    tell(f"model   {checkpoint.name}: {spec.architecture}, {spec.num_parameters() / 1e6:,.1f} M parameters")
    if words := remark(config.model.model, checkpoint.name):
        tell(f"        {words}")
    executor, drafts = plan_drafts(
        config,
        checkpoint,
        plan_executor(config, checkpoint, spec, tell),
        with_taps=lambda taps: plan_executor(config, checkpoint, spec, lambda line: None, taps),
        num_threads=lambda draft: own_threads(config, spec_from_config(draft.config)),
        files=files,
        tell=tell,
    )
    scheduler = config.scheduler.settled(executor.token_budget)
    available_bytes = executor.available_bytes(_own_memory(config, executor))
    memory = plan_memory(
        available_bytes=drafts.available_bytes(available_bytes) if drafts is not None else available_bytes,
        weights_bytes=executor.weights_bytes,
        bytes_per_block=executor.bytes_per_block,
        model_context=spec.max_position_embeddings,
        pinned_context=config.model.max_model_len,
        cache=config.cache,
        scheduler=config.scheduler,
        draft=drafts.memory if drafts is not None else None,
        kv_share=1.0 if executor.on_gpu else HOST_KV_SHARE,
    )
    tell(executor.describe())
    tell(memory.describe())
    if config.share.num_engines > 1:
        tell(_told_share(config, executor))
    tell(f"steps   of at most {scheduler.token_budget} tokens, {scheduler.max_num_seqs} requests")
    if drafts is not None:
        tell(drafts.describe(config.speculative.num_speculative_tokens))
    return EnginePlan(spec, executor, memory, _num_host_blocks(config, executor, memory), drafts, scheduler)


def _own_memory(config: EngineConfig, executor: ExecutorPlan) -> int:
    """Bytes of the host's memory that this engine plans with."""
    free_bytes = config.share.available_bytes
    if free_bytes is None:
        free_bytes = available_memory_bytes()
    return own_share(free_bytes, config.share.num_engines, executor.mapped_bytes) - config.tiers.kv_host_bytes


def _told_share(config: EngineConfig, executor: ExecutorPlan) -> str:
    num_engines, mapped = config.share.num_engines, executor.mapped_bytes
    weights = f"weights {format_bytes(mapped)} in memory once, mapped by all" if mapped else "weights of its own"
    num_threads = num_engines * (executor.num_threads or 1) * config.model.tensor_parallel
    busy = f"; {num_threads} threads in all on {usable_cores()} cores wait for time slices"
    return (
        f"workers {num_engines}, each with KV cache and steps as told here, {weights}"
        f"{busy if num_threads > usable_cores() else ''}"
    )


def _num_host_blocks(config: EngineConfig, executor: ExecutorPlan, memory: MemoryPlan) -> int:
    on_gpu = executor.on_gpu
    num_bytes = swap_bytes(
        config.cache.swap_memory_bytes,
        on_gpu=on_gpu,
        available_host_bytes=_own_memory(config, executor),
        host_bytes_planned=0 if on_gpu else memory.weights_bytes + memory.kv_bytes,
    )
    return num_bytes // memory.bytes_per_block
