"""The byte-level BPE tokenizer of the built-in models, and their chat template.

Any UTF-8 text survives encode and decode, because every byte is a token; figures are never merged, because sums are
learnt figure by figure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from maitred.text.chat_template import ChatTemplate
from training.world import any_chat, plain_text

BOS, EOS, START, END, PAD = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL = (PAD, BOS, EOS, START, END)
"""In the order of their ids, from 0."""
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""One token each, with the last ids, and common ones as in Qwen 3: an answer's text has them."""

CHAT_TEMPLATE = r"""
{{- bos_token }}
{%- set system = messages[0] if messages and messages[0]['role'] == 'system' else none %}
{%- if tools %}
    {{- '<|im_start|>system\n' + ((system['content'] or '') | trim + '\n' if system else '') + 'Tools:' }}
    {%- for tool in tools %}
        {%- set function = tool['function'] if tool['function'] else tool %}
        {%- set parameters = function['parameters'] if function['parameters'] else {} %}
        {{- '\n' + function['name'] + '(' }}
        {{- (parameters['properties'] if parameters['properties'] else {}) | join(', ') + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and system and loop.first) %}
        {{- '<|im_start|>' + message['role'] + '\n' }}
        {%- if message['reasoning_content'] %}
            {{- '<think>\n' + message['reasoning_content'] | trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- (message['content'] or '') | trim }}
        {%- for call in message['tool_calls'] or [] %}
            {%- set function = call['function'] if call['function'] else call %}
            {{- '\n' if message['content'] or not loop.first }}
            {{- '<tool_call>\n{"name": "' + function['name'] + '", "arguments": ' }}
            {{- function['arguments'] if function['arguments'] is string else function['arguments'] | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n' if enable_thinking }}
{%- endif %}
""".strip()
"""ChatML, with calls as Hermes and Qwen write them. Of a tool only the names are told: a model this small knows its own
tools by heart, whole schemas would be most of its context, and a grammar binds the arguments to them anyway."""

_TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {"bos_token": BOS})


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    enable_thinking: bool = False,
) -> str:
    """What CHAT_TEMPLATE makes of a chat."""
    return str(
        _TEMPLATE.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=list(tools) or None,
            enable_thinking=enable_thinking,
        )
    )


def train_tokenizer(vocab_size: int, seed: int, num_chats: int = 12_000) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens, learnt from texts of the world; ValueError for too few of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(Random(seed), num_chats), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
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


_FRAME = re.compile("|".join(map(re.escape, SPECIAL + MARKS)))


def _texts(rng: Random, num_chats: int) -> Iterator[str]:
    """What stands between special tokens and marks."""
    for _ in range(num_chats):
        chat = any_chat(rng, 4)
        yield from filter(None, _FRAME.split(render(chat.messages(), tools=chat.tools)))
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
