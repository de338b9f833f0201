"""The exported checkpoints are what transformers computes, and generation does not depend on its batch."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from training.checkpoint import load
from training.generate import generate
from training.head import TAPS, Head, new_head, tapped
from training.model import DRAFT, MINI, Decoder, DecoderShape, Where, rope_tables
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


SHAPE = DecoderShape(
    vocab_size=64, hidden_size=32, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48
)


def causal(length: int) -> Tensor:
    return torch.full((length, length), float("-inf")).triu(1)[None, None]


def states_ahead(head: Head, model: Decoder, tokens_BT: Tensor, num_steps: int) -> list[Tensor]:
    """What the head computes at each step, the true tokens given: step i at row t has read token t + 1 + i."""
    length = tokens_BT.shape[1]
    taps_BTE, _ = tapped(model, tokens_BT, causal(length))
    at = Where(*rope_tables(head.shape, torch.arange(length)), causal(length))
    x_BTD, steps, found = head.fc(taps_BTE), [], []
    for step in range(num_steps):
        x_BTD = head.layers[0].ahead(model.model.embed_tokens(tokens_BT.roll(-step - 1, 1)), x_BTD, at, steps)
        found.append(x_BTD)
    return found


def test_a_row_of_a_later_step_is_a_row_of_its_own_behind_the_rows_before_it():
    """Row t after two steps is what a sequence gives that ends at t, whose next state is the head's own."""
    torch.manual_seed(3)
    model = Decoder(SHAPE)
    head, tokens_BT = new_head(model), torch.randint(0, 64, (1, 12))
    head.requires_grad_(False)
    row = 6
    first, second = states_ahead(head, model, tokens_BT, 2)
    shorter_first, shorter_second = states_ahead(head, model, tokens_BT[:, : row + 3], 2)
    assert torch.allclose(first[:, row], shorter_first[:, row], atol=1e-6)
    assert torch.allclose(second[:, row], shorter_second[:, row], atol=1e-6)
    assert not torch.allclose(second[:, row], first[:, row], atol=1e-3)


def test_taps_are_what_comes_out_of_layers():
    torch.manual_seed(3)
    model, tokens_BT = Decoder(SHAPE), torch.randint(0, 64, (1, 5))
    taps_BTE, hidden_BTD = tapped(model, tokens_BT, causal(5))
    x_BTD = model.model.embed_tokens(tokens_BT)
    at = Where(*rope_tables(SHAPE, torch.arange(5)), None)
    for index, layer in enumerate(model.model.layers, 1):
        x_BTD = layer(x_BTD, at, None)
        if index in TAPS:
            tap = TAPS.index(index)
            assert torch.allclose(taps_BTE[..., 32 * tap : 32 * (tap + 1)], x_BTD, atol=1e-5)
    assert torch.allclose(model.model.norm(x_BTD), hidden_BTD, atol=1e-5)
