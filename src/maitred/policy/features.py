"""Prompt features for length prediction: a few numbers of the text, cheap enough for every request.

Bounded work whatever the prompt's length: only its last words count, where chats have the question. The numbers are
sums over hashed words, so no text can be read from them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import log1p
from zlib import crc32

TAIL_CHARS = 120  # of the text, template included: what is before the last turn tells little, and hides the rest
TAIL_TOKENS = 32  # of a prompt that came as tokens
NUM_BUCKETS = 64  # of hashed words

_WORD = re.compile(r"[a-z]+|[0-9]+")
# Words of one meaning share a slot, so that a few examples teach it.
_MEANINGS: tuple[frozenset[str], ...] = (
    frozenset({"write", "compose", "draft", "create", "generate"}),
    frozenset({"story", "essay", "article", "poem", "blog", "report", "letter", "tale", "song"}),
    frozenset({"explain", "describe", "discuss", "compare", "analyse", "analyze", "elaborate"}),
    frozenset({"list", "enumerate", "name", "give", "examples", "ideas", "ways", "steps"}),
    frozenset({"code", "function", "implement", "program", "script", "class", "debug"}),
    frozenset({"summarise", "summarize", "summary", "shorten", "tldr"}),
    frozenset({"translate", "rewrite", "paraphrase", "correct", "fix"}),
    frozenset({"classify", "label", "choose", "true", "false", "yes", "no", "which"}),
    frozenset({"short", "brief", "briefly", "concise", "concisely", "one", "single", "only", "just"}),
    frozenset({"long", "detailed", "detail", "details", "thorough", "comprehensive", "full", "every", "all"}),
    frozenset({"what", "who", "when", "where", "whose"}),
    frozenset({"why", "how"}),
    frozenset({"hello", "hi", "hey", "thanks", "thank", "bye", "goodbye", "ok", "okay"}),
    frozenset({"continue", "more", "another", "next", "further", "again"}),
)
_SLOT_OF = {word: slot for slot, words in enumerate(_MEANINGS) for word in words}
_UNITS = frozenset({"word", "words", "sentence", "sentences", "line", "lines", "items", "paragraph", "paragraphs"})
NUM_PLAIN = 3  # question mark, number asked for, length of the last part
NUM_FEATURES = NUM_PLAIN + len(_MEANINGS) + NUM_BUCKETS


def prompt_features(prompt: str | Sequence[int]) -> tuple[float, ...]:
    """NUM_FEATURES numbers, each from 0 to about 1. Never raises."""
    return _of_text(prompt[-TAIL_CHARS:]) if isinstance(prompt, str) else _of_tokens(prompt[-TAIL_TOKENS:])


def _of_text(tail: str) -> tuple[float, ...]:
    words = _WORD.findall(tail.lower())
    features = [0.0] * NUM_FEATURES
    features[0] = float("?" in tail)
    features[1] = _number_asked_for(words)
    features[2] = log1p(len(words)) / 5.0
    for word in words:
        slot = _SLOT_OF.get(word)
        if slot is not None:
            features[NUM_PLAIN + slot] = 1.0
        features[-1 - crc32(word.encode()) % NUM_BUCKETS] = 1.0
    return tuple(features)


def _of_tokens(tail: Sequence[int]) -> tuple[float, ...]:
    """Return the features of tokens: without text, each token is a word of which only the hash is known."""
    features = [0.0] * NUM_FEATURES
    features[2] = log1p(len(tail)) / 5.0
    for token in tail:
        features[-1 - (token * 2654435761 >> 8) % NUM_BUCKETS] = 1.0
    return tuple(features)


def _number_asked_for(words: Sequence[str]) -> float:
    """`in 50 words`: the logarithm of the last number that stands before a unit of text, 0 if there is none."""
    for number, unit in zip(reversed(words[:-1]), reversed(words[1:]), strict=True):
        if unit in _UNITS and number.isdecimal():
            return log1p(min(int(number[:6]), 100_000)) / 10.0
    return 0.0
