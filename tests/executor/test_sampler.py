"""What the sampler does for each parameter, told on rows small enough to read."""

from __future__ import annotations

import math

import numpy as np
import pytest

from maitred.core.errors import InvalidRequest
from maitred.core.request import SamplingParams
from maitred.executor.sampler import (
    RequestSampler,
    check_sampling_tokens,
    sample_rows,
    token_logprobs,
    uniform,
)
from maitred.executor.sampler_state import LogitsRow

INF = math.inf


def make_sampler(
    *,
    vocab_size: int = 8,
    seed: int = 1,
    sample_index: int = 0,
    prompt: tuple[int, ...] = (0,),
    output: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    **sampling: object,
) -> RequestSampler:
    return RequestSampler(
        SamplingParams(max_tokens=1000, **{"temperature": 0.0, **sampling}),  # type: ignore[arg-type]
        vocab_size=vocab_size,
        seed=seed,
        sample_index=sample_index,
        prompt_token_ids=prompt,
        output_token_ids=output,
        eos_token_ids=eos,
        bad_word_token_ids=bad_words,
    )


def row(*logits: float) -> LogitsRow:
    return np.array(logits, dtype=np.float32)


def sample_one(logits_V: LogitsRow, sampler: RequestSampler) -> int:
    (sampled,) = sample_rows(logits_V[None].copy(), [sampler])
    assert sampled.error is None
    return sampled.token_id


def possible_tokens(logits_V: LogitsRow, *, draws: int = 300, **made_with: object) -> set[int]:
    samplers = [make_sampler(vocab_size=len(logits_V), seed=seed, **made_with) for seed in range(draws)]  # type: ignore[arg-type]
    return {sampled.token_id for sampled in sample_rows(np.tile(logits_V, (draws, 1)), samplers)}


# --- greedy and filters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits", [row(0.0, 3.0, -1.0, 2.0), row(0.0, 3.0, 3.0, 3.0)], ids=["largest", "lowest id"])
def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_equals(logits: LogitsRow):
    assert sample_one(logits, make_sampler(vocab_size=4)) == 1


def test_a_very_low_temperature_is_greedy_without_overflow():
    with np.errstate(all="raise", under="ignore", over="raise"):
        assert possible_tokens(row(0.0, 3.0, 2.999, -INF), temperature=1e-300) == {1}


LIKELY, ALL = np.log(row(0.1, 0.4, 0.2, 0.3)), {0, 1, 2, 3, 4, 5}
OVER_TOP_K = np.log(row(0.3, 0.2, 0.1, 0.4))  # after top-k: 0.4/0.9, 0.3/0.9, 0.2/0.9
CLOSE = np.log(row(0.5, 0.26, 0.24))  # flatter at temperature 2: 0.24 becomes 0.69 of the likeliest
KEPT: dict[str, tuple[LogitsRow, dict[str, object], set[int]]] = {
    "top_k keeps the k largest": (row(1, 5, 4, 5, 3, 0), {"temperature": 5.0, "top_k": 3}, {1, 2, 3}),
    "and of equals the lowest ids": (row(2, 7, 2, 2, 2, 2), {"temperature": 5.0, "top_k": 3}, {0, 1, 2}),
    **{f"top_k of {k} keeps all": (row(0, 0, 0, 0, 0, 0), {"top_k": k}, ALL) for k in (0, -1, 6, 100)},
    "top_k of what masks left": (row(0, 0, 0, 0, 0, 0), {"top_k": 4, "allowed_token_ids": [2, 5]}, {2, 5}),
    "top_p keeps the smallest set that reaches it": (LIKELY, {"top_p": 0.65}, {1, 3}),
    "and not one more": (LIKELY, {"top_p": 0.75}, {1, 2, 3}),
    "top_p always keeps one token": (np.log(row(0.2, 0.5, 0.3)), {"top_p": 1e-9}, {1}),
    "top_p counts the mass that top_k left": (OVER_TOP_K, {"top_k": 3, "top_p": 0.75}, {0, 3}),
    "without top_k that is more": (OVER_TOP_K, {"top_p": 0.75}, {0, 1, 3}),
    "min_p is a share of the likeliest": (CLOSE, {"min_p": 0.5}, {0, 1}),
    "min_p of one": (CLOSE, {"min_p": 1.0}, {0}),
    "filters work on tempered probabilities": (CLOSE, {"temperature": 2.0, "min_p": 0.6}, {0, 1, 2}),
    "only allowed tokens": (row(9, 9, 1, 0), {"allowed_token_ids": (3, 2, 2)}, {2, 3}),
}


@pytest.mark.parametrize("name", KEPT)
def test_just_the_tokens_that_filters_and_masks_keep_are_drawn(name: str):
    logits_V, asked, kept = KEPT[name]
    assert possible_tokens(logits_V, **{"temperature": 1.0, **asked}) == kept


# --- masks and bias ---------------------------------------------------------------------------------------------------


CHOSEN: dict[str, tuple[LogitsRow, dict[str, object], int]] = {
    "a bad word of one token": (row(0, 5, 1, 0), {"bad_words": ((1,),)}, 2),
    "one that begins in the prompt": (row(0, 5, 4, 3), {"prompt": (0, 2, 3), "bad_words": ((2, 3, 1),)}, 2),
    "one that is longer than all text": (row(0, 5, 4, 3), {"prompt": (3,), "bad_words": ((2, 3, 1),)}, 1),
    "the end, where it is ignored": (row(0, 9, 8, 7), {"eos": (1,), "ignore_eos": True}, 1),
    "a bias is added": (row(0, 5, 4, 3), {"logit_bias": {0: 6.0, 1: -100.0}}, 0),
    "and a ban by -100 is only a bias": (row(0, 200, 4, 3), {"logit_bias": {1: -100.0}}, 1),
    "it brings back no masked token": (row(0, 5, 4, 3), {"allowed_token_ids": [2], "logit_bias": {1: 100.0}}, 2),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_largest_that_masks_and_biases_leave_is_taken(name: str):
    logits_V, asked, chosen = CHOSEN[name]
    assert sample_one(logits_V, make_sampler(vocab_size=4, **asked)) == chosen  # type: ignore[arg-type]


def test_a_longer_bad_word_is_cut_before_its_last_token_only():
    logits_V = row(0, 5, 4, 3)
    sampler = make_sampler(vocab_size=4, prompt=(0,), bad_words=((2, 3, 1),))
    assert sample_one(logits_V, sampler) == 1
    sampler.append(2)
    sampler.append(3)
    assert sample_one(logits_V, sampler) == 2
    sampler.append(2)
    assert sample_one(logits_V, sampler) == 1


def test_end_and_stop_tokens_are_out_until_min_tokens():
    sampler = make_sampler(vocab_size=4, eos=(1,), min_tokens=2, stop_token_ids=[2, 99])
    logits_V = row(0, 9, 8, 7)
    for expected in (3, 3, 1):
        assert sample_one(logits_V, sampler) == expected
        sampler.append(expected)


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids"])
@pytest.mark.parametrize("token", [-1, 100, 2**40])
def test_tokens_outside_the_vocabulary_are_refused_by_name(field: str, token: int):
    value = {3: 1.0, token: 1.0} if field == "logit_bias" else [3, token]
    with pytest.raises(InvalidRequest, match=f"{field} names token {token}; the model's tokens are 0 to 99") as refused:
        check_sampling_tokens(SamplingParams(**{field: value}), 100)  # type: ignore[arg-type]
    assert refused.value.param == field


def test_tokens_inside_the_vocabulary_pass():
    check_sampling_tokens(SamplingParams(logit_bias={0: 1.0, 99: -1.0}, allowed_token_ids=[0, 99]), 100)
    check_sampling_tokens(SamplingParams(), 1)


# --- penalties --------------------------------------------------------------------------------------------------------


def penalised(logits_V: LogitsRow, sampler: RequestSampler) -> list[float]:
    changed_V = logits_V.copy()
    sampler.apply(changed_V)
    return changed_V.tolist()


def test_repetition_penalty_covers_prompt_and_output_by_sign():
    sampler = make_sampler(vocab_size=4, prompt=(0, 0, 1), output=(2,), repetition_penalty=2.0)
    assert penalised(row(4, -4, 1, 5), sampler) == [2, -8, 0.5, 5]


def test_presence_and_frequency_penalties_cover_the_output_only():
    sampler = make_sampler(vocab_size=4, prompt=(0, 1), output=(2, 2, 3), presence_penalty=0.5, frequency_penalty=0.25)
    assert penalised(row(1, 1, 1, 1), sampler) == [1, 1, 0, 0.25]


def test_penalties_follow_appended_tokens():
    sampler = make_sampler(vocab_size=40, frequency_penalty=1.0, repetition_penalty=2.0)
    for token in [*range(30), *range(30)]:
        sampler.append(token)
    made_at_once = make_sampler(
        vocab_size=40, frequency_penalty=1.0, repetition_penalty=2.0, output=(*range(30), *range(30))
    )
    logits_V = np.arange(40, dtype=np.float32)
    assert penalised(logits_V, sampler) == penalised(logits_V, made_at_once)
    assert penalised(logits_V, sampler)[10] == 10 / 2 - 2


def test_a_request_learned_again_after_preemption_goes_on_as_before():
    made_with = {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 1.0, "min_tokens": 3}
    logits_V = np.random.default_rng(0).normal(size=8).astype(np.float32)
    stayed = make_sampler(prompt=(4, 1), bad_words=((1, 2),), **made_with)
    output: list[int] = []
    for _ in range(10):
        again = make_sampler(prompt=(4, 1), output=tuple(output), bad_words=((1, 2),), **made_with)
        output.append(sample_one(logits_V, stayed))
        assert sample_one(logits_V, again) == output[-1]
        stayed.append(output[-1])


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_usable_logits_ends_alone(temperature: float):
    good = row(1, 3, 2)
    rows = np.stack([good, row(1, math.nan, 2), row(1, INF, 2), row(-INF, -INF, -INF), row(math.nan, INF, 0), good])
    samplers = [make_sampler(vocab_size=3, temperature=temperature, logprobs=1) for _ in rows]
    sampled = sample_rows(rows.copy(), samplers)
    assert [s.error for s in sampled] == [
        None,
        "logits are NaN",
        "logits hold +inf",
        "every logit is -inf",
        "logits are NaN",
        None,
    ]
    alone = sample_rows(good[None].copy(), samplers[:1])
    assert sampled[0] == sampled[5] == alone[0]


def test_a_row_whose_every_token_is_masked_is_an_error_that_says_so():
    (sampled,) = sample_rows(row(1, 3, -INF)[None], [make_sampler(vocab_size=3, allowed_token_ids=[2])])
    assert sampled.error is not None
    assert "no token can be sampled" in sampled.error


# --- logprobs ---------------------------------------------------------------------------------------------------------


def test_logprobs_are_raw_whatever_the_parameters_did():
    logits_V = row(1, 3, 2, 0)
    sampler = make_sampler(vocab_size=4, logit_bias={3: 100.0}, temperature=0.5, logprobs=2)
    (sampled,) = sample_rows(logits_V[None].copy(), [sampler])
    assert sampled.token_id == 3
    assert sampled.logprobs == token_logprobs(logits_V, 3, 2)
    total = math.log(sum(math.exp(x) for x in (1, 3, 2, 0)))
    assert sampled.logprobs is not None
    assert sampled.logprobs.token_ids == (3, 1, 2)
    assert sampled.logprobs.ranks == (4, 1, 2)
    assert sampled.logprobs.logprobs == pytest.approx((0 - total, 3 - total, 2 - total), abs=1e-12)


def test_no_logprobs_are_given_unless_asked_for_and_zero_asks_for_the_chosen_alone():
    assert sample_rows(row(1, 2)[None], [make_sampler(vocab_size=2)])[0].logprobs is None
    logprobs = sample_rows(row(1, 2)[None], [make_sampler(vocab_size=2, logprobs=0)])[0].logprobs
    assert logprobs is not None
    assert (logprobs.token_ids, logprobs.ranks) == ((1,), (1,))


def test_equal_logits_rank_by_id_and_the_chosen_has_the_rank_of_its_place():
    logits_V = row(5, 7, 5, 5, 7)
    assert token_logprobs(logits_V, 2, 5).token_ids == (2, 1, 4, 0, 2, 3)
    assert token_logprobs(logits_V, 2, 5).ranks == (4, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("logits_V", [row(1, math.nan, 2), row(1, INF, 2), row(-INF, -INF, -INF), row(*[math.nan] * 3)])
@pytest.mark.filterwarnings("error")
def test_logprobs_of_an_unusable_row_are_nan(logits_V: LogitsRow):
    assert math.isnan(token_logprobs(logits_V, 0, 2).logprobs[0])


def test_more_logprobs_than_tokens_give_every_token():
    assert token_logprobs(row(1, 2), 0, 20).token_ids == (0, 1, 0)


# --- the random number ------------------------------------------------------------------------------------------------


def test_uniform_is_splitmix64_fed_three_times():
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z &= mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    assert mix(1234567 + gamma) == 6457827717110365317  # the published first output of splitmix64 for this seed
    h = mix(mix(mix(1234567 + gamma) ^ 2) ^ 3)  # not the chain: each round adds the constant
    chain = mix((mix((mix(1234567 + gamma) ^ 2) + gamma) ^ 3) + gamma)
    assert uniform(1234567, 2, 3) == (chain >> 11) / 2**53 != (h >> 11) / 2**53


def test_uniform_never_changes():
    """These values are part of the contract: a seed must give the same text in the next version."""
    assert uniform(0, 0, 0) == 0.13870941014555427
    assert uniform(2**63 - 1, 127, 131072) == 0.09236586251347012
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
