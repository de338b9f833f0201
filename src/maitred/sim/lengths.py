"""Lengths in tokens: `128`, `uniform:16,512`, `normal:256,64`, `lognormal:200,0.8`, `zipf:1.2,2048`, `choice:8,64`."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable

from maitred.core.errors import ConfigError

Draw = Callable[[random.Random], int]  # one length, at least 1


def _fixed(length: float) -> Draw:
    return lambda rng: int(length)


def _uniform(low: float, high: float) -> Draw:
    if low > high:
        raise ValueError("the first number is the smaller one")
    return lambda rng: rng.randint(int(low), int(high))


def _normal(mean: float, deviation: float) -> Draw:
    return lambda rng: round(rng.gauss(mean, deviation))


def _lognormal(median: float, sigma: float) -> Draw:
    if median <= 0:
        raise ValueError("the median must be over 0")
    return lambda rng: round(rng.lognormvariate(math.log(median), sigma))


def _zipf(exponent: float, longest: float) -> Draw:
    if not 1 <= longest <= 10_000_000:
        raise ValueError("the longest must be from 1 to 10000000")
    steps = list(itertools.accumulate(k**-exponent for k in range(1, int(longest) + 1)))
    return lambda rng: 1 + bisect.bisect_left(steps, rng.random() * steps[-1])


def _choice(*lengths: float) -> Draw:
    return lambda rng: int(rng.choice(lengths))


# name -> (how to write its numbers, how many or None for any, maker)
DISTRIBUTIONS: dict[str, tuple[str, int | None, Callable[..., Draw]]] = {
    "uniform": ("uniform:LOW,HIGH", 2, _uniform),
    "normal": ("normal:MEAN,DEVIATION", 2, _normal),
    "lognormal": ("lognormal:MEDIAN,SIGMA", 2, _lognormal),
    "zipf": ("zipf:EXPONENT,LONGEST", 2, _zipf),
    "choice": ("choice:A,B,...", None, _choice),
}


def parse_length(text: str, flag: str) -> Draw:
    """Raises ConfigError that lists the forms; `flag` names the culprit."""
    name, colon, rest = text.partition(":")
    try:
        if not colon:
            return _at_least_one(_fixed(_positive(name)))
        form, count, make = DISTRIBUTIONS[name]
        numbers = [_positive(word) for word in rest.split(",")]
        if count is not None and len(numbers) != count:
            raise ValueError(f"write {form}")
        return _at_least_one(make(*numbers))
    except (KeyError, ValueError) as error:
        forms = ", ".join(["N", *(form for form, _, _ in DISTRIBUTIONS.values())])
        cause = f" ({error})" if isinstance(error, ValueError) else ""
        raise ConfigError(f"{flag} is {text!r}{cause}; write tokens as one of {forms}") from None


def _positive(word: str) -> float:
    value = float(word)
    if not 0 < value < math.inf:
        raise ValueError(f"{word} is not over 0")
    return value


def _at_least_one(draw: Draw) -> Draw:
    return lambda rng: max(1, draw(rng))
