"""Fusion passes: they turn a lowered program into one of native operations, and each is named in reports.

A pass looks at a short run of neighbours and gives what stands in their place, or None; `_everywhere` applies it along
the list. Passes run in the order of `PASSES`, since one makes the neighbours that the next one looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from maitred.core.errors import KernelError
from maitred.model.program import (
    HIDDEN,
    LOGITS,
    ORDER,
    QKV,
    TAKEN,
    TAPS,
    VECTOR,
    Activated,
    Add,
    AddTo,
    Attention,
    ChooseExperts,
    Columns,
    Embed,
    EmbedMore,
    Experts,
    Format,
    Formats,
    Fusion,
    Gate,
    Gated,
    HeadLinear,
    HeadNorm,
    LayerNorm,
    Linear,
    Norm,
    NormAdd,
    Op,
    Part,
    Prepare,
    Program,
    Recurrent,
    Rope,
    Scale,
    ScaleBy,
    SigmoidScale,
    Softcap,
    Store,
    Take,
    ValueNorm,
    Weight,
    WriteKV,
)
from maitred.model.spec import DecoderSpec, EncoderSpec, NormPlacement, QKNorm, RecurrentSpec, RoutedSpec

BY_LAYER = "by layer"  # inputs of all layers


def lower(spec: DecoderSpec, formats: Formats, taps: Sequence[int] = ()) -> list[Op]:
    """The whole step, one operation a formula; `taps` are numbers of layers after which a head reads HIDDEN."""
    return list(_lowered(spec, formats, taps))


def _lowered(spec: DecoderSpec, formats: Formats, taps: Sequence[int]) -> Iterator[Op]:
    embedding = matrix("embedding", spec.vocab_size, spec.hidden_size, formats.of("embedding.weight", 0))
    yield Embed(HIDDEN, embedding, spec.embedding_scale)
    if spec.encoder is not None:
        yield from _encoder(spec, spec.encoder, formats)
        return
    if size := spec.per_layer_width:
        width = spec.num_layers * size
        format = formats.of("by_layer.embedding.weight", 0)
        yield Embed(BY_LAYER, matrix("by_layer.embedding", spec.vocab_size, width, format), size**0.5)
        yield from linears(HIDDEN, [("context", 0, width)], "by_layer.projection", spec.hidden_size, formats, False)
        yield Scale("context", spec.hidden_size**-0.5)
        yield NormAdd("context", BY_LAYER, vector("by_layer.norm", size), 1.0, spec.num_layers)
    for index in range(spec.num_layers):
        yield from _tap(spec, taps, index)
        yield from decoder_layer(spec, formats, index)
    yield from _tap(spec, taps, spec.num_layers)
    yield Take(HIDDEN, TAKEN)
    yield Norm(TAKEN, "normed", vector("norm", spec.hidden_size))
    yield from logits(spec, formats, "normed")


def _encoder(spec: DecoderSpec, encoder: EncoderSpec, formats: Formats) -> Iterator[Op]:
    """Write an encoder from its tokens' embeddings on; its states are what is taken."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    types = [("types", encoder.num_types)] if encoder.num_types else []
    for name, count in (*types, ("positions", encoder.num_positions)):
        weight = matrix(f"{name}.embedding", count, hidden, formats.of(f"{name}.embedding.weight", 0))
        by_position = name == "positions"
        yield EmbedMore(HIDDEN, weight, by_position, encoder.first_position if by_position else 0)
    yield _layer_norm(spec, "embedding_norm")
    for i in range(spec.num_layers):
        layer = f"layers.{i}."
        yield from attention(spec, formats, i, source=HIDDEN)
        yield Add("part", HIDDEN, 1.0)
        yield _layer_norm(spec, f"{layer}attention_post_norm")
        for op in linears(HIDDEN, [("inner", 0, inner)], f"{layer}up", hidden, formats, True):
            yield replace(op, ending=Activated(spec.activation)) if isinstance(op, Linear) else op
        yield from linears("inner", [("part", 0, hidden)], f"{layer}down", inner, formats, True)
        yield Add("part", HIDDEN, 1.0)
        yield _layer_norm(spec, f"{layer}mlp_post_norm")
    yield Take(HIDDEN, TAKEN)


def _layer_norm(spec: DecoderSpec, name: str) -> LayerNorm:
    bias = Part(parameter=f"{name}.bias", first=0, rows=spec.hidden_size)
    return LayerNorm(
        HIDDEN,
        vector(name, spec.hidden_size),
        Weight(name=f"{name}.bias", parts=(bias,), width=1, format=VECTOR),
    )


def decoder_layer(spec: DecoderSpec, formats: Formats, index: int) -> Iterator[Op]:
    layer, routed = f"layers.{index}.", spec.layers[index].routed
    yield from part_of(spec, layer + "attention", _mixer(spec, formats, index))
    computed = (
        mlp(spec, formats, layer, spec.inner_width(index)) if routed is None else experts(spec, formats, layer, routed)
    )
    yield from part_of(spec, layer + "mlp", computed)
    if size := spec.per_layer_width:
        yield from linears(HIDDEN, [("opened", 0, size)], f"{layer}input_gate", spec.hidden_size, formats, False)
        yield Gate("opened", BY_LAYER, "input", spec.activation, index * size)
        yield from linears("input", [("part", 0, spec.hidden_size)], f"{layer}input", size, formats, False)
        yield Scale("part", 2**-0.5)
        yield Norm("part", "part", vector(f"{layer}input_norm", spec.hidden_size))
        yield Add("part", HIDDEN, 1.0)
    if spec.layer_scales:
        yield ScaleBy(HIDDEN, vector(f"{layer}scale", 1))


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


def _mixer(spec: DecoderSpec, formats: Formats, index: int) -> Iterator[Op]:
    """Write what mixes a layer's tokens."""
    if (delta := spec.layers[index].recurrent) is None:
        kept = spec.layers[index].kv_of
        place = spec.kv_layers.index(index if kept is None else kept)
        write = attention if spec.latent is None else latent_attention
        return write(spec.at(index), formats, index, pool_layer=place)
    return recurrent(delta, formats, index, spec.hidden_size)


def recurrent(delta: RecurrentSpec, formats: Formats, index: int, hidden: int) -> Iterator[Op]:
    """Write the recurrent layer `index`; states are kept in the order of such layers."""
    name, heads = f"layers.{index}.recurrent.", delta.num_value_heads
    parts, row = [], 0
    for value, rows in (("channels", delta.num_channels), ("z", delta.value_width), ("b", heads), ("a", heads)):
        parts.append((value, row, rows))
        row += rows
    yield from linears("normed", parts, f"{name}inputs", hidden, formats, False)
    vectors = {"conv": delta.num_channels * delta.conv_width, "step_bias": heads, "rate": heads}
    weights = [vector(name + each, rows) for each, rows in (vectors | {"norm": delta.value_dim}).items()]
    yield Recurrent("inputs", "mixed", delta, *weights)
    yield from linears("mixed", [("part", 0, hidden)], f"{name}output", delta.value_width, formats, False)


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
    parts = [("q", 0, q), ("k", q, kv), ("v", q + kv, kv)] + [("og", q + 2 * kv, q)] * spec.output_gate
    written = ("q", "k") if layer.kv_of is None else ("q",)
    yield from linears(source, parts if layer.kv_of is None else parts[:1], qkv, width, formats, spec.qkv_bias)
    if spec.value_norm and layer.kv_of is None:
        yield ValueNorm("v")
    if spec.qk_norm is not QKNorm.NONE:
        full = spec.qk_norm is QKNorm.FULL_WIDTH
        for value, width in zip(written, (q, kv), strict=False):
            weight = vector(f"layers.{index}.{value}_norm", width if full else spec.head_dim)
            yield HeadNorm(value, weight, full)
    if layer.rope is not None:
        yield from (Rope(value, layer.rope) for value in written)
    yield WriteKV(kept, "k" if layer.kv_of is None else "", "v")
    sinks = vector(f"layers.{index}.sinks", spec.num_heads) if spec.attention_sinks else None
    yield Attention("q", "attended", kept, layer.window, sinks, spec.output_gate)
    output = f"layers.{index}.attention_output"
    yield from linears("attended", [("part", 0, spec.hidden_size)], output, q, formats, spec.output_bias)


def latent_attention(spec: DecoderSpec, formats: Formats, index: int, pool_layer: int) -> Iterator[Op]:
    """Write attention over latent keys: each head's query is multiplied to meet them, and what it attended to back.
    Queries and the key have their rotated values first."""
    latent, layer, name = spec.layers[index].latent, spec.layers[index], f"layers.{index}.latent."
    assert latent is not None
    heads, between = spec.num_heads, latent.query_rank
    first, key, queries = between or heads * latent.query_dim, spec.q_width, "latent"
    parts = [("lq", 0, first), ("lk", first, latent.head_dim)]
    yield from linears("normed", parts, f"{name}inputs", spec.hidden_size, formats, False)
    if between:
        norm, queries = vector(f"{name}query_norm", between), "queries"
        for op in linears("latent", [(queries, 0, heads * latent.query_dim)], f"{name}query", between, formats, False):
            yield replace(op, norm=norm, eps=latent.norm_eps) if isinstance(op, Prepare) else op
    absorb = _by_head(f"{name}absorb", heads, latent.rank, latent.key_dim, formats)
    yield HeadLinear(queries, "qkv", absorb, latent.rope_dim)
    yield Columns("latent", "qkv", latent.rope_dim, key, first + latent.rank)
    norm = vector(f"{name}norm", latent.rank)
    yield Columns("latent", "qkv", latent.rank, key + latent.rope_dim, first, norm, latent.norm_eps)
    yield QKV("qkv", pool_layer, layer.rope)
    yield Attention("q", "attended", pool_layer, layer.window)
    yield HeadLinear("attended", "values", _by_head(f"{name}expand", heads, latent.value_dim, latent.rank, formats))
    output, width = f"layers.{index}.attention_output", heads * latent.value_dim
    yield from linears("values", [("part", 0, spec.hidden_size)], output, width, formats, False)


def _by_head(name: str, heads: int, rows: int, width: int, formats: Formats) -> Weight:
    return replace(matrix(name, heads * rows, width, formats.of(f"{name}.weight", 0)), experts=heads)


def mlp(spec: DecoderSpec, formats: Formats, layer: str, inner: int) -> Iterator[Op]:
    """Write a dense MLP of `inner` values, whose parameters have the prefix `layer`."""
    hidden = spec.hidden_size
    parts = [("gate", 0, inner), ("up", inner, inner)]
    yield from linears("normed", parts, f"{layer}gate_up", hidden, formats, spec.mlp_bias)
    yield Gate("gate", "up", "inner", spec.activation)
    yield from linears("inner", [("part", 0, hidden)], f"{layer}down", inner, formats, spec.mlp_bias)


def experts(spec: DecoderSpec, formats: Formats, layer: str, routed: RoutedSpec) -> Iterator[Op]:
    """Write a routed MLP. All that reads the residual stream comes before anything is added to it."""
    hidden, shared = spec.hidden_size, routed.shared_width
    gate_up = _expert_weight(f"{layer}experts.gate_up", routed, 2 * routed.width, hidden, formats)
    down = _expert_weight(f"{layer}experts.down", routed, hidden, routed.width, formats)
    gated = Gated(spec.activation, spec.activation_limit)
    if routed.beside_dense:
        yield from _beside_dense(spec, formats, layer, Experts("operand", "routed", gate_up, down, gated, routed))
        return
    yield prepare("normed", hidden, VECTOR)
    yield Linear("operand", "scores", _router(layer, routed, hidden))
    yield ChooseExperts(
        "scores", routed, vector(f"{layer}correction", routed.num_experts) if routed.correction_bias else None
    )
    prepared = None
    if shared:
        dense = list(mlp(spec, formats, f"{layer}shared.", shared))
        down_at = next(i for i, op in enumerate(dense) if isinstance(op, Prepare) and op.source == "inner")
        yield from dense[:down_at]
        last = next(op for op in reversed(dense[:down_at]) if isinstance(op, Prepare))
        prepared = last.dtype if last.order is None else None
        if routed.shared_gate:
            yield SigmoidScale("inner", "scores", routed.num_experts)
    if prepared != gate_up.format.operand:
        yield prepare("normed", hidden, gate_up.format)
    yield Experts("operand", "part", gate_up, down, gated, routed)
    if shared:
        pre = spec.norm_placement is NormPlacement.PRE
        if pre:
            yield Add("part", HIDDEN, spec.residual_scale)
        for op in dense[down_at:]:
            yield replace(op, ending=AddTo(1.0)) if isinstance(op, Linear) and not pre else op


def _beside_dense(spec: DecoderSpec, formats: Formats, layer: str, experts: Experts) -> Iterator[Op]:
    """Write a dense MLP and a routed one, each between norms of its own."""
    hidden, routed, name = spec.hidden_size, experts.routed, f"{layer}beside."
    yield Norm(HIDDEN, "scored", vector(f"{name}router_norm", hidden))
    yield prepare("scored", hidden, VECTOR)
    yield Linear("operand", "scores", _router(layer, routed, hidden), Store(hidden**-0.5))
    yield ChooseExperts("scores", routed, None, vector(f"{name}expert_scale", routed.num_experts))
    for op in mlp(spec, formats, f"{layer}shared.", routed.shared_width):
        yield replace(op, target="dense") if isinstance(op, Linear) and op.target == "part" else op
    yield Norm(HIDDEN, "gathered", vector(f"{name}experts_norm", hidden))
    yield prepare("gathered", hidden, experts.gate_up.format)
    yield experts
    yield Columns("dense", "part", hidden, norm=vector(f"{name}dense_post_norm", hidden))
    yield NormAdd("routed", "part", vector(f"{name}experts_post_norm", hidden), 1.0)


def _router(layer: str, routed: RoutedSpec, hidden: int) -> Weight:
    parts = [Part(parameter=f"{layer}router.weight", first=0, rows=routed.num_experts)]
    if routed.shared_gate:
        parts.append(Part(parameter=f"{layer}shared_gate.weight", first=0, rows=1))
    bias = (Part(parameter=f"{layer}router.bias", first=0, rows=routed.num_experts),) if routed.router_bias else ()
    return Weight(name=f"{layer}router", parts=tuple(parts), width=hidden, format=VECTOR, bias=bias)


def _expert_weight(name: str, routed: RoutedSpec, rows: int, width: int, formats: Formats) -> Weight:
    found = {formats.of(f"{name}.weight", row) for row in range(0, routed.num_experts * rows, max(rows // 2, 1))}
    if len(found) > 1:
        raise KernelError(
            f"{name} is stored in {' and '.join(sorted(map(str, found)))}; experts of a layer must be in one format; "
            f"choose one by --dtype"
        )
    total = routed.num_experts * rows
    return Weight(
        name=name,
        parts=(Part(parameter=f"{name}.weight", first=0, rows=total),),
        width=width,
        format=found.pop(),
        bias=(Part(parameter=f"{name}.bias", first=0, rows=total),) if routed.expert_bias else (),
        gated=name.endswith("gate_up"),
        experts=routed.num_experts,
    )


def linears(
    source: str, parts: Sequence[tuple[str, int, int]], name: str, width: int, formats: Formats, biased: bool
) -> Iterator[Op]:
    """Values (target, first row, rows) of one parameter, each in its format. The source is prepared once for those of
    one format, which become one linear: preparing is also when adapters project the source for the linear behind it."""
    prepared = None
    for target, first, rows in parts:
        format = formats.of(f"{name}.weight", first)
        if format != prepared:
            prepared, order = format, None
            if format.order:
                part = Part(parameter=f"{name}.weight", first=first, rows=width)
                order = Weight(name=f"{name}.{target}.order", parts=(part,), width=1, format=ORDER)
            yield replace(prepare(source, width, format), order=order)
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


NATIVE_OPS = (
    Embed, Take, Columns, Prepare, Linear, ScaleBy, QKV, Attention, NormAdd, Gate, ChooseExperts, Experts, SigmoidScale,
    Recurrent, HeadLinear, EmbedMore, LayerNorm,
)  # fmt: skip


Rewrite = Callable[[Sequence[Op]], tuple[int, list[Op]] | None]
"""Given the operations from here to the end: how many of the first are replaced and by what; None leaves them."""


@dataclass(frozen=True, slots=True)
class Pass:
    name: str
    why: str
    run: Callable[[list[Op]], tuple[list[Op], int]]
    """The new list, and how often something was found."""


def compile_program(
    spec: DecoderSpec, formats: Formats, taps: Sequence[int] = (), *, needs_all: bool = False
) -> Program:
    """Lower and fuse; `taps` as `lower` has them. `needs_all`: the last states of all tokens are wanted. Raises
    KernelError, naming the operation, for what the native library cannot express."""
    return fused(spec, formats, lower(spec, formats, taps), PASSES[1:] if needs_all else PASSES)


def fused(spec: DecoderSpec, formats: Formats, lowered: Sequence[Op], passes: Sequence[Pass] | None = None) -> Program:
    """Raises KernelError as `compile_program` does."""
    ops, fusions = list(lowered), []
    for each in PASSES if passes is None else passes:
        before = len(ops)
        ops, num_times = each.run(ops)
        if num_times:
            fusions.append(Fusion(each.name, each.why, num_times, before - len(ops)))
    strangers = sorted({type(op).__name__ for op in ops if not isinstance(op, NATIVE_OPS)})
    if strangers:
        raise KernelError(
            f"{spec.architecture} needs {', '.join(strangers)} by itself, which the native executor does not have; "
            "--executor torch has"
        )
    return Program(spec, formats, tuple(ops), tuple(fusions), len(lowered))


def _everywhere(rewrite: Rewrite) -> Callable[[list[Op]], tuple[list[Op], int]]:
    def run(ops: list[Op]) -> tuple[list[Op], int]:
        done: list[Op] = []
        num_times, at = 0, 0
        while at < len(ops):
            found = rewrite(ops[at : at + _LONGEST])
            if found is None:
                done.append(ops[at])
                at += 1
            else:
                done += found[1]
                at += found[0]
                num_times += 1
        return done, num_times

    return run


_LONGEST = 12  # more than any pass looks at


_STACKED = {**dict.fromkeys("qkv", "qkv"), "og": "qkv", **dict.fromkeys(("channels", "z", "b", "a"), "inputs")}
_STACKED |= dict.fromkeys(("lq", "lk"), "latent")


def _stack_qkv(ops: Sequence[Op]) -> tuple[int, list[Op]] | None:
    """Linears of one format that write columns of one value, one behind the other."""
    run: list[Linear] = []
    for op in ops:
        if not isinstance(op, Linear) or op.target not in _STACKED or (run and not _alike(run[0], op)):
            break
        run.append(op)
    if not run:
        return None
    first = run[0]
    weight = _stack(*run) if len(run) > 1 else first.weight
    return len(run), [replace(first, target=_STACKED[first.target], weight=weight, first=_first_row(first))]


def _alike(*linears: Linear) -> bool:
    return len({linear.weight.format for linear in linears}) == 1


def _first_row(linear: Linear) -> int:
    """First row of the parameter, and so the column of a value that several linears write."""
    return linear.weight.parts[0].first


def _gate_into_linear(ops: Sequence[Op]) -> tuple[int, list[Op]] | None:
    match ops:
        case [Linear(target="gate") as gate, Linear(target="up") as up, Gate() as activated, *_] if _alike(gate, up):
            weight = replace(_stack(gate, up), gated=True)
            return 3, [Linear(gate.source, activated.target, weight, Gated(activated.activation))]
    return None


def _stack(*linears: Linear) -> Weight:
    weights = [linear.weight for linear in linears]
    parts = _joined(tuple(part for weight in weights for part in weight.parts))
    bias = _joined(tuple(part for weight in weights for part in weight.bias))
    return replace(weights[0], parts=parts, bias=bias)


def _joined(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Neighbouring rows of one parameter as one part."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and (last.parameter, last.first + last.rows) == (part.parameter, part.first):
            joined[-1] = replace(last, rows=last.rows + part.rows)
        else:
            joined.append(part)
    return tuple(joined)


def _norm_into_prepare(ops: Sequence[Op]) -> tuple[int, list[Op]] | None:
    match ops:
        case [Norm() as norm, Prepare() as prepare, *_] if prepare.source == norm.target and prepare.norm is None:
            return 2, [replace(prepare, source=norm.source, norm=norm.weight)]
    return None


def _norm_into_add(ops: Sequence[Op]) -> tuple[int, list[Op]] | None:
    match ops:
        case [Norm() as norm, Add() as add, *_] if add.source == norm.target:
            return 2, [NormAdd(norm.source, add.target, norm.weight, add.scale)]
    return None


def _add_into_linear(ops: Sequence[Op]) -> tuple[int, list[Op]] | None:
    match ops:
        case [Linear(ending=Store()) as linear, Add() as add, *_] if add.source == linear.target:
            return 2, [replace(linear, target=add.target, ending=AddTo(add.scale))]
        case [Experts(ending=Store()) as each, Add() as add, *_] if add.source == each.target:
            return 2, [replace(each, target=add.target, ending=AddTo(add.scale))]
    return None


def _scale_into_linear(ops: Sequence[Op]) -> tuple[int, list[Op]] | None:
    match ops:
        case [Linear(ending=Store() as store) as linear, Scale() as scale, *_] if scale.value == linear.target:
            return 2, [replace(linear, ending=replace(store, scale=store.scale * scale.factor))]
    return None


def _softcap_into_linear(ops: Sequence[Op]) -> tuple[int, list[Op]] | None:
    match ops:
        case [Linear(ending=Store() as store) as linear, Softcap() as softcap, *_] if softcap.value == linear.target:
            return 2, [replace(linear, ending=replace(store, softcap=softcap.cap))]
    return None


def _qkv_in_one(ops: Sequence[Op]) -> tuple[int, list[Op]] | None:
    """Return the operations between the stacked linear and the write: norms and ropes of q and k, in any number."""
    if not isinstance(ops[0], HeadNorm | ValueNorm | Rope | WriteKV):
        return None
    has_value_norm = isinstance(ops[0], ValueNorm)
    norms: dict[str, HeadNorm] = {}
    ropes: dict[str, Rope] = {}
    for length, op in enumerate(ops, start=1):
        match op:
            case HeadNorm():
                norms[op.value] = op
            case ValueNorm() if length == 1:
                continue
            case Rope():
                ropes[op.value] = op
            case WriteKV() if all(set(each) in (set(), {"q", "k"} if op.keys else {"q"}) for each in (norms, ropes)):
                q_norm, k_norm = norms.get("q"), norms.get("k")
                fused = QKV(
                    "qkv",
                    op.layer,
                    ropes["q"].rope if ropes else None,
                    q_norm.weight if q_norm is not None else None,
                    k_norm.weight if k_norm is not None else None,
                    q_norm is not None and q_norm.full_width,
                    has_value_norm,
                    not op.keys,
                )
                return length, [fused]
            case _:
                return None
    return None


def _tie_output(ops: list[Op]) -> tuple[list[Op], int]:
    embedding = next(op.weight for op in ops if isinstance(op, Embed))
    num_times = 0
    for index, op in enumerate(ops):
        if isinstance(op, Linear) and op.weight.parts == embedding.parts and op.weight.format == embedding.format:
            ops = [*ops[:index], replace(op, weight=embedding), *ops[index + 1 :]]
            num_times += 1
    return ops, num_times


def _take_early(ops: list[Op]) -> tuple[list[Op], int]:
    """End unwanted rows where their keys and values are written and attended to: in the last layer."""
    last = max(index for index, op in enumerate(ops) if isinstance(op, Attention | Recurrent))
    if any(isinstance(op, Columns) and op.target == TAPS for op in ops[last:]):  # a head looks at all of them
        return ops, 0
    if any(isinstance(op, Gate) and op.up == BY_LAYER for op in ops[last:]):
        return ops, 0
    take = next(op for op in ops[last:] if isinstance(op, Take))
    rest: list[Op] = [take]
    for op in ops[last + 1 :]:
        match op:
            case Take():
                continue
            case Prepare() | HeadLinear() if op.source == ops[last].target:  # type: ignore[union-attr]
                rest.append(replace(op, takes=True))
            case Norm() | Prepare() | Linear() | Add():
                rest.append(replace(op, source=_renamed(op.source, take), target=_renamed(op.target, take)))
            case ScaleBy() | LayerNorm():
                rest.append(replace(op, value=_renamed(op.value, take)))
            case _:
                rest.append(op)
    return [*ops[: last + 1], *rest], 1


def _renamed(value: str, take: Take) -> str:
    return take.target if value == take.source else value


PASSES: tuple[Pass, ...] = (
    Pass("wanted rows after the last attention", "the last layer's MLP only where somebody looks", _take_early),
    Pass("qkv stack", "one read of the operand, one barrier", _everywhere(_stack_qkv)),
    Pass("gate into linear ending", "gate and up never reach memory", _everywhere(_gate_into_linear)),
    Pass("norm into prepare", "the residual stream is read once", _everywhere(_norm_into_prepare)),
    Pass("post-norm into residual add", "the part is read once", _everywhere(_norm_into_add)),
    Pass("residual add into linear ending", "the part never reaches memory", _everywhere(_add_into_linear)),
    Pass("rope, q/k norm and KV write in one", "queries and keys are touched once", _everywhere(_qkv_in_one)),
    Pass("logit scale into linear ending", "logits are written once", _everywhere(_scale_into_linear)),
    Pass("logit softcap into linear ending", "logits are written once", _everywhere(_softcap_into_linear)),
    Pass("tied lm_head = embedding", "one matrix in memory", _tie_output),
)
