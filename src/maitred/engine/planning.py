"""Planning of one engine before anything large is allocated: executor, memory, and facts of the served model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from maitred.config import CacheConfig, EngineConfig, SchedulerConfig, TiersConfig
from maitred.core.errors import CheckpointError, ConfigError, InvalidRequest
from maitred.core.request import PoolingFacts, SamplingParams
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
from maitred.engine.model_facts import Footprint, ModelFacts
from maitred.kv.pages import KVGroups, groups_of
from maitred.model.checkpoint import Checkpoint
from maitred.model.families import UnknownArchitecture, spec_from_config
from maitred.model.packaged import remark
from maitred.model.pooling import OF_ONE_TOKEN, pooling_of
from maitred.model.spec import DecoderSpec
from maitred.text.folder import added_token_id, read_chat_template, read_named_tokens

OnEvent = Callable[[str], None]
ENCODER_BUDGET = 512  # tokens of a step, at least


class EnginePlan(NamedTuple):
    """Choices settled before anything large is allocated."""

    config: EngineConfig  # without what this model excludes
    spec: DecoderSpec
    executor: ExecutorPlan
    memory: MemoryPlan
    num_host_blocks: int
    drafts: DraftPlan | None
    pooling: PoolingFacts
    scheduler: SchedulerConfig  # with the executor's token budget where none was given


def plan_engine(config: EngineConfig, checkpoint: Checkpoint, tell: OnEvent, files: ExitStack) -> EnginePlan:
    """Choose the executor, and how much memory for what; told line by line. Raises OutOfMemory for what cannot fit."""
    spec = described_model(checkpoint)
    tell(f"model   {checkpoint.name}: {spec.architecture}, {spec.num_parameters() / 1e6:,.1f} M parameters{spec.way}")
    if words := remark(config.model.model, checkpoint.name):
        tell(f"        {words}")
    if spec.has_state or spec.is_uneven:
        config = _without_moved_kv(config, tell, has_state=spec.has_state)
    pooling = pooling_of(checkpoint, spec)
    if spec.encoder is not None:
        config = _as_encoder(config, spec, pooling)
    elif pooling.max_tokens and config.model.max_model_len is None:
        config = replace(config, model=replace(config.model, max_model_len=_own_context(spec, pooling)))
    needs_all = pooling.kind not in OF_ONE_TOKEN
    executor, drafts = plan_drafts(
        config,
        checkpoint,
        plan_executor(config, checkpoint, spec, tell, needs_all=needs_all),
        with_taps=lambda taps: plan_executor(config, checkpoint, spec, lambda _: None, taps, needs_all=needs_all),
        num_threads=lambda draft: own_threads(config, spec_from_config(draft.config)),
        files=files,
        tell=tell,
    )
    if (groups := _groups(config, spec, executor, drafts, tell)) is not None:
        executor = executor.in_groups(groups)
    scheduler = config.scheduler.settled(executor.token_budget)
    available_bytes = executor.available_bytes(_own_memory(config, executor))
    memory = plan_memory(
        available_bytes=drafts.available_bytes(available_bytes) if drafts is not None else available_bytes,
        weights_bytes=executor.weights_bytes,
        bytes_per_block=executor.bytes_per_block,
        model_context=spec.max_position_embeddings,
        pinned_context=config.model.max_model_len,
        cache=config.cache if spec.encoder is None else _encoders_cache(config.cache, scheduler, executor),
        scheduler=scheduler,
        draft=drafts.memory if drafts is not None else None,
        kv_share=1.0 if executor.on_gpu else HOST_KV_SHARE,
        groups=groups,
        bytes_per_page=executor.bytes_per_page,
        bytes_per_state_slot=executor.bytes_per_state_slot,
    )
    tell(executor.describe())
    tell(memory.describe())
    if config.share.num_engines > 1:
        tell(_told_share(config, executor))
    tell(f"steps   of at most {scheduler.token_budget} tokens, {scheduler.max_num_seqs} requests")
    if drafts is not None:
        tell(drafts.describe(config.speculative.num_speculative_tokens))
    num_host_blocks = _num_host_blocks(config, executor, memory)
    return EnginePlan(config, spec, executor, memory, num_host_blocks, drafts, pooling, scheduler)


def _own_context(spec: DecoderSpec, pooling: PoolingFacts) -> int:
    return min(spec.max_position_embeddings, pooling.max_tokens or spec.max_position_embeddings)


def _as_encoder(config: EngineConfig, spec: DecoderSpec, pooling: PoolingFacts) -> EngineConfig:
    """Settle what an encoder's steps need: room for whole prompts, and nothing that keeps or moves what they wrote.
    Raises ConfigError for a context that it has no positions for, and for steps that are shorter."""
    context, scheduler = config.model.max_model_len or _own_context(spec, pooling), config.scheduler
    if context > spec.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {context}, and {spec.architecture} has {spec.max_position_embeddings} positions; "
            f"serve with --max-model-len {spec.max_position_embeddings} or less"
        )
    if (budget := scheduler.max_num_batched_tokens) is not None and budget < context:
        raise ConfigError(
            f"max_num_batched_tokens is {budget}, and an encoder computes a text of up to {context} tokens in one "
            f"step; raise it, or serve with --max-model-len {budget}"
        )
    if config.lora.lora:
        raise ConfigError(f"adapters are not for an encoder ({spec.architecture}); leave out --lora")
    budget = budget or max(ENCODER_BUDGET, context, scheduler.max_num_seqs)
    return replace(
        config,
        model=replace(config.model, max_model_len=context),
        scheduler=replace(scheduler, max_num_batched_tokens=budget),
        cache=replace(config.cache, enable_prefix_caching=False, swap_memory_bytes=0),
        tiers=TiersConfig(),
        share=replace(config.share, exchanges_kv=False),
        speculative=replace(config.speculative, speculative="off", speculative_model=None),
    )


def _encoders_cache(cache: CacheConfig, scheduler: SchedulerConfig, executor: ExecutorPlan) -> CacheConfig:
    """Blocks of one step: none outlives it."""
    if cache.kv_cache_memory_bytes is not None:
        return cache
    num_blocks = -(-scheduler.token_budget // cache.block_size) + scheduler.max_num_seqs
    return replace(cache, kv_cache_memory_bytes=num_blocks * executor.bytes_per_block)


def _without_moved_kv(config: EngineConfig, tell: OnEvent, *, has_state: bool) -> EngineConfig:
    """Turn off what moves KV elsewhere, for a model of which something stays where it is; that is told. A layer of
    unlike heads has no cells that peers agree on; a block of all layers is bytes.
    """
    wanted = {
        "swap memory": has_state and bool(config.cache.swap_memory_bytes),
        "KV tiers": has_state and config.tiers.are_wanted,
        "KV between engines": config.share.exchanges_kv,
    }
    stays = "states  of recurrent layers stay" if has_state else "KV      of layers with unlike heads stays"
    if names := [name for name, is_wanted in wanted.items() if is_wanted]:
        tell(f"{stays} in this engine, so {', '.join(names)} cannot be used; off")
    config = replace(config, share=replace(config.share, exchanges_kv=False))
    if not has_state:
        return config
    return replace(config, cache=replace(config.cache, swap_memory_bytes=0), tiers=TiersConfig())


def described_model(checkpoint: Checkpoint) -> DecoderSpec:
    """The model by its native row; without one, by transformers' module of it. Raises CheckpointError."""
    try:
        return spec_from_config(checkpoint.config)
    except UnknownArchitecture as unknown:
        try:
            from maitred.model.transformers_module import module_spec  # noqa: PLC0415  two seconds
        except ImportError:
            raise UnknownArchitecture(f"{unknown} Others may run after pip install 'maitred[torch]'") from None
        return module_spec(checkpoint)


def _groups(
    config: EngineConfig, spec: DecoderSpec, executor: ExecutorPlan, drafts: DraftPlan | None, tell: OnEvent
) -> KVGroups | None:
    """Groups of layers that keep what their windows see, a head's layer among them; None where blocks are whole:
    without windows, where a head alone would see all tokens, and beside Redis. That is told.
    """
    context = config.model.max_model_len or spec.max_position_embeddings
    windows, has_head = [spec.layers[i].window for i in spec.kv_layers], drafts is not None and drafts.head is not None
    by_width = spec.is_uneven and executor.name == "native"  # PyTorch's has equal room for unlike layers
    widths = [heads * size for heads, size in spec.kv_heads] if by_width else [1] * len(windows)
    groups = groups_of(windows, context, widths)
    if groups is not None and groups.counts[0] and has_head:
        groups = groups_of([*windows, None], context, [*widths, spec.kv_width if by_width else 1])
    reasons = {
        "a head alone would see all tokens": has_head and groups is not None and not groups.counts[0],
        "Redis has whole blocks alone": config.tiers.kv_redis is not None,
    }
    why = [reason for reason, holds in reasons.items() if holds]
    if groups is not None and why:
        tell(f"windows the KV of all tokens is kept in all layers: {why[0]}")
    return None if why else groups


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
    return num_bytes // executor.bytes_per_page


# ---- facts that a checkpoint and the user's settings give of a served model


# generation_config.json's names for our sampling parameters
_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def check_overrides(overrides: Mapping[str, Any]) -> None:
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


def facts_of(
    config: EngineConfig,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    executor_plan: ExecutorPlan,
    plan: MemoryPlan,
    names: Sequence[str],
    proposer: str = "",
    pooling: PoolingFacts | None = None,
) -> ModelFacts:
    """Raises CheckpointError when the model has no tokenizer, ConfigError for a template that cannot be read."""
    generation = {**checkpoint.generation_config, **config.model.generation_config}
    tokenizer_file = checkpoint.tokenizer_file()
    text_place = tokenizer_file.parent if checkpoint.gguf is None else tokenizer_file
    own_eos = checkpoint.config.get("eos_token_id") if checkpoint.gguf is not None else _tokenizers_eos(tokenizer_file)
    return ModelFacts(
        tokenizer_folder=str(text_place),
        chat_template=_chat_template(config.model.chat_template, text_place),
        names=tuple(names) or (checkpoint.name,),
        max_model_len=plan.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=_eos_token_ids(checkpoint.config, generation, own_eos),
        generation_defaults=_generation_defaults(generation),
        created=int(time.time()),
        root=config.model.model or checkpoint.name,
        revision=checkpoint.identity,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        footprint=_footprint(spec, executor_plan, plan, proposer),
        allow_special_tokens_in_content=config.model.allow_special_tokens_in_content,
        tool_format=config.model.tool_format,
        pooling=pooling,
    )


def _footprint(spec: DecoderSpec, executor_plan: ExecutorPlan, plan: MemoryPlan, proposer: str) -> Footprint:
    return Footprint(
        architecture=spec.architecture,
        num_parameters=spec.num_parameters(),
        executor=executor_plan.name,
        device=executor_plan.device_name,
        dtype=executor_plan.dtype_name,
        kv_dtype=executor_plan.kv_dtype_name,
        weights_bytes=plan.weights_bytes,
        kv_bytes=plan.kv_bytes,
        isa=executor_plan.isa,
        proposer=proposer,
    )


def _chat_template(override: str | None, folder: Path) -> str | dict[str, str] | None:
    """Text of the template, or texts by name; rendering compiles them."""
    if override is None:
        return read_chat_template(folder)
    try:
        return Path(override).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the chat template {override}: {error.strerror}") from None


def _eos_token_ids(model_config: Mapping[str, Any], generation: Mapping[str, Any], own: int | None) -> tuple[int, ...]:
    """generation_config.json's, else config.json's, and always the tokenizer's `own`."""
    listed = generation.get("eos_token_id", model_config.get("eos_token_id"))
    ids = {} if listed is None else dict.fromkeys(listed if isinstance(listed, list) else [listed])
    if own is not None:
        ids[own] = None
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(f"eos_token_id is {listed!r}; it must be a token id or a list of them")
    return tuple(ids)


def _tokenizers_eos(tokenizer_file: Path) -> int | None:
    """Nearly always a token added to the vocabulary; only where it is none, all of the tokenizer is read."""
    text = read_named_tokens(tokenizer_file.parent).get("eos_token")
    if text is None:
        return None
    added = added_token_id(tokenizer_file, text)
    if added is not None:
        return added
    from maitred.text.tokenizer import Tokenizer  # noqa: PLC0415

    return Tokenizer.from_folder(tokenizer_file.parent).eos_token_id


def _generation_defaults(generation: Mapping[str, Any]) -> dict[str, float | int]:
    return {
        ours: generation[theirs] for theirs, ours in _GENERATION_FIELDS.items() if generation.get(theirs) is not None
    }
