"""Prompts of a load test: random tokens or words, alike only where a shared prefix or a trace says so."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from maitred.sim.arrivals import arrival_times
from maitred.sim.lengths import Draw

# Short common words: most tokenizers spend one token on each, with the space before it.
_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part over new sound take only little work know place
year live me back give most very after thing our just name good sentence man think say
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    index: int
    due_s: float  # since the run began; 0 in a closed loop
    token_ids: list[int]
    output_len: int  # tokens to ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Ids that prompts are made of: [low, high)."""

    low: int
    high: int

    def sentence(self, length: int, rng: random.Random) -> list[int]:
        return rng.choices(range(self.low, self.high), k=length)


WORD_VOCABULARY = Vocabulary(low=0, high=len(WORDS))


def as_text(token_ids: Sequence[int]) -> str:
    """One word for each id."""
    return " ".join([WORDS[token % len(WORDS)] for token in token_ids])


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Independent random prompts. Each kind of draw has its own stream, so changing one leaves the others alone."""

    seed: int | str
    vocabulary: Vocabulary
    input_len: Draw
    output_len: Draw
    rate: float | None = None  # requests per second; None is a closed loop
    burstiness: float = 1.0
    shared_prefix_len: int = 0
    num_prefixes: int = 1

    def requests(self) -> Iterator[PlannedRequest]:
        """Without end."""
        lengths, texts, choices = (random.Random(f"{self.seed}/{name}") for name in ("lengths", "texts", "prefixes"))
        prefixes = [self._prefix(number) for number in range(self.num_prefixes if self.shared_prefix_len else 0)]
        for index, due_s in enumerate(self._due_times()):
            prefix = choices.choice(prefixes) if prefixes else []
            unique = self.vocabulary.sentence(self.input_len(lengths), texts)
            yield PlannedRequest(index, due_s, prefix + unique, self.output_len(lengths))

    def _prefix(self, number: int) -> list[int]:
        return self.vocabulary.sentence(self.shared_prefix_len, random.Random(f"{self.seed}/prefix/{number}"))

    def _due_times(self) -> Iterator[float]:
        if self.rate is not None:
            return arrival_times(self.rate, self.burstiness, random.Random(f"{self.seed}/arrivals"))
        return iter(lambda: 0.0, None)
