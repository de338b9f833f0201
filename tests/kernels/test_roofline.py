"""The probes of what the machine can do: they do all the work they count, for every instruction set and format."""

from __future__ import annotations

import numpy as np
import pytest

from maitred.kernels import _native, linear
from maitred.kernels.linear import DTYPES, SourceMatrix

ISAS = _native.available_isas()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_rates_are_positive_and_finite(isa: str, threads: int) -> None:
    pool = _native.ThreadPool(threads)
    memory = linear.allocate(1 << 20)
    rates = [_native.measure_stream(isa, pool, memory, 2)]
    rates += [_native.measure_peak(isa, pool, dtype, 1) for dtype in DTYPES]
    assert np.isfinite(rates).all()
    assert min(rates) > 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_linear_is_timed_over_copies_of_its_weights(isa: str, dtype: str) -> None:
    pool = _native.ThreadPool(2)
    weights = linear.pack(pool, [SourceMatrix(np.ones((64, 96), np.float32))], dtype)
    stride = -(-weights.shape.packed_bytes // 4096) * 4096
    copies = linear.allocate(3 * stride)
    assert 0 < _native.time_linear(isa, pool, weights.shape, copies, 3, 5, 2) < float("inf")
    with pytest.raises(ValueError, match="too few bytes"):
        _native.time_linear(isa, pool, weights.shape, copies, 4, 5, 2)


def test_unknown_names_are_refused_with_the_choices() -> None:
    pool = _native.ThreadPool(1)
    with pytest.raises(ValueError, match="plain"):
        _native.measure_stream("mmx", pool, linear.allocate(4096), 1)
    with pytest.raises(ValueError, match="bfloat16"):
        _native.measure_peak(ISAS[0], pool, "float8", 1)
