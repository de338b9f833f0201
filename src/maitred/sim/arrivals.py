"""Arrival times of open-loop requests: a gamma process, which is Poisson at shape 1 and bursty below it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator


def arrival_times(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Seconds since the start, without end. Gaps are gamma: mean 1/rate (s), variance 1/(burstiness * rate**2).

    An infinite `rate` sends everything at once.
    """
    at = 0.0
    while True:
        yield at
        if not math.isinf(rate):
            at += rng.gammavariate(burstiness, 1 / (burstiness * rate))
