"""Fusion passes: they turn a lowered program into one of native operations, and each is named in reports.

A pass looks at a short run of neighbours and gives what stands in their place, or None; `_everywhere` applies it along
the list. Passes run in the order of `PASSES`, since one makes the neighbours that the next one looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from maitred.core.errors import KernelError
from maitred.model.lowering import lower
from maitred.model.program import (
    QKV,
    TAPS,
    Add,
    AddTo,
    Attention,
    Columns,
    Embed,
    Formats,
    Fusion,
    Gate,
    Gated,
    HeadNorm,
    Linear,
    Norm,
    NormAdd,
    Op,
    Part,
    Prepare,
    Program,
    Rope,
    Scale,
    Softcap,
    Store,
    Take,
    Weight,
    WriteKV,
)
from maitred.model.spec import DecoderSpec

NATIVE_OPS = (Embed, Take, Columns, Prepare, Linear, QKV, Attention, NormAdd, Gate)


Rewrite = Callable[[Sequence[Op]], tuple[int, list[Op]] | None]
"""Given the operations from here to the end: how many of the first are replaced and by what; None leaves them."""


@dataclass(frozen=True, slots=True)
class Pass:
    name: str
    why: str
    run: Callable[[list[Op]], tuple[list[Op], int]]
    """The new list, and how often something was found."""


def compile_program(spec: DecoderSpec, formats: Formats, taps: Sequence[int] = ()) -> Program:
    """Lower and fuse; `taps` as `lower` has them. Raises KernelError, naming the operation, for what the native library
    cannot express."""
    return fused(spec, formats, lower(spec, formats, taps))


def fused(spec: DecoderSpec, formats: Formats, lowered: Sequence[Op]) -> Program:
    """Raises KernelError as `compile_program` does."""
    ops, fusions = list(lowered), []
    for each in PASSES:
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


def _stack_qkv(ops: Sequence[Op]) -> tuple[int, list[Op]] | None:
    match ops:
        case [Linear(target="q") as q, Linear(target="k") as k, Linear(target="v") as v, *_] if _alike(q, k, v):
            return 3, [replace(q, target="qkv", weight=_stack(q, k, v))]
        case [Linear(target="q") as q, Linear(target="k") as k, *_] if _alike(q, k):
            return 2, [replace(q, target="qkv", weight=_stack(q, k))]
        case [Linear(target="k") as k, Linear(target="v") as v, *_] if _alike(k, v):
            return 2, [replace(k, target="qkv", weight=_stack(k, v), first=_first_row(k))]
        case [Linear(target="q" | "k" | "v") as one, *_]:
            return 1, [replace(one, target="qkv", first=_first_row(one))]
    return None


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
    if not isinstance(ops[0], HeadNorm | Rope | WriteKV):
        return None
    norms: dict[str, HeadNorm] = {}
    ropes: dict[str, Rope] = {}
    for length, op in enumerate(ops, start=1):
        match op:
            case HeadNorm():
                norms[op.value] = op
            case Rope():
                ropes[op.value] = op
            case WriteKV() if set(norms) in (set(), {"q", "k"}) and set(ropes) in (set(), {"q", "k"}):
                q_norm, k_norm = norms.get("q"), norms.get("k")
                fused = QKV(
                    "qkv",
                    op.layer,
                    ropes["q"].rope if ropes else None,
                    q_norm.weight if q_norm is not None else None,
                    k_norm.weight if k_norm is not None else None,
                    q_norm is not None and q_norm.full_width,
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
    last = max(index for index, op in enumerate(ops) if isinstance(op, Attention))
    if any(isinstance(op, Columns) and op.target == TAPS for op in ops[last:]):  # a head looks at all of them
        return ops, 0
    take = next(op for op in ops[last:] if isinstance(op, Take))
    rest: list[Op] = [take]
    for op in ops[last + 1 :]:
        match op:
            case Take():
                continue
            case Prepare() if op.source == ops[last].target:  # type: ignore[union-attr]
                rest.append(replace(op, takes=True))
            case Norm() | Prepare() | Linear() | Add():
                rest.append(replace(op, source=_renamed(op.source, take), target=_renamed(op.target, take)))
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
