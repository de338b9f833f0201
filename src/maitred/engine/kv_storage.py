"""KV tiers of an engine, opened: which there are, and what their blocks depend on."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Protocol

from maitred.config import EngineConfig
from maitred.engine.executors import ExecutorPlan
from maitred.engine.memory import format_bytes
from maitred.errors import ConfigError
from maitred.kvcache.tiers import KVTier
from maitred.model.rope import depends_on_context
from maitred.model.spec import DecoderSpec


class _Identified(Protocol):
    """A checkpoint."""

    @property
    def identity(self) -> str: ...


def fingerprint(
    config: EngineConfig,
    executor: ExecutorPlan,
    spec: DecoderSpec,
    max_model_len: int,
    files: Sequence[_Identified],
) -> str:
    """What the bytes of a block depend on besides its tokens; `files` are the model and, where there is one, its head,
    whose layer is part of each block.
    """
    model = config.model
    by_context = any(depends_on_context(layer.rope) for layer in spec.layers if layer.rope is not None)
    parts = (
        version("maitred"),
        *(file.identity for file in files),
        spec,
        max_model_len if by_context else 0,
        config.cache.block_size,
        (executor.name, executor.device_name, executor.isa, executor.bytes_per_block),
        (executor.dtype_name, model.dtype, model.lm_head_dtype, model.int4_group_size, executor.kv_dtype_name),
    )
    return repr(parts)


def open_tiers(config: EngineConfig, executor: ExecutorPlan, fingerprint: str) -> list[KVTier]:
    """Those that were asked for, the fastest first. Raises ConfigError."""
    tiers = config.tiers
    if tiers.kv_disk is None:
        return []
    if executor.on_gpu:
        raise ConfigError("kv_disk keeps KV of an executor on a CPU, not of a GPU yet; leave it out")
    from maitred.storage.kv_disk import open_kv_disk  # noqa: PLC0415  numpy

    return [
        open_kv_disk(
            tiers.kv_disk,
            max_bytes=tiers.kv_disk_max_bytes,
            bytes_per_block=executor.bytes_per_block,
            fingerprint=fingerprint,
            key_file=tiers.kv_disk_key_file,
        )
    ]


def describe(tier: KVTier, block_size: int) -> str:
    """A line for the terminal."""
    stats, dropped = tier.stats, tier.stats.dropped.total()
    lost = f"; {dropped:,} that could not be used are gone" if dropped else ""
    return (
        f"kv      {tier.name} holds {stats.num_blocks:,} blocks = {stats.num_blocks * block_size:,} tokens, "
        f"{format_bytes(stats.num_bytes)}{lost}"
    )
