"""N-gram proposer: what followed the last few tokens when the request had them before follows again, perhaps.

Source: Saxena, Prompt Lookup Decoding, 2023 (github.com/apoorvumang/prompt-lookup-decoding). The longest of a few
lengths decides; tables of where each n-gram ended last are kept as tokens come, so no step scans the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maitred.speculative.proposer import DraftAsk, Ints, Proposer

LENGTHS = (4, 3, 2)
"""Of n-grams, the longest first. Single tokens say little: they would draft nearly always, and mostly in vain."""


class NGrams:
    """Where each n-gram of a text was followed by what, last; the text only grows."""

    __slots__ = ("_num_indexed", "_tables", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._tables: tuple[dict[bytes, int], ...] = tuple({} for _ in LENGTHS)
        self._num_indexed = 0  # n-grams that end before it are in the tables

    def extend(self, tokens: Ints) -> None:
        """The text is `tokens` now, which begin with what it was."""
        self._tokens += tokens[len(self._tokens) :].tolist()
        last = len(tokens) - 1  # what ends with the last token has no successor yet
        raw, size = np.ascontiguousarray(tokens).tobytes(), tokens.itemsize
        for length, table in zip(LENGTHS, self._tables, strict=True):
            first = max(self._num_indexed, length - 1)
            for end in range(first, last):
                table[raw[(end + 1 - length) * size : (end + 1) * size]] = end + 1
        self._num_indexed = max(self._num_indexed, last)

    def find(self, last: Ints) -> int | None:
        """Position of what followed the longest n-gram that `last` ends with; None where none was there."""
        for length, table in zip(LENGTHS, self._tables, strict=True):
            if length <= len(last) and (found := table.get(last[len(last) - length :].tobytes())) is not None:
                return found
        return None

    def after(self, position: int, count: int) -> list[int]:
        """`count` tokens from there on; past the end it goes on with those that it gave, as a text repeats itself."""
        found = self._tokens[position : position + count]
        period = len(self._tokens) - position
        while len(found) < count:
            found.append(found[len(found) - period])
        return found


class NGramProposer:
    """Looks drafts up in the request's own tokens (`proposer.Proposer`)."""

    name = "ngram"

    def __init__(self) -> None:
        self._texts: dict[str, NGrams] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        return [self._look_up(ask) for ask in asks]

    def _look_up(self, ask: DraftAsk) -> Sequence[int]:
        tokens = ask.request.tokens.array
        text = self._texts.setdefault(ask.request.request_id, NGrams())
        text.extend(tokens)
        found = text.find(tokens[-LENGTHS[0] :])
        return () if found is None else text.after(found, ask.num_drafts)

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def close(self) -> None:
        self._texts.clear()


class PredictionProposer:
    """Requests that came with a prediction of their output draft from it, all others as `others` says."""

    def __init__(self, others: Proposer | None) -> None:
        self._others = others
        self._predictions: dict[str, NGrams] = {}

    @property
    def name(self) -> str:
        return self._others.name if self._others is not None else "prediction"

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        others = [ask for ask in asks if not len(ask.request.prediction)]
        made = iter(self._others.propose(others) if self._others is not None and others else [()] * len(others))
        return [self._predicted(ask) if len(ask.request.prediction) else next(made) for ask in asks]

    def _predicted(self, ask: DraftAsk) -> Sequence[int]:
        request, output = ask.request, ask.request.tokens.array[ask.request.num_prompt_tokens :]
        prediction = np.array(request.prediction, dtype=np.int64)
        text = self._predictions.get(request.request_id)
        if text is None:
            text = self._predictions[request.request_id] = NGrams()
            text.extend(prediction)
        if len(output) < LENGTHS[-1] and np.array_equal(output, prediction[: len(output)]):
            found: int | None = len(output)  # too little of it to be looked up
        else:
            found = text.find(output[-LENGTHS[0] :])
        return () if found is None else request.prediction[found : found + ask.num_drafts]

    def forget(self, request_id: str) -> None:
        self._predictions.pop(request_id, None)
        if self._others is not None:
            self._others.forget(request_id)

    def close(self) -> None:
        self._predictions.clear()
        if self._others is not None:
            self._others.close()
