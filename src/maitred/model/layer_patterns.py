"""config.json -> one LayerSpec for each layer: which layers slide, and which rope each has.

Today's configs list `layer_types`; the older ones give a rule (`sliding_window_pattern`, `max_window_layers` ...).
"""

from __future__ import annotations

from collections.abc import Callable

from maitred.core.errors import CheckpointError
from maitred.model.rope_config import Config, gemma3_ropes, rope_from_config
from maitred.model.spec import LayerSpec

LayersOf = Callable[[Config, int], tuple[LayerSpec, ...]]  # (config with the family's defaults, head_dim)


def same_window(c: Config, head_dim: int) -> tuple[LayerSpec, ...]:
    """Every layer alike; `sliding_window`, when the family has it, holds for all (Llama, Mistral, Phi-3 ...)."""
    rope = rope_from_config(c, head_dim)
    return (LayerSpec(window=c.get("sliding_window"), rope=rope),) * int(c["num_hidden_layers"])


def no_window(c: Config, head_dim: int) -> tuple[LayerSpec, ...]:
    return same_window({**c, "sliding_window": None}, head_dim)


def qwen_layers(c: Config, head_dim: int) -> tuple[LayerSpec, ...]:
    """Sliding from layer `max_window_layers` on, when `use_sliding_window` says so."""
    window = c["sliding_window"] if c["use_sliding_window"] else None
    first = c["max_window_layers"] if window is not None else c["num_hidden_layers"]
    types = _layer_types(c, lambda i: i >= first)
    rope = rope_from_config(c, head_dim)
    return tuple(LayerSpec(window=_window(window, t), rope=rope) for t in types)


def gemma2_layers(c: Config, head_dim: int) -> tuple[LayerSpec, ...]:
    rope = rope_from_config(c, head_dim)
    types = _layer_types(c, lambda i: i % 2 == 0)
    return tuple(LayerSpec(window=_window(c["sliding_window"], t), rope=rope) for t in types)


def gemma3_layers(c: Config, head_dim: int) -> tuple[LayerSpec, ...]:
    pattern = c["sliding_window_pattern"]
    ropes = gemma3_ropes(c, head_dim)
    types = _layer_types(c, lambda i: (i + 1) % pattern != 0)
    return tuple(LayerSpec(window=_window(c["sliding_window"], t), rope=ropes[t]) for t in types)


def smollm3_layers(c: Config, head_dim: int) -> tuple[LayerSpec, ...]:
    """Each `no_rope_layer_interval`-th layer is without rope; only those slide, when the config asks for it."""
    interval = c["no_rope_layer_interval"]
    has_rope = c["no_rope_layers"] or [(i + 1) % interval != 0 for i in range(c["num_hidden_layers"])]
    slides = bool(c["use_sliding_window"]) and c["sliding_window"] is not None
    types = _layer_types(c, lambda i: slides and not has_rope[i])
    rope = rope_from_config(c, head_dim)
    return tuple(
        LayerSpec(window=_window(c["sliding_window"], t), rope=rope if has_rope[i] else None)
        for i, t in enumerate(types)
    )


def _layer_types(c: Config, is_sliding: Callable[[int], bool]) -> list[str]:
    """`layer_types` of today's form, or the rule of the older one."""
    n = c["num_hidden_layers"]
    types = c.get("layer_types") or ["sliding_attention" if is_sliding(i) else "full_attention" for i in range(n)]
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(
            f"layer type {unknown[0]!r} is not supported; the supported ones are full_attention, sliding_attention"
        )
    if len(types) != n:
        raise CheckpointError(f"config.json has {len(types)} layer_types for {n} layers")
    return list(types)


def _window(window: int | None, layer_type: str) -> int | None:
    if layer_type == "full_attention":
        return None
    if window is None:
        raise CheckpointError("config.json has sliding_attention layers, but no sliding_window in use; set it")
    return window
