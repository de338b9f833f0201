"""What engines tell each other of their KV, made of what an engine is."""

from __future__ import annotations

import json
from typing import Any

from maitred.engine.model_facts import ModelFacts
from maitred.executor.kv_layout import NATIVE
from maitred.executor.layer_io import LayerIO, NativeLayers
from maitred.model.spec import DecoderSpec
from maitred.transfer.compat import Agreed, Layout, Numerics


def layout_of(facts: ModelFacts, spec: DecoderSpec, executor: Any) -> Layout:
    """Of a native executor."""
    held = facts.footprint
    assert held is not None
    return Layout(
        agreed=Agreed(
            revision=facts.revision,
            positions=json.dumps([sorted({str(layer.rope) for layer in spec.layers}), facts.max_model_len]),
            kv_dtype=held.kv_dtype,
            num_layers=int(executor.pool.num_layers),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        ),
        numerics=Numerics(weight_dtype=held.dtype, executor=held.executor, isa=held.isa),
        cells=NATIVE,
        block_size=facts.block_size,
    )


def layers_of(executor: Any, layout: Layout) -> LayerIO:
    """Of a native executor's pool."""
    return NativeLayers(executor.pool, layout.of_layer())
