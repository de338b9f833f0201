"""From a prompt to requests: what is refused, with which numbers, and what is resolved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from maitred.core.errors import InvalidRequest, PromptTooLong
from maitred.core.request import SamplingParams
from maitred.engine.intake import make_requests
from maitred.kv.prefix_cache import hash_blocks, root_hash
from maitred.text.tokenizer import Tokenizer
from tests.engine.worlds import BLOCK_SIZE, served_model
from tests.fakes import MODEL


def test_text_and_its_token_ids_give_the_same_request():
    model = served_model()
    tokens = model.tokenizer.encode("two soups, please")
    by_text = make_requests(model, "two soups, please", SamplingParams(), request_id="a", now=1.0)[0]
    by_ids = make_requests(model, tokens, SamplingParams(), request_id="b", now=1.0)[0]
    assert list(by_text.prompt_token_ids) == list(by_ids.prompt_token_ids) == tokens
    assert by_text.block_hashes == by_ids.block_hashes == hash_blocks(tokens, BLOCK_SIZE, root_hash(MODEL))
    assert by_text.arrived_at == 1.0


def test_a_salt_changes_every_hash():
    model = served_model()
    plain = make_requests(model, [5] * 32, SamplingParams(), request_id="a", now=0)[0]
    salted = make_requests(model, [5] * 32, SamplingParams(), request_id="b", now=0, cache_salt="t")[0]
    assert not set(plain.block_hashes) & set(salted.block_hashes)


def test_samples_share_prompt_and_seed_and_differ_in_index():
    requests = make_requests(served_model(), "hi", SamplingParams(n=3), request_id="x", now=0, new_seed=lambda: 42)
    assert [r.request_id for r in requests] == ["x-0", "x-1", "x-2"]
    assert [r.sample_index for r in requests] == [0, 1, 2]
    assert {r.seed for r in requests} == {42}
    assert {r.parent_id for r in requests} == {"x"}


def test_a_request_without_a_seed_gets_a_random_one():
    seeds = {make_requests(served_model(), "hi", SamplingParams(), request_id="x", now=0)[0].seed for _ in range(8)}
    assert len(seeds) == 8


def test_negative_seeds_are_valid_and_distinct():
    make = lambda seed: make_requests(served_model(), "hi", SamplingParams(seed=seed), request_id="x", now=0)[0].seed  # noqa: E731
    assert make(-1) != make(1)
    assert 0 <= make(-1) < 2**63


def test_no_max_tokens_fills_the_context():
    request = make_requests(served_model(64), [5] * 10, SamplingParams(max_tokens=None), request_id="x", now=0)[0]
    assert request.max_tokens == 54


def test_a_prompt_and_max_tokens_over_the_context_are_refused_with_the_numbers():
    make_requests(served_model(64), [5] * 10, SamplingParams(max_tokens=54), request_id="x", now=0)
    with pytest.raises(PromptTooLong, match=r"10 tokens.*max_tokens \(55\).*65 tokens.*64 tokens"):
        make_requests(served_model(64), [5] * 10, SamplingParams(max_tokens=55), request_id="x", now=0)


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers():
    with pytest.raises(PromptTooLong, match=r"has 64 tokens.*maximum context length is 64 tokens"):
        make_requests(served_model(64), [5] * 64, SamplingParams(max_tokens=None), request_id="x", now=0)


def test_a_text_that_is_too_long_by_its_length_alone_is_never_tokenised():
    class Unused(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
            raise AssertionError("tokenised")

    model = served_model(64)
    model.tokenizer.__class__ = Unused
    with pytest.raises(PromptTooLong, match=r"at least \d+ tokens \(1000000 characters\).*64 tokens"):
        make_requests(model, "a" * 1_000_000, SamplingParams(), request_id="x", now=0)


@pytest.mark.parametrize("bad", [-1, 10**6, "a", True, 1.5])
def test_tokens_that_the_vocabulary_does_not_have_are_refused(bad: object):
    with pytest.raises(InvalidRequest, match="prompt token 1"):
        make_requests(served_model(), [5, bad], SamplingParams(), request_id="x", now=0)  # type: ignore[list-item]


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        make_requests(served_model(), [], SamplingParams(), request_id="x", now=0)


def test_sampling_parameters_must_name_tokens_of_the_vocabulary():
    model = replace(served_model(), vocab_size=100)
    with pytest.raises(InvalidRequest, match="logit_bias"):
        make_requests(model, [5], SamplingParams(logit_bias={100: 1.0}), request_id="x", now=0)


def test_parameters_that_leave_no_token_are_refused_before_anything_is_computed():
    model = served_model()
    for allowed, fields in (
        (model.eos_token_ids, {"min_tokens": 2}),
        ((7, 8), {"stop_token_ids": [8, 7], "min_tokens": 1}),
        (tuple(model.tokenizer.encode("s", add_special_tokens=False)), {"bad_words": ["s"]}),
    ):
        with pytest.raises(InvalidRequest, match=f"each of the {len(allowed)} tokens") as refused:
            make_requests(model, "hi", SamplingParams(allowed_token_ids=allowed, **fields), request_id="x", now=0)
        assert refused.value.param == "allowed_token_ids"
        make_requests(model, "hi", SamplingParams(allowed_token_ids=(*allowed, 9), **fields), request_id="x", now=0)


def test_bad_words_are_tokenised_at_the_start_and_after_a_space():
    model = served_model()
    request = make_requests(model, "hi", SamplingParams(bad_words=["soup"]), request_id="x", now=0)[0]
    texts = {model.tokenizer.decode(tokens) for tokens in request.bad_word_token_ids}
    assert texts == {"soup", " soup"}


def test_a_bad_word_of_white_space_forbids_only_itself():
    model = served_model()
    request = make_requests(model, "hi", SamplingParams(bad_words=["\n"]), request_id="x", now=0)[0]
    assert [model.tokenizer.decode(tokens) for tokens in request.bad_word_token_ids] == ["\n"]
