"""The byte-level BPE tokenizer of the built-in models, and their chat template.

Any UTF-8 text survives encode and decode, because every byte is a token; figures are never merged, because sums are
learnt figure by figure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from training.world import plain_text, training_chat

BOS, EOS, START, END, PAD = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL = (PAD, BOS, EOS, START, END)
"""In the order of their ids, from 0."""

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def render(messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
    """What CHAT_TEMPLATE renders, without jinja."""
    body = "".join(f"{START}{m['role']}\n{m['content'].strip()}{END}\n" for m in messages)
    return BOS + body + (f"{START}assistant\n" if add_generation_prompt else "")


def train_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens, learnt from texts of the world."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(Random(seed)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts gave {tokenizer.get_vocab_size()} tokens, not {vocab_size}; feed more texts")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json in the layout of Hugging Face."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _texts(rng: Random) -> Iterator[str]:
    """Contents without the frame of the template, which is made of special tokens and three role names."""
    for _ in range(12_000):
        yield from (message["content"] for message in training_chat(rng, 4).messages())
        yield "assistant\n"
        yield "user\n"
        yield "system\n"
    for _ in range(1_000):
        yield plain_text(rng)
    # Common English, so that texts from outside the world are not spelt letter by letter.
    for _ in range(4):
        yield _ENGLISH


_ENGLISH = """
The quick brown fox jumps over the lazy dog. There are many people who think that this is not the right way to do
it, but they have been wrong before. When you come back, would you please make sure that everything has been done?
She said that her brother could not have known about their plan, because nobody had told him anything. In the first
place, we must understand how these things work and why they were made. After some time the old man went down to
the water and looked at the ships. It was a long day, and the children were tired. Some of them wanted to go home,
others would rather play.
"""
