"""Consistent hashing: a key's replica is the first on a ring of hashed points, so a rescale moves few keys.

Source: Karger et al., STOC 1997; with bounded loads, where a full one is passed over: Mirrokni, Thorup, Zadimoghaddam,
SODA 2018, arXiv:1608.01350. The bound itself is a filter of `balance`, for whatever balance there is.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Container
from hashlib import blake2b

NUM_POINTS = 96  # of a replica of speed 1: shares of the keys differ by some 10 %
MAX_POINTS = 1024


def hash_of(text: str) -> int:
    """64 bits, the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


class HashRing:
    """Names on a ring, each with points in proportion to its weight."""

    def __init__(self) -> None:
        self._points: list[tuple[int, str]] = []
        self._num_points: dict[str, int] = {}

    def set_weights(self, weights: dict[str, float]) -> None:
        """Set the names on the ring; only the points of those that changed move."""
        for name in [name for name in self._num_points if name not in weights]:
            self._set(name, 0)
        for name, weight in weights.items():
            self._set(name, max(1, min(MAX_POINTS, round(NUM_POINTS * weight))))

    def owner(self, key: int, allowed: Container[str]) -> str | None:
        """The first of `allowed` from the key on, 64 bits; None when none of them is on the ring."""
        points = self._points
        start = bisect_right(points, (key, ""))
        for at in range(len(points)):
            name = points[(start + at) % len(points)][1]
            if name in allowed:
                return name
        return None

    def _set(self, name: str, num_points: int) -> None:
        had = self._num_points.get(name, 0)
        if num_points < had:
            kept = {(hash_of(f"{name}#{i}"), name) for i in range(num_points)}
            self._points = [point for point in self._points if point[1] != name or point in kept]
        for i in range(had, num_points):
            insort(self._points, (hash_of(f"{name}#{i}"), name))
        self._num_points[name] = num_points
        if not num_points:
            del self._num_points[name]
