"""KV tiers of an engine, opened: which there are, and what their blocks depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from maitred.config import EngineConfig
from maitred.core.errors import ConfigError
from maitred.engine.executors import ExecutorPlan
from maitred.engine.memory import format_bytes
from maitred.kv.tiers import KVFingerprint, KVTier
from maitred.model.rope import depends_on_context
from maitred.model.spec import DecoderSpec


class _Identified(Protocol):
    """A checkpoint."""

    @property
    def identity(self) -> str: ...


def fingerprint_of(
    config: EngineConfig,
    executor: ExecutorPlan,
    spec: DecoderSpec,
    max_model_len: int,
    files: Sequence[_Identified],
) -> KVFingerprint:
    """`files` are the model and, where there is one, its head, whose layer is part of each block."""
    model = config.model
    by_context = any(depends_on_context(layer.rope) for layer in spec.layers if layer.rope is not None)
    return KVFingerprint(
        revision=" ".join(file.identity for file in files),
        weight_dtype=repr((executor.dtype_name, model.dtype, model.lm_head_dtype)),
        kv_dtype=executor.kv_dtype_name,
        executor=repr((executor.name, executor.device_name, _library(executor.name))),
        instruction_set=executor.isa,
        block_layout=repr((config.cache.block_size, executor.bytes_per_block, spec)),
        rope=f"for {max_model_len}" if by_context else "",  # the rest of it is the spec's
    )


def _library(executor: str) -> str:
    """Digest of the library that computes: another build may round otherwise."""
    found = find_spec("maitred.kernels._native" if executor == "native" else "torch.version")
    assert found is not None, executor
    assert found.origin is not None, executor
    with open(found.origin, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_tiers(config: EngineConfig, executor: ExecutorPlan, fingerprint: KVFingerprint) -> list[KVTier]:
    """Open the tiers that were asked for, the fastest first. Raises ConfigError."""
    tiers = config.tiers
    if tiers.kv_disk is None and tiers.kv_redis is None and not tiers.kv_host_bytes:
        return []
    num_bytes, of_what = executor.bytes_per_block, fingerprint.digest()
    if tiers.kv_staging_bytes < num_bytes:
        raise ConfigError(
            f"kv_staging_bytes is {tiers.kv_staging_bytes}, and a block takes {num_bytes}; give that or more"
        )
    found: list[KVTier] = []
    if tiers.kv_host_bytes:
        from maitred.kv.host import open_kv_host  # noqa: PLC0415  numpy

        found.append(open_kv_host(tiers.kv_host_bytes, num_bytes))
    if tiers.kv_disk is not None:
        from maitred.kv.disk import open_kv_disk  # noqa: PLC0415  numpy

        disk = open_kv_disk(
            tiers.kv_disk,
            max_bytes=tiers.kv_disk_max_bytes,
            bytes_per_block=num_bytes,
            fingerprint=of_what,
        )
        found.append(disk)
    if tiers.kv_redis is not None:
        from maitred.kv.redis import open_kv_redis  # noqa: PLC0415  redis

        most = tiers.kv_redis_max_block_bytes
        found.append(
            open_kv_redis(tiers.kv_redis, max_block_bytes=most, bytes_per_block=num_bytes, fingerprint=of_what)
        )
    return found


def with_own_tiers(config: EngineConfig, number: int, num_engines: int) -> EngineConfig:
    """Config of an engine that shares --kv-disk with others alike: a folder in it, and its part of all bytes."""
    tiers = config.tiers
    if num_engines == 1:
        return config
    own = replace(
        tiers,
        kv_host_bytes=tiers.kv_host_bytes // num_engines,
        kv_disk=str(Path(tiers.kv_disk) / f"worker-{number}") if tiers.kv_disk is not None else None,
        kv_disk_max_bytes=max(1, tiers.kv_disk_max_bytes // num_engines),
    )
    return replace(config, tiers=own)


def describe(tier: KVTier, block_size: int) -> str:
    """A line for the terminal."""
    if (why := tier.hindrance) is not None:
        return f"kv      {tier.name} cannot be used ({why}); the engine goes on without it until it can"
    if not tier.has_index:
        return f"kv      {tier.name} answers; blocks that other servers stored are found as prompts ask for them"
    stats, dropped = tier.stats, tier.stats.dropped.total()
    lost = f"; {dropped:,} that could not be used are gone" if dropped else ""
    return (
        f"kv      {tier.name} holds {stats.num_blocks:,} blocks = {stats.num_blocks * block_size:,} tokens, "
        f"{format_bytes(stats.num_bytes)}{lost}"
    )
