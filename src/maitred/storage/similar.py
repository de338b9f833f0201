"""Similar requests: which answer of the result cache a prompt gets that is not the same, but very near to one that was.

Requests of one `rest` (tenant, model, everything in the body but the last text of the user) are compared by the cosine
of that text's vector. Some of the answers found so are computed all the same: what they show decides whether the rule
stays. Pure; a semantic cache after GPTCache (Bang, 2023, https://aclanthology.org/2023.nlposs-1.24/).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

MAX_TEXTS = 1024  # of one rest, 1.5 MiB of vectors of MiniLM's width; the oldest go first
MAX_RESTS = 256
MAX_WRONG = 0.01
LEAST_CHECKED = 100
"""Checks over which a share is counted: fewer are counted as so many, so that one mismatch alone is not 1%."""


class Found(NamedTuple):
    """The nearest request with an answer."""

    key: bytes  # of the result cache
    answer: str  # its text, as far as it is compared
    similarity: float  # cosine


@dataclass(slots=True)
class _Texts:
    """What was asked under one rest, the oldest first."""

    vectors: np.ndarray  # [requests, width], float32, of length 1
    answers: list[tuple[bytes, str]] = field(default_factory=list)  # keys of the result cache, and texts


@dataclass(slots=True)
class SimilarAnswers:
    """Answers by the vectors of what was asked; `bound` is the least cosine of a hit, `check` the share of hits that is
    computed too."""

    bound: float
    check: float
    num_hits: int = 0
    num_checked: int = 0
    num_wrong: int = 0
    _rests: OrderedDict[bytes, _Texts] = field(default_factory=OrderedDict)
    _num_taken: int = 0  # hits to be computed

    @property
    def is_on(self) -> bool:
        """False once more than 1% of the checks have shown another answer."""
        return self.num_wrong <= MAX_WRONG * max(self.num_checked, LEAST_CHECKED)

    def find(self, rest: bytes, vector: np.ndarray, is_kept: Callable[[bytes], bool]) -> Found | None:
        """The nearest request within the bound whose answer is kept; `vector` has length 1."""
        texts = self._rests.get(rest)
        if texts is None or not self.is_on:
            return None
        self._rests.move_to_end(rest)
        cosines = texts.vectors @ vector
        for index in np.argsort(-cosines, kind="stable"):
            if not cosines[index] >= self.bound:
                return None
            key, answer = texts.answers[index]
            if is_kept(key):
                return Found(key, answer, float(cosines[index]))
        return None

    def is_checked(self) -> bool:
        """Whether this hit is computed too: every so many, from the first on."""
        self.num_hits += 1
        is_due = self.num_hits * self.check > self._num_taken
        self._num_taken += is_due
        return is_due

    def checked(self, cosine: float) -> bool:
        """Count a check whose two answers are so near; whether this one turned the rule off."""
        was_on = self.is_on
        self.num_checked += 1
        self.num_wrong += not cosine >= self.bound
        return was_on and not self.is_on

    def keep(self, rest: bytes, vector: np.ndarray, key: bytes, answer: str) -> None:
        """Note a request that the result cache now has an answer to."""
        texts = self._rests.setdefault(rest, _Texts(np.empty((0, len(vector)), np.float32)))
        self._rests.move_to_end(rest)
        at = next((at for at, (known, _) in enumerate(texts.answers) if known == key), None)
        if at is not None:  # computed again
            texts.answers[at] = key, answer
            return
        first = len(texts.answers) >= MAX_TEXTS
        texts.vectors = np.vstack((texts.vectors[first:], vector))
        texts.answers = [*texts.answers[first:], (key, answer)]
        if len(self._rests) > MAX_RESTS:
            self._rests.popitem(last=False)
