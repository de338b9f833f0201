"""Does the time to refuse a wrong key tell how much of it is right?"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator

from edge.witness import Line

from maitred.tenancy.keys import Key, KeyRing, digest_of

SECRET_BYTES = 32


def key_timing(num_samples: int) -> Iterator[Line]:
    """Wrong keys that share 0 to 31 leading bytes with the right one: does the time rise or fall with how many?

    The same of a comparison that leaves at the first wrong byte, to show that it would be seen.
    """
    secret = b"k" * SECRET_BYTES
    ring = KeyRing([Key(id="a", tenant="t", digest=digest_of(secret), admin=False)])

    def leaves_early(sent: bytes) -> bool:
        return all(one == other for one, other in zip(sent, secret, strict=True))

    slope, error = trend_of_time(ring.find, secret, num_samples)
    figures = f"{slope:+.3f} ns for each byte, standard error {error:.3f}, t = {slope / error:.2f}"
    yield Line(f"{num_samples} wrong keys, 0 to 31 of 32 bytes right", figures, abs(slope / error) < 4.5)
    slope, error = trend_of_time(leaves_early, secret, num_samples // 10)
    figures = f"{slope:+.1f} ns for each byte, t = {slope / error:.0f}: it would be seen"
    yield Line(f"{num_samples // 10} of them, by a comparison that leaves early", figures, slope / error > 4.5)


def trend_of_time(find: Callable[[bytes], object], secret: bytes, num_samples: int) -> tuple[float, float]:
    """Slope, in ns for each leading byte that is right, of the line through all times, and its standard error.

    Keys come in random order, all made alike and before any is sent, so that nothing but the likeness differs (making
    one between two measurements showed as 1.6 ns for each byte). Of each number of bytes
    the slowest twentieth is left out: those are the machine's other work.
    """
    chooser = random.Random(5)
    samples: list[list[float]] = [[] for _ in range(len(secret))]
    keys: list[tuple[int, bytes]] = []
    for _ in range(num_samples):
        shared, noise = chooser.randrange(len(secret)), bytes(chooser.choices(b"abcdefghij", k=len(secret)))
        keys.append((shared, bytes((*secret[:shared], *noise[shared:]))))
    for shared, wrong in keys:
        began = time.perf_counter_ns()
        find(wrong)
        samples[shared].append(float(time.perf_counter_ns() - began))
    points = [(float(shared), ns) for shared, all_ns in enumerate(samples) for ns in quickest(all_ns)]
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*points, strict=True))
    spread_x = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread_x
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points) / (len(points) - 2)
    return slope, math.sqrt(rest / spread_x)


def quickest(all_ns: list[float]) -> list[float]:
    return sorted(all_ns)[: int(len(all_ns) * 0.95)]
