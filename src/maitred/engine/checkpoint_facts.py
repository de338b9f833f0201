"""Facts that a checkpoint and the user's settings give of a served model: its names, end tokens, defaults, template."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from maitred.config import EngineConfig
from maitred.core.errors import CheckpointError, ConfigError, InvalidRequest
from maitred.core.request import SamplingParams
from maitred.engine.executors import ExecutorPlan
from maitred.engine.memory import MemoryPlan
from maitred.engine.model_facts import Footprint, ModelFacts
from maitred.model.checkpoint import Checkpoint
from maitred.model.spec import DecoderSpec
from maitred.text.folder import added_token_id, read_chat_template, read_named_tokens

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
