"""A replica's side of prefix keys: which of them end in KV blocks that can be found, told as the blocks come and go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from maitred.kv.prefix_cache import Changes

MAX_AWAITED = 16 * 1024  # keys whose block is not there: not yet, or no more
MAX_PER_BLOCK = 8  # keys that end in one block; one text has many forms as JSON


class KeyBlock(NamedTuple):
    """A prefix key, and the hash of the last KV block that it determines; None before the first is full."""

    key: int
    block: bytes | None


@dataclass(slots=True, eq=False)
class _Key:
    parent: int | None
    block: bytes | None
    has_block: bool = False
    num_stored: int = 0  # of its children
    num_children: int = 0

    @property
    def is_stored(self) -> bool:
        return self.has_block or self.num_stored > 0


class StoredKeys:
    """A key is stored while its block or that of any key behind it is: so a replica with a key has all keys before it.

    Memory is bounded by the blocks there are and MAX_AWAITED.
    """

    def __init__(self) -> None:
        self._keys: dict[int, _Key] = {}
        self._by_block: dict[bytes, list[int]] = {}
        self._cached: set[bytes] = set()
        self._awaited: OrderedDict[int, None] = OrderedDict()  # the one noted longest ago first
        self._listeners: list[Changes[int]] = []

    def listen(self) -> Changes[int]:
        """Changes from now on, and first all keys stored. End it with `leave`."""
        changes = Changes(key for key, entry in self._keys.items() if entry.is_stored)
        self._listeners.append(changes)
        return changes

    def leave(self, changes: Changes[int]) -> None:
        self._listeners = [each for each in self._listeners if each is not changes]

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    @property
    def stored(self) -> set[int]:
        """All of them; for tests."""
        return {key for key, entry in self._keys.items() if entry.is_stored}

    def note(self, chain: Sequence[KeyBlock]) -> None:
        """The keys of one request, in order. A key that is known and stored stays with the block it has."""
        parent: int | None = None
        for key, block in chain:
            entry = self._keys.get(key)
            if entry is None:
                self._keys[key] = entry = _Key(parent, None)
                if parent is not None:
                    self._keys[parent].num_children += 1
            if entry.block != block and not entry.has_block:
                self._bind(key, entry, block)
            parent = key
        for key, _ in reversed(chain):  # a chain is dropped from its end
            if not self._keys[key].has_block:
                self._await(key)
        self._forget_oldest()

    def blocks_changed(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Blocks `removed` can be found no more, and those `stored` from now on."""
        for block in removed:
            self._cached.discard(block)
            for key in self._by_block.get(block, ()):
                self._lose_block(key)
        for block in stored:
            self._cached.add(block)
            for key in self._by_block.get(block, ()):
                self._gain_block(key)
        self._forget_oldest()

    def forgot(self) -> None:
        """The engine died, and with it all that was cached."""
        self.blocks_changed((), tuple(self._cached))

    # -- a key and its block

    def _bind(self, key: int, entry: _Key, block: bytes | None) -> None:
        self._unbind(key, entry)
        entry.block = block
        if block is None:
            return
        keys = self._by_block.setdefault(block, [])
        keys.append(key)
        if block in self._cached:
            self._gain_block(key)
        if len(keys) > MAX_PER_BLOCK:
            oldest = keys[0]
            self._lose_block(oldest)
            self._unbind(oldest, self._keys[oldest])

    def _unbind(self, key: int, entry: _Key) -> None:
        if entry.block is not None:
            keys = self._by_block[entry.block]
            keys.remove(key)
            if not keys:
                del self._by_block[entry.block]
            entry.block = None

    def _gain_block(self, key: int) -> None:
        entry = self._keys[key]
        if entry.has_block:
            return
        self._awaited.pop(key, None)
        was_stored, entry.has_block = entry.is_stored, True
        if not was_stored:
            self._tell_stored(key, entry)

    def _lose_block(self, key: int) -> None:
        entry = self._keys[key]
        if not entry.has_block:
            return
        entry.has_block = False
        self._await(key)
        if not entry.is_stored:
            self._tell_removed(key, entry)

    def _tell_stored(self, key: int, entry: _Key | None) -> None:
        """Tell listeners of a key, and of those before it that were not stored."""
        while entry is not None:
            for changes in self._listeners:
                changes.stored(key)
            if entry.parent is None:
                return
            key, entry = entry.parent, self._keys[entry.parent]
            entry.num_stored += 1
            if entry.has_block or entry.num_stored > 1:
                return

    def _tell_removed(self, key: int, entry: _Key | None) -> None:
        while entry is not None:
            for changes in self._listeners:
                changes.removed(key)
            if entry.parent is None:
                return
            key, entry = entry.parent, self._keys[entry.parent]
            entry.num_stored -= 1
            if entry.is_stored:
                return

    # -- what is forgotten

    def _await(self, key: int) -> None:
        self._awaited[key] = None
        self._awaited.move_to_end(key)

    def _forget_oldest(self) -> None:
        while len(self._awaited) > MAX_AWAITED:
            key, _ = self._awaited.popitem(last=False)
            self._drop(key)

    def _drop(self, key: int | None) -> None:
        """A key that nothing hangs on, and those before it that nothing hangs on any more."""
        while key is not None:
            entry = self._keys[key]
            if entry.num_children or entry.has_block or key in self._awaited:
                return
            self._unbind(key, entry)
            del self._keys[key]
            key = entry.parent
            if key is not None:
                self._keys[key].num_children -= 1

    def check_invariants(self) -> None:
        """Asserts that every entry says what its block and its children say."""
        for key, entry in self._keys.items():
            children = [each for each in self._keys.values() if each.parent == key]
            assert entry.num_children == len(children)
            assert entry.num_stored == sum(each.is_stored for each in children)
            assert entry.has_block == (entry.block is not None and entry.block in self._cached)
            assert entry.block is None or key in self._by_block[entry.block]
        assert all(not self._keys[key].has_block for key in self._awaited)
