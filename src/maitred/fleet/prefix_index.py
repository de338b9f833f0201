"""Which replica has which prefix: for each key, the replicas that hold it, as bits of one integer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Hit(NamedTuple):
    """The replicas (bits) that hold just the first `num_keys` keys of a request."""

    num_keys: int
    replicas: int


class PrefixIndex:
    """Takes some 150 B for a key that one replica holds, 330 B for one that two hold.

    A replica that holds a key holds those before it in the chain, which replicas and `ForeignHistory` see to; so a
    look-up is a binary search, not a walk: in an index of a million keys each look at one is a cache miss.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, int] = {}  # key -> bits
        self._keys: dict[int, set[int]] = {}  # bit number -> its keys

    @property
    def num_keys(self) -> int:
        """Different ones."""
        return len(self._replicas)

    def num_keys_of(self, bit: int) -> int:
        return len(self._keys.get(bit, ()))

    def holders(self, key: int) -> int:
        """Replicas that hold the key, as bits."""
        return self._replicas.get(key, 0)

    def hits(self, keys: Sequence[int], mask: int) -> list[Hit]:
        """How many of the first `keys` each replica in `mask` (bits) has: deepest first, without those that have none.

        Looks at about log2(len(keys)) keys for each hit that it finds.
        """
        found: list[Hit] = []
        ranges = [(0, len(keys), mask)]  # each of these replicas has at least so many keys, and at most so many
        holders = self._replicas.get
        while ranges:
            low, high, replicas = ranges.pop()
            while low < high:
                middle = (low + high + 1) >> 1
                deeper = holders(keys[middle - 1], 0) & replicas
                if not deeper:
                    high = middle - 1
                    continue
                if deeper != replicas:
                    ranges.append((low, middle - 1, replicas ^ deeper))
                low, replicas = middle, deeper
            if low and replicas:
                found.append(Hit(low, replicas))
        return found

    def stored(self, bit: int, keys: Iterable[int]) -> None:
        """Replica number `bit` holds these from now on, if it did not."""
        replicas, flag = self._replicas, 1 << bit
        own = self._keys.setdefault(bit, set())
        for key in keys:
            replicas[key] = replicas.get(key, 0) | flag
            own.add(key)

    def removed(self, bit: int, keys: Iterable[int]) -> None:
        """The replica holds these keys no more."""
        own = self._keys.get(bit, set())
        for key in keys:
            if key in own:
                own.discard(key)
                self._take_from(key, 1 << bit)

    def forgot(self, bit: int) -> None:
        """The replica holds nothing; takes some 0.2 us for each key that it held."""
        for key in self._keys.pop(bit, ()):
            self._take_from(key, 1 << bit)

    def _take_from(self, key: int, flag: int) -> None:
        left = self._replicas[key] & ~flag
        if left:
            self._replicas[key] = left
        else:
            del self._replicas[key]

    def check_invariants(self) -> None:
        """Asserts that both directions agree."""
        by_key: dict[int, int] = {}
        for bit, keys in self._keys.items():
            for key in keys:
                by_key[key] = by_key.get(key, 0) | 1 << bit
        assert by_key == self._replicas
