"""The sampler against slow obvious ways, its distributions, and its independence of the batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.request import SamplingParams
from maitred.executor.sampler import RequestSampler, _first_over, sample_rows, token_logprobs, uniform
from maitred.executor.sampler_state import LogitsRow, TokenMask

# Chi-square above this happens once in 10,000 for the given degrees of freedom (tables of the distribution).
CHI_SQUARE_1E_4 = {4: 23.51, 7: 29.88, 15: 44.26, 99: 161.3}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[LogitsRow, dict[str, Any], list[int], list[int], int]:
    """A row with many ties, parameters, prompt, output and a seed."""
    size = draw(st.integers(2, 40))
    logit = st.integers(-8, 8).map(lambda i: i / 2) | st.floats(-30, 30, width=32) | st.just(-math.inf)
    logits = draw(st.lists(logit, min_size=size, max_size=size))
    tokens = st.integers(0, size - 1)
    optional = {
        "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
        "top_k": st.integers(-1, size + 1),
        "top_p": st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.99, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.4, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.7]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.7]),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.25, 100.0]), max_size=4),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=size),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(tokens, max_size=2),
    }
    params = draw(st.fixed_dictionaries({}, optional=optional))
    prompt = draw(st.lists(tokens, min_size=1, max_size=10))
    output = draw(st.lists(tokens, max_size=10))
    return np.array(logits, dtype=np.float32), params, prompt, output, draw(st.integers(-(2**63), 2**63 - 1))


def slow_sample(logits_V: LogitsRow, p: SamplingParams, prompt: list[int], output: list[int], seed: int) -> int | None:
    """The ten steps of the docstring, one token at a time."""
    logits = [np.float32(x) for x in logits_V]
    for token in range(len(logits)):
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            logits[token] = np.float32(-math.inf)
        if len(output) < p.min_tokens and token in p.stop_token_ids:
            logits[token] = np.float32(-math.inf)
        logits[token] += np.float32((p.logit_bias or {}).get(token, 0.0))
        if token in prompt or token in output:
            penalty = np.float32(p.repetition_penalty)
            logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
        if token in output:
            logits[token] -= np.float32(p.frequency_penalty) * np.float32(output.count(token))
            logits[token] -= np.float32(p.presence_penalty)
    largest = max(logits)
    if largest == -math.inf:
        return None
    if p.temperature == 0.0:
        return logits.index(largest)
    weights = {t: float(np.exp((float(x) - float(largest)) / p.temperature)) for t, x in enumerate(logits)}
    order = sorted(weights, key=lambda t: (-logits[t], t))
    kept = [t for t in order if weights[t] >= p.min_p]
    kept = [t for t in order[: p.top_k] if t in kept] if p.top_k > 0 else kept
    if p.top_p < 1.0:
        kept = smallest_set(kept, weights, p.top_p)
    target = uniform(seed, 0, len(prompt) + len(output)) * math.fsum(weights[t] for t in kept)
    below = 0.0
    for token in sorted(kept):
        below += weights[token]
        if below > target:
            return token
    raise AssertionError("the draw fell off the end")


def smallest_set(order: list[int], weights: dict[int, float], top_p: float) -> list[int]:
    needed, reached = top_p * math.fsum(weights[t] for t in order), 0.0
    for number, token in enumerate(order, start=1):
        reached += weights[token]
        if reached >= needed - 1e-12:
            return order[:number]
    return order


def make_sampler(p: SamplingParams, size: int, seed: int, **known: Any) -> RequestSampler:
    return RequestSampler(p, vocab_size=size, seed=seed, sample_index=0, **{"prompt_token_ids": [0], **known})


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_sampling_equals_the_slow_obvious_way(world: tuple[LogitsRow, dict[str, Any], list[int], list[int], int]):
    logits_V, params, prompt, output, seed = world
    p = SamplingParams(max_tokens=100, **params)
    sampler = make_sampler(p, len(logits_V), seed, prompt_token_ids=prompt, output_token_ids=output)
    (sampled,) = sample_rows(logits_V[None].copy(), [sampler])
    expected = slow_sample(logits_V, p, prompt, output, seed)
    assert (sampled.error is None) == (expected is not None)
    assert expected is None or sampled.token_id == expected


def mask_of(token_ids: Iterable[int], size: int) -> TokenMask:
    """A bit for each of `token_ids`, and bits past the vocabulary, which nobody may look at."""
    bits = np.ones(-(-size // 32) * 32, dtype=np.uint8)
    bits[:size] = 0
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@settings(max_examples=50, deadline=None)
@given(worlds(), st.data())
def test_a_mask_gives_the_token_that_a_list_of_allowed_tokens_gives(
    world: tuple[LogitsRow, dict[str, Any], list[int], list[int], int], data: st.DataObject
):
    logits_V, params, prompt, output, seed = world
    size = len(logits_V)
    allowed = data.draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
    others = {name: value for name, value in params.items() if name != "allowed_token_ids"}
    known = {"prompt_token_ids": prompt, "output_token_ids": output}
    by_list = make_sampler(SamplingParams(**others, max_tokens=9, allowed_token_ids=allowed), size, seed, **known)
    by_mask = make_sampler(SamplingParams(**others, max_tokens=9), size, seed, **known)
    by_mask.mask = mask_of(allowed, size)
    assert sample_rows(logits_V[None].copy(), [by_mask]) == sample_rows(logits_V[None].copy(), [by_list])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([4096, 4097, 20_000]), st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]))
def test_top_p_of_a_large_vocabulary_equals_a_full_sort(seed: int, size: int, top_p: float):
    rng = np.random.default_rng(seed)
    logits_V = (rng.normal(size=size) * rng.uniform(0.01, 8)).astype(np.float32)
    p = SamplingParams(top_p=top_p)
    (sampled,) = sample_rows(logits_V[None].copy(), [make_sampler(p, size, seed)])
    weights = np.exp(logits_V.astype(np.float64) - float(logits_V.max()))
    order = np.argsort(-weights, kind="stable")
    num_kept = int(np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum())) + 1
    kept = np.sort(order[:num_kept])
    cumulated = np.cumsum(weights[kept])
    assert sampled.token_id == kept[np.searchsorted(cumulated, uniform(seed, 0, 1) * cumulated[-1], side="right")]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0 - 2.0**-53])
@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 5000])
def test_a_draw_at_the_ends_never_gives_a_token_of_weight_zero(size: int, share: float):
    rng = np.random.default_rng(size)
    for _ in range(50):
        weights = rng.random(size) * (rng.random(size) < 0.3)
        weights[rng.integers(size)] = 1.0
        index = _first_over(weights, share)
        assert weights[index] > 0
        assert math.fsum(weights[: index + 1]) >= share * math.fsum(weights) * (1 - 1e-12)
        assert math.fsum(weights[:index]) <= share * math.fsum(weights) * (1 + 1e-12)


@pytest.mark.parametrize("value", [0.0, -3.5])
def test_top_p_of_a_flat_row_keeps_the_first_ids(value: float):
    logits_RV = np.full((200, 10_000), value, dtype=np.float32)
    samplers = [make_sampler(SamplingParams(top_p=0.25), 10_000, seed) for seed in range(200)]
    drawn = [sampled.token_id for sampled in sample_rows(logits_RV, samplers)]
    assert 2300 < max(drawn) < 2500


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_logprobs_equal_a_full_sort(data: st.DataObject):
    values = st.integers(-5, 5).map(float) | st.floats(-50, 50, width=32)
    logits_V = np.array(data.draw(st.lists(values, min_size=1, max_size=60)), dtype=np.float32)
    chosen = data.draw(st.integers(0, len(logits_V) - 1))
    num_top = data.draw(st.integers(0, 20))
    exact = [float(x) for x in logits_V]
    total = math.log(math.fsum(math.exp(x - max(exact)) for x in exact)) + max(exact)
    order = sorted(range(len(exact)), key=lambda t: (-exact[t], t))
    got = token_logprobs(logits_V, chosen, num_top)
    assert got.token_ids == (chosen, *order[:num_top])
    assert got.ranks == (order.index(chosen) + 1, *range(1, min(num_top, len(order)) + 1))
    assert got.logprobs == pytest.approx([exact[t] - total for t in got.token_ids], abs=1e-10)


# --- the batch changes nothing ----------------------------------------------------------------------------------------

MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {},
    {"temperature": 0.3, "top_k": 20},
    {"top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"logit_bias": {3: 5.0}, "frequency_penalty": 0.5, "logprobs": 1},
    {"allowed_token_ids": [1, 2, 3, 900]},
]


def mixed_batch(num_rows: int) -> tuple[LogitsRow, list[RequestSampler]]:
    logits_RV = (np.random.default_rng(5).normal(size=(num_rows, 5000)) * 3).astype(np.float32)
    samplers = [
        make_sampler(SamplingParams(**MIXED[r % len(MIXED)]), 5000, seed=r, output_token_ids=[3, 5, 5])
        for r in range(num_rows)
    ]
    return logits_RV, samplers


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(16)), st.integers(1, 16))
def test_a_row_is_sampled_alike_alone_in_any_batch_and_at_any_place(order: list[int], size: int):
    logits_RV, samplers = mixed_batch(16)
    alone = [sample_rows(logits_RV[r : r + 1].copy(), [samplers[r]])[0] for r in range(16)]
    chosen = order[:size]
    together = sample_rows(logits_RV[chosen].copy(), [samplers[r] for r in chosen])
    assert together == [alone[r] for r in chosen]


def test_other_memory_layouts_and_broken_neighbours_change_nothing():
    logits_RV, samplers = mixed_batch(16)
    expected = sample_rows(logits_RV.copy(), samplers)
    assert sample_rows(np.asfortranarray(logits_RV), samplers) == expected
    wide_RV = np.zeros((32, 5000), dtype=np.float32)
    wide_RV[::2], wide_RV[1::2] = logits_RV, math.nan
    doubled = [sampler for sampler in samplers for _ in range(2)]
    assert sample_rows(wide_RV, doubled)[::2] == expected


# --- distributions ----------------------------------------------------------------------------------------------------


def chi_square(counts: dict[int, int], probabilities: dict[int, float]) -> float:
    total = sum(counts.values())
    assert set(counts) <= set(probabilities)
    return sum((counts.get(t, 0) - total * q) ** 2 / (total * q) for t, q in probabilities.items())


def draw_many(logits_V: LogitsRow, p: SamplingParams, positions: range) -> Counter[int]:
    drawn: Counter[int] = Counter()
    for position in positions:
        sampler = make_sampler(p, len(logits_V), seed=77, prompt_token_ids=[0] * position)
        drawn[sample_rows(logits_V[None].copy(), [sampler])[0].token_id] += 1
    return drawn


@pytest.mark.parametrize(
    ("params", "probabilities"),
    [
        ({}, [0.30, 0.05, 0.10, 0.20, 0.05, 0.15, 0.10, 0.05]),
        ({"temperature": 0.5}, [x / 0.1900 for x in (0.09, 0.0025, 0.01, 0.04, 0.0025, 0.0225, 0.01, 0.0025)]),
        ({"top_k": 5}, [0.30 / 0.85, 0, 0.10 / 0.85, 0.20 / 0.85, 0, 0.15 / 0.85, 0.10 / 0.85, 0]),
    ],
)
def test_tokens_come_as_often_as_their_probability_says(params: dict[str, Any], probabilities: list[float]):
    logits_V = np.log(np.array([0.30, 0.05, 0.10, 0.20, 0.05, 0.15, 0.10, 0.05])).astype(np.float32)
    scale = sum(probabilities)
    expected = {t: q / scale for t, q in enumerate(probabilities) if q}
    drawn = draw_many(logits_V, SamplingParams(**params), range(1, 2001))
    assert chi_square(drawn, expected) < CHI_SQUARE_1E_4[len(expected) - 1]


@pytest.mark.parametrize("axis", ["seed", "sample_index", "position"])
def test_consecutive_seeds_samples_and_positions_give_even_numbers(axis: str):
    at = {"seed": 11, "sample_index": 3, "position": 500}
    bins = Counter(int(uniform(**{**at, axis: at[axis] + i}) * 100) for i in range(50_000))
    assert chi_square(bins, dict.fromkeys(range(100), 0.01)) < CHI_SQUARE_1E_4[99]


@pytest.mark.parametrize("axis", ["seed", "sample_index", "position"])
def test_neighbouring_streams_are_unlike(axis: str):
    """Pairs of numbers, one from each of two neighbouring streams, fill a 4 x 4 grid evenly."""
    at = {"seed": 11, "sample_index": 3, "position": 500}
    other = "position" if axis != "position" else "seed"
    pairs: Counter[int] = Counter()
    for i in range(20_000):
        here = {**at, other: at[other] + i}
        pairs[int(uniform(**here) * 4) * 4 + int(uniform(**{**here, axis: here[axis] + 1}) * 4)] += 1
    assert chi_square(pairs, dict.fromkeys(range(16), 1 / 16)) < CHI_SQUARE_1E_4[15]


def test_samples_of_one_prompt_are_unlike_and_repeatable():
    logits_V = np.zeros(1000, dtype=np.float32)

    def text(sample_index: int) -> list[int]:
        sampler = RequestSampler(
            SamplingParams(), vocab_size=1000, seed=9, sample_index=sample_index, prompt_token_ids=[1, 2]
        )
        tokens = []
        for _ in range(20):
            tokens.append(sample_rows(logits_V[None].copy(), [sampler])[0].token_id)
            sampler.append(tokens[-1])
        return tokens

    texts = [text(i) for i in range(8)]
    assert texts == [text(i) for i in range(8)]
    assert len({tuple(t) for t in texts}) == 8
    assert all(len(set(t)) > 10 for t in texts)


@settings(max_examples=50, deadline=None)
@given(worlds(), st.integers(0, 10), st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), max_size=2))
def test_a_sampler_ahead_is_the_one_that_was_told_the_tokens(
    world: tuple[LogitsRow, dict[str, Any], list[int], list[int], int], num_known: int, words: list[list[int]]
):
    logits, params, prompt, output, seed = world
    known = {
        "sampling": SamplingParams(**params, logprobs=1),
        "vocab_size": len(logits),
        "seed": seed,
        "sample_index": 0,
        "prompt_token_ids": prompt,
        "bad_word_token_ids": words,
    }

    def drawn(sampler: RequestSampler) -> object:
        return sample_rows(logits[None, :].copy(), [sampler])[0]

    sampler = RequestSampler(**known, output_token_ids=output[:num_known])
    before, ahead = drawn(sampler), sampler
    for count, token in enumerate(output[num_known:], num_known + 1):
        ahead = ahead.ahead(token)
        assert drawn(ahead) == drawn(RequestSampler(**known, output_token_ids=output[:count]))
    assert drawn(sampler) == before
