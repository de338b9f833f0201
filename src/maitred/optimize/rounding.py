"""Rounding a matrix: each weight alone (RTN), or so that later weights make up for earlier ones (GPTQ, SparseGPT).

N rows (outputs), K columns (inputs), G groups of a row that share a scale. H is the Hessian of the outputs' squared
error, the sum of x x' over inputs x; rows of one input share it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maitred.core.errors import ConfigError

_log = logging.getLogger(__name__)

BLOCK = 128
"""Columns between which errors are passed on at once; arXiv:2210.17323, section 3.3."""
DAMPING = 0.01
SHRINKS = tuple(1 - 0.025 * i for i in range(16))
"""Shares of a group's range that a scale may cover; what lies outside is clipped."""

Choose = Callable[[Tensor, int], Tensor]
"""(column of weights [N], its number in the group) -> the values that take its place"""
Begin = Callable[[Tensor, Tensor, int], Choose]
"""(a group's weights [N, V], its columns' diagonal of the inverse Hessian's factor [V], first column) -> Choose"""


@dataclass(frozen=True, slots=True)
class Form:
    """Number format of a rounded matrix: value = (code - zero) * scale."""

    bits: int
    group: int | None
    """Columns that share a scale; None is a whole row."""
    symmetric: bool
    """Without a zero: Q4_0's and Q8_0's form, else Q4_1's."""

    @property
    def lowest(self) -> int:
        return -(1 << (self.bits - 1))

    def width_of(self, num_columns: int) -> int:
        """Raises ConfigError where groups do not fill the rows."""
        width = self.group or num_columns
        if num_columns % width:
            raise ConfigError(
                f"rows of {num_columns} weights are no multiple of groups of {width}; choose a --group-size that "
                f"divides them"
            )
        return width

    def bytes_of(self, rows: int, columns: int) -> int:
        groups = rows * columns // self.width_of(columns)
        return rows * columns * self.bits // 8 + groups * 2 + (0 if self.symmetric else groups * self.bits // 8)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Codes [N, K] int8; scale [N, G] float16, zero [N, G] int8."""

    form: Form
    codes: Tensor
    scale: Tensor
    zero: Tensor

    def values(self) -> Tensor:
        rows, columns = self.codes.shape
        codes = self.codes.view(*self.scale.shape, -1).float() - self.zero[:, :, None]
        return (codes * self.scale[:, :, None].float()).view(rows, columns)


def fit(
    form: Form, weights: Tensor, importance: Tensor | None = None, shrinks: Sequence[float] = SHRINKS
) -> tuple[Tensor, Tensor]:
    """Scale (float16) and zero of weights [..., V] that share them: least squared error over `shrinks`, weighted by
    `importance` [V].

    Scales have 8 significant bits, which bfloat16 holds as well: no loader rounds them. Beside a zero they have 7, so
    that their product, Q4_1's minimum, is a float16.
    """
    weights = weights.float()
    low, high = weights.amin(-1).clamp(max=0), weights.amax(-1).clamp(min=0)
    steps = (1 << form.bits) - 1
    best = torch.full(low.shape, torch.inf)
    scale, zero = torch.zeros(low.shape), torch.zeros(low.shape)
    for shrink in shrinks:
        if form.symmetric:
            tried = _short(torch.maximum(-low, high) * (shrink * 2 / steps), 8)
            tried_zero = torch.zeros(low.shape)
        else:
            tried = _short((high - low) * (shrink / steps), 7)
            tried_zero = (form.lowest - low * shrink / tried).round().clamp(form.lowest, form.lowest + steps)
        error = nearest(form, weights, tried[..., None], tried_zero[..., None])[1] - weights
        error = (error.square() if importance is None else error.square() * importance).sum(-1)
        better = error < best
        best, scale, zero = (
            torch.where(better, new, old) for new, old in ((error, best), (tried, scale), (tried_zero, zero))
        )
    return scale.half(), zero.to(torch.int8)


def _short(values: Tensor, bits: int) -> Tensor:
    """The nearest float16s of so many significant bits, none 0."""
    mantissa, exponent = torch.frexp(values.clamp(2.0**-14, 2048.0))
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


def nearest(form: Form, weights: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """The codes nearest to the weights, and their values."""
    codes = (weights / scale + zero).round().clamp(form.lowest, -form.lowest - 1)
    return codes, (codes - zero) * scale


def round_to_nearest(
    form: Form, weights: Tensor, importance: Tensor | None = None, shrinks: Sequence[float] = SHRINKS
) -> Rounded:
    """RTN, each weight alone; scales fitted with `importance` [K], as the inputs' mean squares."""
    rows, columns = weights.shape
    width = form.width_of(columns)
    grouped = weights.view(rows, -1, width)
    scale, zero = fit(form, grouped, None if importance is None else importance.view(-1, width), shrinks)
    codes, _ = nearest(form, grouped, scale.float()[..., None], zero[..., None])
    return Rounded(form, codes.view(rows, columns).to(torch.int8), scale, zero)


def gptq(form: Form, weights: Tensor, hessian: Tensor, name: str) -> Rounded:
    """GPTQ, Frantar et al. 2022, arXiv:2210.17323: of the two orders of columns the one that loses less. `name` is for
    what is told of a singular Hessian."""

    def error(rounded: Rounded) -> float:
        change = rounded.values() - weights
        return float(((change @ hessian) * change).sum())

    return min((each(form, weights, hessian, name) for each in (gptq_in_order, gptq_by_importance)), key=error)


def gptq_by_importance(form: Form, weights: Tensor, hessian: Tensor, name: str) -> Rounded:
    """Columns of the largest inputs first, whose errors most others can make up for; scales are fitted before that, so
    that a group's columns still lie side by side ("act-order" with static groups)."""
    start = round_to_nearest(form, weights, hessian.diagonal())
    order, width = hessian.diagonal().argsort(descending=True), form.width_of(weights.shape[1])
    codes_KN = torch.empty(weights.shape[::-1], dtype=torch.int8)

    def begin(_: Tensor, __: Tensor, first: int) -> Choose:
        column = int(order[first])
        scale, zero = start.scale[:, column // width].float(), start.zero[:, column // width]

        def choose(column_N: Tensor, place: int) -> Tensor:
            code_N, value_N = nearest(form, column_N, scale, zero)
            codes_KN[column] = code_N
            return value_N

        return choose

    compensated(weights[:, order], hessian[order][:, order], 1, begin, name)
    return Rounded(form, codes_KN.T.contiguous(), start.scale, start.zero)


def gptq_in_order(form: Form, weights: Tensor, hessian: Tensor, name: str) -> Rounded:
    """Columns from left to right, a group's scale fitted to what is left of it; algorithm 1."""
    rows, columns = weights.shape
    width = form.width_of(columns)
    codes_KN = torch.empty(columns, rows, dtype=torch.int8)
    scales, zeros = torch.empty(rows, columns // width).half(), torch.empty(rows, columns // width, dtype=torch.int8)
    importance = hessian.diagonal()

    def begin(group_NV: Tensor, _: Tensor, first: int) -> Choose:
        number = first // width
        scales[:, number], zeros[:, number] = fit(form, group_NV, importance[first : first + width])
        scale, zero = scales[:, number].float(), zeros[:, number]

        def choose(column_N: Tensor, place: int) -> Tensor:
            code_N, value_N = nearest(form, column_N, scale, zero)
            codes_KN[first + place] = code_N
            return value_N

        return choose

    compensated(weights, hessian, width, begin, name)
    return Rounded(form, codes_KN.T.contiguous(), scales, zeros)


def sparse_2_4(weights: Tensor, hessian: Tensor, name: str) -> Tensor:
    """SparseGPT's 2:4 pattern: of each 4 columns the 2 whose loss costs least are 0, and later columns make up for it.

    Frantar and Alistarh 2023, arXiv:2301.00774, section 3.
    """

    def begin(group_NV: Tensor, diagonal_V: Tensor, _: int) -> Choose:
        saliency_NV = group_NV.square() / diagonal_V.square()
        kept_NV = torch.zeros_like(group_NV).scatter_(1, saliency_NV.topk(2, dim=1).indices, 1.0)
        return lambda column_N, place: column_N * kept_NV[:, place]

    return compensated(weights, hessian, 4, begin, name)


def compensated(weights: Tensor, hessian: Tensor, width: int, begin: Begin, name: str) -> Tensor:
    """Replace columns from left to right; each one's error is made up for by those on its right. Returns the values."""
    factor = inverse_factor(hessian, name).float()
    rest_KN = weights.float().T.clone(memory_format=torch.contiguous_format)  # columns lie together
    rest_KN[hessian.diagonal() == 0] = 0  # inputs that are never there
    found_KN, columns = torch.empty_like(rest_KN), len(rest_KN)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        block, square = rest_KN[start:end], factor[start:end, start:end]
        errors = torch.empty_like(block)
        for i in range(end - start):
            first, place = start + i, (start + i) % width
            if place == 0:
                choose = begin(rest_KN[first : first + width].T, factor.diagonal()[first : first + width], first)
            found_KN[first] = value_N = choose(block[i], place)
            errors[i] = (block[i] - value_N) / square[i, i]
            block[i + 1 :].addr_(square[i, i + 1 :], errors[i], alpha=-1)
        rest_KN[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return found_KN.T


def inverse_factor(hessian: Tensor, name: str) -> Tensor:
    """Upper Cholesky factor of the damped Hessian's inverse; the damping is ten times as much as long as there is none,
    which is told."""
    hessian = hessian.double()
    diagonal = hessian.diagonal()
    dead = torch.where(diagonal == 0, 1.0, 0.0)
    damping = DAMPING
    while True:
        damped = hessian + torch.diag(dead + damping * diagonal.mean().clamp(min=1e-12))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                factor: Tensor = upper
                return factor
        damping *= 10
        _log.warning("%s: the Hessian is singular, damped by %g of its mean diagonal", name, damping)
        if damping > 1e6:
            raise ConfigError(f"{name}: the inputs' Hessian has no inverse; give other documents with --data")
