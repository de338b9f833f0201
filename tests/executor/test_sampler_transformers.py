"""Masks and penalties against transformers' own logits processors on random rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from maitred.core.request import SamplingParams
from maitred.executor.sampler import RequestSampler, sample_rows

torch = pytest.importorskip("torch")
processors = pytest.importorskip("transformers.generation.logits_process")

VOCAB_SIZE = 200
KNOWN = [3, 3, 17, 120, 5]


def random_rows(num_rows: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(num_rows, VOCAB_SIZE)) * 4).astype(np.float32)


def make_sampler(seed: int = 0, **params: Any) -> RequestSampler:
    return RequestSampler(
        SamplingParams(**params), vocab_size=VOCAB_SIZE, seed=seed, sample_index=0, prompt_token_ids=KNOWN
    )


def processed(logits_V: np.ndarray, *chain: Any) -> Any:
    scores = torch.from_numpy(logits_V.copy())[None]
    for processor in chain:
        scores = processor(torch.tensor([KNOWN]), scores)
    return scores[0]


@pytest.mark.parametrize("penalty", [0.7, 1.2, 3.0])
def test_repetition_penalty_is_bit_equal(penalty: float):
    for logits_V in random_rows(20, seed=1):
        expected = processed(logits_V, processors.RepetitionPenaltyLogitsProcessor(penalty)).numpy()
        make_sampler(repetition_penalty=penalty).apply(logits_V)
        np.testing.assert_array_equal(logits_V, expected)


FILTERS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"top_k": 7}, [processors.TopKLogitsWarper(7)]),
    ({"top_p": 0.8}, [processors.TopPLogitsWarper(0.8)]),
    ({"min_p": 0.1}, [processors.MinPLogitsWarper(0.1)]),
    ({"temperature": 0.5, "top_p": 0.6}, [processors.TemperatureLogitsWarper(0.5), processors.TopPLogitsWarper(0.6)]),
    (
        {"temperature": 2.0, "min_p": 0.05, "top_k": 12, "top_p": 0.9},
        [
            processors.TemperatureLogitsWarper(2.0),
            processors.MinPLogitsWarper(0.05),
            processors.TopKLogitsWarper(12),
            processors.TopPLogitsWarper(0.9),
        ],
    ),
]


@pytest.mark.parametrize(("params", "chain"), FILTERS, ids=[",".join(params) for params, _ in FILTERS])
def test_the_tokens_kept_and_their_shares_are_those_of_transformers(params: dict[str, Any], chain: list[Any]):
    """Every token kept is drawn, none besides, and as often as its probability says (within 5 sigma)."""
    draws = 1500
    for number, logits_V in enumerate(random_rows(2, seed=2)):
        probabilities = torch.softmax(processed(logits_V, *chain).double(), dim=0).numpy()
        samplers = [make_sampler(seed=1000 * number + i, **params) for i in range(draws)]
        drawn = [s.token_id for s in sample_rows(np.tile(logits_V, (draws, 1)), samplers)]
        shares = np.bincount(drawn, minlength=VOCAB_SIZE) / draws
        assert set(np.flatnonzero(shares)) <= set(np.flatnonzero(probabilities))
        sigma = np.sqrt(probabilities * (1 - probabilities) / draws)
        assert np.all(np.abs(shares - probabilities) <= 5 * sigma + 1e-12)


def test_greedy_after_a_repetition_penalty_is_theirs():
    for logits_V in random_rows(50, seed=3):
        expected = int(processed(logits_V, processors.RepetitionPenaltyLogitsProcessor(1.8)).argmax())
        (sampled,) = sample_rows(logits_V[None], [make_sampler(temperature=0.0, repetition_penalty=1.8)])
        assert sampled.token_id == expected
