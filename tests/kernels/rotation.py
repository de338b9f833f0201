"""Rotation by Hadamard matrices in numpy, sum by sum as the kernels do it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rotation_block(n: int) -> int:
    return min(n & -n, 64)


def rotate(x: NDArray[Any]) -> NDArray[Any]:
    """H x in each block of the last axis, H of 1 and -1, in x's own precision; twice is the block times x."""
    n = x.shape[-1]
    stride = 1
    while stride < rotation_block(n):
        low, high = np.moveaxis(x.reshape(*x.shape[:-1], n // (2 * stride), 2, stride), -2, 0)
        x = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
        stride *= 2
    return x
