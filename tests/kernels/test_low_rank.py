"""What an adapter adds to one linear: numpy's B (A x), before the linear's ending, and to its own rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maitred.executor.native_lora import pack_adapter
from maitred.kernels import _native
from maitred.kernels.kv_pool import make_kv_pool
from maitred.kernels.linear import SourceMatrix, pack
from maitred.model.adapters import Adapter, LowRank
from maitred.model.program import Format, Part, Weight

Floats = NDArray[np.float32]
FORMATS = ("float32", "bfloat16", "int8", "q4_1")
ENDINGS = ("store", "add", "gate")
NUM_TOKENS = 57  # more than any kernel takes at once
MAX_ROWS = 64


class LinearLayer:
    """x [T, K] -> norm -> linear with bias, as a program of the library; adapters of it in slots 0, 1 ..."""

    def __init__(self, matrix_NK: Floats, dtype: str, ending: str, isa: str, num_threads: int, norm: bool) -> None:
        rows, width = matrix_NK.shape
        random, self.threads = np.random.default_rng(1), _native.ThreadPool(num_threads)
        self.bias = random.standard_normal(rows, dtype=np.float32)
        self.norm = random.standard_normal(width, dtype=np.float32) if norm else None
        gated = ending == "gate"
        self.packed = pack(self.threads, [SourceMatrix(matrix_NK)], dtype, gated=gated, bias=self.bias)
        part, format = Part(parameter="w", first=0, rows=rows), Format(dtype=dtype)
        self.weight = Weight(name="w", parts=(part,), width=width, format=format, gated=gated)
        self._pool = make_kv_pool(
            dtype="float32", num_layers=1, num_blocks=4, block_size=MAX_ROWS, num_kv_heads=1, head_dim=8
        )
        program = _native.Program(self.threads, self._pool, isa, MAX_ROWS, 1, 1, MAX_ROWS)
        self.program, shape = program, self.packed.shape
        self.x, self.y = program.rows(width), program.rows(self.packed.out_width)
        program.operands([shape])
        number = program.adapted_linear(shape, False)
        program.prepare(self.x, shape, self.norm, 1e-6, False, False, number)
        program.linear(shape, self.packed.data, self.y, 0, 0, ending, 0.5, 0.0, "silu", False, number, "w")
        program.begin_logits()
        self._kept: list[Any] = []

    def load(self, slot: int, *parts: LowRank) -> None:
        packed = pack_adapter([self.weight], Adapter(1, 0, "", {"w": parts}))
        self._kept.append(packed)
        self.program.load_adapter(slot, list(packed.parts))

    def run(self, x_TK: Floats, slots: list[int] | None, before: float = 0.0) -> Floats:
        """A row of the step for each token; `slots` of their adapters."""
        count = len(x_TK)
        self.x.view(count)[:] = x_TK
        self.y.view(count)[:] = before
        ends, none = np.arange(count + 1, dtype=np.int32), np.zeros(count, dtype=np.int32)
        adapters = None if slots is None else np.array(slots, dtype=np.int32)
        self.program.run(none, none, ends, none, ends, np.empty(0, dtype=np.int32), adapters)
        return np.array(self.y.view(count))

    def read(self, x_TK: Floats) -> Floats:
        """The rows as the linear reads them, unrounded."""
        if self.norm is None:
            return x_TK
        rms = np.sqrt((x_TK.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-6)
        return (x_TK / rms * self.norm).astype(np.float32)


def low_rank(row: int, num_rows: int, rank: int, width: int, seed: int) -> LowRank:
    random = np.random.default_rng(seed)
    a = random.standard_normal((rank, width), dtype=np.float32) * width**-0.5
    return LowRank(row, a, random.standard_normal((num_rows, rank), dtype=np.float32))


def delta(parts: list[LowRank], x_K: Floats, num_rows: int, dtype: str) -> Floats:
    """In float64, of matrices as rounded for such weights."""
    total = np.zeros(num_rows)
    for part in parts:
        a, b = (rounded(m, dtype).astype(np.float64) for m in (part.a, part.b))
        total[part.row : part.row + len(b)] += b @ (a @ x_K.astype(np.float64))
    return total.astype(np.float32)


def rounded(values: Floats, dtype: str) -> Floats:
    if dtype == "float32":
        return values
    bits = values.view(np.uint32)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


def random_matrix(rows: int, width: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32) * np.float32(width**-0.5)


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


# (rows of B from, to; rank) of each matrix that an adapter changes, of 160 rows: whole tiles, and not
STACKS: dict[str, list[tuple[int, int, int]]] = {
    "all": [(0, 160, 16)],
    "first and last": [(0, 96, 8), (128, 160, 4)],
    "side by side": [(0, 96, 5), (96, 128, 3), (128, 160, 1)],
    "off the panels": [(0, 90, 6), (90, 160, 2)],
}


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("stack", STACKS)
def test_an_adapter_adds_what_numpy_says_before_the_ending(stack: str, ending: str, dtype: str, isa: str) -> None:
    rows, width = 160, 84
    matrix, gated = random_matrix(rows, width), ending == "gate"
    layer = LinearLayer(matrix, dtype, ending, isa, 2, norm=True)
    plain = LinearLayer(matrix, dtype, "store", isa, 1, norm=True)  # twice: it halves
    parts = [low_rank(a, b - a, rank, width, seed) for seed, (a, b, rank) in enumerate(STACKS[stack])]
    layer.load(0, *parts)
    x_TK = np.random.default_rng(5).standard_normal((NUM_TOKENS, width), dtype=np.float32)
    acc = 2 * plain.run(x_TK, None) + np.stack([delta(parts, x, rows, dtype) for x in plain.read(x_TK)])
    wanted = silu(acc[:, : rows // 2]) * acc[:, rows // 2 :] if gated else 0.5 * acc + (3.0 if ending == "add" else 0)
    got = layer.run(x_TK, [0] * NUM_TOKENS, before=3.0)
    np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_row_has_the_same_bits_in_any_company(ending: str, dtype: str, isa: str) -> None:
    """Rows of four adapters and none, mixed; alone, shuffled, and on other threads. Rows without one are as ever."""
    rows, width = 140, 70
    matrix = random_matrix(rows, width)
    layers = [LinearLayer(matrix, dtype, ending, isa, threads, norm=False) for threads in (1, 2)]
    for layer in layers:
        for slot, rank in enumerate((1, 6, 16, 33)):
            layer.load(slot, low_rank(0, rows, rank, width, slot))
    random = np.random.default_rng(3)
    x_TK = random.standard_normal((NUM_TOKENS, width), dtype=np.float32)
    slots = random.integers(-1, 4, NUM_TOKENS)
    together, order = layers[0].run(x_TK, slots.tolist()), random.permutation(NUM_TOKENS)
    shuffled = layers[1].run(x_TK[order], slots[order].tolist())
    assert np.array_equal(shuffled, together[order])
    for t in range(0, NUM_TOKENS, 2):
        assert np.array_equal(layers[0].run(x_TK[t : t + 1], [int(slots[t])])[0], together[t])
    none = layers[0].run(x_TK, None)
    assert np.array_equal(none[slots < 0], together[slots < 0])
    assert np.array_equal(none, layers[1].run(x_TK, [-1] * NUM_TOKENS))


def test_a_step_cannot_name_an_adapter_that_is_not_there() -> None:
    layer = LinearLayer(random_matrix(64, 32), "float32", "store", "plain", 1, norm=False)
    layer.load(0, low_rank(0, 64, 4, 32, 0))
    x_TK = np.ones((2, 32), dtype=np.float32)
    layer.program.unload_adapter(0)
    for slot in (0, 1, 99, -2):
        with pytest.raises(ValueError, match="which is not loaded"):
            layer.run(x_TK, [-1, slot])
    with pytest.raises(ValueError, match="do not fit"):
        layer.run(x_TK, [-1])


def test_parts_that_do_not_fit_a_linear_are_refused() -> None:
    layer = LinearLayer(random_matrix(64, 32), "float32", "store", "plain", 1, norm=False)
    [part] = pack_adapter([layer.weight], Adapter(1, 0, "", {"w": (low_rank(0, 64, 4, 32, 0),)})).parts
    wrong: list[tuple[Any, str]] = [
        ([], "parts for 0 linears of 1"),
        ([part._replace(rank=6)], "does not fit"),
        ([part._replace(runs=part.runs[:0])], "does not fit"),
        ([part._replace(runs=part.runs + np.array([0, 1, 0], dtype=np.int32))], "does not fit"),
        ([part._replace(runs=part.runs + np.array([1, 0, 0], dtype=np.int32))], "does not fit"),
        ([part._replace(a=part.a[64:])], "which are not what its ranks take"),
        ([part._replace(b=part.b[:-64])], "which are not what its ranks take"),
        ([part._replace(dtype="int8")], "an adapter in int8"),
    ]
    for parts, fault in wrong:
        with pytest.raises(ValueError, match=fault):
            layer.program.load_adapter(0, parts)
    layer.program.load_adapter(0, [None])
