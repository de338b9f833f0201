"""KV of an engine beyond its pool, as its config asks: tiers, peers, and what their blocks depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec

from maitred.config import EngineConfig
from maitred.config.field_checks import host_and_port
from maitred.core.clock import Clock
from maitred.engine.executors import BuiltExecutor
from maitred.engine.memory import format_bytes
from maitred.engine.model_facts import ModelFacts
from maitred.engine.planning import EnginePlan, OnEvent
from maitred.kv.fetching import KVThreads
from maitred.kv.giving import PeerConfig
from maitred.kv.keeping import KVTiers, open_tiers
from maitred.kv.pages import KVGroups
from maitred.kv.peers import KVPeers
from maitred.kv.tiers import KVFingerprint, KVTier
from maitred.kv.wire import Agreed, Identity, Layout
from maitred.model.checkpoint import Checkpoint
from maitred.model.rope import depends_on_context
from maitred.model.spec import DecoderSpec, RopeSpec


def opened_tiers(config: EngineConfig, checkpoint: Checkpoint, plan: EnginePlan, tell: OnEvent) -> list[KVTier]:
    """Open the tiers that were asked for, the fastest first; a line for each. Raises ConfigError."""
    fingerprint = fingerprint_of(config, checkpoint, plan).digest()
    tiers = open_tiers(config.tiers, plan.executor.bytes_per_page, fingerprint)
    for tier in tiers:
        tell(described(tier, config.cache.block_size, in_groups=plan.memory.groups is not None))
    return tiers


def movers(
    config: EngineConfig,
    executor: BuiltExecutor,
    facts: ModelFacts,
    spec: DecoderSpec,
    tiers: Sequence[KVTier],
    clock: Clock,
) -> tuple[KVPeers | None, KVTiers | None]:
    """Listeners that move KV to and from peers and tiers, where the config has them."""
    threads, block_size, staging_bytes = KVThreads(), config.cache.block_size, config.tiers.kv_staging_bytes
    at_work = None
    if tiers:
        io = executor.block_io()
        assert all(tier.bytes_per_block == io.bytes_per_block for tier in tiers), "tiers of other blocks"
        at_work = KVTiers(io, tiers, block_size=block_size, staging_bytes=staging_bytes, threads=threads, clock=clock)
    if not config.share.exchanges_kv:
        return None, at_work
    # between engines of one machine and user nothing is proved; those of several hosts have the fleet's token
    layout, listen = layout_of(facts, spec, executor), config.share.kv_listen
    peers = PeerConfig(
        Identity(layout, config.share.kv_token),
        config.cache.kv_transport,
        staging_bytes,
        config.cache.kv_lease_s,
        host_and_port("kv_listen", listen) if listen is not None else None,
    )
    given = KVPeers(
        executor.layer_io(layout.of_layer()),
        peers,
        knows=at_work.knows if at_work is not None else lambda key: False,
        block_size=block_size,
        threads=threads,
        clock=clock,
        is_one_run=executor.is_one_run,
    )
    return given, at_work


def fingerprint_of(config: EngineConfig, checkpoint: Checkpoint, plan: EnginePlan) -> KVFingerprint:
    """The files are the model and, where there is one, its head, whose layer is part of each block."""
    model, executor, spec = config.model, plan.executor, plan.spec
    head = plan.drafts.head if plan.drafts is not None else None
    identities = [checkpoint.identity] if head is None else [checkpoint.identity, head.head.checkpoint.identity]
    by_context = any(depends_on_context(layer.rope) for layer in spec.layers if layer.rope is not None)
    return KVFingerprint(
        revision=" ".join(identities),
        weight_dtype=repr((executor.dtype_name, model.dtype, model.lm_head_dtype)),
        kv_dtype=executor.kv_dtype_name,
        executor=repr((executor.name, executor.device_name, _library(executor.name))),
        instruction_set=executor.isa,
        block_layout=repr(
            (config.cache.block_size, executor.bytes_per_block, spec, *filter(None, [plan.memory.groups]))
        ),
        rope=f"for {plan.memory.max_model_len}" if by_context else "",  # the rest of it is the spec's
    )


def _library(executor: str) -> str:
    """Digest of the library that computes: another build may round otherwise."""
    found = find_spec("maitred.kernels._native" if executor == "native" else "torch.version")
    assert found is not None, executor
    assert found.origin is not None, executor
    with open(found.origin, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def described(tier: KVTier, block_size: int, *, in_groups: bool = False) -> str:
    """A line for the terminal."""
    if (why := tier.hindrance) is not None:
        return f"kv      {tier.name} cannot be used ({why}); the engine goes on without it until it can"
    if not tier.has_index:
        return f"kv      {tier.name} answers; blocks that other servers stored are found as prompts ask for them"
    stats, dropped = tier.stats, tier.stats.dropped.total()
    lost = f"; {dropped:,} that could not be used are gone" if dropped else ""
    what = "pages" if in_groups else f"blocks = {stats.num_blocks * block_size:,} tokens"
    return f"kv      {tier.name} holds {stats.num_blocks:,} {what}, {format_bytes(stats.num_bytes)}{lost}"


def layout_of(facts: ModelFacts, spec: DecoderSpec, executor: BuiltExecutor) -> Layout:
    """Layout of an engine's KV. PyTorch chooses its instructions by the device."""
    held = facts.footprint
    assert held is not None
    return Layout(
        agreed=Agreed(
            revision=facts.revision,
            positions=_positions(spec, facts.max_model_len) + _kept(executor.groups),
            kv_dtype=held.kv_dtype,
            num_layers=len(spec.kv_layers),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            is_latent=spec.latent_rank > 0,
            weight_dtype=held.dtype,
            executor=held.executor,
            isa=held.isa or held.device,
        ),
        block_size=facts.block_size,
        num_head_layers=executor.num_kv_layers - len(spec.kv_layers),
    )


def _positions(spec: DecoderSpec, max_model_len: int) -> str:
    """Positions in one readable line: what rope is besides its defaults, of each kind of layer, and the context."""
    if spec.module is not None:
        return f"config {spec.module.identity}; context {max_model_len}"
    ropes = [layer.rope for layer in spec.layers]
    told = {" ".join(_unlike_defaults(rope)) if rope is not None else "no rope" for rope in ropes}
    return f"{'; '.join(sorted(told))}; context {max_model_len}"


def _kept(groups: KVGroups | None) -> str:
    """Windows that layers keep, where that is not all tokens: the other end reckons by them what it is sent."""
    windows = [str(window or "all") for window in groups.layer_windows] if groups is not None else []
    return f"; KV of the last {' '.join(windows)} tokens" if windows else ""


def _unlike_defaults(rope: RopeSpec) -> list[str]:
    names = [field.name for field in fields(rope) if getattr(rope, field.name) != field.default]
    told = [(name, getattr(rope, name)) for name in names]
    return [f"{name} {getattr(value, 'value', value)}" for name, value in told]
