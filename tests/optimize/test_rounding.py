"""GPTQ and SparseGPT beside the slow obvious way in float64; every scale is a number that each loader holds exactly."""

from __future__ import annotations

import logging

import pytest
import torch

from maitred.core.errors import ConfigError
from maitred.optimize.rounding import (
    Form,
    Rounded,
    gptq,
    gptq_in_order,
    inverse_factor,
    round_to_nearest,
    sparse_2_4,
)

torch.set_num_threads(1)


def world(rows: int = 24, columns: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and the Hessian of inputs that hang together."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(columns, columns, generator=generator)
    inputs = torch.randn(1000, columns, generator=generator) @ mixed
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs


def output_error(change: torch.Tensor, hessian: torch.Tensor) -> float:
    return float(((change.double() @ hessian.double()) * change.double()).sum())


def obvious_gptq(rounded: Rounded, weights: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Codes of the paper's equations 2 and 3 in float64, on the grid of `rounded`: the inverse Hessian of the columns
    that are left is taken anew for each column."""
    rest, damped = (
        weights.double().clone(),
        hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(len(hessian)),
    )
    width = rounded.form.width_of(weights.shape[1])
    scale = rounded.scale.double().repeat_interleave(width, 1)
    minimum = rounded.minimum.double().repeat_interleave(width, 1)
    codes = torch.empty_like(rest)
    for i in range(rest.shape[1]):
        inverse = torch.linalg.inv(damped[i:, i:])
        codes[:, i] = ((rest[:, i] - minimum[:, i]) / scale[:, i]).round().clamp(0, 15)
        error = (rest[:, i] - codes[:, i] * scale[:, i] - minimum[:, i]) / inverse[0, 0]
        rest[:, i:] -= error[:, None] * inverse[0]
    return codes


@pytest.mark.parametrize("form", [Form(4, 32, False), Form(4, 128, True), Form(4, None, True)])
def test_gptq_chooses_what_float64_chooses(form: Form):
    weights, hessian = world()
    rounded = gptq_in_order(form, weights, hessian, "a linear")
    expected = obvious_gptq(rounded, weights, hessian)
    assert (rounded.codes == expected).double().mean() > 0.99  # the rest lies between two codes
    nearest = round_to_nearest(form, weights, hessian.diagonal())
    assert output_error(rounded.values() - weights, hessian) < 0.7 * output_error(nearest.values() - weights, hessian)
    better = gptq(form, weights, hessian, "a linear")
    assert output_error(better.values() - weights, hessian) <= output_error(rounded.values() - weights, hessian)


@pytest.mark.parametrize("form", [Form(4, 64, True), Form(8, None, True), Form(8, 32, True)])
def test_scales_and_minima_are_exact_in_float16_and_bfloat16(form: Form):
    weights, _ = world()
    rounded = round_to_nearest(form, weights * torch.logspace(-4, 2, len(weights))[:, None])
    assert (rounded.scale.bfloat16().float() == rounded.scale.float()).all()
    zero = -rounded.minimum / rounded.scale.float()
    assert (zero == zero.round()).all()
    if form.bits == 4:
        assert (rounded.minimum.half().float() == rounded.minimum).all()
    assert int(rounded.codes.max()) <= form.most


def test_minima_find_the_grid_that_weights_lie_on():
    """Of a file in Q4_1 whose values went through bfloat16."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (16, 4, 32), generator=generator)
    scale = (0.02 + 0.01 * torch.rand(16, 4, 1, generator=generator)).half().float()
    minimum = (-7.4 * scale + 0.003).half().float()
    weights = (codes * scale + minimum).bfloat16().float().view(16, -1)
    rounded = round_to_nearest(Form(4, 32, False), weights)
    assert (rounded.minimum.half().float() == rounded.minimum).all()
    assert float((rounded.values() - weights).square().mean()) < 0.02 / 12 * float(scale.square().mean())


def test_an_error_of_rounding_is_at_most_half_a_step_where_nothing_is_clipped():
    weights, _ = world()
    for form in (Form(4, 32, True), Form(8, None, True)):
        rounded = round_to_nearest(form, weights, shrinks=(1.02,))
        step = rounded.scale.float().repeat_interleave(form.width_of(256), 1)
        assert ((rounded.values() - weights).abs() <= 0.51 * step).all()


def test_inputs_that_hang_together_wholly_are_damped_more_which_is_told(caplog: pytest.LogCaptureFixture):
    row = torch.randn(1, 64)
    hessian = 1e6 * row.T @ row - 0.02 * 1e6 * torch.eye(64) * float((row**2).mean())
    with caplog.at_level(logging.WARNING):
        factor = inverse_factor(hessian, "layers.3.down")
    assert factor.isfinite().all()
    assert "layers.3.down: the Hessian is singular, damped by 0.1 of its mean diagonal" in caplog.text


def test_columns_whose_inputs_are_never_there_cost_nothing():
    weights, hessian = world(columns=64)
    hessian[5], hessian[:, 5] = 0, 0
    values = gptq(Form(4, 32, True), weights, hessian, "a linear").values()
    assert values.isfinite().all()
    assert (values[:, 5] == 0).all()


def test_sparse_matrices_keep_two_of_four_and_lose_less_than_by_size_alone():
    weights, hessian = world()
    sparse = sparse_2_4(weights, hessian, "a linear")
    assert ((sparse.view(24, -1, 4) != 0).sum(-1) == 2).all()
    grouped = weights.view(24, -1, 4)
    kept = torch.zeros_like(grouped).scatter_(2, grouped.abs().topk(2, dim=2).indices, 1.0)
    by_size = (grouped * kept).view_as(weights)
    assert output_error(sparse - weights, hessian) < 0.7 * output_error(by_size - weights, hessian)


def test_groups_that_do_not_fill_a_row_are_refused():
    with pytest.raises(ConfigError, match="rows of 96 weights are no multiple of groups of 64"):
        round_to_nearest(Form(4, 64, True), torch.ones(2, 96))
