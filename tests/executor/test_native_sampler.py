"""The native sampler against the numpy one: the same token for the same row, on every instruction set there is.

Sums run in another order than numpy's, so a draw may differ where the random number falls within rounding of an edge.
Such draws have a chance of about 1e-12 each here; the cases with exact edges (equal logits) have exact sums.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import KernelError
from maitred.core.request import SamplingParams
from maitred.executor.native_plan import NativeSampler
from maitred.executor.sampler import RequestSampler, SampledToken, sample_rows
from maitred.executor.sampler_state import LogitsRow
from maitred.kernels import _native
from maitred.kernels.sampler import Sampler
from tests.executor.test_sampler_properties import MIXED, make_sampler, mask_of, worlds

ISAS = _native.available_isas()
INF = math.inf
POOL = _native.ThreadPool(2)
NATIVE = {isa: NativeSampler(POOL, isa=isa) for isa in ISAS}

# parameters x the shapes of rows that take different ways through the code
DRAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 3000},
    {"min_p": 0.05},
    {"min_p": 1e-12},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"top_k": 50, "top_p": 0.95},
    {"top_k": 1000, "min_p": 0.02, "top_p": 0.7},
    {"min_p": 0.001, "top_p": 0.9, "temperature": 1.7},
]
SCALES = [0.001, 0.1, 0.6, 3.0, 12.0]  # flat to peaked


def rows_of(num_rows: int, vocab_size: int, scale: float, seed: int = 0) -> LogitsRow:
    return (np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * scale).astype(np.float32)


def samplers_for(num_rows: int, vocab_size: int, **params: Any) -> list[RequestSampler]:
    return [make_sampler(SamplingParams(**params), vocab_size, seed=row) for row in range(num_rows)]


def assert_same(ours: list[SampledToken], theirs: list[SampledToken]) -> None:
    assert [(s.token_id, s.error) for s in ours] == [(s.token_id, s.error) for s in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.logprobs is not None and b.logprobs is not None:
            assert (a.logprobs.token_ids, a.logprobs.ranks) == (b.logprobs.token_ids, b.logprobs.ranks)
            assert a.logprobs.logprobs == pytest.approx(b.logprobs.logprobs, abs=1e-10)


def assert_all_agree(logits_RV: LogitsRow, samplers: list[RequestSampler]) -> None:
    expected = sample_rows(logits_RV.copy(), samplers)
    for isa in ISAS:
        assert_same(NATIVE[isa].sample_rows(logits_RV.copy(), samplers), expected)


@settings(max_examples=100, deadline=None)
@given(worlds(), st.none() | st.integers(0, 5))
def test_every_parameter_gives_the_numpy_samplers_token(
    world: tuple[LogitsRow, dict[str, Any], list[int], list[int], int], logprobs: int | None
):
    logits_V, params, prompt, output, seed = world
    p = SamplingParams(max_tokens=100, logprobs=logprobs, **params)
    sampler = make_sampler(p, len(logits_V), seed, prompt_token_ids=prompt, output_token_ids=output)
    assert_all_agree(logits_V[None], [sampler])


@settings(max_examples=100, deadline=None)
@given(worlds(), st.data())
def test_every_mask_gives_the_numpy_samplers_token(
    world: tuple[LogitsRow, dict[str, Any], list[int], list[int], int], data: st.DataObject
):
    logits_V, params, prompt, output, seed = world
    p = SamplingParams(max_tokens=100, logprobs=data.draw(st.none() | st.integers(0, 5)), **params)
    sampler = make_sampler(p, len(logits_V), seed, prompt_token_ids=prompt, output_token_ids=output)
    sampler.mask = mask_of(data.draw(st.sets(st.integers(0, len(logits_V) - 1))), len(logits_V))
    assert_all_agree(logits_V[None], [sampler])


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 0.999, 1.0])
def test_masks_over_large_vocabularies_give_the_numpy_samplers_tokens(share: float):
    random = np.random.default_rng(3)
    for vocab_size in (1023, 20_000, 50_257):
        samplers = samplers_for(6, vocab_size, top_p=0.9, logprobs=2)
        for sampler in samplers:
            sampler.mask = mask_of(np.flatnonzero(random.random(vocab_size) < share), vocab_size)
        assert_all_agree(rows_of(6, vocab_size, 3.0), samplers)


@pytest.mark.parametrize("value", [math.nan, INF])
def test_a_fault_that_a_mask_would_hide_is_told(value: float):
    logits_RV = rows_of(1, 100, 1.0)
    logits_RV[0, 70] = value
    (sampler,) = samplers_for(1, 100)
    sampler.mask = mask_of([3, 4], 100)
    assert sample_rows(logits_RV.copy(), [sampler])[0].error is not None
    assert_all_agree(logits_RV, [sampler])


def test_a_mask_of_too_few_words_is_refused():
    (sampler,) = samplers_for(1, 100)
    sampler.mask = mask_of([3], 64)
    with pytest.raises(KernelError, match="too few words"):
        NATIVE[ISAS[0]].sample_rows(rows_of(1, 100, 1.0), [sampler])


@pytest.mark.parametrize("params", DRAWS, ids=str)
def test_a_large_vocabulary_gives_the_numpy_samplers_tokens(params: dict[str, Any]):
    for vocab_size, scale in zip((1023, 20_000, 50_257, 1023, 20_000), SCALES, strict=True):
        assert_all_agree(rows_of(6, vocab_size, scale), samplers_for(6, vocab_size, **params))


@pytest.mark.parametrize("params", DRAWS, ids=str)
def test_a_few_tokens_above_a_flat_rest_give_the_numpy_samplers_tokens(params: dict[str, Any]):
    """What a sample of the row gets wrong: most of the mass on tokens that it does not see."""
    logits_RV = rows_of(8, 40_000, 0.01)
    logits_RV[:, 17:2017] += np.linspace(4, 11, 8, dtype=np.float32)[:, None]
    assert_all_agree(logits_RV, samplers_for(8, 40_000, **params))


@pytest.mark.parametrize("params", DRAWS, ids=str)
def test_heavy_tokens_that_the_sample_misses_give_the_numpy_samplers_tokens(params: dict[str, Any]):
    """16 heavy tokens in each block of 1,024 (64 vectors), and never in a vector that speaks for its block."""
    ids = np.arange(40_000)
    block, vector = ids // 1024, ids % 1024 // 16
    heavy = (vector == 40) & (block * 29 % 32 != 40 % 32)
    logits_RV = rows_of(8, 40_000, 0.01)
    logits_RV[:, heavy] += np.linspace(0.1, 11, 8, dtype=np.float32)[:, None]
    logits_RV[:, heavy] += np.linspace(0, 0.5, heavy.sum(), dtype=np.float32)
    assert_all_agree(logits_RV, samplers_for(8, 40_000, **params))


def kinds_of_rows(num_rows: int, vocab_size: int) -> dict[str, LogitsRow]:
    random = np.random.default_rng(5)
    shape = (num_rows, vocab_size)
    zipf_V = -1.1 * np.log(np.arange(1, vocab_size + 1))
    alone_RV = np.full(shape, -INF)
    alone_RV[:, 777] = 3.0
    rows = {
        "student": random.standard_t(3, shape) * 2.0,
        "zipf": random.permuted(np.tile(zipf_V, (num_rows, 1)), axis=1),
        "rounded": np.round(random.standard_normal(shape) * 4.0) / 2.0,
        "masked": np.where(random.random(shape) < 0.7, -INF, random.standard_normal(shape)),
        "deep": random.standard_normal(shape) * 300.0,
        "far": random.standard_normal(shape) + 900.0,
        "alone": alone_RV,
    }
    return {name: values_RV.astype(np.float32) for name, values_RV in rows.items()}


@pytest.mark.parametrize("params", DRAWS, ids=str)
def test_every_kind_of_row_gives_the_numpy_samplers_tokens(params: dict[str, Any]):
    for logits_RV in kinds_of_rows(6, 20_000).values():
        assert_all_agree(logits_RV, samplers_for(6, 20_000, **params))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_draw_on_the_edge_of_two_tokens_is_decided_in_double_precision(isa: str, top_p: float):
    """Equal logits: every edge is a multiple of 1 / 4096 exactly, which sums in single precision miss."""
    edges = np.arange(1, 4096, 37)
    shares = np.concatenate([edges, np.nextafter(edges, 0.0)]) / 4096
    settings_R5 = np.tile([0.7, 0.0, top_p, 0.0, 0.0], (len(shares), 1))
    settings_R5[:, 4] = shares
    logits_RV = np.full((len(shares), 4096), -1.37, dtype=np.float32)
    sampled = Sampler(POOL, isa=isa).sample(
        logits_RV, settings_R5, [None] * len(shares), np.full(len(shares), -1, dtype=np.int32)
    )
    assert sampled.tokens.tolist() == np.floor(shares * 4096 * top_p).astype(int).tolist()


@pytest.mark.parametrize("params", DRAWS, ids=str)
def test_equal_logits_give_the_numpy_samplers_tokens(params: dict[str, Any]):
    """Edges among equals: the lowest ids are kept. All weights are 1, so sums are exact in any order."""
    logits_RV = np.full((40, 9_000), -1.5, dtype=np.float32)
    logits_RV[::2, 1000:] = -INF
    assert_all_agree(logits_RV, samplers_for(40, 9_000, **params))


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-8, 1e-3])
def test_tiny_temperatures_take_the_largest(temperature: float):
    logits_RV = rows_of(4, 5000, 2.0)
    assert_all_agree(logits_RV, samplers_for(4, 5000, temperature=temperature))
    assert_all_agree(logits_RV, samplers_for(4, 5000, temperature=temperature, top_p=0.9))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("place", [0, 7, 1023, 1024, 2999])
@pytest.mark.parametrize(
    ("value", "error"), [(math.nan, "logits are NaN"), (INF, "logits hold +inf"), (-INF, "every logit is -inf")]
)
def test_a_row_that_cannot_be_sampled_is_named_and_harms_no_other(isa: str, place: int, value: float, error: str):
    logits_RV = rows_of(3, 3000, 1.0)
    if value == -INF:
        logits_RV[1] = -INF
    logits_RV[1, place] = value
    samplers = samplers_for(3, 3000, top_p=0.9)
    got = NATIVE[isa].sample_rows(logits_RV.copy(), samplers)
    assert got[1] == SampledToken(0, error=error)
    assert got == sample_rows(logits_RV, samplers)


@pytest.mark.parametrize(
    ("banned", "others"), [(math.nan, 0.0), (INF, 0.0), (INF, math.nan), (1.0, -INF), (-INF, -INF), (0.0, INF)]
)
def test_a_ban_hides_no_fault(banned: float, others: float):
    logits_RV = np.full((1, 300), others, dtype=np.float32)
    logits_RV[0, 7] = banned
    sampler = RequestSampler(
        SamplingParams(min_tokens=2, repetition_penalty=1.5),
        vocab_size=300,
        seed=1,
        sample_index=0,
        prompt_token_ids=[0],
        output_token_ids=(),
        eos_token_ids=[7],
    )
    assert sample_rows(logits_RV.copy(), [sampler])[0].error is not None
    assert_all_agree(logits_RV, [sampler])


@pytest.mark.parametrize("isa", ISAS)
def test_nan_beside_infinity_is_called_nan(isa: str):
    logits_RV = np.array([[INF, 0.0, math.nan, -INF]], dtype=np.float32)
    (got,) = NATIVE[isa].sample_rows(logits_RV, samplers_for(1, 4))
    assert got.error == "logits are NaN"


@pytest.mark.parametrize("isa", ISAS)
def test_greedy_takes_the_lowest_id_of_equals_wherever_they_lie(isa: str):
    for first, second in [(0, 1), (5, 1029), (1023, 1024), (2047, 2999), (31, 47), (2998, 2999)]:
        logits_RV = np.zeros((1, 3000), dtype=np.float32)
        logits_RV[0, [first, second]] = 2.0
        assert NATIVE[isa].sample_rows(logits_RV, samplers_for(1, 3000, temperature=0.0))[0].token_id == first


def mixed_samplers(num_rows: int, vocab_size: int) -> list[RequestSampler]:
    return [
        make_sampler(SamplingParams(**MIXED[r % len(MIXED)]), vocab_size, seed=r, output_token_ids=[3, 5, 5])
        for r in range(num_rows)
    ]


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(16)), st.integers(1, 16), st.integers(1, 3))
def test_neighbours_and_threads_change_no_row(order: list[int], size: int, num_threads: int):
    logits_RV, samplers = rows_of(16, 5000, 3.0), mixed_samplers(16, 5000)
    alone = [NATIVE[ISAS[-1]].sample_rows(logits_RV[r : r + 1].copy(), [samplers[r]])[0] for r in range(16)]
    chosen = order[:size]
    sampler = NativeSampler(_native.ThreadPool(num_threads))
    together = sampler.sample_rows(logits_RV[chosen].copy(), [samplers[r] for r in chosen])
    assert together == [alone[r] for r in chosen]


@pytest.mark.parametrize("scale", SCALES)
def test_instruction_sets_agree_in_every_bit(scale: float):
    logits_RV = rows_of(3, 30_001, scale)
    samplers = samplers_for(3, 30_001, logprobs=20, top_p=0.97)
    plain = NATIVE["plain"].sample_rows(logits_RV.copy(), samplers)
    assert all(NATIVE[isa].sample_rows(logits_RV.copy(), samplers) == plain for isa in ISAS)


def test_other_memory_layouts_change_nothing():
    logits_RV, samplers = rows_of(16, 5000, 3.0), mixed_samplers(16, 5000)
    expected = NATIVE[ISAS[-1]].sample_rows(logits_RV.copy(), samplers)
    wide_RV = np.full((32, 6000), math.nan, dtype=np.float32)
    wide_RV[::2, :5000] = logits_RV
    frozen_RV = logits_RV.copy()
    frozen_RV.flags.writeable = False
    for layout_RV in (np.asfortranarray(logits_RV), wide_RV[::2, :5000], frozen_RV):
        assert NATIVE[ISAS[-1]].sample_rows(layout_RV, samplers) == expected


def test_bad_words_and_min_tokens_are_kept_out():
    def sampler(output: tuple[int, ...]) -> RequestSampler:
        return RequestSampler(
            SamplingParams(temperature=0.0, min_tokens=2),
            vocab_size=8,
            seed=1,
            sample_index=0,
            prompt_token_ids=[0],
            output_token_ids=output,
            eos_token_ids=[7],
            bad_word_token_ids=[[6], [2, 5]],
        )

    logits_RV = np.arange(8, dtype=np.float32)[None]
    chosen = [
        NATIVE["plain"].sample_rows(logits_RV.copy(), [sampler(output)])[0].token_id
        for output in [(), (2,), (2, 2), (2, 2, 2)]
    ]
    assert chosen == [5, 4, 7, 7]


def test_no_rows_are_no_tokens():
    assert NATIVE["plain"].sample_rows(np.zeros((0, 10), dtype=np.float32), []) == []


def test_arrays_that_do_not_belong_together_are_refused():
    logits_RV, num_top_R = np.zeros((2, 10), dtype=np.float32), np.full(2, -1, dtype=np.int32)
    changes = make_sampler(SamplingParams(logit_bias={3: 1.0}), 10, 0).changes()
    with pytest.raises(KernelError, match="one row for each row"):
        Sampler(POOL).sample(logits_RV, np.zeros((1, 5)), [None, None], num_top_R)
    wrong = changes._replace(bias_ids=np.array([12]))
    with pytest.raises(KernelError, match="token 12 of a vocabulary of 10"):
        Sampler(POOL).sample(logits_RV, np.zeros((2, 5)), [None, wrong], num_top_R)
    with pytest.raises(KernelError, match="avx1024"):
        Sampler(POOL, isa="avx1024")
