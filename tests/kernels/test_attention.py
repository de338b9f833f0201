"""Attention over the paged pool against numpy in float64, for every pool dtype and instruction set of this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from maitred.kernels import _native
from maitred.kernels.kv_pool import make_kv_pool
from tests.kernels.attention_layer import AttentionLayer, HeadNorm, StepRow
from tests.kernels.attention_world import (
    ISAS,
    Doubles,
    Floats,
    assert_close,
    attend_in_steps,
    cases,
    oracle,
    random_rows,
    random_steps,
    shape_of,
    whole,
)

pytestmark = pytest.mark.parametrize(("dtype", "isa"), list(cases()))

SHAPES = {
    "qwen3": shape_of(4, 2, 128),
    "one head each": shape_of(3, 3, 64),
    "three share": shape_of(3, 1, 32),
    "five share": shape_of(5, 1, 48),
    "eight share": shape_of(16, 2, 64),
    "many share": shape_of(64, 1, 16),
    "blocks that divide no heads": shape_of(91, 13, 16),
    "head of 16": shape_of(2, 1, 16),
    "head of 24": shape_of(4, 2, 24),
    "head of 26": shape_of(2, 1, 26),
    "head of 80": shape_of(4, 4, 80),
    "head of 96": shape_of(6, 2, 96),
    "head of 256": shape_of(4, 1, 256),
    "window": shape_of(4, 2, 64, window=100),
    "window of one": shape_of(2, 1, 32, window=1),
    "window of 300": shape_of(2, 2, 32, window=300),
    "softcap": shape_of(4, 2, 64, softcap=3.0),
    "sinks": shape_of(4, 2, 64, sinks=(-3.0, 0.0, 2.5, 9.0)),
    "all three": shape_of(4, 2, 48, window=33, softcap=20.0, sinks=(1.0, -1.0, 0.5, 4.0)),
    "partial rope": shape_of(4, 2, 64, inverse_frequencies=(1.0, 0.5, 0.25), attention_factor=1.3),
    "no rope, no norm": shape_of(
        4, 2, 64, inverse_frequencies=(), norm=HeadNorm.NONE, q_norm=(), k_norm=(), scale=0.05
    ),
    "norm over full width": shape_of(
        4,
        2,
        32,
        norm=HeadNorm.FULL_WIDTH,
        q_norm=tuple(np.linspace(0.5, 1.5, 128)),
        k_norm=tuple(np.linspace(1.5, 0.5, 64)),
    ),
}

LATENT = {
    "latent": shape_of(16, 1, 72, latent_dim=64, inverse_frequencies=(1.0, 0.3, 0.1, 0.03)),
    "latent of odd sizes": shape_of(5, 1, 26, latent_dim=22, inverse_frequencies=(1.0, 0.3)),
    "latent, heads over a block": shape_of(50, 1, 46, latent_dim=40, inverse_frequencies=(1.0, 0.3, 0.1)),
    "latent, few heads and a window": shape_of(2, 1, 34, latent_dim=32, inverse_frequencies=(1.0,), window=100),
}
"""Values that are a part of their keys: kept in float32 and bfloat16."""
SHAPES |= LATENT

IN_INT4 = [
    "qwen3",
    "three share",
    "head of 24",
    "head of 26",
    "head of 96",
    "head of 256",
    "window of 300",
    "all three",
]
"""Shapes that are tried over int4: what differs from int8 is how a head is coded."""


@lru_cache(maxsize=len(SHAPES))
def requests_and_oracles(name: str, dtype: str) -> tuple[list[Floats], list[Doubles]]:
    """The same for every instruction set, one after the other."""
    rows = random_rows(SHAPES[name], [1, 37, 100, 530])
    return rows, [oracle(SHAPES[name], request, dtype) for request in rows]


EVERY = pytest.mark.parametrize("every", ["some", pytest.param("every", marks=pytest.mark.soak)])
"""Of a matrix of shapes, formats and instruction sets: every case, or some by turns."""


@EVERY
def test_mixed_steps_agree_with_float64(dtype: str, isa: str, every: str) -> None:
    """Every shape on the best instruction set, and some of them, by turns, on the others."""
    shapes = IN_INT4 if dtype == "int4" else [name for name in SHAPES if dtype != "int8" or name not in LATENT]
    turn = [*cases()].index((dtype, isa)) + ISAS.index(isa)
    steps = [[(2, 60), (0, 1), (3, 300)], [(3, 1), (2, 39), (1, 36)], [(3, 229), (2, 1), (1, 1)]]
    for name in shapes if every == "every" or isa == ISAS[-1] else shapes[turn % 6 :: 6]:
        rows, wanted = requests_and_oracles(name, dtype)
        for got, exact in zip(attend_in_steps(SHAPES[name], rows, steps, dtype=dtype, isa=isa), wanted, strict=True):
            assert_close(got, exact, dtype, name)


@EVERY
def test_output_is_the_same_bits_for_any_steps_blocks_and_threads(dtype: str, isa: str, every: str) -> None:
    rng, most_threads = np.random.default_rng(5), min(3, os.cpu_count() or 1)
    names = ["qwen3", "all three", "head of 26", "head of 80", "head of 96", "head of 256", "many share", "eight share"]
    names.append("blocks that divide no heads")
    names += LATENT if dtype in ("float32", "bfloat16") else []
    if isa == "plain":  # takes ten times as long, by the same loops for every shape
        names = ["all three", "head of 26", *names[9:][:2]]
    elif dtype == "int4":
        names = ["all three", "head of 26", "head of 80", "eight share"]
    if every == "some" and isa not in ("plain", ISAS[-1]):
        names = names[ISAS.index(isa) % 2 :: 2]
    for number, shape in enumerate(SHAPES[name] for name in names):
        rows = random_rows(shape, [3, 70, 310, 530])  # attention sums 256 tokens at once
        alone = attend_in_steps(shape, rows, whole(rows), dtype=dtype, isa=isa, num_threads=1)
        first = number + (ISAS.index(isa) if every == "some" else 0)
        for trial in (first % 4, (number + 2 + number // 4) % 4)[: 1 if every == "some" else 2]:
            steps = random_steps(rng, [len(r) for r in rows])
            got = attend_in_steps(
                shape,
                rows,
                steps,
                dtype=dtype,
                isa=isa,
                num_threads=1 + trial % most_threads,
                block_size=(16, 48, 5, 1)[trial],
                seed=trial,
            )
            for a, b in zip(alone, got, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.skipif("amx" not in ISAS, reason="needs a processor with AMX")
def test_amx_takes_an_integer_pool_to_the_bits_of_avx512(dtype: str, isa: str) -> None:
    if isa != "amx" or dtype not in ("int8", "int4"):
        pytest.skip("is about int8 and int4 with AMX")
    for name in ("qwen3", "all three", "head of 26", "head of 80", "five share", "window of 300"):
        rows = random_rows(SHAPES[name], [330, 700, 20])
        steps = [[(0, 250), (1, 300), (2, 20)], [(0, 80), (1, 390)], [(1, 1)], [(1, 9)]]
        for block_size in (16, 5):
            with_amx, with_avx512 = (
                attend_in_steps(SHAPES[name], rows, steps, dtype=dtype, isa=one, block_size=block_size)
                for one in ("amx", "avx512")
            )
            for a, b in zip(with_amx, with_avx512, strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_long_request_alone_is_divided_among_the_threads(dtype: str, isa: str) -> None:
    shape = SHAPES["three share"]
    pool = make_kv_pool(dtype=dtype, num_layers=1, num_blocks=64, block_size=16, num_kv_heads=1, head_dim=32)
    layer = AttentionLayer(shape, pool, _native.ThreadPool(2), max_tokens=40, isa=isa)
    for num_requests, num_units in ((1, 4), (40, 40)):
        rows = [StepRow(1000, 1, range(63))] * num_requests
        layer.run(rows, np.zeros((num_requests, shape.qkv_width), dtype=np.float32))
        assert layer.num_units == num_units


def test_later_tokens_that_are_not_finite_leave_earlier_ones_alone(dtype: str, isa: str) -> None:
    shape = shape_of(4, 2, 64, norm=HeadNorm.NONE, q_norm=(), k_norm=(), inverse_frequencies=())
    rows = random_rows(shape, [40])
    good = attend_in_steps(shape, rows, whole(rows), dtype=dtype, isa=isa)[0]
    rows[0][25, shape.num_heads * shape.head_dim :] = np.inf
    bad = attend_in_steps(shape, rows, whole(rows), dtype=dtype, isa=isa)[0]
    np.testing.assert_array_equal(bad[:25], good[:25])
    assert np.isnan(bad[25:]).all()


def test_tokens_that_left_the_window_are_forgotten_whatever_they_were(dtype: str, isa: str) -> None:
    shape = shape_of(2, 1, 32, window=20, norm=HeadNorm.NONE, q_norm=(), k_norm=(), inverse_frequencies=())
    rows = random_rows(shape, [300])
    rows[0][70] = np.nan
    out = attend_in_steps(shape, rows, [[(0, 60)], [(0, 1)], [(0, 200)], [(0, 39)]], dtype=dtype, isa=isa)[0]
    assert np.isnan(out[70:90]).all()
    assert np.isfinite(np.delete(out, np.s_[70:90], axis=0)).all()


@pytest.mark.parametrize("name", ["no rope, no norm", "window of few", "head of 80, six share"])
def test_values_that_are_not_finite_reach_those_that_see_them_and_no_other_bit(name: str, dtype: str, isa: str) -> None:
    """Chunks whose queries see different parts of a tile, and the same queries one by one."""
    plain = {"norm": HeadNorm.NONE, "q_norm": (), "k_norm": (), "inverse_frequencies": ()}
    shape = {
        "no rope, no norm": shape_of(4, 2, 64, **plain),
        "window of few": shape_of(4, 2, 64, window=21, **plain),
        "head of 80, six share": shape_of(6, 1, 80, window=300, **plain),
    }[name]
    rows = random_rows(shape, [330])
    good = attend_in_steps(shape, rows, whole(rows), dtype=dtype, isa=isa)[0]
    bad_tokens = {37: np.nan, 38: np.inf, 64: -np.inf, 255: np.nan, 300: np.inf}
    poisoned = np.zeros(len(good), dtype=bool)
    for token, value in bad_tokens.items():
        rows[0][token, -shape.num_kv_heads * shape.head_dim :] = value
        poisoned[token : None if shape.window is None else token + shape.window] = True
    chunks = [[(0, 30)], [(0, 20)], [(0, 14)], [(0, 1)], [(0, 190)], [(0, 75)]]
    for steps in (whole(rows), chunks, [[(0, 1)]] * 330):
        bad = attend_in_steps(shape, rows, steps, dtype=dtype, isa=isa)[0]
        np.testing.assert_array_equal(bad[~poisoned], good[~poisoned])
        assert not np.isfinite(bad[poisoned]).any()


def test_scores_far_apart_neither_overflow_nor_vanish(dtype: str, isa: str) -> None:
    shape = shape_of(2, 1, 32, norm=HeadNorm.NONE, q_norm=(), k_norm=(), inverse_frequencies=(), scale=30.0)
    rows = random_rows(shape, [600])
    out = attend_in_steps(shape, rows, whole(rows), dtype=dtype, isa=isa)[0]
    exact = oracle(shape, rows[0], dtype)
    if dtype == "float32":
        np.testing.assert_allclose(out, exact, atol=2e-3, rtol=0)
    assert np.isfinite(out).all()
    assert np.abs(out).max() < 6


@pytest.mark.parametrize("num_tokens", [1, 200])
def test_equal_values_come_back_whole(num_tokens: int, dtype: str, isa: str) -> None:
    """Weights add up to 1 whatever their rounding: the sum counts what the products counted."""
    shape = shape_of(8, 2, 64)
    rows = random_rows(shape, [num_tokens])
    rows[0][:, -2 * 64 :] = 1.0
    out = attend_in_steps(shape, rows, whole(rows), dtype=dtype, isa=isa)[0]
    # int4's scale is rounded to bf16, and a code is up to 15 of them
    np.testing.assert_allclose(out, 1.0, atol=4e-3 if dtype == "int4" else 2e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "cannot share"),
        ({"sinks": (1.0,)}, "1 values where 4 are needed"),
        ({"q_norm": (1.0,) * 7}, "7 values where 32 are needed"),
        ({"norm": HeadNorm.FULL_WIDTH}, "32 values where 128 are needed"),
        ({"scale": 0.0}, "must be positive"),  # a row's maximum is taken before scores are multiplied with it
        ({"scale": -0.125}, "must be positive"),
        ({"scale": float("nan")}, "must be positive"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, object], message: str, dtype: str, isa: str) -> None:
    pool = make_kv_pool(dtype=dtype, num_layers=1, num_blocks=4, block_size=16, num_kv_heads=2, head_dim=32)
    with pytest.raises(ValueError, match=message):
        AttentionLayer(replace(shape_of(4, 2, 32), **changes), pool, _native.ThreadPool(1), max_tokens=1, isa=isa)  # type: ignore[arg-type]


def test_the_plain_path_is_always_there(dtype: str, isa: str) -> None:
    assert ISAS[0] == "plain"
    assert isa in ISAS
