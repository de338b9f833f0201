"""Scales of input channels, taken out of what comes before a matrix and put into its columns: the model's function
stays, and what is rounded changes. AWQ, Lin et al. 2023, arXiv:2306.00978; SmoothQuant, Xiao et al. 2022,
arXiv:2211.10438.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maitred.model.spec import DecoderSpec
from maitred.optimize.calibrate import LINEARS, CalibratedLayer
from maitred.optimize.rounding import Form, round_to_nearest

_NORMS = {"qkv": "attention_norm", "gate_up": "mlp_norm"}
EXPONENTS = tuple(i / 10 for i in range(11))
SMOOTH_EXPONENT = 0.5  # of the inputs' largest values: the paper's, section 4


@dataclass(slots=True)
class SeenInputs:
    """What is kept of a linear's inputs over all documents."""

    hessian: Tensor  # sum of x x' over tokens, [K, K]
    largest: Tensor  # largest |x| of each channel, [K]
    total: Tensor  # sum of |x|, [K]
    count: int = 0

    def add(self, x_TK: Tensor) -> None:
        self.hessian.addmm_(x_TK.T, x_TK)
        self.largest = torch.maximum(self.largest, x_TK.abs().amax(0))
        self.total += x_TK.abs().sum(0)
        self.count += len(x_TK)

    def error(self, change: Tensor) -> float:
        """Sum of squares by which outputs change with a change of the weights."""
        return float(((change @ self.hessian) * change).sum())


def seen_inputs(layer: CalibratedLayer) -> dict[str, SeenInputs]:
    """Inputs of each linear of the layer as it is now."""
    found: dict[str, SeenInputs] = {}

    def on_input(name: str, x_TK: Tensor) -> None:
        width = x_TK.shape[1]
        if name not in found:
            found[name] = SeenInputs(torch.zeros(width, width), torch.zeros(width), torch.zeros(width))
        found[name].add(x_TK)

    layer.observe(on_input)
    return found


def awq_scale(form: Form, weight: Tensor, inputs: SeenInputs, shared: Callable[[Tensor], Tensor]) -> Tensor:
    """The scale [K] of least output error, of powers of the inputs' mean |x| over powers of the weights'; `shared`
    makes channels equal that have one source."""
    mean, size = inputs.total / inputs.count, weight.abs().mean(0)
    best, found = torch.inf, torch.ones_like(mean)
    for exponent in EXPONENTS:
        for divided in (torch.ones_like(size), size ** (1 - exponent)):
            scale = shared(_centred(mean**exponent / divided.clamp(min=1e-8)))
            rounded = round_to_nearest(form, weight * scale, inputs.hessian.diagonal() / scale.square(), (1.0,))
            error = inputs.error(rounded.values() / scale - weight)
            if error < best:
                best, found = error, scale
    return found


def smooth_scale(form: Form, weight: Tensor, inputs: SeenInputs, shared: Callable[[Tensor], Tensor]) -> Tensor:
    """SmoothQuant's scale [K], equation 4, which makes inputs as easy to round as weights."""
    largest = weight.abs().amax(0).clamp(min=1e-5) ** (1 - SMOOTH_EXPONENT)
    return shared(_centred(inputs.largest.clamp(min=1e-5) ** SMOOTH_EXPONENT / largest))


def _centred(scale: Tensor) -> Tensor:
    scale = scale.clamp(min=1e-4)
    return scale / (scale.max() * scale.min()).sqrt()


SCALES = {"awq": awq_scale, "smoothquant": smooth_scale}


def scale_layer(
    layer: nn.Module, spec: DecoderSpec, inputs: Mapping[str, SeenInputs], form: Form, method: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Find and fold a scale [K] for each linear that has a source to fold it into; returns the scales by linear, and
    brings `inputs` in line with them. Norms stay numbers of `dtype`, in which they are written."""
    folded: dict[str, Tensor] = {}
    for name in LINEARS:
        if name in _NORMS and getattr(layer, _NORMS[name]) is None:
            continue

        def shared(scale_K: Tensor, name: str = name) -> Tensor:
            if name != "attention_output":
                return scale_K
            scale_KGH = scale_K.view(spec.num_kv_heads, -1, spec.head_dim)  # query heads that share values
            return scale_KGH.log().mean(1, keepdim=True).exp().expand_as(scale_KGH).flatten()

        scale = SCALES[method](form, layer.get_parameter(f"{name}.weight"), inputs[name], shared)
        folded[name] = scale = fold(layer, spec, name, scale, dtype)
        inputs[name].hessian /= scale[:, None] * scale
        inputs[name].largest /= scale
        inputs[name].total /= scale
    return folded


def fold(layer: nn.Module, spec: DecoderSpec, name: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide the source of the linear's inputs by `scale` and multiply its columns; returns the scale as it became with
    a norm of `dtype`, which folds again into the same numbers."""
    if name in _NORMS:
        norm = getattr(layer, _NORMS[name]).weight
        new = (norm / scale - spec.norm_offset).to(dtype).float() + spec.norm_offset
        scale = torch.where((new == 0) | (norm == 0), 1.0, norm / new)
        norm.copy_(torch.where(new == 0, norm, new))
    else:
        source = getattr(layer, {"attention_output": "qkv", "down": "gate_up"}[name])
        rows = scale if name == "down" else scale.view(spec.num_kv_heads, -1, spec.head_dim)[:, 0].flatten()
        for parameter in source.parameters():  # weight, and bias if there is one
            parameter[-len(rows) :] /= rows[:, None] if parameter.ndim > 1 else rows
    layer.get_parameter(f"{name}.weight").mul_(scale)
    return scale
