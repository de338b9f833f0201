"""Lowering: a decoder's spec written down as operations, one a formula, and the parts that a head shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from maitred.model.program import (
    HIDDEN,
    LOGITS,
    TAKEN,
    TAPS,
    VECTOR,
    Add,
    Attention,
    Columns,
    Embed,
    Format,
    Formats,
    Gate,
    HeadNorm,
    Linear,
    Norm,
    Op,
    Part,
    Prepare,
    Rope,
    Scale,
    Softcap,
    Take,
    Weight,
    WriteKV,
)
from maitred.model.spec import DecoderSpec, NormPlacement, QKNorm


def lower(spec: DecoderSpec, formats: Formats, taps: Sequence[int] = ()) -> list[Op]:
    """The whole step, one operation a formula; `taps` are numbers of layers after which a head reads HIDDEN."""
    return list(_lowered(spec, formats, taps))


def _lowered(spec: DecoderSpec, formats: Formats, taps: Sequence[int]) -> Iterator[Op]:
    embedding = matrix("embedding", spec.vocab_size, spec.hidden_size, formats.of("embedding.weight", 0))
    yield Embed(HIDDEN, embedding, spec.embedding_scale)
    for index in range(spec.num_layers):
        yield from _tap(spec, taps, index)
        layer = f"layers.{index}."
        yield from part_of(spec, layer + "attention", attention(spec, formats, index))
        yield from part_of(spec, layer + "mlp", mlp(spec, formats, layer))
    yield from _tap(spec, taps, spec.num_layers)
    yield Take(HIDDEN, TAKEN)
    yield Norm(TAKEN, "normed", vector("norm", spec.hidden_size))
    yield from logits(spec, formats, "normed")


def _tap(spec: DecoderSpec, taps: Sequence[int], num_layers: int) -> Iterator[Op]:
    if num_layers in taps:
        yield Columns(HIDDEN, TAPS, spec.hidden_size, first=taps.index(num_layers) * spec.hidden_size)


def logits(spec: DecoderSpec, formats: Formats, source: str) -> Iterator[Op]:
    """Write the logits of normed rows."""
    name = "embedding" if spec.tied_embeddings else "output"
    format = formats.of(f"{name}.weight", 0)
    yield prepare(source, spec.hidden_size, format)
    # A name of its own even when tied: that both are one buffer is for a pass to find.
    parts = (Part(parameter=f"{name}.weight", first=0, rows=spec.vocab_size),)
    yield Linear("operand", LOGITS, Weight(name="output", parts=parts, width=spec.hidden_size, format=format))
    if spec.logit_scale != 1.0:
        yield Scale(LOGITS, spec.logit_scale)
    if spec.logit_softcap is not None:
        yield Softcap(LOGITS, spec.logit_softcap)


def part_of(spec: DecoderSpec, name: str, computed: Iterator[Op]) -> Iterator[Op]:
    """A part of a layer between its norms, from the residual stream ("normed") and back onto it ("part")."""
    pre = spec.norm_placement is not NormPlacement.POST
    post = spec.norm_placement is not NormPlacement.PRE
    for op in computed:
        if isinstance(op, Prepare) and op.source == "normed" and pre:
            yield Norm(HIDDEN, "normed", vector(f"{name}_norm", spec.hidden_size))
            yield op
        elif isinstance(op, Prepare) and op.source == "normed":
            yield replace(op, source=HIDDEN)
        else:
            yield op
    if post:
        yield Norm("part", "part", vector(f"{name}_post_norm", spec.hidden_size))
    yield Add("part", HIDDEN, spec.residual_scale)


def attention(
    spec: DecoderSpec,
    formats: Formats,
    index: int,
    source: str = "normed",
    width: int = 0,
    pool_layer: int | None = None,
) -> Iterator[Op]:
    """Write the attention of layer `index`, over `width` source values (0: HIDDEN's), kept as `pool_layer`."""
    layer, qkv = spec.layers[index], f"layers.{index}.qkv"
    q, kv, width = spec.q_width, spec.kv_width, width or spec.hidden_size
    kept = index if pool_layer is None else pool_layer
    parts = [("q", 0, q), ("k", q, kv), ("v", q + kv, kv)]
    yield from linears(source, parts, qkv, width, formats, spec.qkv_bias)
    if spec.qk_norm is not QKNorm.NONE:
        full = spec.qk_norm is QKNorm.FULL_WIDTH
        for value, width in (("q", q), ("k", kv)):
            weight = vector(f"layers.{index}.{value}_norm", width if full else spec.head_dim)
            yield HeadNorm(value, weight, full)
    if layer.rope is not None:
        yield Rope("q", layer.rope)
        yield Rope("k", layer.rope)
    yield WriteKV(kept, "k", "v")
    yield Attention("q", "attended", kept, layer.window)
    output = f"layers.{index}.attention_output"
    yield from linears("attended", [("part", 0, spec.hidden_size)], output, q, formats, spec.output_bias)


def mlp(spec: DecoderSpec, formats: Formats, layer: str) -> Iterator[Op]:
    inner, hidden = spec.intermediate_size, spec.hidden_size
    parts = [("gate", 0, inner), ("up", inner, inner)]
    yield from linears("normed", parts, f"{layer}gate_up", hidden, formats, spec.mlp_bias)
    yield Gate("gate", "up", "inner", spec.activation)
    yield from linears("inner", [("part", 0, hidden)], f"{layer}down", inner, formats, spec.mlp_bias)


def linears(
    source: str, parts: Sequence[tuple[str, int, int]], name: str, width: int, formats: Formats, biased: bool
) -> Iterator[Op]:
    """Values (target, first row, rows) of one parameter, each in its format. The source is prepared once for those of
    one format, which become one linear: preparing is also when adapters project the source for the linear behind it."""
    prepared = None
    for target, first, rows in parts:
        format = formats.of(f"{name}.weight", first)
        if format != prepared:
            prepared = format
            yield prepare(source, width, format)
        yield linear("operand", target, name, first, rows, width, format, biased)


def prepare(source: str, width: int, format: Format) -> Prepare:
    return Prepare(source, "operand", width, format.operand)


def linear(
    source: str, target: str, name: str, first: int, rows: int, width: int, format: Format, biased: bool
) -> Linear:
    part = Part(parameter=f"{name}.weight", first=first, rows=rows)
    bias = (Part(parameter=f"{name}.bias", first=first, rows=rows),) if biased else ()
    own_name = f"{name}.{target}" if first else name  # two linears of one parameter are two weights
    return Linear(source, target, Weight(name=own_name, parts=(part,), width=width, format=format, bias=bias))


def matrix(name: str, rows: int, width: int, format: Format) -> Weight:
    part = Part(parameter=f"{name}.weight", first=0, rows=rows)
    return Weight(name=name, parts=(part,), width=width, format=format)


def vector(name: str, rows: int) -> Weight:
    return matrix(name, rows, 1, VECTOR)
