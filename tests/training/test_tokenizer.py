"""The tokenizer loses nothing, keeps figures apart, and renders the template as transformers does."""

from __future__ import annotations

import string
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from training.tokenizer import SPECIAL, render, train_tokenizer
from training.world import training_chat

BUILTIN = Path(__file__).parents[2] / "src/maitred/builtin"
DIRECTORY = BUILTIN / "maitred-mini"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


@given(st.text())
def test_any_text_survives(text: str):
    tokenizer = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    if any(special in text for special in SPECIAL):
        return
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(st.integers(0, 10**12))
def test_each_figure_is_one_token(number: int):
    tokenizer = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    assert tokenizer.encode(str(number), add_special_tokens=False).tokens == list(str(number))


def test_no_token_holds_two_figures(tokenizer: Tokenizer):
    assert all(sum(map(token.count, string.digits)) <= 1 for token in tokenizer.get_vocab())


def test_special_tokens_come_first_and_the_vocabulary_is_full(tokenizer: Tokenizer):
    assert [tokenizer.id_to_token(index) for index in range(len(SPECIAL))] == list(SPECIAL)
    assert tokenizer.get_vocab_size() == 1536


def test_plain_text_begins_with_the_bos_token(tokenizer: Tokenizer):
    assert tokenizer.encode("Once upon a time").tokens[0] == "<|bos|>"


def test_target_and_draft_share_the_tokenizer():
    mini, draft = (BUILTIN / name / "tokenizer.json" for name in ("maitred-mini", "maitred-mini-draft"))
    assert mini.read_text() == draft.read_text()


@pytest.mark.soak
def test_training_a_tokenizer_is_deterministic():
    assert train_tokenizer(600, seed=0).to_str() == train_tokenizer(600, seed=0).to_str()


def test_transformers_renders_the_template_as_training_does():
    transformers = pytest.importorskip("transformers")
    hugging_face = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    rng = Random(0)
    for _ in range(20):
        messages = training_chat(rng, 6).messages()
        assert hugging_face.apply_chat_template(messages, tokenize=False) == render(messages)
        prompt = hugging_face.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert prompt == render(messages[:-1], add_generation_prompt=True)


def test_transformers_gives_the_same_ids(tokenizer: Tokenizer):
    transformers = pytest.importorskip("transformers")
    hugging_face = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    text = render(training_chat(Random(1), 6).messages())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert hugging_face.encode(text, add_special_tokens=False) == ids
    assert hugging_face.decode(ids) == text
    assert (hugging_face.bos_token, hugging_face.eos_token) == ("<|bos|>", "<|im_end|>")
