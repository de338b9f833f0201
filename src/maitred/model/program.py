"""Program: a decoder as a flat list of operations, known before a weight is read; one step of the native executor.

`lowering` writes a `DecoderSpec` down formula by formula; `fusions.fuse` merges neighbours by named passes until every
operation is one that the native library has. Nothing here computes: operations name values (rows of float32, one row a
token, or an operand made ready for a linear) and weights by name.

The place of weights in memory is the seam to packing and caching (`packed.py`):

- `Program.weights` lists, in the order of use, a `Weight` for each buffer the native operations read: its name, which
  rows of which parameters (`spec.parameter_shapes`) it stacks, and its number format.
- `packed.plan_weights(program)` gives each its packed size in bytes, and so the layout of one flat file, before any
  checkpoint is read; `packed.pack_weights(program, checkpoint)` fills buffers tensor by tensor, or buffers that the
  caller brings (a mapped cache file).
- `packed.PackedWeights` is the ordered mapping name -> `PackedTensor`(weight, buffer) that the executor takes; a buffer
  is bytes at a 64-byte-aligned address, owned by its maker, and never written once it is filled.

T tokens of a step, L rows whose logits are wanted. Operations are msgspec's structs and no dataclasses: two dozen of
those take 7 ms of every start to define.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from maitred.model.spec import Activation, DecoderSpec, HeadSpec, RecurrentSpec, RopeSpec, RoutedSpec

HIDDEN = "hidden"  # the residual stream
TAKEN = "taken"  # its rows whose logits are wanted
TAPS = "taps"  # states that a head reads, or that the caller of a head gives
LOGITS = "logits"


BLOCK_FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_z", "q8_z", "q8_w", "q4_k", "q5_k", "q6_k")
"""Codes of 4 to 8 bits, with a scale (and a minimum or a zero) for each 32 values or each 16: GGML's, and three of
quantised folders."""


class Format(Struct, frozen=True, kw_only=True):
    """Number format of a weight: float32, float16, bfloat16, int8, fp8, or one of `BLOCK_FORMATS`."""

    dtype: str
    order: str = ""
    """A name of the order in which the file has the columns, where that is not theirs: rows are sorted likewise."""

    def __str__(self) -> str:
        return self.dtype

    @property
    def operand(self) -> str:
        """Format of the activations that multiply it; block formats share one, 8 bits with a scale for each 32."""
        if self.dtype in BLOCK_FORMATS:
            return "q8_0"
        return {"float16": "float32", "fp8": "bfloat16"}.get(self.dtype, self.dtype)


VECTOR = Format(dtype="float32")
ORDER = Format(dtype="order")  # of a vector of columns' numbers, int32
ROUTERS = ("router.weight", "shared_gate.weight")  # parameters that stay float32: a token's experts hang on them


class Formats(Struct, frozen=True, kw_only=True):
    """Number formats of a program's matrices."""

    linears: Format
    head: Format
    """The output matrix and the embedding, which is often the same."""
    stored: dict[str, tuple[tuple[int, Format], ...]] = {}
    """Formats that a file gives: parameter -> (first row, format), ascending; empty where all are the two above."""

    def of(self, parameter: str, row: int) -> Format:
        """Format of the parameter's rows from `row` on."""
        if parameter.endswith(ROUTERS):
            return VECTOR
        for first, format in reversed(self.stored.get(parameter, ())):
            if first <= row:
                return format
        return self.head if parameter.endswith("embedding.weight") or parameter == "output.weight" else self.linears

    def __str__(self) -> str:
        if self.stored:
            names = sorted({str(format) for parts in self.stored.values() for _, format in parts})
            return f"{', '.join(names)} as the file has them"
        return str(self.linears) if self.head == self.linears else f"{self.linears}, embedding and output {self.head}"


class Part(Struct, frozen=True, kw_only=True):
    """Rows [first, first + rows) of a parameter of the spec."""

    parameter: str
    first: int
    rows: int


class Weight(Struct, frozen=True, kw_only=True):
    """A matrix [rows, width], `parts` one below the other, and the bias that is packed with it; a vector has width 1.

    `gated`: the first half of the rows is the gate and the second half goes up, packed so that one tile holds both.
    `experts`: so many matrices [rows / experts, width], one behind the other at equal distances; 0: it is one matrix.
    """

    name: str
    parts: tuple[Part, ...]
    width: int
    format: Format
    bias: tuple[Part, ...] = ()
    gated: bool = False
    experts: int = 0

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def matrix_rows(self) -> int:
        """Rows of one matrix."""
        return self.rows // (self.experts or 1)


def cut(parts: tuple[Part, ...], first: int, end: int) -> Iterator[Part]:
    """Rows [first, end) of the parts, counted from the first one's top."""
    top = 0
    for part in parts:
        from_row, to_row = max(first - top, 0), min(end - top, part.rows)
        if from_row < to_row:
            yield replace(part, first=part.first + from_row, rows=to_row - from_row)
        top += part.rows


# ---- operations


class Embed(Struct, frozen=True):
    """target = weight[token] * scale"""

    target: str
    weight: Weight
    scale: float


class EmbedMore(Struct, frozen=True):
    """target += weight[a token's type], or weight[its position + offset]"""

    target: str
    weight: Weight
    by_position: bool
    offset: int = 0


class LayerNorm(Struct, frozen=True):
    """value = (value - mean) / sqrt(variance + eps) * weight + bias, in place"""

    value: str
    weight: Weight
    bias: Weight


class Take(Struct, frozen=True):
    """target = the rows of source whose logits are wanted"""

    source: str
    target: str


class Norm(Struct, frozen=True):
    """target = source / rms(source) * weight"""

    source: str
    target: str
    weight: Weight


class Columns(Struct, frozen=True):
    """target[:, first:] = source[:, source_first:], `width` columns, normed if there is a norm; eps 0: the model's"""

    source: str
    target: str
    width: int
    first: int = 0
    source_first: int = 0
    norm: Weight | None = None
    eps: float = 0.0


class Prepare(Struct, frozen=True):
    """target = source's first columns, as of `Columns`, in the number format and padding that a linear reads"""

    source: str
    target: str
    width: int
    dtype: str
    norm: Weight | None = None
    takes: bool = False  # only the rows whose logits are wanted
    order: Weight | None = None
    eps: float = 0.0


class Store(Struct, frozen=True):
    """target = softcap(acc * scale)"""

    scale: float = 1.0
    softcap: float | None = None


class AddTo(Struct, frozen=True):
    """target += acc * scale"""

    scale: float


class Gated(Struct, frozen=True):
    """target = activation(acc of the gate) * (acc of the way up)"""

    activation: Activation
    limit: float = 0.0  # of a clamped activation


class Activated(Struct, frozen=True):
    """target = activation(acc)"""

    activation: Activation


class Linear(Struct, frozen=True):
    """acc = source @ weight.T + bias, and what becomes of it"""

    source: str
    target: str
    weight: Weight
    ending: Store | AddTo | Gated | Activated = Store()
    first: int = 0  # column of the target where the outputs begin


class HeadLinear(Struct, frozen=True):
    """target's head = the last `copied` columns of the source's, then its other columns @ weight.T; each head has a
    matrix of its own, one of the weight's `experts`"""

    source: str
    target: str
    weight: Weight
    copied: int = 0
    takes: bool = False  # only the rows whose logits are wanted


class ChooseExperts(Struct, frozen=True):
    """Experts and weights of each row, from its logits; those that the next `Experts` computes."""

    source: str
    routed: RoutedSpec
    correction: Weight | None
    scales: Weight | None = None  # of each expert, by which its weight is multiplied


class Experts(Struct, frozen=True):
    """acc = sum over a row's experts, in ascending order, of weight * down(gated gate_up), and what becomes of it"""

    source: str
    target: str
    gate_up: Weight
    down: Weight
    gated: Gated
    routed: RoutedSpec
    ending: Store | AddTo = Store()


class SigmoidScale(Struct, frozen=True):
    """value *= sigmoid(column of source)"""

    value: str
    source: str
    column: int


class HeadNorm(Struct, frozen=True):
    """Normalise each head of the value alone, or all at once, in place."""

    value: str
    weight: Weight
    full_width: bool


class Rope(Struct, frozen=True):
    """Rotates the heads of the value, in place."""

    value: str
    rope: RopeSpec


class ValueNorm(Struct, frozen=True):
    """Normalise each head of the value alone, without weights, in place."""

    value: str


class WriteKV(Struct, frozen=True):
    """Keys and values into the pool."""

    layer: int
    keys: str
    values: str


class QKV(Struct, frozen=True):
    """Queries, keys and values stacked in one value: norms, rope, keys and values into the pool, queries made ready.
    `shared`: there are queries alone, over what another layer keeps."""

    source: str
    layer: int
    rope: RopeSpec | None
    q_norm: Weight | None = None
    k_norm: Weight | None = None
    full_width: bool = False
    value_norm: bool = False
    shared: bool = False


class Attention(Struct, frozen=True):
    """target = attention of the queries over the layer's blocks"""

    queries: str
    target: str
    layer: int
    window: int | None
    sinks: Weight | None = None
    gated: bool = False  # times the sigmoid of the columns of "qkv" behind the values


class Recurrent(Struct, frozen=True):
    """target = the gated delta rule over a request's tokens, from their inputs and the state of its slot"""

    source: str
    target: str
    spec: RecurrentSpec
    conv: Weight
    step_bias: Weight
    rate: Weight  # minus exp(A_log)
    norm: Weight


class Gate(Struct, frozen=True):
    """target = activation(gate) * columns of up"""

    gate: str
    up: str
    target: str
    activation: Activation
    first: int = 0


class Add(Struct, frozen=True):
    """target += source * scale"""

    source: str
    target: str
    scale: float


class NormAdd(Struct, frozen=True):
    """target += norm(source) * scale, of each head alone"""

    source: str
    target: str
    weight: Weight
    scale: float
    num_heads: int = 1


class Scale(Struct, frozen=True):
    value: str
    factor: float


class ScaleBy(Struct, frozen=True):
    """value *= the weight's one number"""

    value: str
    weight: Weight


class Softcap(Struct, frozen=True):
    """value = cap * tanh(value / cap)"""

    value: str
    cap: float


Op = (
    Embed | Take | Norm | Columns | Prepare | Linear | HeadNorm | Rope | WriteKV | QKV | Attention | Gate | Add
    | NormAdd | Scale | ScaleBy | Softcap | ValueNorm | ChooseExperts | Experts | SigmoidScale | Recurrent | HeadLinear
    | EmbedMore | LayerNorm
)  # fmt: skip

# ---- the program


class Fusion(Struct, frozen=True):
    """Result of a fusion pass: how often it applied, and how many operations it took away."""

    name: str
    why: str
    num_times: int
    num_ops_saved: int


class Program(Struct, frozen=True):
    """The fused list, and how it came about."""

    spec: DecoderSpec
    formats: Formats
    ops: tuple[Op, ...]
    fusions: tuple[Fusion, ...]
    num_ops_lowered: int
    head: HeadSpec | None = None  # of which `spec` is the decoder

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return each buffer once, in the order of use."""
        found: dict[str, Weight] = {}
        for op in self.ops:
            for weight in weights_of(op):
                known = found.setdefault(weight.name, weight)
                assert known == weight, (known, weight)
        return tuple(found.values())


def weights_of(op: Op) -> tuple[Weight, ...]:
    match op:
        case Embed() | Norm() | HeadNorm() | NormAdd() | Linear() | HeadLinear() | ScaleBy():
            return (op.weight,)
        case EmbedMore():
            return (op.weight,)
        case LayerNorm():
            return (op.weight, op.bias)
        case Experts():
            return (op.gate_up, op.down)
        case Prepare():
            return tuple(weight for weight in (op.norm, op.order) if weight is not None)
        case Columns():
            return (op.norm,) if op.norm is not None else ()
        case ChooseExperts():
            return tuple(weight for weight in (op.correction, op.scales) if weight is not None)
        case Attention():
            return (op.sinks,) if op.sinks is not None else ()
        case Recurrent():
            return (op.conv, op.step_bias, op.rate, op.norm)
        case QKV():
            return tuple(weight for weight in (op.q_norm, op.k_norm) if weight is not None)
        case _:
            return ()
