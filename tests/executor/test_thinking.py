"""Thoughts end at their budget, where and only where the end mark may stand."""

from __future__ import annotations

import numpy as np

from maitred.core.request import SamplingParams, ThinkingLimit
from maitred.executor.sampler import RequestSampler, sample_rows
from tests.executor.test_sampler_properties import mask_of

BEGIN, END_1, END_2, WORD = 1, 2, 3, 9
SIZE = 12


def sampler_of(num_tokens: int, *, opened: bool) -> RequestSampler:
    limit = ThinkingLimit(num_tokens, (BEGIN,), (END_1, END_2), opened)
    greedy = SamplingParams(temperature=0.0)
    return RequestSampler(greedy, vocab_size=SIZE, seed=0, sample_index=0, prompt_token_ids=[0], thinking=limit)


def write(sampler: RequestSampler, *wishes: int) -> list[int]:
    """What comes out where the model would say `wishes`, one after another."""
    written = []
    for wish in wishes:
        logits_V = np.zeros(SIZE, dtype=np.float32)
        logits_V[wish] = 1.0
        (token,) = sample_rows(logits_V[None], [sampler])
        assert token.error is None
        sampler.append(token.token_id)
        written.append(token.token_id)
    return written


def test_the_end_mark_comes_after_as_many_tokens_and_the_answer_is_free():
    assert write(sampler_of(2, opened=True), *[WORD] * 7) == [WORD, WORD, END_1, END_2, WORD, WORD, WORD]


def test_no_thoughts_at_all():
    assert write(sampler_of(0, opened=True), *[WORD] * 4) == [END_1, END_2, WORD, WORD]


def test_thoughts_that_end_by_themselves_leave_the_rest_of_the_budget_for_later_ones():
    said = [WORD, END_1, END_2, WORD, BEGIN, WORD, WORD, WORD, WORD, WORD]
    assert write(sampler_of(3, opened=True), *said) == [*said[:7], END_1, END_2, WORD]


def test_a_text_without_thoughts_is_left_alone():
    assert write(sampler_of(1, opened=False), *[WORD] * 5) == [WORD] * 5


def test_the_end_mark_waits_until_the_grammar_allows_it():
    sampler = sampler_of(1, opened=True)
    assert write(sampler, WORD) == [WORD]
    sampler.mask = mask_of([WORD, 7], SIZE)  # as in the middle of a character
    assert write(sampler, WORD) == [WORD]
    sampler.mask = mask_of([WORD, END_1], SIZE)
    assert write(sampler, WORD) == [END_1]
