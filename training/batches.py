"""Rows of tokens for training: whole chats packed side by side, a weight for each token, no sight across chats."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.tokenizer import BOS, END, EOS, PAD, SPECIAL, START, render
from training.world import plain_text, training_chat

REPLY_WEIGHT = 1.0
PROMPT_WEIGHT = 0.1
"""Questions are learnt a little too, so that the model can also write both sides of a chat."""
PLAIN_SHARE = 0.04
TOKENS_PER_TURN = 45
"""About the mean; only decides how long the longest chats of a row are."""


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens_BT; weight_BT of predicting each token (0 for padding and the first); document_BT, unique in a row."""

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


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids and their weights, of equal length."""

    ids: list[int]
    weights: list[float]


class Batches:
    """An endless supply of batches drawn from one generator."""

    def __init__(self, tokenizer: Tokenizer, rng: Random) -> None:
        self._tokenizer, self._rng = tokenizer, rng
        self._pad, self._start, self._end = (SPECIAL.index(token) for token in (PAD, START, END))
        self._header = tokenizer.encode("assistant\n", add_special_tokens=False).ids
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
        chat = training_chat(self._rng, max(2, length // TOKENS_PER_TURN))
        ids = self._encode(render(chat.messages()))
        return Document(ids, self._weights(ids))

    def _row(self, length: int) -> tuple[list[int], list[float], list[int]]:
        """Documents from the pool that fit, longest first drawn; one that fits no row is cut at its end."""
        ids: list[int] = []
        weights: list[float] = []
        documents: list[int] = []
        while True:
            while len(self._pool) < 32:
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
        """REPLY_WEIGHT from after an assistant header to its end mark, PROMPT_WEIGHT elsewhere."""
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
            index += 1
        return weights
