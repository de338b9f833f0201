"""Number of replicas that a fleet may have, as a word: `3`, or `0:8`."""

from __future__ import annotations

import re
from typing import NamedTuple

from maitred.core.errors import ConfigError


class Bounds(NamedTuple):
    """Fewest and most replicas."""

    low: int
    high: int

    @classmethod
    def parse(cls, word: str) -> Bounds:
        """Raises ConfigError."""
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", word)
        if found is None:
            raise ConfigError(f"{word!r} is no number of replicas; it must look like 3, or 0:8 for from none to eight")
        low, high = int(found[1]), int(found[2] or found[1])
        if high < max(1, low):
            raise ConfigError(f"{word!r} is no number of replicas; most must be at least 1, and at least the fewest")
        return cls(low, high)
