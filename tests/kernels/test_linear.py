"""Linears against float64 arithmetic on the same rounded or quantised numbers, on every instruction set there is."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.kernels import _native, linear
from maitred.kernels.linear import PackedWeights, SourceMatrix
from tests.kernels.rotation import rotate, rotation_block

ISAS = _native.available_isas()
FORMATS = ["float32", "float16", "bfloat16", "int8", "q4_1", "q8_0"]  # what float32 is packed as
SHAPES = [(1, 1), (3, 1), (32, 64), (33, 5), (70, 131), (64, 256), (95, 1023), (16, 2600), (130, 96)]
MAPS = Path("/proc/self/maps")
Array = NDArray[Any]


@dataclass(frozen=True)
class World:
    """A random matrix, packed, and the float64 matrix that the packed one stands for."""

    weights: PackedWeights
    exact: Array
    bias: Array | None


@pytest.fixture(scope="module")
def pool() -> Any:
    return _native.ThreadPool(2)


def bf16_bits(x: Array) -> Array:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_round(x: Array) -> Array:
    return (bf16_bits(x).astype(np.uint32) << 16).view(np.float32)


def make_world(pool: Any, dtype: str, n: int, k: int, *, gated: bool = False, bias: bool = False) -> World:
    rng = np.random.default_rng(n * 10_007 + k)
    matrix = (rng.standard_normal((n, k)) * rng.uniform(0.01, 2.0, (n, 1))).astype(np.float32)
    offsets = rng.standard_normal(n).astype(np.float32) if bias else None
    weights = linear.pack(pool, [SourceMatrix(matrix)], dtype, gated=gated, bias=offsets)
    return World(weights, linear.unpack_rows(weights, range(n)).astype(np.float64), offsets)


def rows(m: int, k: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((m, k)) * rng.uniform(0.1, 3.0, (m, 1))).astype(np.float32)


def prepared(dtype: str, x: Array) -> Array:
    """The rows as a linear of that format sees them, turned back where it rotates them."""
    if dtype in ("float32", "float16"):
        return x.astype(np.float64)
    if dtype == "bfloat16":
        return bf16_round(x).astype(np.float64)
    if dtype != "int8":
        return in_blocks(x)
    turned = rotate(x)
    scale = np.abs(turned).max(axis=1, keepdims=True) / np.float32(127)
    q = np.rint(turned * (np.float32(1) / scale)).clip(-127, 127)
    return rotate(q.astype(np.float64) * scale) / rotation_block(x.shape[1])


def in_blocks(x: Array) -> Array:
    """Rounded to 8 bits with a scale for each 32 values."""
    m, k = x.shape
    blocks = np.pad(x, ((0, 0), (0, -k % 32))).reshape(m, -1, 32)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.rint(blocks * np.where(scale > 0, np.float32(1) / scale, np.float32(0))).clip(-127, 127)
    return (q.astype(np.float64) * scale).reshape(m, -1)[:, :k]


def product(world: World, x: Array) -> Array:
    y = x @ world.exact.T
    return y if world.bias is None else y + world.bias


def tolerance(world: World, x: Array) -> Array:
    """What float32 sums of K terms may lose, with room for one order or another."""
    k = x.shape[1]
    return 4e-7 * (math.sqrt(k) + 4) * (np.abs(x) @ np.abs(world.exact).T) + 2e-6


def assert_within(actual: Array, expected: Array, allowed: Array) -> None:
    excess = np.abs(actual - expected) - allowed
    assert np.isfinite(actual).all()
    assert (excess <= 0).all(), f"off by {np.abs(actual - expected).max()}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_store_is_the_product(pool: Any, isa: str, dtype: str, n: int, k: int) -> None:
    for bias, sizes in ((False, (1, 7, 70)), (True, (2, 13))):
        world = make_world(pool, dtype, n, k, bias=bias)
        for m in sizes:
            x = rows(m, k)
            y = linear.linear(pool, world.weights, x, isa=isa)
            seen = prepared(dtype, x)
            assert_within(y, product(world, seen), tolerance(world, seen))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_add_adds_alpha_times_the_product(pool: Any, isa: str, dtype: str) -> None:
    world = make_world(pool, dtype, 75, 200, bias=True)
    x, residual = rows(9, 200), rows(9, 75, seed=1)
    y = linear.linear(pool, world.weights, x, isa=isa, add_to=residual.copy(), alpha=0.25)
    seen = prepared(dtype, x)
    assert_within(y, residual + 0.25 * product(world, seen), tolerance(world, seen))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cap", [0.0, 30.0, 0.5])
def test_logits_are_scaled_and_then_capped(pool: Any, isa: str, cap: float) -> None:
    world = make_world(pool, "float32", 90, 70)
    x = rows(3, 70)
    y = linear.linear(pool, world.weights, x, isa=isa, alpha=0.5, softcap=cap)
    expected = 0.5 * product(world, x.astype(np.float64))
    if cap:
        expected = cap * np.tanh(expected / cap)
    assert_within(y, expected, tolerance(world, x.astype(np.float64)))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTS = {"silu": lambda x: x / (1 + np.exp(-x)), "gelu": gelu, "gelu_tanh": gelu_tanh}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("act", sorted(ACTS))
@pytest.mark.parametrize("half", [1, 16, 41])
def test_gate_is_act_of_gate_times_up(pool: Any, isa: str, dtype: str, act: str, half: int) -> None:
    world = make_world(pool, dtype, 2 * half, 160, gated=True, bias=half == 41)
    x = rows(5, 160)
    y = linear.linear(pool, world.weights, x, isa=isa, act=act)
    seen = prepared(dtype, x)
    both, allowed = product(world, seen), tolerance(world, seen)
    gate, up = both[:, :half], both[:, half:]
    room = 1.2 * (allowed[:, :half] * np.abs(up) + allowed[:, half:] * np.abs(gate)) + 2e-6 * (1 + np.abs(gate * up))
    assert_within(y, ACTS[act](gate) * up, room)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("act", sorted(ACTS))
def test_activations_hold_from_end_to_end(pool: Any, isa: str, act: str) -> None:
    """Gate values -100 .. 100 pass through exactly (a 1 x 1 matrix of ones), so what is off is the activation's."""
    weights = linear.pack(pool, [SourceMatrix(np.ones((2, 1), np.float32))], "float32", gated=True)
    x = np.concatenate([np.linspace(-100, 100, 4001), np.linspace(-1, 1, 4001)]).astype(np.float32)[:, None]
    y = linear.linear(pool, weights, x, isa=isa, act=act)
    expected = ACTS[act](x.astype(np.float64)) * x
    assert_within(y, expected, 1e-6 * (np.abs(x) + 0.1) * np.maximum(np.abs(x), 0.1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [1, 19, 64, 1000])
@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_are_gathered_and_normed(pool: Any, isa: str, dtype: str, k: int) -> None:
    world = make_world(pool, dtype, 40, k)
    x, weight = rows(6, k), np.random.default_rng(5).uniform(0.5, 1.5, k).astype(np.float32)
    y = linear.linear(pool, world.weights, x, isa=isa, rows=[4, 1, 1], norm_weight=weight, norm_eps=1e-3)
    chosen = x[[4, 1, 1]].astype(np.float64)
    normed = chosen / np.sqrt((chosen**2).mean(axis=1, keepdims=True) + 1e-3) * weight
    coarse = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 0.0}.get(dtype, 1 / 127)
    wide = np.broadcast_to(np.abs(normed).max(axis=1, keepdims=True), normed.shape)
    slack = coarse * (wide @ np.abs(world.exact).T) * 0.6
    assert_within(y, product(world, normed), tolerance(world, normed) + slack)
    assert (y[1] == y[2]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(75, 515), (32, 2048)])
def test_a_row_comes_out_the_same_in_any_company(pool: Any, isa: str, dtype: str, n: int, k: int) -> None:
    """Bit for bit: cut into any runs, in any order, on one, two or three threads."""
    world = make_world(pool, dtype, n, k, gated=n == 32)
    x, weight = rows(260, k), np.random.default_rng(5).uniform(0.5, 1.5, k).astype(np.float32)
    whole = linear.linear(pool, world.weights, x, isa=isa, norm_weight=weight)
    rng = np.random.default_rng(k)
    pools = [_native.ThreadPool(threads) for threads in (1, 2, min(3, os.cpu_count() or 1))]
    start = 0
    while start < len(x):
        end = min(len(x), start + int(rng.choice([1, 2, 3, 5, 11, 12, 13, 14, 15, 31, 97])))
        order = rng.permutation(np.arange(start, end))
        part = linear.linear(pools[start % 3], world.weights, x, isa=isa, rows=order.tolist(), norm_weight=weight)
        assert (part == whole[order]).all()
        start = end


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("k", "gated"), [(131, False), (640, True)])
def test_every_number_of_rows_gives_the_same_bits(pool: Any, isa: str, dtype: str, k: int, gated: bool) -> None:
    world = make_world(pool, dtype, 66, k, gated=gated, bias=gated)
    x = rows(150, k)
    whole = linear.linear(pool, world.weights, x, isa=isa)
    for m in (*range(1, 20), *range(30, 34), *range(46, 50), *range(62, 67), 70, 95, 96, 97, 127, 129):
        assert (linear.linear(pool, world.weights, x[-m:], isa=isa) == whole[-m:]).all(), m


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [37, 515])
def test_sums_at_the_edge_of_denormal_numbers_have_the_same_bits_beside_any_rows(pool: Any, isa: str, k: int) -> None:
    """Whether such numbers count as zeros, as in tiles, must not depend on how many rows there are."""
    rng = np.random.default_rng(k)
    matrix, x = (
        (rng.standard_normal((n, k)) * 10.0 ** rng.uniform(-23, -16, (n, k))).astype(np.float32) for n in (70, 64)
    )
    x[2] *= np.float32(1e-19)  # most of it denormal itself
    x[3, k // 2], x[4, 0] = math.inf, math.nan
    weights = linear.pack(pool, [SourceMatrix(matrix)], "bfloat16")
    whole = linear.linear(pool, weights, x, isa=isa)
    for m in (*range(1, 18), 31, 32, 33, 48, 63, 64):
        for some in (slice(0, m), slice(64 - m, 64)):
            part = linear.linear(pool, weights, x[some], isa=isa)
            assert (part.view(np.uint32) == whole[some].view(np.uint32)).all(), m


@pytest.mark.parametrize("isa", ISAS)
def test_denormal_numbers_are_numbers_again_behind_a_product_of_bfloat16(isa: str) -> None:
    alone, one = _native.ThreadPool(1), np.ones((1, 1), np.float32)
    tiny = linear.pack(alone, [SourceMatrix(np.full((3, 1), 1e-40, np.float32))], "float32")
    before = linear.linear(alone, tiny, one, isa=isa).view(np.uint32)
    assert before.all()
    for m in (1, 4, 5):
        linear.linear(alone, make_world(alone, "bfloat16", 32, 64).weights, rows(m, 64), isa=isa)
        assert (linear.linear(alone, tiny, one, isa=isa).view(np.uint32) == before).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_beyond_one_block_are_each_added_once(pool: Any, isa: str, dtype: str) -> None:
    """Long rows, so that a block has few of them; blocks and chunks end in the middle of others."""
    world = make_world(pool, dtype, 40, 12_000, bias=True)
    x, residual = rows(110, 12_000), rows(110, 40, seed=1)
    y = linear.linear(pool, world.weights, x, isa=isa, add_to=residual.copy(), alpha=0.5)
    for start in range(0, 110, 22):
        some = slice(start, start + 22)
        part = linear.linear(pool, world.weights, x[some], isa=isa, add_to=residual[some].copy(), alpha=0.5)
        assert (part == y[some]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_shows_in_its_output_and_in_no_other(
    pool: Any, isa: str, dtype: str, bad: float
) -> None:
    world = make_world(pool, dtype, 40, 100)
    for m in (3, 29, 50):
        x = rows(m, 100)
        sane = linear.linear(pool, world.weights, x, isa=isa)
        x[1, 37] = bad
        y = linear.linear(pool, world.weights, x, isa=isa)
        assert not np.isfinite(y[1]).any()
        assert (np.delete(y, 1, axis=0) == np.delete(sane, 1, axis=0)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_show_in_their_channel_alone(pool: Any, isa: str, bad: float) -> None:
    """The next tile's weights begin where K ends in the middle of a step, and must not be read for it."""
    matrix = rows(70, 99)
    finite = linear.linear(pool, linear.pack(pool, [SourceMatrix(matrix)], "bfloat16"), rows(20, 99), isa=isa)
    matrix[35, 0] = bad
    y = linear.linear(pool, linear.pack(pool, [SourceMatrix(matrix)], "bfloat16"), rows(20, 99), isa=isa)
    assert not np.isfinite(y[:, 35]).any()
    assert (np.delete(y, 35, axis=1) == np.delete(finite, 35, axis=1)).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_of_zeros_gives_zeros(pool: Any, isa: str) -> None:
    for dtype in FORMATS:
        world = make_world(pool, dtype, 40, 100)
        y = linear.linear(pool, world.weights, np.zeros((2, 100), np.float32), isa=isa)
        assert (y == 0).all()


def test_int8_is_the_same_on_every_instruction_set(pool: Any) -> None:
    for k in (5, 72, 100, 515, 1088):
        world = make_world(pool, "int8", 75, k)
        for m in (1, 9, 31, 50):
            x = rows(m, k)
            outputs = [linear.linear(pool, world.weights, x, isa=isa) for isa in ISAS]
            assert all((y == outputs[0]).all() for y in outputs)


@pytest.mark.skipif("amx" not in ISAS, reason="this processor has no tiles")
@pytest.mark.parametrize("dtype", ["int8", "q4_1", "q8_0"])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (75, 515), (64, 1184)])
def test_integers_come_out_of_tiles_as_out_of_vectors(pool: Any, dtype: str, n: int, k: int) -> None:
    world = make_world(pool, dtype, n, k, gated=n == 64, bias=n == 75)
    x = rows(140, k)
    vectors = linear.linear(pool, world.weights, x, isa="avx512")
    for m in (*range(1, 71), 140):
        assert (linear.linear(pool, world.weights, x[:m], isa="amx") == vectors[:m]).all(), m


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.08), ("q8_0", 0.15)])
def test_a_few_huge_channels_do_not_spoil_a_row(pool: Any, isa: str, dtype: str, most: float) -> None:
    """The products beside the huge channels, which weights of 0 leave out, come out as if those were not there."""
    x, matrix = rows(20, 512), rows(64, 512, seed=1)
    channels = [3, 70, 200, 401]
    x[:, channels] *= 64
    matrix[:, channels] = 0
    weights = linear.pack(pool, [SourceMatrix(matrix)], dtype)
    y, expected = linear.linear(pool, weights, x, isa=isa), x @ matrix.T
    assert 0 < np.abs(y - expected).mean() / expected.std() < most


# --- packing ---


def test_float_formats_survive_a_round_trip(pool: Any) -> None:
    matrix = rows(45, 77)
    exact = linear.pack(pool, [SourceMatrix(matrix)], "float32")
    assert (linear.unpack_rows(exact, range(45)) == matrix).all()
    rounded = linear.pack(pool, [SourceMatrix(matrix)], "bfloat16")
    assert (linear.unpack_rows(rounded, range(45)) == bf16_round(matrix)).all()


def test_quantised_formats_keep_to_half_a_step(pool: Any) -> None:
    matrix = rows(45, 192)
    int8 = rotate(linear.unpack_rows(linear.pack(pool, [SourceMatrix(matrix)], "int8"), range(45)))
    step = np.abs(rotate(matrix)).max(axis=1, keepdims=True) / 127
    assert (np.abs(int8 - rotate(matrix)) <= 0.501 * step).all()
    q4_1 = linear.unpack_rows(linear.pack(pool, [SourceMatrix(matrix)], "q4_1"), range(45))
    blocks = matrix.reshape(45, -1, 32)
    step = (blocks.max(axis=2) - blocks.min(axis=2)) / 15
    error = np.abs(q4_1 - matrix).reshape(45, -1, 32)
    assert (error.mean(axis=2) <= 0.3 * step).all()  # a quarter of a step is what even spacing leaves
    assert (error.max(axis=2) <= 1.2 * step).all()  # the fit may leave out an end for the others' sake


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell how memory is mapped")
def test_packed_weights_lie_in_private_memory_as_shared_memory_has_no_huge_pages() -> None:
    memory = linear.allocate(8 * 2**20)
    assert permissions_at(memory.ctypes.data) == "rw-p"


def permissions_at(place: int) -> str:
    for line in MAPS.read_text().splitlines():
        addresses, permissions = line.split()[:2]
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if begin <= place < end:
            return permissions
    raise AssertionError("nothing is mapped there")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_sources_are_read_exactly(pool: Any, dtype: str) -> None:
    bits = np.arange(0x7C00 if dtype == "float16" else 0x7F80, dtype=np.uint16).reshape(-1, 32)
    values = bits.view(np.float16) if dtype == "float16" else bits
    wide = values.astype(np.float32) if dtype == "float16" else (bits.astype(np.uint32) << 16).view(np.float32)
    packed = linear.pack(pool, [SourceMatrix(values, dtype)], "float32")
    assert (linear.unpack_rows(packed, range(len(bits))) == wide).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_sources_stack(pool: Any, dtype: str) -> None:
    q, k, v = rows(40, 96, 1), rows(20, 96, 2), rows(21, 96, 3)
    apart = linear.pack(pool, [SourceMatrix(m) for m in (q, k, v)], dtype)
    together = linear.pack(pool, [SourceMatrix(np.concatenate([q, k, v]))], dtype)
    assert (apart.data == together.data).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_gated_rows_unpack_in_stacked_order(pool: Any, dtype: str) -> None:
    matrix = rows(74, 96)
    plain = linear.pack(pool, [SourceMatrix(matrix)], dtype)
    gated = linear.pack(pool, [SourceMatrix(matrix[:37]), SourceMatrix(matrix[37:])], dtype, gated=True)
    assert (linear.unpack_rows(gated, range(74)) == linear.unpack_rows(plain, range(74))).all()


def test_rows_of_a_wider_matrix_are_packed_in_place(pool: Any) -> None:
    wide = rows(40, 100)
    view = linear.pack(pool, [SourceMatrix(wide[:, 20:84])], "int8")
    copy = linear.pack(pool, [SourceMatrix(wide[:, 20:84].copy())], "int8")
    assert (view.data == copy.data).all()


# --- what cannot be ---


@pytest.mark.parametrize(
    ("dtype", "n", "k", "gated", "says"),
    [
        ("int3", 4, 4, False, "choose one of"),
        ("q6_k", 4, 128, False, "multiples of 256"),
        ("int8", 4, 70_000, False, "65,536"),
        ("int8", 0, 4, False, "at least one"),
        ("bfloat16", 5, 4, True, "even number"),
    ],
)
def test_impossible_shapes_are_refused(dtype: str, n: int, k: int, gated: bool, says: str) -> None:
    with pytest.raises(KernelError, match=says):
        linear.linear_shape(dtype, n, k, gated=gated)


def test_what_does_not_fit_is_refused_with_both_shapes(pool: Any) -> None:
    world = make_world(pool, "int8", 8, 64)
    with pytest.raises(KernelError, match=r"\(2, 63\).*\[M, 64\]"):
        linear.linear(pool, world.weights, rows(2, 63))
    with pytest.raises(KernelError, match=r"must be float32 \[2, 8\]"):
        linear.linear(pool, world.weights, rows(2, 64), add_to=rows(3, 8))
    with pytest.raises(KernelError, match="norm weight"):
        linear.linear(pool, world.weights, rows(2, 64), norm_weight=np.ones(63, np.float32))
    with pytest.raises(KernelError, match="rows"):
        linear.linear(pool, world.weights, rows(2, 64), rows=[2])
    with pytest.raises(KernelError, match="none of silu"):
        linear.linear(pool, make_world(pool, "int8", 8, 64, gated=True).weights, rows(1, 64), act="relu")
    with pytest.raises(KernelError, match="row 8"):
        linear.unpack_rows(world.weights, [8])
    with pytest.raises(KernelError, match="do not stack"):
        linear.pack(pool, [SourceMatrix(rows(2, 3)), SourceMatrix(rows(2, 4))], "int8")
    with pytest.raises(KernelError, match="contiguous uint16"):
        linear.pack(pool, [SourceMatrix(rows(2, 3), "bfloat16")], "int8")
    with pytest.raises(KernelError, match="bias"):
        linear.pack(pool, [SourceMatrix(rows(2, 3))], "int8", bias=np.zeros(3, np.float32))
