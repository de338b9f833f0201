"""A head as a program: from the taps to its state, then a layer that reads token and state, then logits."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from maitred.model.fusions import fused
from maitred.model.head import HeadSpec
from maitred.model.lowering import attention, logits, matrix, mlp, part_of, prepare, vector
from maitred.model.program import (
    HIDDEN,
    TAKEN,
    TAPS,
    Add,
    Columns,
    Embed,
    Formats,
    Linear,
    Norm,
    Op,
    Part,
    Program,
    Take,
    Weight,
)

_BOTH = "both"  # token and state, side by side


def compile_head(spec: HeadSpec, formats: Formats, pool_layer: int) -> Program:
    """Compile the head; its keys and values are those of `pool_layer`. Raises KernelError without a kernel."""
    program = fused(spec.decoder, formats, list(_lowered(spec, formats, pool_layer)))
    return replace(program, head=spec)


def own_weights(program: Program) -> Program:
    """The program without its embedding, for which the served model's is used: what is to be packed of it."""
    return replace(program, ops=tuple(op for op in program.ops if not isinstance(op, Embed)))


def _lowered(spec: HeadSpec, formats: Formats, pool_layer: int) -> Iterator[Op]:
    decoder, hidden = spec.decoder, spec.decoder.hidden_size
    yield from _state(spec, formats)
    yield Embed("embedded", matrix("embedding", spec.num_embeddings, hidden, formats.head), 1.0)
    yield Columns("embedded", _BOTH, hidden, norm=vector("layers.0.attention_norm", hidden))
    norm = vector("layers.0.hidden_norm", hidden)
    if spec.norms_residual:
        yield Columns(HIDDEN, HIDDEN, hidden, norm=norm)
    yield Columns(HIDDEN, _BOTH, hidden, first=hidden, norm=None if spec.norms_residual else norm)
    yield from attention(decoder, formats, 0, _BOTH, 2 * hidden, pool_layer)
    yield Add("part", HIDDEN, 1.0)
    yield from part_of(decoder, "layers.0.mlp", mlp(decoder, formats, "layers.0."))
    yield Take(HIDDEN, TAKEN)
    if spec.norms_state:
        yield Columns(TAKEN, TAKEN, hidden, norm=vector("norm", hidden))
    else:
        yield Norm(TAKEN, "normed", vector("norm", hidden))
    yield from logits(decoder, formats, TAKEN if spec.norms_state else "normed")


def _state(spec: HeadSpec, formats: Formats) -> Iterator[Op]:
    """HIDDEN, of the taps."""
    hidden, width = spec.decoder.hidden_size, spec.tap_width
    if spec.norms_each_tap:
        for index in range(len(spec.taps)):
            first = index * hidden
            yield Columns(TAPS, TAPS, hidden, first, first, vector(f"tap_norms.{index}", hidden))
    if spec.norms_taps:
        yield Norm(TAPS, TAPS, vector("taps_norm", width))
    yield prepare(TAPS, width, formats.linears)
    part = Part(parameter="fc.weight", first=0, rows=hidden)
    yield Linear("operand", HIDDEN, Weight(name="fc", parts=(part,), width=width, format=formats.linears))
