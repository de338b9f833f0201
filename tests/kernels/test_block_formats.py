"""Block formats against GGML's own arithmetic (`gguf`): codes, products, and the same bits in any company. And those of
quantised folders against what their makers' papers say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.kernels import _native, linear
from maitred.kernels.linear import SourceMatrix
from tests.kernels.test_linear import bf16_round, in_blocks

gguf = pytest.importorskip("gguf")
ml_dtypes = pytest.importorskip("ml_dtypes")

ISAS = _native.available_isas()
HEADS = {  # where a block has its f16 numbers
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
KEPT = {
    "Q4_0": "q4_0", "Q4_1": "q4_1", "Q5_0": "q5_0", "Q5_1": "q5_1", "Q8_0": "q8_0", "Q3_K": "q6_k", "Q4_K": "q4_k",
    "Q5_K": "q5_k", "Q6_K": "q6_k", "IQ4_NL": "q8_0", "MXFP4": "q8_0",
    "Q4_Z": "q4_z", "Q8_Z": "q8_z", "Q8_W": "q8_w", "F8_128": "fp8",
}  # fmt: skip
FOLDERS = ("Q4_Z", "Q8_Z", "Q8_W", "F8_128")
MADE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_Z", "Q8_Z", "Q8_W")
Array = NDArray[Any]


@pytest.fixture(scope="module")
def pool() -> Any:
    return _native.ThreadPool(2)


def random_rows(kind: str, n: int, k: int, *, scale: float = 0.01, seed: int = 0) -> tuple[Array, Array]:
    """Bytes of n rows, every code and part there is among them, and the float32 values that they stand for."""
    rng = np.random.default_rng(n + k + seed)
    if kind in FOLDERS:
        return folder_rows(kind, n, k, scale, rng)
    values, num_bytes = _native.source_block(kind)
    blocks = rng.integers(0, 256, (n, k // values, num_bytes), dtype=np.uint8)
    for at in HEADS[kind]:
        heads = rng.uniform(-scale, scale, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = heads.view(np.uint8).reshape(*heads.shape, 2)
    if kind == "MXFP4":
        blocks[:, :, 0] = rng.integers(110, 130, blocks.shape[:2])
    rows = blocks.reshape(n, -1)
    return rows, gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])


def folder_rows(kind: str, n: int, k: int, scale: float, rng: Any) -> tuple[Array, Array]:
    size = 128 if kind == "F8_128" else 32
    codes = rng.integers(0, 16 if kind == "Q4_Z" else 256, (n, k // size, size), dtype=np.uint8)
    d = rng.uniform(scale / 50, scale, codes.shape[:2]).astype(np.float16 if kind in ("Q4_Z", "Q8_Z") else np.float32)
    zero = rng.integers(0, 16 if kind == "Q4_Z" else 256, codes.shape[:2]).astype(np.float16)
    heads, values = d[..., None].view(np.uint8), codes.astype(np.float32)
    if kind in ("Q4_Z", "Q8_Z"):
        heads = np.concatenate([heads, zero[..., None].view(np.uint8)], -1)
        values -= zero[..., None]
    if kind == "Q8_W":
        values = codes.view(np.int8).astype(np.float32)
    if kind == "F8_128":
        codes[codes & 127 == 127] = 1  # no NaN
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    stored = codes[..., :16] | codes[..., 16:] << 4 if kind == "Q4_Z" else codes
    rows = np.concatenate([heads, stored], -1).reshape(n, -1)
    return rows, (values * d[..., None].astype(np.float32)).reshape(n, k)


def stored_rows(kind: str, values: Array, *, seed: int = 0) -> Array:
    """Rows as a file of that type has them: the values', or, where gguf cannot make those, some of its own."""
    try:
        return np.asarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]))
    except (NotImplementedError, KeyError):
        return random_rows(kind, *values.shape, scale=2e-3, seed=seed)[0]


@pytest.mark.parametrize("kind", [*HEADS, *FOLDERS])
def test_rows_expand_to_the_values_that_ggml_computes(kind: str):
    rows, values = random_rows(kind, 9, 768)
    assert np.array_equal(linear.expand(kind, rows.reshape(-1), (9, 768)), values)


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("gated", [False, True])
def test_packed_codes_are_the_files(pool: Any, kind: str, gated: bool):
    rows, values = random_rows(kind, 70, 512)
    packed = linear.pack(pool, [SourceMatrix(rows[:30], kind), SourceMatrix(rows[30:], kind)], KEPT[kind], gated=gated)
    assert np.array_equal(linear.unpack_rows(packed, range(70)), values)


@pytest.mark.parametrize("kind", MADE)
def test_memory_is_at_most_a_tenth_more_than_the_file(kind: str):
    values, num_bytes = _native.source_block(kind)
    shape = linear.linear_shape(KEPT[kind], 640, 1024)
    assert shape.packed_bytes <= 1.1 * 640 * 1024 / values * num_bytes


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", MADE)
def test_a_product_is_the_files_values_times_rows_of_8_bits(pool: Any, isa: str, kind: str):
    rows, values = random_rows(kind, 45, 768)
    packed = linear.pack(pool, [SourceMatrix(rows, kind)], KEPT[kind])
    x = np.random.default_rng(3).standard_normal((40, 768)).astype(np.float32) * 3
    x[7, 100:140] = 0.0  # a block without a value
    expected, size = (
        in_blocks(x) @ values.astype(np.float64).T,
        np.abs(in_blocks(x)) @ np.abs(values.astype(np.float64)).T,
    )
    whole = linear.linear(pool, packed, x, isa=isa)
    assert (np.abs(whole - expected) <= 2e-5 * size + 1e-6).all()
    for m in (1, 3, 8, 33):
        assert np.array_equal(linear.linear(pool, packed, x[:m], isa=isa), whole[:m])


@pytest.mark.skipif("amx" not in ISAS, reason="this processor has no tiles")
@pytest.mark.parametrize("kind", MADE)
def test_tiles_give_the_bits_of_vectors(pool: Any, kind: str):
    rows, _ = random_rows(kind, 45, 768)
    packed = linear.pack(pool, [SourceMatrix(rows, kind)], KEPT[kind])
    x = np.random.default_rng(3).standard_normal((70, 768)).astype(np.float32)
    by_tiles, by_vectors = (linear.linear(pool, packed, x, isa=isa) for isa in ("amx", "avx512"))
    assert np.array_equal(by_tiles, by_vectors)


@pytest.mark.parametrize("isa", ISAS)
def test_fp8_meets_rows_of_bfloat16(pool: Any, isa: str):
    rows, values = random_rows("F8_128", 45, 768)
    packed = linear.pack(pool, [SourceMatrix(rows, "F8_128")], "fp8")
    x = np.random.default_rng(3).standard_normal((40, 768)).astype(np.float32)
    expected = bf16_round(x).astype(np.float64) @ values.astype(np.float64).T
    whole = linear.linear(pool, packed, x, isa=isa)
    assert (np.abs(whole - expected) <= 2e-5 * (np.abs(x) @ np.abs(values).T) + 1e-6).all()
    for m in (1, 2, 3, 8, 33):
        assert np.array_equal(linear.linear(pool, packed, x[:m], isa=isa), whole[:m])


@pytest.mark.parametrize("kind", FOLDERS)
def test_planted_channels_cost_at_most_a_third_of_one_scale_a_row(pool: Any, kind: str):
    rows, values = random_rows(kind, 64, 768)
    x = np.random.default_rng(5).standard_normal((8, 768)).astype(np.float32)
    x[:, ::97] *= 60
    step = np.abs(x).max(1, keepdims=True) / 127
    exact, one_scale = (each.astype(np.float64) @ values.T for each in (x, np.rint(x / step) * step))
    found = linear.linear(pool, linear.pack(pool, [SourceMatrix(rows, kind)], KEPT[kind]), x)
    assert 3 * np.sqrt(((found - exact) ** 2).mean()) <= np.sqrt(((one_scale - exact) ** 2).mean())


def test_a_code_of_minus_128_is_what_it_says(pool: Any):
    """Signed 8-bit products that are made of absolute values must not lose the one that has no opposite."""
    rows = np.zeros((32, 34), dtype=np.uint8)
    rows[:, :2] = np.array([1.0], dtype=np.float16).view(np.uint8)
    rows[:, 2:] = 0x80
    packed = linear.pack(pool, [SourceMatrix(rows, "Q8_0")], "q8_0")
    x = np.full((1, 32), -127.0, dtype=np.float32)
    for isa in ISAS:
        assert (linear.linear(pool, packed, x, isa=isa) == 32 * 127 * 128).all()


def test_float32_becomes_what_can_be_made_and_no_other_block_format(pool: Any):
    matrix = np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32)
    for dtype, most in (("q4_1", 0.09), ("q8_0", 0.006)):
        packed = linear.unpack_rows(linear.pack(pool, [SourceMatrix(matrix)], dtype), range(40))
        assert np.sqrt(((packed - matrix) ** 2).mean()) < most
    with pytest.raises(KernelError, match="cannot be packed so"):
        linear.pack(pool, [SourceMatrix(matrix)], "q6_k")
