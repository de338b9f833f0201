"""Tensor parallelism over output channels: which rows of each matrix belong to a rank. Pure.

Each tile of 32 channels (16 of a gated pair's gate and the same 16 of its way up) is one rank's, which sums it over all
of K; so nothing that ranks exchange is a sum, and any number of them gives the bits of one. Vectors (norms) are small,
and every rank has them all; biases go with their channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from maitred.model.program import Embed, Linear, Op, Part, Program, Weight

TILE = 32  # rows that are packed side by side


class Share(NamedTuple):
    """The part of a matrix that one rank has."""

    first: int  # output channel
    weight: Weight | None  # of its rows alone; None where there are fewer tiles than ranks and it has none


def share_of(weight: Weight, rank: int, num_ranks: int) -> Share:
    """Tiles are dealt evenly, in order."""
    halves = 2 if weight.gated else 1
    width, tile = weight.rows // halves, TILE // halves
    num_tiles = -(-width // tile)
    first, end = (min(num_tiles * r // num_ranks * tile, width) for r in (rank, rank + 1))
    if first == end:
        return Share(first, None)
    runs = [(half * width + first, half * width + end) for half in range(halves)]
    parts, bias = (tuple(part for run in runs for part in _cut(of, *run)) for of in (weight.parts, weight.bias))
    return Share(first, replace(weight, parts=parts, bias=bias))


def own_program(program: Program, rank: int, num_ranks: int) -> Program:
    """The program as far as its weights go: matrices are the rank's shares, and what it has no share of is left out."""
    ops: list[Op] = []
    for op in program.ops:
        if isinstance(op, Embed | Linear):
            share = share_of(op.weight, rank, num_ranks)
            if share.weight is not None:
                ops.append(replace(op, weight=share.weight))
        else:
            ops.append(op)
    return replace(program, ops=tuple(ops))


def _cut(parts: tuple[Part, ...], first: int, end: int) -> Iterator[Part]:
    """Rows [first, end) of the parts, counted from the first one's top."""
    top = 0
    for part in parts:
        from_row, to_row = max(first - top, 0), min(end - top, part.rows)
        if from_row < to_row:
            yield replace(part, first=part.first + from_row, rows=to_row - from_row)
        top += part.rows
