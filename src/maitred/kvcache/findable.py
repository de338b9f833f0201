"""Findable blocks, by their hashes: blocks that an engine need not compute, in its pool or in a tier with an index."""

from __future__ import annotations

from itertools import chain
from typing import Protocol

from maitred.kvcache.changes import Changes
from maitred.kvcache.manager import KVCacheManager
from maitred.kvcache.tiers import KVTier


class _TellsChanges(Protocol):
    @property
    def changes(self) -> Changes[bytes] | None: ...

    def tell_changes(self, wanted: bool) -> None: ...


class FindableBlocks:
    """Changes of findable blocks, for the choice of an engine: a block in both places is told once. For one thread."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._tiers: list[KVTier] = []
        self._sources: list[_TellsChanges] = [kv_cache]
        self._told: set[bytes] = set()

    def __len__(self) -> int:
        """Hashes that may be news."""
        return sum(map(len, self._changes()))

    def add(self, tier: KVTier) -> None:
        """Add a source before changes are told."""
        self._tiers.append(tier)
        self._sources.append(tier)

    def tell_changes(self, wanted: bool) -> None:
        """Begin or end telling changes. The blocks that can be found now are told first."""
        self._told.clear()
        for source in self._sources:
            source.tell_changes(wanted)

    def take(self, most: int) -> tuple[list[bytes], list[bytes]]:
        """Return the changes as `Changes.take` does."""
        changed: list[bytes] = []
        for changes in self._changes():
            changed += chain(*changes.take(most - len(changed)))
        there = {digest: self._is_there(digest) for digest in changed}
        stored = [digest for digest, is_there in there.items() if is_there and digest not in self._told]
        removed = [digest for digest, is_there in there.items() if not is_there and digest in self._told]
        self._told.update(stored)
        self._told.difference_update(removed)
        return stored, removed

    def _changes(self) -> list[Changes[bytes]]:
        return [source.changes for source in self._sources if source.changes is not None]

    def _is_there(self, digest: bytes) -> bool:
        """Now, whatever was noted; what changes after this is noted anew. In a tier that would tell when it goes."""
        tiers = (tier for tier in self._tiers if tier.changes is not None)
        return self._kv_cache.has_block(digest) or any(tier.num_known([digest]) for tier in tiers)
