"""Weight map: which tensors of a Hugging Face checkpoint fill which parameters (`spec.parameter_shapes`)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from maitred.errors import CheckpointError
from maitred.model.spec import DecoderSpec, NormPlacement, QKNorm

# Prefixes under which a text model's tensors stand: as usual, and inside a multimodal model, older form and today's.
PREFIXES = ("model.", "language_model.model.", "model.language_model.")

# Tensors that a checkpoint may hold and the decoder has no use for: rotary tables of old releases, and the parts of a
# multimodal model that read pictures.
HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq$|vision_tower\.|multi_modal_projector\.)")


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One tensor of the checkpoint and where it goes: rows [row, row + shape[0]) of `parameter`, plus `offset`."""

    tensor: str
    shape: tuple[int, ...]  # as in the file
    parameter: str
    row: int = 0
    offset: float = 0.0  # added to every value: Gemma's norms store w - 1


def weight_map(spec: DecoderSpec, tensor_names: Collection[str]) -> tuple[WeightSource, ...]:
    """Where each of `tensor_names` goes; every row of every parameter is filled exactly once.

    Raises CheckpointError naming tensors that are missing, or that the decoder has no place for.
    """
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in tensor_names), PREFIXES[0])
    sources = tuple(_sources(spec, prefix))
    wanted = {source.tensor for source in sources}
    missing = [source.tensor for source in sources if source.tensor not in tensor_names]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of {spec.architecture} are missing from the weights: {_first(missing)}; "
            f"config.json and the weights may be of different models"
        )
    surplus = [name for name in sorted(tensor_names) if name not in wanted and not _is_harmless(name, spec)]
    if surplus:
        raise CheckpointError(
            f"the weights hold {len(surplus)} tensors that {spec.architecture} as described by config.json has no "
            f"place for: {_first(surplus)}; leaving them out would change the model's answers"
        )
    return sources


def linear_sources(spec: DecoderSpec) -> dict[str, WeightSource]:
    """The layers' matrices by the name of their module without the model's prefix, as layers.0.self_attn.q_proj."""
    found: dict[str, WeightSource] = {}
    for i in range(spec.num_layers):
        layer = f"layers.{i}."
        for source in (*_attention(spec, f"{layer}self_attn.", layer), *_mlp(spec, f"{layer}mlp.", layer)):
            if len(source.shape) == 2:
                found[source.tensor.removesuffix(".weight")] = source
    return found


def _is_harmless(name: str, spec: DecoderSpec) -> bool:
    return bool(HARMLESS.search(name)) or (spec.tied_embeddings and name.endswith("lm_head.weight"))


def _first(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def _sources(spec: DecoderSpec, prefix: str) -> Iterator[WeightSource]:
    hidden = (spec.hidden_size,)
    yield WeightSource(f"{prefix}embed_tokens.weight", (spec.vocab_size, spec.hidden_size), "embedding.weight")
    for i in range(spec.num_layers):
        source, target = f"{prefix}layers.{i}.", f"layers.{i}."
        yield from _attention(spec, source + "self_attn.", target)
        yield from _mlp(spec, source + "mlp.", target)
        for tensor, parameter in _NORMS[spec.norm_placement]:
            yield WeightSource(f"{source}{tensor}.weight", hidden, f"{target}{parameter}.weight", 0, spec.norm_offset)
    yield WeightSource(f"{prefix}norm.weight", hidden, "norm.weight", 0, spec.norm_offset)
    if not spec.tied_embeddings:
        head = prefix.removesuffix("model.") if prefix == "language_model.model." else ""
        yield WeightSource(f"{head}lm_head.weight", (spec.vocab_size, spec.hidden_size), "output.weight")


_NORMS: dict[NormPlacement, tuple[tuple[str, str], ...]] = {  # (name in the checkpoint, parameter)
    NormPlacement.PRE: (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")),
    NormPlacement.POST: (
        ("post_attention_layernorm", "attention_post_norm"),
        ("post_feedforward_layernorm", "mlp_post_norm"),
    ),
    NormPlacement.BOTH: (
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "attention_post_norm"),
        ("pre_feedforward_layernorm", "mlp_norm"),
        ("post_feedforward_layernorm", "mlp_post_norm"),
    ),
}


def _attention(spec: DecoderSpec, source: str, target: str) -> Iterator[WeightSource]:
    q, kv = spec.q_width, spec.kv_width
    parts = (("qkv_proj", q + 2 * kv),) if spec.fused_weights else (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    yield from _stacked(source, parts, spec.hidden_size, f"{target}qkv", spec.qkv_bias)
    if spec.qk_norm is not QKNorm.NONE:
        full = spec.qk_norm is QKNorm.FULL_WIDTH
        for name, width in (("q_norm", q), ("k_norm", kv)):
            shape = (width if full else spec.head_dim,)
            yield WeightSource(f"{source}{name}.weight", shape, f"{target}{name}.weight", 0, spec.norm_offset)
    parts = (("o_proj", spec.hidden_size),)
    yield from _stacked(source, parts, spec.q_width, f"{target}attention_output", spec.output_bias)


def _mlp(spec: DecoderSpec, source: str, target: str) -> Iterator[WeightSource]:
    n = spec.intermediate_size
    parts = (("gate_up_proj", 2 * n),) if spec.fused_weights else (("gate_proj", n), ("up_proj", n))
    yield from _stacked(source, parts, spec.hidden_size, f"{target}gate_up", spec.mlp_bias)
    yield from _stacked(source, (("down_proj", spec.hidden_size),), n, f"{target}down", spec.mlp_bias)


def _stacked(
    source: str, parts: tuple[tuple[str, int], ...], width_in: int, parameter: str, bias: bool
) -> Iterator[WeightSource]:
    """Matrices (name, rows) one below the other in one parameter, and their biases."""
    row = 0
    for name, rows in parts:
        yield WeightSource(f"{source}{name}.weight", (rows, width_in), f"{parameter}.weight", row)
        if bias:
            yield WeightSource(f"{source}{name}.bias", (rows,), f"{parameter}.bias", row)
        row += rows
