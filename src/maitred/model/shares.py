"""Tensor parallelism over output channels: which rows of each matrix belong to a rank. Pure.

Each tile of 32 channels (16 of a gated pair's gate and the same 16 of its way up) is one rank's, which sums it over all
of K; so nothing that ranks exchange is a sum, and any number of them gives the bits of one. Vectors (norms) are small,
and every rank has them all; biases go with their channels.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from maitred.core.errors import KernelError
from maitred.model.program import Embed, Experts, HeadLinear, Linear, Op, Program, Weight, cut

TILE = 32  # rows that are packed side by side


class Share(NamedTuple):
    """The part of a matrix that one rank has."""

    first: int  # output channel
    weight: Weight | None  # of its rows alone; None where there are fewer tiles than ranks and it has none


def share_of(weight: Weight, rank: int, num_ranks: int) -> Share:
    """Tiles are dealt evenly, in order."""
    halves = 2 if weight.gated else 1
    width, tile = weight.matrix_rows // halves, TILE // halves
    num_tiles = -(-width // tile)
    first, end = (min(num_tiles * r // num_ranks * tile, width) for r in (rank, rank + 1))
    if first == end:
        return Share(first, None)
    runs = [(half * width + first, half * width + end) for half in range(halves * (weight.experts or 1))]
    parts, bias = (tuple(part for run in runs for part in cut(of, *run)) for of in (weight.parts, weight.bias))
    return Share(first, replace(weight, parts=parts, bias=bias))


def heads_of(weight: Weight, rank: int, num_ranks: int) -> Share:
    """Whole matrices of heads, dealt evenly in order; `first` is a head."""
    heads, rows = weight.experts, weight.matrix_rows
    first, end = (heads * r // num_ranks for r in (rank, rank + 1))
    parts = tuple(cut(weight.parts, first * rows, end * rows))
    return Share(first, replace(weight, parts=parts, experts=end - first) if first < end else None)


def own_program(program: Program, rank: int, num_ranks: int) -> Program:
    """The program as far as its weights go: matrices are the rank's shares, and what it has no share of is left out."""
    ops: list[Op] = []
    for op in program.ops:
        if isinstance(op, Embed | Linear | HeadLinear):
            share = (heads_of if isinstance(op, HeadLinear) else share_of)(op.weight, rank, num_ranks)
            if share.weight is not None:
                ops.append(replace(op, weight=share.weight))
        elif isinstance(op, Experts):
            gate_up, down = (share_of(weight, rank, num_ranks).weight for weight in (op.gate_up, op.down))
            if gate_up is None or down is None:
                raise KernelError(
                    f"{op.gate_up.name}: experts of {op.routed.width} values cannot be divided over {num_ranks} ranks; "
                    f"choose a smaller --tensor-parallel"
                )
            ops.append(replace(op, gate_up=gate_up, down=down))
        else:
            ops.append(op)
    return replace(program, ops=tuple(ops))
