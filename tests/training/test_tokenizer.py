"""The tokenizer loses nothing, keeps figures apart, and renders the template as transformers does."""

from __future__ import annotations

import string
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from training.batches import PROMPT_WEIGHT, REPLY_WEIGHT, Batches
from training.model import DRAFT, Decoder
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


def test_the_committed_vocabulary_is_full_and_keeps_figures_apart(tokenizer: Tokenizer):
    assert all(sum(map(token.count, string.digits)) <= 1 for token in tokenizer.get_vocab())

    assert [tokenizer.id_to_token(index) for index in range(len(SPECIAL))] == list(SPECIAL)
    assert tokenizer.get_vocab_size() == 1536

    assert tokenizer.encode("Once upon a time").tokens[0] == "<|bos|>"

    mini, draft = (BUILTIN / name / "tokenizer.json" for name in ("maitred-mini", "maitred-mini-draft"))
    assert mini.read_text() == draft.read_text()


@pytest.mark.soak
def test_training_a_tokenizer_is_deterministic():
    assert train_tokenizer(600, seed=0).to_str() == train_tokenizer(600, seed=0).to_str()


def test_transformers_renders_the_template_and_gives_the_same_ids(tokenizer: Tokenizer):
    transformers = pytest.importorskip("transformers")
    hugging_face = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    rng = Random(0)
    for _ in range(20):
        messages = training_chat(rng, 6).messages()
        assert hugging_face.apply_chat_template(messages, tokenize=False) == render(messages)
        prompt = hugging_face.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert prompt == render(messages[:-1], add_generation_prompt=True)

    transformers = pytest.importorskip("transformers")
    hugging_face = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    text = render(training_chat(Random(1), 6).messages())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert hugging_face.encode(text, add_special_tokens=False) == ids
    assert hugging_face.decode(ids) == text
    assert (hugging_face.bos_token, hugging_face.eos_token) == ("<|bos|>", "<|im_end|>")


def test_rows_have_the_length_asked_for_and_little_padding(tokenizer: Tokenizer):
    batch = Batches(tokenizer, Random(0)).draw(16, 256)
    assert batch.tokens_BT.shape == (16, 256)
    assert (batch.document_BT == -1).float().mean() < 0.1


def test_full_weight_is_on_replies_and_their_end_mark(tokenizer: Tokenizer):
    batch = Batches(tokenizer, Random(1)).draw(1, 256)
    first = batch.document_BT[0] == 0
    tokens, weights = batch.tokens_BT[0][first], batch.weight_BT[0][first]
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    weighed = tokenizer.decode(tokens[weights == REPLY_WEIGHT].tolist(), skip_special_tokens=False)
    replies = [part.split("<|im_end|>")[0] + "<|im_end|>" for part in text.split("<|im_start|>assistant\n")[1:]]
    assert weighed == "".join(replies)
    assert weights[1:][weights[1:] != REPLY_WEIGHT].eq(torch.tensor(PROMPT_WEIGHT)).all()


def test_a_chat_does_not_see_its_neighbours_in_the_row(tokenizer: Tokenizer):
    torch.manual_seed(0)
    model = Decoder(DRAFT)
    batch = Batches(tokenizer, Random(3)).draw(1, 256)
    first = batch.document_BT == 0
    with torch.inference_mode():
        changed_BT = torch.where(first, 7, batch.tokens_BT)
        before, after = (model(tokens, batch.mask()) for tokens in (batch.tokens_BT, changed_BT))
    torch.testing.assert_close(before[batch.document_BT > 0], after[batch.document_BT > 0])
    assert not torch.allclose(before[first], after[first])
