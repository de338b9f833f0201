"""The committed model is really good at its world."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from training.checkpoint import load
from training.evaluate import Score, agreement, score, table
from training.model import DRAFT, Decoder
from training.world import SCORED, SHAPES, held_out_question, held_out_shape

BUILTIN = Path(__file__).parents[2] / "src/maitred/builtin"


@pytest.mark.soak  # two minutes
def test_the_committed_model_answers_held_out_questions():
    """Eight questions of each category, in bf16 as shipped: 95%, as in the whole evaluation (training/README.md)."""
    model, tokenizer = load(BUILTIN / "maitred-mini", torch.bfloat16)
    rng = Random(11)
    chats = [held_out_question(rng, name) for name in SCORED for _ in range(8)]
    chats += [held_out_shape(rng, shape) for shape in SHAPES for _ in range(8)]
    result = score(model, tokenizer, "sample", chats)
    assert result.exact_match >= 0.95, result.misses


def test_a_model_agrees_with_itself_and_hardly_with_another():
    model, tokenizer = load(BUILTIN / "maitred-mini-draft", torch.float32)
    torch.manual_seed(0)
    assert agreement(model, model, tokenizer, 4) == 1
    assert agreement(model, Decoder(DRAFT), tokenizer, 4) < 0.5


def test_the_table_counts_every_question():
    text = table([Score("one", 3, (("q", "a", "b"),)), Score("two", 1, ())])
    assert "| one | 2 | 3 | 66.7% |" in text
    assert "| **all** | 3 | 4 | 75.0% |" in text
