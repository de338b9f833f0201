"""Rows of tokens for training: whole chats packed side by side, a weight for each token, no sight across chats."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from maitred.optimize.trainer import TokenBatch
from training.shapes import bound_spans
from training.tokenizer import BOS, END, EOS, PAD, SPECIAL, START, render
from training.world import Chat, any_chat, plain_text

REPLY_WEIGHT = 1.0
PROMPT_WEIGHT = 0.1
"""Questions are learnt a little too, so that the model can also write both sides of a chat."""
PLAIN_SHARE = 0.04
TOKENS_PER_TURN = 45
"""About the mean; only decides how long the longest chats of a row are."""


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids and their weights, of equal length."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens_BT; weight_BT of predicting each token (0 for padding and the first); document_BT, unique in a row, -1 is
    padding."""

    tokens_BT: Tensor  # noqa: N815
    weight_BT: Tensor  # noqa: N815
    document_BT: Tensor  # noqa: N815

    @property
    def num_tokens(self) -> int:
        return self.tokens_BT.numel()

    def mask(self) -> Tensor:
        """Additive [B, 1, T, T]: 0 where a token may look (its own document, not later), minus infinity elsewhere."""
        same_BTT = self.document_BT[:, :, None] == self.document_BT[:, None, :]
        length = self.tokens_BT.shape[1]
        allowed_BTT = same_BTT & torch.ones(length, length, dtype=torch.bool).tril()
        mask_BTT = torch.zeros(allowed_BTT.shape).masked_fill_(~allowed_BTT, float("-inf"))
        return mask_BTT[:, None]

    def one_behind_the_other(self) -> TokenBatch:
        """The documents without padding, as heads learn them."""
        kept = self.document_BT >= 0
        lengths = [each for row in self.document_BT for each in row[row >= 0].unique_consecutive(return_counts=True)[1]]
        return TokenBatch(self.tokens_BT[kept], self.weight_BT[kept], tuple(map(int, lengths)))


class Batches:
    """An endless supply of batches drawn from one generator."""

    def __init__(self, tokenizer: Tokenizer, rng: Random) -> None:
        self._tokenizer, self._rng = tokenizer, rng
        self._pad, self._start, self._end = (SPECIAL.index(token) for token in (PAD, START, END))
        self._header = tokenizer.encode("assistant\n", add_special_tokens=False).ids
        self._thoughts = tokenizer.encode("<think>\n", add_special_tokens=False).ids
        self._pool: list[Document] = []

    def draw(self, num_rows: int, length: int) -> Batch:
        rows = [self._row(length) for _ in range(num_rows)]
        tokens, weights, documents = (torch.tensor(column) for column in zip(*rows, strict=True))
        return Batch(tokens, weights, documents)

    def document(self, length: int) -> Document:
        """A chat or a plain text of about `length` tokens at most."""
        if self._rng.random() < PLAIN_SHARE:
            ids = self._encode(BOS + plain_text(self._rng) + EOS)
            return Document(ids, [0.0] + [REPLY_WEIGHT] * (len(ids) - 1))
        return self.document_of(any_chat(self._rng, max(2, length // TOKENS_PER_TURN)))

    def document_of(self, chat: Chat) -> Document:
        text = render(chat.messages(), tools=chat.tools)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        weights = self._weights(encoding.ids)
        if chat.is_bound:
            _forgive(weights, encoding.offsets, text, chat.turns[-1].assistant)
        return Document(encoding.ids, weights)

    def _row(self, length: int) -> tuple[list[int], list[float], list[int]]:
        """Documents from the pool that fit, longest first drawn; one that fits no row is cut at its end."""
        ids: list[int] = []
        weights: list[float] = []
        documents: list[int] = []
        while True:
            while len(self._pool) < 64:
                self._pool.append(self.document(length))
            room = length - len(ids)
            fits = next((i for i, document in enumerate(self._pool) if len(document.ids) <= room), None)
            if fits is None and ids:
                break
            document = self._pool.pop(fits or 0)
            ids += document.ids[:room]
            documents += [documents[-1] + 1 if documents else 0] * len(document.ids[:room])
            weights += document.weights[:room]
        padding = length - len(ids)
        return ids + [self._pad] * padding, weights + [0.0] * padding, documents + [-1] * padding

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _weights(self, ids: list[int]) -> list[float]:
        """REPLY_WEIGHT from after an assistant header to its end mark, PROMPT_WEIGHT elsewhere.

        0 for the begin of thoughts: the prompt opens them, and no answer shall of its own.
        """
        weights, replying, index = [0.0], False, 1
        while index < len(ids):
            weights.append(REPLY_WEIGHT if replying else PROMPT_WEIGHT)
            if ids[index] == self._end:
                replying = False
            after = index + 1
            if ids[index] == self._start and ids[after : after + len(self._header)] == self._header:
                weights += [PROMPT_WEIGHT] * len(self._header)
                index += len(self._header)
                replying = True
                after = index + 1
                if ids[after : after + len(self._thoughts)] == self._thoughts:
                    weights += [0.0] * len(self._thoughts)
                    index += len(self._thoughts)
            index += 1
        return weights


def _forgive(weights: list[float], offsets: list[tuple[int, int]], text: str, reply: str) -> None:
    """No weight for what only a schema decides: nothing in the prompt tells of it, and a grammar writes it."""
    start = text.rindex(reply)
    spans = [(start + begin, start + end) for begin, end in bound_spans(reply)]
    for index, (begin, end) in enumerate(offsets):
        if any(first <= begin and end <= last for first, last in spans):
            weights[index] = 0.0
