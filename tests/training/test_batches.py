"""Rows hold whole chats that cannot see each other, and only replies have full weight."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from training.batches import PROMPT_WEIGHT, REPLY_WEIGHT, Batches
from training.model import DRAFT, Decoder

DIRECTORY = Path(__file__).parents[2] / "src/maitred/builtin/maitred-mini"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


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
