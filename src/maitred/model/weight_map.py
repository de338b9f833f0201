"""Weight map: which tensors of a Hugging Face checkpoint fill which parameters (`spec.parameter_shapes`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from maitred.core.errors import CheckpointError
from maitred.model.spec import (
    BESIDE,
    DecoderSpec,
    EncoderSpec,
    HeadSpec,
    LatentSpec,
    NormPlacement,
    QKNorm,
    RecurrentSpec,
    RoutedSpec,
)

# Prefixes under which a text model's tensors stand: as usual, and inside a multimodal model, older form and today's.
PREFIXES = ("model.", "language_model.model.", "model.language_model.")

# Tensors that a checkpoint may hold and the decoder has no use for: rotary tables of old releases, and the parts of a
# multimodal model that read pictures and sounds.
OTHER_SENSES = re.compile(
    r"(^|\.)(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_(vision|audio))\."
)
# mtp: Qwen's layers for drafting; cls: a reranker's labels in a GGUF file, which `pooling` reads
HARMLESS = re.compile(rf"(^|\.)rotary_emb\.inv_freq$|^(mtp|cls\.output)\.|{OTHER_SENSES.pattern}")

# And beside an encoder: what is built on its states, and numbers of positions of old releases.
HARMLESS_BESIDE_ENCODER = re.compile(
    r"(^|\.)((pre_)?classifier|vocab_\w+|pooler|cls|lm_head|predictions)\.|embeddings\.position_ids$"
)

# And in a head's folder: its vocabulary (`head_folder` reads it), and what its training copied from the model.
HARMLESS_IN_HEAD = re.compile(r"^(d2t|t2d|verifier_norm\.weight|verifier_lm_head\.weight)$")
HEAD_LAYERS = ("layers.0.", "midlayer.")
"""Names of a head's one layer in `speculators` and in SpecForge."""


class Stack(NamedTuple):
    """How a tensor [experts, ..] that holds something of all experts lies in their parameter; likewise one whose rows
    are `groups` of equal size, of a head each, that hold unlike things side by side."""

    rows: int  # of each expert
    distance: int  # rows of the parameter from one expert's to the next one's
    transposed: bool = False  # its matrices are [in, out], those of groups too
    turn: int = 0  # every `turns`-th row from this one on: 2 where rows of gate and up are in turn
    turns: int = 1
    groups: int = 0
    first: int = 0  # of the `rows`, or of the columns that become them, in a group
    width: int = 0  # columns of the `rows` where groups are transposed


class RowSpan(NamedTuple):
    """Rows of a parameter that lie together in a tensor of the checkpoint."""

    row: int
    num_rows: int
    expert: int = 0  # of a stack


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One tensor of the checkpoint and where it goes: rows [row, row + shape[0]) of `parameter`, plus `offset`; those
    of a stack lie apart. A tensor of a stack may be the source of several parts."""

    tensor: str
    shape: tuple[int, ...]  # as in the file
    parameter: str
    row: int = 0
    offset: float = 0.0  # added to every value: Gemma's norms store w - 1
    stack: Stack | None = None
    is_log: bool = False  # the parameter is minus exp of every value

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) - (self.stack is not None and not self.stack.groups) == 2

    @property
    def is_turned(self) -> bool:
        """Columns of the tensor become rows."""
        return self.stack is not None and self.stack.transposed

    def pieces(self) -> Iterator[RowSpan]:
        if self.stack is None:  # a convolution [channels, 1, width] lies flat
            yield RowSpan(self.row, self.shape[0] * (self.shape[2] if len(self.shape) > 2 else 1))
            return
        for expert in range(self.stack.groups or self.shape[0]):
            yield RowSpan(self.row + expert * self.stack.distance, self.stack.rows, expert)

    def take(self, values: Any, piece: RowSpan) -> Any:
        """Rows of a piece out of the tensor's values, NumPy's or PyTorch's; a view."""
        if self.stack is None:
            return values if len(self.shape) <= 2 else values.reshape(-1)
        if self.stack.groups:
            by_group = values.reshape(self.stack.groups, self.shape[0] // self.stack.groups, *values.shape[1:])
            found = by_group[piece.expert][self.stack.first :]
            return found[: self.stack.width].T if self.stack.transposed else found[: self.stack.rows]
        found = values[piece.expert]
        return (found.T if self.stack.transposed else found)[self.stack.turn :: self.stack.turns]


def weight_map(spec: DecoderSpec | HeadSpec, tensor_names: Collection[str]) -> tuple[WeightSource, ...]:
    """Return the place of each of `tensor_names`; every row of every parameter is filled exactly once. Of an MTP layer
    the tensors are found among the model's.

    Raises CheckpointError naming tensors that are missing, or that the decoder has no place for.
    """
    if isinstance(tensor_names, tuple):  # a checkpoint's, of which thousands are looked for one by one
        tensor_names = dict.fromkeys(tensor_names)
    if isinstance(spec, HeadSpec):
        return head_map(spec, tensor_names)
    sources = decoder_sources(spec, tensor_names)
    _check(sources, tensor_names, spec.architecture, lambda name: _is_harmless(name, spec))
    return sources


def decoder_sources(spec: DecoderSpec, tensor_names: Collection[str]) -> tuple[WeightSource, ...]:
    """Every tensor that a checkpoint of `spec` holds, under the prefix of `tensor_names`; none is looked for."""
    if spec.encoder is not None:
        return tuple(_encoder_sources(spec, spec.encoder, tensor_names))
    return tuple(_sources(spec, _prefix(tensor_names), tensor_names))


def _prefix(tensor_names: Collection[str]) -> str:
    """Prefix of a decoder's tensors; none where sentence-transformers saved it, without what is built on it."""
    return next((p for p in (*PREFIXES, "") if f"{p}embed_tokens.weight" in tensor_names), PREFIXES[0])


def head_map(spec: HeadSpec, tensor_names: Collection[str]) -> tuple[WeightSource, ...]:
    """`weight_map` of a head, in the layout of `speculators` or of SpecForge. Raises CheckpointError as that does."""
    if spec.layer:
        sources = mtp_sources(spec.decoder, spec.layer, tensor_names)
        _check(sources, tensor_names, f"the MTP layer of {spec.decoder.architecture}", lambda name: True)
        return sources
    layer = next((p for p in HEAD_LAYERS if f"{p}hidden_norm.weight" in tensor_names), HEAD_LAYERS[0])
    sources = tuple(head_sources(spec, layer))
    _check(sources, tensor_names, spec.decoder.architecture, lambda name: bool(HARMLESS_IN_HEAD.search(name)))
    return sources


def _check(
    sources: tuple[WeightSource, ...],
    tensor_names: Collection[str],
    architecture: str,
    is_harmless: Callable[[str], bool],
) -> None:
    wanted = {source.tensor for source in sources}
    missing = [source.tensor for source in sources if source.tensor not in tensor_names]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of {architecture} are missing from the weights: {_first(missing)}; "
            f"config.json and the weights may be of different models"
        )
    surplus = [name for name in sorted(tensor_names) if name not in wanted and not is_harmless(name)]
    if surplus:
        raise CheckpointError(
            f"the weights hold {len(surplus)} tensors that {architecture} as described by config.json has no "
            f"place for: {_first(surplus)}; leaving them out would change the model's answers"
        )


def check_shape(source: WeightSource, shape: tuple[int, ...], file: Path) -> None:
    """Raise CheckpointError where the tensor of `source`, in `file`, has another shape than the decoder's."""
    if shape != source.shape:
        raise CheckpointError(
            f"tensor {source.tensor} has shape {list(shape)}, config.json asks for {list(source.shape)} ({file})"
        )


def linear_sources(spec: DecoderSpec) -> dict[str, WeightSource]:
    """The layers' matrices by the name of their module without the model's prefix, as layers.0.self_attn.q_proj; no
    routed MLP's."""
    found: dict[str, WeightSource] = {}
    for i in range(spec.num_layers):
        layer = f"layers.{i}."
        recurrent = spec.layers[i].recurrent
        attention = () if recurrent else _attention(spec.at(i), f"{layer}self_attn.", layer, spec.hidden_size, i)
        dense = () if spec.layers[i].routed else _mlp(spec, f"{layer}mlp.", layer, spec.inner_width(i))
        for source in (*attention, *dense):
            if source.is_matrix and source.stack is None:
                found[source.tensor.removesuffix(".weight")] = source
    return found


def _is_harmless(name: str, spec: DecoderSpec) -> bool:
    if spec.encoder is not None:
        return bool(HARMLESS_BESIDE_ENCODER.search(name))
    layer = re.search(r"\blayers\.(\d+)\.", name)
    behind = layer is not None and 0 <= int(layer[1]) - spec.num_layers < spec.num_mtp_layers
    unread = layer is not None and int(layer[1]) < spec.num_layers and spec.layers[int(layer[1])].kv_of is not None
    behind = behind or (unread and bool(re.search(r"self_attn\.[kv]_(proj|norm)\.", name)))
    is_output = spec.tied_embeddings and name.endswith("lm_head.weight")
    is_output = is_output or (name == "score.weight" and spec.architecture.endswith("ForSequenceClassification"))
    return bool(HARMLESS.search(name)) or behind or is_output


def _first(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def _sources(spec: DecoderSpec, prefix: str, names: Collection[str]) -> Iterator[WeightSource]:
    yield WeightSource(f"{prefix}embed_tokens.weight", (spec.vocab_size, spec.hidden_size), "embedding.weight")
    if width := spec.num_layers * spec.per_layer_width:
        for tensor, parameter, shape in (
            ("embed_tokens_per_layer", "embedding", (spec.vocab_size, width)),
            ("per_layer_model_projection", "projection", (width, spec.hidden_size)),
            ("per_layer_projection_norm", "norm", (spec.per_layer_width,)),
        ):
            yield WeightSource(f"{prefix}{tensor}.weight", shape, f"by_layer.{parameter}.weight")
    for i in range(spec.num_layers):
        yield from _layer(spec, i, f"{prefix}layers.{i}.", names)
    yield from _after_layers(spec, prefix)


def _layer(spec: DecoderSpec, index: int, source: str, names: Collection[str]) -> Iterator[WeightSource]:
    layer, target = spec.layers[index], f"layers.{index}."
    if layer.recurrent is not None:
        yield from _recurrent(layer.recurrent, source + "linear_attn.", f"{target}recurrent.", spec.hidden_size, names)
    else:
        yield from _attention(spec.at(index), source + "self_attn.", target, spec.hidden_size, index, names)
    if layer.routed is not None:
        yield from _routed(layer.routed, source, target, spec.hidden_size, names)
    else:
        yield from _mlp(spec, source + "mlp.", target, spec.inner_width(index))
    for tensor, parameter in _NORMS[spec.norm_placement]:
        shape = (spec.hidden_size,)
        yield WeightSource(f"{source}{tensor}.weight", shape, f"{target}{parameter}.weight", 0, spec.norm_offset)
    if spec.per_layer_width:
        for tensor, name, sizes in (
            ("per_layer_input_gate", "input_gate", (spec.per_layer_width, spec.hidden_size)),
            ("per_layer_projection", "input", (spec.hidden_size, spec.per_layer_width)),
            ("post_per_layer_input_norm", "input_norm", (spec.hidden_size,)),
        ):
            yield WeightSource(f"{source}{tensor}.weight", sizes, f"{target}{name}.weight")
    if spec.layer_scales:
        yield WeightSource(f"{source}layer_scalar", (1,), f"{target}scale.weight")


def _after_layers(spec: DecoderSpec, prefix: str) -> Iterator[WeightSource]:
    yield WeightSource(f"{prefix}norm.weight", (spec.hidden_size,), "norm.weight", 0, spec.norm_offset)
    if not spec.tied_embeddings:
        head = prefix.removesuffix("model.") if prefix == "language_model.model." else ""
        yield WeightSource(f"{head}lm_head.weight", (spec.vocab_size, spec.hidden_size), "output.weight")


def encoder_prefix(tensor_names: Collection[str]) -> str:
    """What stands before an encoder's tensors: nothing, where it was saved without what is built on it."""
    word = "embeddings.word_embeddings.weight"
    return next((p for p in ("", "bert.", "roberta.", "distilbert.") if p + word in tensor_names), "")


_DISTILBERT = {
    "encoder.layer": "transformer.layer", "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin", "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin", "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1", "output.dense": "ffn.lin2", "output.LayerNorm": "output_layer_norm",
}  # fmt: skip
_DISTILBERTS = re.compile("|".join(map(re.escape, _DISTILBERT)))  # the longer first


def _encoder_sources(spec: DecoderSpec, encoder: EncoderSpec, tensor_names: Collection[str]) -> Iterator[WeightSource]:
    found, names = _berts(spec, encoder, encoder_prefix(tensor_names)), "transformer.layer.0.attention.q_lin.weight"
    if not any(prefix + names in tensor_names for prefix in ("", "distilbert.")):
        yield from found
        return
    for source in found:
        yield replace(source, tensor=_DISTILBERTS.sub(lambda part: _DISTILBERT[part[0]], source.tensor))


def _berts(spec: DecoderSpec, encoder: EncoderSpec, prefix: str) -> Iterator[WeightSource]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    rows = {"word": spec.vocab_size, "token_type": encoder.num_types, "position": encoder.num_positions}
    names = ("embedding", "types.embedding", "positions.embedding")
    for (kind, count), name in zip(rows.items(), names, strict=True):
        if count:
            yield WeightSource(f"{prefix}embeddings.{kind}_embeddings.weight", (count, hidden), f"{name}.weight")
    yield from _layer_norm(f"{prefix}embeddings.LayerNorm", "embedding_norm", hidden)
    for i in range(spec.num_layers):
        source, target = f"{prefix}encoder.layer.{i}.", f"layers.{i}."
        parts = tuple((each, hidden) for each in ("query", "key", "value"))
        yield from _stacked(f"{source}attention.self.", parts, hidden, f"{target}qkv", True)
        for dense, name, width, count in (
            ("attention.output", "attention_output", hidden, hidden),
            ("intermediate", "up", hidden, inner),
            ("output", "down", inner, hidden),
        ):
            yield from _stacked(f"{source}{dense}.", (("dense", count),), width, target + name, True)
        yield from _layer_norm(f"{source}attention.output.LayerNorm", f"{target}attention_post_norm", hidden)
        yield from _layer_norm(f"{source}output.LayerNorm", f"{target}mlp_post_norm", hidden)


def _layer_norm(source: str, target: str, width: int) -> Iterator[WeightSource]:
    for kind in ("weight", "bias"):
        yield WeightSource(f"{source}.{kind}", (width,), f"{target}.{kind}")


_MTP_LAYOUTS = (  # prefixes, and tensors: of GLM-4.5 and DeepSeek, and of Qwen
    ("{model}layers.{index}.", "", ("eh_proj", "enorm", "hnorm", "shared_head.norm")),
    ("mtp.", "layers.0.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
)


def mtp_sources(spec: DecoderSpec, index: int, names: Collection[str]) -> tuple[WeightSource, ...]:
    """Tensors of layer `index` where that is an MTP layer in the checkpoint (`HeadSpec`), which it need not have: then
    there are none. Its copies of embedding and output matrix are the model's.
    """
    prefix, hidden = _prefix(names), spec.hidden_size
    for at, layer, (fc, *norms) in _MTP_LAYOUTS:
        source = at.format(model=prefix, index=index)
        if f"{source}{fc}.weight" in names:
            found = [WeightSource(f"{prefix}embed_tokens.weight", (spec.vocab_size, hidden), "embedding.weight")]
            found.append(WeightSource(f"{source}{fc}.weight", (hidden, 2 * hidden), "fc.weight"))
            for tensor, norm in zip(norms, ("token_norm", "state_norm", "head_norm"), strict=True):
                place = (f"{norm}.weight", 0, spec.norm_offset)
                found.append(WeightSource(f"{source}{tensor}.weight", (hidden,), *place))
            return (*found, *_layer(spec, index, source + layer, names), *_after_layers(spec, prefix))
    return ()


def head_sources(spec: HeadSpec, source: str = HEAD_LAYERS[0]) -> Iterator[WeightSource]:
    """Return the tensors of a head whose layer is named so."""
    decoder, hidden, target = spec.decoder, (spec.decoder.hidden_size,), "layers.0."
    yield WeightSource("embed_tokens.weight", (spec.num_embeddings, *hidden), "embedding.weight")
    if spec.norms_taps:
        yield WeightSource("input_norm.weight", (spec.tap_width,), "taps_norm.weight")
    for i in range(len(spec.taps) if spec.norms_each_tap else 0):
        yield WeightSource(f"fc_norm.{i}.weight", hidden, f"tap_norms.{i}.weight")
    yield WeightSource("fc.weight", (*hidden, spec.tap_width), "fc.weight")
    yield WeightSource(f"{source}hidden_norm.weight", hidden, f"{target}hidden_norm.weight")
    for tensor, parameter in _NORMS[NormPlacement.PRE]:
        yield WeightSource(f"{source}{tensor}.weight", hidden, f"{target}{parameter}.weight")
    yield from _attention(decoder, source + "self_attn.", target, 2 * decoder.hidden_size)
    yield from _mlp(decoder, source + "mlp.", target, decoder.intermediate_size)
    yield WeightSource("norm.weight", hidden, "norm.weight")
    yield WeightSource("lm_head.weight", (decoder.vocab_size, *hidden), "output.weight")


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
    NormPlacement.GLM4: (
        ("input_layernorm", "attention_norm"),
        ("post_self_attn_layernorm", "attention_post_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("post_mlp_layernorm", "mlp_post_norm"),
    ),
}


def _attention(
    spec: DecoderSpec, source: str, target: str, width_in: int, index: int = 0, names: Collection[str] = ()
) -> Iterator[WeightSource]:
    if (latent := spec.latent) is not None:
        yield from _latent(spec, latent, source, target, names)
        return
    q, kv, layer = spec.q_width, spec.kv_width, spec.layers[index]
    values = "k_proj" if layer.keys_as_values else "v_proj"
    parts = (("qkv_proj", q + 2 * kv),) if spec.fused_weights else (("q_proj", q), ("k_proj", kv), (values, kv))
    if layer.kv_of is not None:
        parts = parts[:1]
    if spec.output_gate:  # q_proj has of each head its query and its gate
        halves, head = ((0, 0), (1, q + 2 * kv)), spec.head_dim
        shapes: tuple[tuple[str, tuple[int, ...]], ...] = (("weight", (2 * q, width_in)), ("bias", (2 * q,)))
        for half, row in halves:
            of_heads = Stack(head, head, groups=spec.num_heads, first=half * head)
            for kind, shape in shapes[: 1 + spec.qkv_bias]:
                yield WeightSource(f"{source}q_proj.{kind}", shape, f"{target}qkv.{kind}", row, stack=of_heads)
        yield from _stacked(source, parts[1:], width_in, f"{target}qkv", spec.qkv_bias, row=q)
    else:
        yield from _stacked(source, parts, width_in, f"{target}qkv", spec.qkv_bias)
    if spec.qk_norm is not QKNorm.NONE:
        full = spec.qk_norm is QKNorm.FULL_WIDTH
        for name, width in (("q_norm", q), ("k_norm", kv))[: 1 if layer.kv_of is not None else 2]:
            shape = (width if full else spec.head_dim,)
            yield WeightSource(f"{source}{name}.weight", shape, f"{target}{name}.weight", 0, spec.norm_offset)
    if spec.attention_sinks:
        yield WeightSource(f"{source}sinks", (spec.num_heads,), f"{target}sinks.weight")
    parts = (("o_proj", spec.hidden_size),)
    yield from _stacked(source, parts, spec.q_width, f"{target}attention_output", spec.output_bias)


def _latent(
    spec: DecoderSpec, latent: LatentSpec, source: str, target: str, names: Collection[str]
) -> Iterator[WeightSource]:
    """kv_b_proj has of each head what keys are made with, which is turned to meet queries, and what values are; GGUF
    files have the two apart, [heads, ..], the first one turned."""
    heads, hidden, between, inputs = spec.num_heads, spec.hidden_size, latent.query_rank, f"{target}latent."
    key, value, queries = latent.key_dim, latent.value_dim, heads * latent.query_dim
    down = (("q_a_proj", between) if between else ("q_proj", queries), ("kv_a_proj_with_mqa", latent.head_dim))
    yield from _stacked(source, down, hidden, f"{inputs}inputs", False)
    if between:
        yield WeightSource(f"{source}q_a_layernorm.weight", (between,), f"{inputs}query_norm.weight")
        yield from _stacked(source, (("q_b_proj", queries),), between, f"{inputs}query", False)
    yield WeightSource(f"{source}kv_a_layernorm.weight", (latent.rank,), f"{inputs}norm.weight")
    turned = Stack(latent.rank, latent.rank, transposed=True, groups=heads, width=key)
    whole: tuple[int, ...] = (heads * (key + value), latent.rank)
    parts = [("absorb", "kv_b", whole, turned), ("expand", "kv_b", whole, Stack(value, value, groups=heads, first=key))]
    if f"{source}k_b_proj.weight" in names and f"{source}kv_b_proj.weight" not in names:
        parts = [
            ("absorb", "k_b", (heads, latent.rank, key), Stack(latent.rank, latent.rank)),
            ("expand", "v_b", (heads, value, latent.rank), Stack(value, value)),
        ]
    for parameter, name, shape, stack in parts:
        yield WeightSource(f"{source}{name}_proj.weight", shape, f"{inputs}{parameter}.weight", stack=stack)
    yield from _stacked(source, (("o_proj", hidden),), heads * value, f"{target}attention_output", False)


def _recurrent(
    recurrent: RecurrentSpec, source: str, target: str, hidden: int, names: Collection[str]
) -> Iterator[WeightSource]:
    """Inputs by key head, all channels and then all z, or, in GGUF files of Qwen3-Next, the latter with b and a by key
    head. Those files have the decay's rate in place of its logarithm."""
    keys, heads, inputs = recurrent.num_key_heads, recurrent.num_value_heads, f"{target}inputs"
    key, value = recurrent.key_dim, recurrent.value_width // keys  # rows of a key head
    qkvz, ba = (
        (("in_proj_qkv", recurrent.num_channels), ("in_proj_z", recurrent.value_width)),
        (("in_proj_b", heads), ("in_proj_a", heads)),
    )
    row = 0
    for name, parts, apart in (("qkvz", (key, key, value, value), qkvz), ("ba", (heads // keys,) * 2, ba)):
        whole = f"{source}in_proj_{name}.weight"
        if not recurrent.grouped or (f"{source}{apart[0][0]}.weight" in names and whole not in names):
            yield from _stacked(source, apart, hidden, inputs, False, row=row)
        else:
            for index, rows in enumerate(parts):
                of_head = Stack(rows, rows, groups=keys, first=sum(parts[:index]))
                shape = (keys * sum(parts), hidden)
                yield WeightSource(whole, shape, f"{inputs}.weight", row + keys * sum(parts[:index]), stack=of_head)
        row += keys * sum(parts)
    taps = (recurrent.num_channels, 1, recurrent.conv_width)
    yield WeightSource(f"{source}conv1d.weight", taps, f"{target}conv.weight")
    is_log = f"{source}A_log" in names or f"{source}rate" not in names
    yield WeightSource(f"{source}{'A_log' if is_log else 'rate'}", (heads,), f"{target}rate.weight", is_log=is_log)
    yield WeightSource(f"{source}dt_bias", (heads,), f"{target}step_bias.weight")
    yield WeightSource(f"{source}norm.weight", (recurrent.value_dim,), f"{target}norm.weight")
    yield from _stacked(source, (("out_proj", hidden),), recurrent.value_width, f"{target}output", False)


def _mlp(spec: DecoderSpec, source: str, target: str, n: int) -> Iterator[WeightSource]:
    fused = spec.fused_weights or spec.fused_gate_up
    parts = (("gate_up_proj", 2 * n),) if fused else (("gate_proj", n), ("up_proj", n))
    yield from _stacked(source, parts, spec.hidden_size, f"{target}gate_up", spec.mlp_bias)
    yield from _stacked(source, (("down_proj", spec.hidden_size),), n, f"{target}down", spec.mlp_bias)


_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # names of an expert's matrices on the hub


def _routed(routed: RoutedSpec, layer: str, target: str, hidden: int, names: Collection[str]) -> Iterator[WeightSource]:
    """A routed MLP: a tensor an expert and matrix, as on the hub, one a matrix for all experts, as in GGUF files, or
    gate and up in one besides, as in transformers 5 and in gpt-oss."""
    mixtral = f"{layer}block_sparse_moe.gate.weight" in names and f"{layer}mlp.gate.weight" not in names
    source, own = f"{layer}{'block_sparse_moe' if mixtral else 'mlp'}.", _MIXTRAL if mixtral else {}
    shared = f"{source}shared_expert{'' if routed.shared_gate else 's'}."
    router = "router" if f"{source}router.weight" in names and f"{source}gate.weight" not in names else "gate"
    if routed.beside_dense:
        source, router, shared = layer, "router.proj", source
        for name, tensor in BESIDE.items():
            width = routed.num_experts if name == "expert_scale" else hidden
            yield WeightSource(f"{layer}{tensor}", (width,), f"{target}beside.{name}.weight")
    yield WeightSource(f"{source}{router}.weight", (routed.num_experts, hidden), f"{target}router.weight")
    if routed.router_bias:
        yield WeightSource(f"{source}{router}.bias", (routed.num_experts,), f"{target}router.bias")
    if routed.correction_bias:
        tensor = f"{source}{router}.e_score_correction_bias"
        yield WeightSource(tensor, (routed.num_experts,), f"{target}correction.weight")
    experts, width = f"{source}experts.", routed.width
    matrices = (
        ("gate_proj", "gate_up", 0, width),
        ("up_proj", "gate_up", width, width),
        ("down_proj", "down", 0, hidden),
    )
    apart = f"{experts}0.{own.get('gate_proj', 'gate_proj')}.weight" in names
    ends = [end for end in ("", "_blocks", ".weight") if f"{experts}gate_up_proj{end}" in names and not apart]
    if ends:
        yield from _fused_experts(routed, experts, target, hidden, ends[0])
    for name, parameter, first, rows in () if ends else matrices:
        width_in, distance = (width, hidden) if parameter == "down" else (hidden, 2 * width)
        for kind, shape in (("weight", (rows, width_in)), ("bias", (rows,)))[: 1 + routed.expert_bias]:
            to = f"{target}experts.{parameter}.{kind}"
            if f"{experts}gate_proj.{kind}" in names and not apart:
                stack, of_all = Stack(rows, distance), (routed.num_experts, *shape)
                yield WeightSource(f"{experts}{name}.{kind}", of_all, to, first, stack=stack)
                continue
            for expert in range(routed.num_experts):
                tensor = f"{experts}{expert}.{own.get(name, name)}.{kind}"
                yield WeightSource(tensor, shape, to, expert * distance + first)
    if routed.shared_width:
        parts = (("gate_proj", routed.shared_width), ("up_proj", routed.shared_width))
        yield from _stacked(shared, parts, hidden, f"{target}shared.gate_up", False)
        yield from _stacked(shared, (("down_proj", hidden),), routed.shared_width, f"{target}shared.down", False)
    if routed.shared_gate:
        yield WeightSource(f"{source}shared_expert_gate.weight", (1, hidden), f"{target}shared_gate.weight")


def _fused_experts(routed: RoutedSpec, experts: str, target: str, hidden: int, end: str) -> Iterator[WeightSource]:
    """One tensor for all experts; what has `end` is MXFP4 or a GGUF file's, whose rows are never [in, out]."""
    number, width, transposed = routed.num_experts, routed.width, routed.interleaved and not end
    for name, rows, width_in in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
        turns = 2 if name == "gate_up" and routed.interleaved else 1
        for turn in range(turns):
            stack = Stack(rows // turns, rows, transposed, turn, turns)
            shape = (number, width_in, rows) if transposed else (number, rows, width_in)
            to, row = f"{target}experts.{name}", turn * stack.rows
            yield WeightSource(f"{experts}{name}_proj{end}", shape, f"{to}.weight", row, stack=stack)
            if routed.expert_bias:
                of_bias = stack._replace(transposed=False)
                yield WeightSource(f"{experts}{name}_proj_bias", (number, rows), f"{to}.bias", row, stack=of_bias)


def _stacked(
    source: str, parts: tuple[tuple[str, int], ...], width_in: int, parameter: str, bias: bool, row: int = 0
) -> Iterator[WeightSource]:
    """Matrices (name, rows) one below the other in one parameter from `row` on, and their biases."""
    for name, rows in parts:
        yield WeightSource(f"{source}{name}.weight", (rows, width_in), f"{parameter}.weight", row)
        if bias:
            yield WeightSource(f"{source}{name}.bias", (rows,), f"{parameter}.bias", row)
        row += rows
