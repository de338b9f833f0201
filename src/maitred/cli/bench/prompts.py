"""Prompts of a load test: random tokens or words, alike only where a shared prefix or a trace says so."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from maitred.cli.simulate.sources import read_unpacked
from maitred.core.errors import ConfigError
from maitred.sim.arrivals import arrival_times
from maitred.sim.lengths import Draw
from maitred.sim.traces import BLOCK_TOKENS, TraceLine, parse_trace

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
        """Requests without end."""
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


def read_trace(path: str) -> list[TraceLine]:
    """Sorted by time. Raises ConfigError with the line at fault."""
    try:
        return parse_trace(read_unpacked(path).splitlines(), f"--trace {path}")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}; give a file of JSON lines") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplay:
    """Requests as the trace has them, `rate_scale` times as fast and with all lengths times `length_scale`.

    Equal hash ids mean equal blocks after equal blocks, so a prompt made from them hits a prefix cache exactly where
    the original would have.
    """

    lines: list[TraceLine]
    vocabulary: Vocabulary
    seed: int | str
    rate_scale: float = 1.0
    length_scale: float = 1.0
    paced: bool = True  # False leaves the timing to a closed loop
    _texts: random.Random = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_texts", random.Random(f"{self.seed}/texts"))

    def requests(self) -> Iterator[PlannedRequest]:
        began = self.lines[0].timestamp
        for index, line in enumerate(self.lines):
            due_s = (line.timestamp - began) / 1000 / self.rate_scale if self.paced else 0.0
            yield PlannedRequest(index, due_s, self._prompt(line), self._scaled(line.output_length))

    def _prompt(self, line: TraceLine) -> list[int]:
        """Blocks as their ids say, cut to length; what no id covers is unique."""
        length = self._scaled(line.input_length)
        block_len = self._scaled(BLOCK_TOKENS)
        token_ids: list[int] = []
        for hash_id in line.hash_ids:
            if len(token_ids) >= length:
                break
            token_ids += _block(self.vocabulary, self.seed, hash_id, block_len)
        del token_ids[length:]
        return token_ids + self.vocabulary.sentence(length - len(token_ids), self._texts)

    def _scaled(self, tokens: int) -> int:
        return max(1, round(tokens * self.length_scale))


@lru_cache(maxsize=4096)
def _block(vocabulary: Vocabulary, seed: int | str, hash_id: int | str, length: int) -> tuple[int, ...]:
    return tuple(vocabulary.sentence(length, random.Random(f"{seed}/block/{hash_id}")))
