"""Rounding a matrix: each weight alone (RTN), or so that later weights make up for earlier ones (GPTQ, SparseGPT).

N rows (outputs), K columns (inputs), G groups of a row that share a scale. H is the Hessian of the outputs' squared
error, the sum of x x' over inputs x; rows of one input share it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maitred.core.errors import ConfigError

_log = logging.getLogger(__name__)

BLOCK = 128  # columns between which errors are passed on at once; arXiv:2210.17323, section 3.3
DAMPING = 0.01
SHRINKS = tuple(1 - 0.025 * i for i in range(16))
"""Shares of a group's range that a scale may cover; what lies outside is clipped."""
WIDER = 0.15  # added to them where minima are free: groups whose values lie on a grid may not have its ends
_LEAST_SCALE = 2.0**-14  # float16's least with all its bits

Choose = Callable[[Tensor, int], Tensor]
"""(column of weights [N], its number in the group) -> the values that take its place"""
Begin = Callable[[Tensor, Tensor, int], Choose]
"""(a group's weights [N, V], its columns' diagonal of the inverse Hessian's factor [V], first column) -> Choose"""


@dataclass(frozen=True, slots=True)
class Form:
    """Number format of a rounded matrix: value = minimum + code * scale, codes from 0."""

    bits: int
    group: int | None  # columns that share a scale; None is a whole row
    symmetric: bool  # 0 is the code in the middle: Q4_0's and Q8_0's form; else minima are any float16s: Q4_1's

    @property
    def most(self) -> int:
        return (1 << self.bits) - 1

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
        return rows * columns * self.bits // 8 + groups * (2 if self.symmetric else 4)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Codes [N, K] uint8; scale [N, G] float16; minimum [N, G] float32, of 4 bits a float16's number."""

    form: Form
    codes: Tensor
    scale: Tensor
    minimum: Tensor

    def values(self) -> Tensor:
        codes = self.codes.view(*self.scale.shape, -1).float()
        return (codes * self.scale[:, :, None].float() + self.minimum[:, :, None]).view(self.codes.shape)


def fit(
    form: Form, weights: Tensor, importance: Tensor | None = None, shrinks: Sequence[float] = SHRINKS
) -> tuple[Tensor, Tensor]:
    """Scale (float16) and minimum of weights [..., V] that share them: least squared error over `shrinks`, weighted by
    `importance` [V].

    Scales of symmetric forms have 8 significant bits, which bfloat16 holds as well: no loader rounds them.
    """
    weights, share = weights.float(), torch.ones(weights.shape[-1]) if importance is None else importance + 1e-30
    share = share / share.sum(-1, keepdim=True)
    low, high = weights.amin(-1), weights.amax(-1)
    if form.symmetric:
        low, high = low.clamp(max=0), high.clamp(min=0)
    best = torch.full(low.shape, torch.inf)
    scale, minimum = torch.zeros(low.shape), torch.zeros(low.shape)
    for shrink in shrinks:
        if form.symmetric:
            tried = _short(torch.maximum(-low, high) * (shrink * 2 / form.most))
            least = -(form.most // 2 + 1) * tried
        else:
            tried, least = _solved(form, weights, share, (high - low) * ((shrink + WIDER) / form.most), low)
        error = nearest(form, weights, tried[..., None], least[..., None])[1] - weights
        error = (error.square() * share).sum(-1)
        better = error < best
        best, scale, minimum = (
            torch.where(better, new, old) for new, old in ((error, best), (tried, scale), (least, minimum))
        )
    return scale.half(), minimum


def _solved(form: Form, weights: Tensor, share: Tensor, scale: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum, float16 numbers, of least squares for the codes that steps of `scale` from `low` give."""
    codes, _ = nearest(form, weights, scale.clamp(min=_LEAST_SCALE)[..., None], low[..., None])
    mean, centre = (codes * share).sum(-1), (weights * share).sum(-1)
    away = (codes - mean[..., None]) * share
    slope = (away * weights).sum(-1) / (away * codes).sum(-1).clamp(min=1e-9)
    solved = slope.clamp(_LEAST_SCALE, 2048.0).half().float()
    return solved, (centre - solved * mean).half().float()


def _short(values: Tensor) -> Tensor:
    """The nearest float16s of 8 significant bits, none 0."""
    mantissa, exponent = torch.frexp(values.clamp(_LEAST_SCALE, 2048.0))
    return torch.ldexp((mantissa * 256).round() / 256, exponent)


def nearest(form: Form, weights: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """The codes nearest to the weights, and their values."""
    codes = ((weights - minimum) / scale).round_().clamp_(0, form.most)
    return codes, codes * scale + minimum


def round_to_nearest(
    form: Form, weights: Tensor, importance: Tensor | None = None, shrinks: Sequence[float] = SHRINKS
) -> Rounded:
    """RTN, each weight alone; scales fitted with `importance` [K], as the inputs' mean squares."""
    rows, columns = weights.shape
    width = form.width_of(columns)
    grouped = weights.view(rows, -1, width)
    scale, minimum = fit(form, grouped, None if importance is None else importance.view(-1, width), shrinks)
    codes, _ = nearest(form, grouped, scale.float()[..., None], minimum[..., None])
    return Rounded(form, codes.view(rows, columns).to(torch.uint8), scale, minimum)


def gptq(form: Form, weights: Tensor, hessian: Tensor, name: str) -> Rounded:
    """GPTQ, Frantar et al. 2022, arXiv:2210.17323: of two orders of columns the one that loses less, from left to right
    or those of the largest inputs first, whose errors most others can make up for. `name` is for what is told of a
    singular Hessian."""

    def error(rounded: Rounded) -> float:
        change = rounded.values() - weights
        return float(((change @ hessian) * change).sum())

    orders = (None, hessian.diagonal().argsort(descending=True))
    return min((gptq_in_order(form, weights, hessian, name, order) for order in orders), key=error)


def gptq_in_order(form: Form, weights: Tensor, hessian: Tensor, name: str, order: Tensor | None = None) -> Rounded:
    """Columns from left to right, a group's scale fitted to what is left of it (algorithm 1); or in `order`, on scales
    that are fitted before, so that a group's columns still lie side by side ("act-order" with static groups)."""
    width, importance = form.width_of(weights.shape[1]), hessian.diagonal()
    found = round_to_nearest(form, weights, importance, SHRINKS if order is not None else (1.0,))
    codes_KN = torch.empty(weights.shape[::-1], dtype=torch.uint8)

    def begin(group_NV: Tensor, _: Tensor, first: int) -> Choose:
        column = first if order is None else int(order[first])
        number = column // width
        if order is None:
            fitted = fit(form, group_NV, importance[first : first + width])
            found.scale[:, number], found.minimum[:, number] = fitted
        scale, minimum = found.scale[:, number].float(), found.minimum[:, number]

        def choose(column_N: Tensor, place: int) -> Tensor:
            codes_KN[column + place], value_N = nearest(form, column_N, scale, minimum)
            return value_N

        return choose

    if order is None:
        compensated(weights, hessian, width, begin, name)
    else:
        compensated(weights[:, order], hessian[order][:, order], 1, begin, name)
    return replace(found, codes=codes_KN.T.contiguous())


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
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))  # H = R R', R upper: the factor is R's inverse
        if not failed:
            eye = torch.eye(len(lower), dtype=lower.dtype)
            factor: Tensor = torch.linalg.solve_triangular(lower, eye, upper=False).flip(0, 1)
            if bool(factor.isfinite().all()):
                return factor
        damping *= 10
        _log.warning("%s: the Hessian is singular, damped by %g of its mean diagonal", name, damping)
        if damping > 1e6:
            raise ConfigError(f"{name}: the inputs' Hessian has no inverse; give other documents with --data")
