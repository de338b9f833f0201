"""What engines tell each other of their KV, made of what an engine is."""

from __future__ import annotations

from dataclasses import fields

from maitred.engine.executors import BuiltExecutor
from maitred.engine.model_facts import ModelFacts
from maitred.model.spec import DecoderSpec, RopeSpec
from maitred.transfer.compat import Agreed, Layout


def layout_of(facts: ModelFacts, spec: DecoderSpec, executor: BuiltExecutor) -> Layout:
    """Of an engine's KV. PyTorch chooses its instructions by the device."""
    held = facts.footprint
    assert held is not None
    return Layout(
        agreed=Agreed(
            revision=facts.revision,
            positions=_positions(spec, facts.max_model_len),
            kv_dtype=held.kv_dtype,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            weight_dtype=held.dtype,
            executor=held.executor,
            isa=held.isa or held.device,
        ),
        block_size=facts.block_size,
        num_head_layers=executor.num_kv_layers - spec.num_layers,
    )


def _positions(spec: DecoderSpec, max_model_len: int) -> str:
    """In one line, for people too: what rope is besides its defaults, of each kind of layer, and the context."""
    ropes = [layer.rope for layer in spec.layers]
    told = {" ".join(_unlike_defaults(rope)) if rope is not None else "no rope" for rope in ropes}
    return f"{'; '.join(sorted(told))}; context {max_model_len}"


def _unlike_defaults(rope: RopeSpec) -> list[str]:
    names = [field.name for field in fields(rope) if getattr(rope, field.name) != field.default]
    told = [(name, getattr(rope, name)) for name in names]
    return [f"{name} {getattr(value, 'value', value)}" for name, value in told]
