"""Replay of a trace: equal hash ids mean equal blocks after equal blocks, so a prompt made from them hits a prefix
cache exactly where the original would have."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from maitred.cli.bench.prompts import PlannedRequest, Vocabulary
from maitred.cli.simulate.sources import read_unpacked
from maitred.errors import ConfigError
from maitred.sim.traces import BLOCK_TOKENS, TraceLine, parse_trace


def read_trace(path: str) -> list[TraceLine]:
    """Sorted by time. Raises ConfigError with the line at fault."""
    try:
        return parse_trace(read_unpacked(path).splitlines(), f"--trace {path}")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}; give a file of JSON lines") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplay:
    """Requests as the trace has them, `rate_scale` times as fast and with all lengths times `length_scale`."""

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
