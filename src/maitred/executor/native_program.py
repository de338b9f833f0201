"""A compiled program with its weights in the native library: operations added one by one, then steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.kernels import _native
from maitred.kernels.sampler import Sampler
from maitred.model.packed import PackedWeights, shape_of
from maitred.model.program import (
    HIDDEN,
    LOGITS,
    QKV,
    TAKEN,
    TAPS,
    Activated,
    AddTo,
    Attention,
    ChooseExperts,
    Columns,
    Embed,
    EmbedMore,
    Experts,
    Gate,
    Gated,
    HeadLinear,
    LayerNorm,
    Linear,
    NormAdd,
    Op,
    Prepare,
    Program,
    Recurrent,
    ScaleBy,
    SigmoidScale,
    Store,
    Take,
    Weight,
)
from maitred.model.rope import inverse_frequencies
from maitred.model.shares import Share, heads_of, share_of
from maitred.model.spec import SWIGLU_SLOPE, Activation, RopeSpec

LOGITS_BYTES = 48 * 2**20  # of the rows of logits of one run; more of them come in several
NOT_ADAPTED = -1  # the number of a linear that adapters leave alone
Int32s = NDArray[np.int32]


@dataclass(slots=True)
class RaggedStep:
    """Rows as `StepRows` of the native library points to them; T tokens of R slices."""

    token_ids: Int32s  # [T]
    positions: Int32s  # [T]
    first_tokens: Int32s  # [R + 1]
    block_tables: Int32s  # block ids of slice 0, then of slice 1, ...; all that for each group of layers
    first_blocks: Int32s  # [R + 1]
    adapters: Int32s | None = None  # [R] slots, -1 for none; None where no row has one
    states: Int32s | None = None  # [R, 3] slot, tokens to replay, tokens that are certain; of models with such layers
    saves: Int32s | None = None  # [saves, 3] row, its tokens, slot


def running_sums(counts: Sequence[int]) -> Int32s:
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums


class Chained(NamedTuple):
    """Tokens of a chain of steps, for each of R rows."""

    tokens: NDArray[np.int32]  # [R, most tokens of a row]; what is beyond `counts` means nothing
    counts: NDArray[np.int32]  # [R]
    faults: NDArray[np.int32]  # [R], index into `kernels.sampler.FAULTS`: why there are fewer than were wanted


class Place(NamedTuple):
    """Place of a process among those that run a program together."""

    rank: int = 0
    num_ranks: int = 1
    team: Any = None  # `_native.Team`, where there are several


ALONE = Place()


class OpTime(NamedTuple):
    name: str
    nanoseconds: int


class LowRankPart(NamedTuple):
    """Addend of an adapter to one linear, as csrc/adapters.h has it: A and B as flat bytes aligned to 64."""

    dtype: str  # float32 or bfloat16
    rank: int  # of all of A, its padding included
    a: NDArray[np.uint8]
    b: NDArray[np.uint8]
    runs: Int32s  # [runs, 3] panels, first rank, ranks


def most_logits(vocab_size: int, max_rows: int) -> int:
    """Rows of logits for which a program has room: one for each of `max_rows` rows, within LOGITS_BYTES."""
    return max(1, min(max_rows, LOGITS_BYTES // (4 * vocab_size)))


class NativeProgram:
    """Runs steps of `program`. Holds weights, pool and threads as long as it lives."""

    def __init__(
        self,
        program: Program,
        weights: PackedWeights,
        pool: Any,
        threads: Any,
        *,
        max_tokens: int,
        max_logits: int,
        max_model_len: int,
        isa: str | None = None,
        place: Place = ALONE,
        layers: Sequence[tuple[int, int]] = (),
        num_state_slots: int = 0,
        num_pending: int = 1,
    ) -> None:
        """`pool` is a `_native.KVPool`, `threads` a `_native.ThreadPool`; `isa` None is the default one. `weights` are
        the shares of `place`'s rank (`shares.own_program`). `layers` have the group of each layer and its place there,
        where steps have block tables for several groups. `num_state_slots` are those of recurrent layers, and
        `num_pending` the tokens of a row that may not be certain.
        """
        spec = program.spec
        self.program = program
        self.max_tokens = max_tokens
        self.max_logits = max_logits
        self.vocab_size = spec.vocab_size
        num_embeddings = program.head.num_embeddings if program.head is not None else spec.vocab_size
        if spec.encoder is not None:  # ids tell types too, see `EmbedMore`
            num_embeddings *= max(1, spec.encoder.num_types)
        self.weights = weights
        self._keep = (pool, threads, place)
        self._native = _native.Program(
            threads,
            pool,
            isa=isa or _native.default_isa(),
            max_tokens=max_tokens,
            max_logits=max_logits,
            vocab_size=num_embeddings,
            max_positions=max_model_len,
            team=place.team,
        )
        if spec.encoder is not None:
            self._native.encode()
        if layers:
            self._native.place_layers(list(layers))
        if not num_state_slots and any(isinstance(op, Recurrent) for op in program.ops):
            raise KernelError(f"{spec.architecture} has recurrent layers, and no slot for their states")
        self._native.state_slots(num_state_slots, num_pending)
        builder = _Builder(program, weights, self._native, max_model_len, place)
        builder.build()
        self._frequencies = builder.frequencies
        self._logits_rows = builder.rows.get(LOGITS)
        self._logits: Any = self._logits_rows.view(max_logits) if self._logits_rows is not None else np.empty((1, 0))
        self.all_states: NDArray[np.float32] = builder.rows[HIDDEN].view(max_tokens)
        """Rows [max_tokens, hidden size]: `last_states` of all tokens of the last step, where the program was compiled
        with `needs_all`."""
        self._taken: NDArray[np.float32] = builder.rows[TAKEN].view(max_logits)
        taps = builder.rows.get(TAPS)
        self.taps: NDArray[np.float32] | None = taps.view(max_tokens) if taps is not None else None
        """Rows [max_tokens, all taps of a token]: what a head reads of the last step, or of its next one if this is the
        head."""
        self._feedback = (builder.rows[TAKEN], builder.rows[HIDDEN]) if program.head is not None else (None, None)
        self.adapted = tuple(builder.adapted)
        """Weights of the linears that adapters may add to, in the order of `load_adapter`'s parts."""

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, target) each, one after another."""
        self._native.copy_states(list(pairs))

    def run(self, step: RaggedStep, logits_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute the step and [len(logits_tokens), V] logits of those tokens; a view, good until the next call."""
        self._native.run(
            step.token_ids,
            step.positions,
            step.first_tokens,
            step.block_tables,
            step.first_blocks,
            np.array(logits_tokens, dtype=np.int32),
            step.adapters,
            step.states,
            step.saves,
        )
        logits: NDArray[np.float32] = self._logits[: len(logits_tokens)]
        return logits

    def chain(
        self,
        sampler: Sampler,
        step: RaggedStep,
        num_tokens_R: Int32s,
        settings_R4: NDArray[np.float64],
        sequences_R3: NDArray[np.uint64],
        vocabulary: Int32s | None = None,
    ) -> Chained:
        """Compute the step, sample each row's next token from its last one's logits, compute that, and so on: so many
        tokens of each row (>= 1), of which the last is not computed. No row is more than one of `max_logits`.

        Settings: temperature (0 is greedy), top_k, top_p, min_p. Sequences: seed, sample index and position of the
        first token, as `executor.sampler.uniform` takes them. A row that nothing can be sampled from ends there.
        `vocabulary` has the token of each logit, where they are not the same. A head reads its own state after the
        first step, in place of the taps.
        """
        num_rows = len(num_tokens_R)
        tokens_RK = np.zeros((num_rows, int(num_tokens_R.max())), np.int32)
        made = Chained(tokens_RK, np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32))
        self._native.chain(
            sampler.native,
            self._logits_rows,
            step.token_ids,
            step.positions,
            step.first_tokens,
            step.block_tables,
            step.first_blocks,
            num_tokens_R,
            settings_R4,
            sequences_R3,
            *made,
            *self._feedback,
            vocabulary,
        )
        return made

    def more_logits(self, logits_tokens: Sequence[int]) -> NDArray[np.float32]:
        """The same of other tokens of the step that ran last."""
        self._native.run_logits(np.array(logits_tokens, dtype=np.int32))
        logits: NDArray[np.float32] = self._logits[: len(logits_tokens)]
        return logits

    def last_states(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Residual stream behind the last layer, [len(tokens), hidden size], of tokens of the step that ran last, as
        `more_logits` has them; an encoder's is normed. A view, good until the next call."""
        self._native.run_logits(np.array(tokens, dtype=np.int32), True)
        return self._taken[: len(tokens)]

    def serve(self) -> None:
        """Serve on a rank above 0: compute what rank 0 runs, until that ends."""
        self._native.serve()

    def load_adapter(self, slot: int, parts: Sequence[LowRankPart | None]) -> None:
        """Rows of later steps may name the slot. The caller keeps the parts until it is unloaded; between steps."""
        self._native.load_adapter(slot, list(parts))

    def unload_adapter(self, slot: int) -> None:
        self._native.unload_adapter(slot)

    @property
    def adapter_memory(self) -> NDArray[np.uint8] | None:
        """Memory for loaded parts, shared by ranks; None for one process: anywhere. Unwritten parts take none."""
        memory: NDArray[np.uint8] | None = self._native.adapter_memory
        return memory

    def release_adapter_memory(self, offset: int, num_bytes: int) -> None:
        """Gives whole pages of it back to the system."""
        self._native.release_adapter_memory(offset, num_bytes)

    @property
    def tokens_of_expert(self) -> list[NDArray[np.int64]]:
        """Of each routed layer, the rows that each of its experts had since the start; views."""
        found: list[NDArray[np.int64]] = self._native.tokens_of_expert
        return found

    @property
    def expert_load_ratio(self) -> float:
        """Rows of a layer's busiest expert over the mean of its experts, where it is largest; 0 before any."""
        return max((float(each.max() / each.mean()) for each in self.tokens_of_expert if each.any()), default=0.0)

    @property
    def buffer_bytes(self) -> int:
        return int(self._native.buffer_bytes)

    def set_profiling(self, on: bool) -> None:
        self._native.set_profiling(on)

    def profile(self) -> list[OpTime]:
        """Return the profile of the last run, in the program's order, on the first thread."""
        return [OpTime(*pair) for pair in self._native.profile()]

    def close(self) -> None:
        """Give back buffers, weights and threads."""
        del (
            self._logits,
            self._logits_rows,
            self._feedback,
            self.taps,
            self.all_states,
            self._taken,
            self._native,
            self._keep,
            self.weights,
        )


class _Builder:
    """Adds a program's operations to a native one; values become rows when they are first written."""

    def __init__(self, program: Program, weights: PackedWeights, native: Any, max_model_len: int, place: Place) -> None:
        self._program, self._weights, self._native = program, weights, native
        self._max_model_len, self._place = max_model_len, place
        self._eps = program.spec.norm_eps
        self._head = _head_begins(program.ops)
        self.rows: dict[str, Any] = {}
        self._made: dict[tuple[str, int], Any] = {}
        self.adapted: list[Weight] = []
        self.frequencies: list[NDArray[np.float32]] = []  # the native program reads them where they are
        self._tables: dict[RopeSpec, Any] = {}
        self._query_tables: dict[RopeSpec | None, Any] = {}  # of ropes with factors of their own for queries

    def build(self) -> None:
        ops = self._program.ops
        by_head = [shape_of(op.weight) for op in ops if isinstance(op, HeadLinear)]
        self._native.operands([shape_of(op.weight) for op in ops if isinstance(op, Linear)] + by_head, bool(by_head))
        if routed := [op for op in ops if isinstance(op, Experts)]:
            shapes = [shape_of(weight) for op in routed for weight in (op.gate_up, op.down)]
            most = (max(getattr(op.routed, name) for op in routed) for name in ("num_experts", "num_active", "width"))
            self._native.routed(*most, self._program.spec.hidden_size, list({repr(s): s for s in shapes}.values()))
        logits_begin = self._head
        if self._program.head is not None:
            self._rows(TAPS, self._program.head.tap_width)
            # Its keys and values are wanted without more than its own state comes of them.
            logits_begin = next(index for index, op in enumerate(ops) if isinstance(op, Attention))
        for index, op in enumerate(ops):
            if isinstance(op, Embed) and not self._tables:
                self._native.begin_state()
                self._add_rope_tables()  # of positions, which move on with the state
            if index == logits_begin:
                self._native.begin_logits()
            if index + 1 < len(ops) and getattr(ops[index + 1], "target", "") == LOGITS:
                self._native.begin_output()
            self._add(index, op)

    def _add(self, index: int, op: Op) -> None:
        match op:
            case Embed():
                self._add_embed(op)
            case EmbedMore() | LayerNorm() | NormAdd():
                self._add_part(op, index >= self._head)
            case Prepare():
                reader = self._reader(index)
                norm, few = self._vector(op.norm), index >= self._head
                shape = shape_of(reader.weight if isinstance(reader, Linear) else reader.gate_up)
                adapted = self._adapted(reader, few) if isinstance(reader, Linear) else NOT_ADAPTED
                order = () if op.order is None else (self._vector(op.order),)
                eps = op.eps or self._eps
                self._native.prepare(self.rows[op.source], shape, norm, eps, few, op.takes, adapted, *order)
            case Take():
                source = self.rows[op.source]
                self._native.take(source, self._rows(op.target, source.width))
            case Columns():
                self._add_columns(index, op)
            case Linear() | HeadLinear():
                self._add_linear(index, op) if isinstance(op, Linear) else self._add_head_linear(index, op)
            case QKV():
                self._add_qkv(op)
            case Attention():
                spec = self._program.spec
                reader = self._reader(index)
                assert isinstance(reader, Linear)
                target = self._rows(op.target, spec.attended_width if spec.latent else reader.weight.width)
                cap = spec.attention_softcap or 0.0
                scale, window, sinks = spec.attention_scale, op.window or 0, self._vector(op.sinks)
                shape = shape_of(reader.weight)
                gates = self.rows["qkv"] if op.gated else None
                self._native.attention(op.layer, spec.num_heads, window, scale, cap, target, shape, sinks, gates)
            case Recurrent():
                delta, target = op.spec, self._rows(op.target, op.spec.value_width)
                sizes = delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.value_dim, delta.conv_width
                vectors = [self._vector(weight) for weight in (op.conv, op.step_bias, op.rate, op.norm)]
                self._native.recurrent(self.rows[op.source], target, *sizes, delta.tiled, *vectors, self._eps)
            case Gate():
                gate, up = self.rows[op.gate], self.rows[op.up]
                target, few = self._rows(op.target, gate.width), index >= self._head
                self._native.gate(gate, up, target, op.activation.value, few, op.first)
            case ChooseExperts() | Experts() | SigmoidScale() | ScaleBy():
                self._add_routed(op, index >= self._head)
            case _:
                raise AssertionError(op)

    def _add_embed(self, op: Embed) -> None:
        target = self._rows(op.target, op.weight.width)
        formats = self._program.formats
        scale = op.scale if formats.stored else _rounded(op.scale, formats.linears.dtype)
        share = self._share(op.weight)
        if share.weight is None:
            self._native.idle("embed")
        else:
            most = () if self._program.spec.encoder is None else (op.weight.rows,)
            self._native.embed(shape_of(share.weight), self._data(op.weight), share.first, scale, target, *most)

    def _add_part(self, op: EmbedMore | LayerNorm | NormAdd, few: bool) -> None:
        if isinstance(op, LayerNorm):
            weight, bias = self._vector(op.weight), self._vector(op.bias)
            self._native.layer_norm(self.rows[op.value], weight, bias, self._eps, few)
        elif isinstance(op, NormAdd):
            part, target, weight = self.rows[op.source], self.rows[op.target], self._vector(op.weight)
            self._native.norm_add(part, target, weight, self._eps, op.scale, few, op.num_heads)
        else:
            most = 0 if op.by_position else self._program.spec.vocab_size
            self._native.embed_more(shape_of(op.weight), self._data(op.weight), op.offset, most, self.rows[op.target])

    def _add_columns(self, index: int, op: Columns) -> None:
        source, target = self.rows[op.source], self._rows(op.target, self._width(op.target))
        norm, eps = self._vector(op.norm), op.eps or self._eps
        self._native.norm(source, op.source_first, target, op.first, op.width, norm, eps, index >= self._head)

    def _width(self, value: str, of: Weight | None = None) -> int:
        """Return the width of a value that is written by columns, of linears by those of a weight's layer."""
        found: list[Columns | Linear] = [
            op
            for op in self._program.ops
            if isinstance(op, Columns | Linear) and op.target == value
            if isinstance(op, Columns) or of is None or _layer_of(op.weight) == _layer_of(of)
        ]
        return max(op.first + (op.width if isinstance(op, Columns) else shape_of(op.weight).out_width) for op in found)

    def _add_head_linear(self, index: int, op: HeadLinear) -> None:
        weight, few = op.weight, index >= self._head
        width = self._width("qkv") if op.target == "qkv" else weight.experts * (op.copied + weight.matrix_rows)
        target = self._rows(op.target, width)
        share = heads_of(weight, self._place.rank, self._place.num_ranks)
        if share.weight is None:
            self._native.idle(weight.name)
            return
        of_rank = shape_of(weight), self._data(weight), share.first, share.weight.experts
        self._native.head_linear(*of_rank, op.copied, self.rows[op.source], target, few, op.takes, weight.name)

    def _add_routed(self, op: ChooseExperts | Experts | SigmoidScale | ScaleBy, few: bool) -> None:
        if isinstance(op, ScaleBy):
            self._native.scale(self.rows[op.value], self._vector(op.weight), few)
        elif isinstance(op, SigmoidScale):
            self._native.sigmoid_scale(self.rows[op.value], self.rows[op.source], op.column, few)
        elif isinstance(op, ChooseExperts):
            self._add_route(op, few)
        else:
            self._add_experts(op, few)

    def _add_route(self, op: ChooseExperts, few: bool) -> None:
        routed = op.routed
        self._native.route(
            self.rows[op.source],
            routed.scoring.value,
            routed.num_experts,
            routed.num_active,
            routed.num_groups,
            routed.num_active_groups,
            routed.best_of_group,
            routed.normalized,
            routed.scale,
            self._vector(op.correction),
            few,
            *(() if op.scales is None else (self._vector(op.scales),)),
        )

    def _add_experts(self, op: Experts, few: bool) -> None:
        gate_up, down = self._share(op.gate_up), self._share(op.down)
        assert gate_up.weight is not None and down.weight is not None  # noqa: PT018  own_program refuses others
        ending, alpha = ("add", op.ending.scale) if isinstance(op.ending, AddTo) else ("store", 1.0)
        gated = op.gated
        self._native.experts(
            op.routed.num_experts,
            op.routed.num_active,
            op.routed.width,
            shape_of(gate_up.weight),
            self._data(op.gate_up),
            gate_up.first,
            shape_of(down.weight),
            self._data(op.down),
            down.first,
            self._rows(op.target, self._program.spec.hidden_size),
            ending,
            alpha,
            gated.activation.value,
            SWIGLU_SLOPE if gated.activation is Activation.CLAMPED_SWIGLU else 1.0,
            gated.limit,
            few,
            op.gate_up.name.removesuffix(".gate_up"),
        )

    def _add_linear(self, index: int, op: Linear) -> None:
        few = index >= self._head
        ending, alpha, softcap, act = "store", 1.0, 0.0, "silu"
        match op.ending:
            case Store():
                alpha, softcap = op.ending.scale, op.ending.softcap or 0.0
            case AddTo():
                ending, alpha = "add", op.ending.scale
            case Gated():
                ending, act = "gate", op.ending.activation.value
            case Activated():
                ending, act = "act", op.ending.activation.value
        width = shape_of(op.weight).out_width
        if op.target in ("qkv", "inputs", "latent"):  # whose columns may be written by several
            width = self._width(op.target, op.weight)
        target = self._rows(op.target, width, few=op.target == LOGITS)
        name = op.weight.name if op.target != LOGITS else "output"
        share = self._share(op.weight)
        adapted = self._adapted(op, few)
        if share.weight is None:
            self._native.idle(name, adapted)
            return
        shape, data = shape_of(share.weight), self._data(op.weight)
        place = (op.first, share.first)
        self._native.linear(shape, data, target, *place, ending, alpha, softcap, act, few, adapted, name)

    def _adapted(self, linear: Linear, few: bool) -> int:
        """The linear's number among those that adapters may add to, -1 for the output matrix."""
        if linear.target == LOGITS:
            return NOT_ADAPTED
        if linear.weight not in self.adapted[-1:]:
            number = self._native.adapted_linear(shape_of(linear.weight), few)
            assert number == len(self.adapted)
            self.adapted.append(linear.weight)
        return len(self.adapted) - 1

    def _add_qkv(self, op: QKV) -> None:
        spec = self._program.spec
        if op.value_norm:
            num_heads, size = spec.kv_heads[op.layer]
            self.frequencies.append(np.ones(size, np.float32))
            rows, first = self.rows[op.source], (spec.num_heads + num_heads) * size
            self._native.norm(rows, first, rows, first, size, self.frequencies[-1], self._eps, False, num_heads)
        self._native.qkv(
            op.layer,
            spec.num_heads,
            self.rows[op.source],
            self._tables[op.rope] if op.rope is not None else None,
            self._vector(op.q_norm),
            self._vector(op.k_norm),
            op.full_width,
            self._eps,
            op.rope is not None and op.rope.interleaved,
            self._query_tables.get(op.rope),
            op.shared,
        )

    def _add_rope_tables(self) -> None:
        for rope in dict.fromkeys(op.rope for op in self._program.ops if isinstance(op, QKV)):
            if rope is not None:
                frequencies = np.array(inverse_frequencies(rope, self._max_model_len), dtype=np.float32)
                self.frequencies.append(frequencies)
                factor, context = rope.attention_factor, rope.original_max_position_embeddings
                self._tables[rope] = self._native.rope_table(frequencies, factor)
                if rope.query_beta:
                    self._query_tables[rope] = self._native.rope_table(frequencies, factor, rope.query_beta, context)

    def _reader(self, index: int) -> Linear | Experts:
        """The operation that reads what the one at `index` prepares or attends to."""
        return next(op for op in self._program.ops[index:] if isinstance(op, Linear | Experts))

    def _rows(self, name: str, width: int, *, few: bool = False) -> Any:
        """The value's rows, which hold what was written last: layers may write it in unlike widths."""
        if (name, width) not in self._made:
            self._made[name, width] = self._native.rows(width, few)
        self.rows[name] = self._made[name, width]
        return self.rows[name]

    def _share(self, weight: Weight) -> Share:
        if self._place.num_ranks == 1:
            return Share(0, weight)
        return share_of(weight, self._place.rank, self._place.num_ranks)

    def _data(self, weight: Weight) -> Any:
        return self._weights[weight.name].buffer

    def _vector(self, weight: Weight | None) -> NDArray[np.float32] | None:
        return self._weights[weight.name].vector if weight is not None else None


def _layer_of(weight: Weight) -> list[str]:
    return weight.parts[0].parameter.split(".")[:2]


def _head_begins(ops: Sequence[Op]) -> int:
    """Index of the first operation that is only about wanted rows."""
    return next(index for index, op in enumerate(ops) if isinstance(op, Take))


def _rounded(scale: float, dtype: str) -> float:
    """A scale as a model in this dtype has it: models that scale embeddings were trained in bfloat16."""
    if dtype == "float32":
        return float(np.float32(scale))
    bits = np.array(scale, dtype=np.float32).view(np.uint32)
    rounded = (int(bits) + 0x7FFF + ((int(bits) >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(rounded).view(np.float32))
