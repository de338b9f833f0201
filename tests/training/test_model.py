"""The exported checkpoints are what transformers computes, and generation does not depend on its batch."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from training.checkpoint import load
from training.generate import generate
from training.model import DRAFT, MINI, Decoder
from training.tokenizer import render
from training.world import held_out_question, training_chat

BUILTIN = Path(__file__).parents[2] / "src/maitred/builtin"
NAMES = ("maitred-mini", "maitred-mini-draft")


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_the_same_logits(name: str):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = load(BUILTIN / name, torch.float32)
    other = transformers.AutoModelForCausalLM.from_pretrained(BUILTIN / name, dtype=torch.float32)
    rng = Random(0)
    text = "".join(render(training_chat(rng, 30).messages()) for _ in range(3))
    tokens_BT = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids[:1500]])
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens_BT), other(tokens_BT).logits, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_the_eos_tokens_and_bf16_weights(name: str):
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoModelForCausalLM.from_pretrained(BUILTIN / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUILTIN / name)
    assert other.dtype is torch.bfloat16
    assert other.generation_config.eos_token_id[0] == tokenizer.eos_token_id
    assert other.config.max_position_embeddings >= 2048


def test_the_sizes_are_what_the_package_allows():
    assert 3e6 < Decoder(MINI).num_parameters() < 5e6
    assert Decoder(DRAFT).num_parameters() < Decoder(MINI).num_parameters() / 8
    assert sum(file.stat().st_size for file in BUILTIN.rglob("*") if file.is_file()) < 12e6


def test_a_reply_is_the_same_alone_and_in_a_padded_batch():
    model, tokenizer = load(BUILTIN / "maitred-mini", torch.float32)
    rng = Random(2)
    chats = [held_out_question(rng, name, 1) for name in ("fact", "price", "order")]
    prompts = [render(chat.messages()[:-1], add_generation_prompt=True) for chat in chats]
    together = generate(model, tokenizer, prompts, max_tokens=30)
    assert together == [generate(model, tokenizer, [prompt], max_tokens=30)[0] for prompt in prompts]
