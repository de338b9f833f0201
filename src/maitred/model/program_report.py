"""A compiled program in words and numbers: what was fused, what each linear reads, what a step costs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from maitred.kernels import _native
from maitred.model.packed import packed_bytes, shape_of
from maitred.model.program import Experts, HeadLinear, Linear, Program, Weight

NAME_WIDTH = 44
MOST_ROWS = 64  # from which on no kernel gives way to another


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linears alike but for their layer."""

    name: str
    count: int
    weight: Weight
    num_active: int = 0
    """Of experts: those that a token has."""

    @property
    def num_bytes(self) -> int:
        return self.count * packed_bytes(self.weight)

    @property
    def read_bytes(self) -> int:
        """Bytes that a step of one token reads."""
        return self.num_bytes * self.num_active // self.weight.experts if self.num_active else self.num_bytes


def linear_groups(program: Program) -> list[LinearGroup]:
    """Return the linears in the order of the program; the same weight used twice counts where it multiplies."""
    groups: dict[tuple[object, ...], LinearGroup] = {}
    for op in program.ops:
        one = (op.weight,) if isinstance(op, Linear | HeadLinear) else ()
        weights = (op.gate_up, op.down) if isinstance(op, Experts) else one
        for weight in weights:
            name = re.sub(r"\.\d+\.", ".*.", weight.name)
            key = (name, weight.rows, weight.width, weight.format)
            count = groups[key].count + 1 if key in groups else 1
            groups[key] = LinearGroup(name, count, weight, op.routed.num_active if isinstance(op, Experts) else 0)
    return list(groups.values())


def step_bytes(program: Program) -> int:
    """Weights that a step of one token reads; of more tokens, so it is without experts, and with them it is more."""
    return sum(group.read_bytes for group in linear_groups(program))


def linear_bytes(program: Program) -> float:
    """Bytes of one weight of the layers' linears, over all of them."""
    groups = [group for group in linear_groups(program) if group.name.startswith("layers.")]
    return sum(group.num_bytes for group in groups) / sum(g.count * g.weight.rows * g.weight.width for g in groups)


def tell_fusions(program: Program) -> list[str]:
    lines = [f"fusions   {program.num_ops_lowered:,} formulas became {len(program.ops):,} operations"]
    for fusion in program.fusions:
        lines.append(
            f"  {fusion.name:{NAME_WIDTH}} {fusion.num_times:>4} times, {fusion.num_ops_saved:>4} operations fewer: "
            f"{fusion.why}"
        )
    return lines


def tell_linears(program: Program, isa: str) -> list[str]:
    lines = ["linears"]
    for group in linear_groups(program):
        weight = group.weight
        experts = f"{weight.experts} x " if weight.experts else ""
        lines.append(
            f"  {group.name:28} {group.count:>4} x {experts}[{weight.matrix_rows:,} x {weight.width:,}] "
            f"{weight.format!s:9} {_tell_kernels(weight, isa)}"
            f"{', gate beside up' if weight.gated else ''}; {group.num_bytes / 1e6:,.1f} MB"
            f"{f', of which a token reads {group.read_bytes / 1e6:,.1f}' if group.num_active else ''}"
        )
    return lines


def _tell_kernels(weight: Weight, isa: str) -> str:
    """Tell the kernel of one row, and the number of rows from which another one multiplies."""
    told = ""
    for num_rows in range(1, MOST_ROWS + 1):
        product, rows, channels = _native.linear_kernel(isa, shape_of(weight), num_rows)
        kernel = f"{product}, tiles of {rows} x {channels}"
        if not told.endswith(kernel):
            told = f"{told}; from {num_rows} rows on {kernel}" if told else kernel
    return told


def tell_buffers(buffers: Sequence[tuple[str, int]]) -> list[str]:
    total = sum(num_bytes for _, num_bytes in buffers)
    lines = [f"buffers   {total / 1e6:,.1f} MB, made once"]
    return lines + [f"  {name:{NAME_WIDTH}} {num_bytes / 1e6:>10,.2f} MB" for name, num_bytes in buffers]
