"""Blocks that came to a tier and went: noted by its threads, under its lock, and taken by an engine's."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice

from maitred.kv.changes import Changes

MAX_HELD = 2**18  # told of what was there before changes were wanted


class SharedChanges(Changes[bytes]):
    """`Changes` of any thread; of what is `held`, the first so many."""

    def __init__(self, held: Iterable[bytes] = ()) -> None:
        super().__init__(islice(held, MAX_HELD))
        self._lock = threading.Lock()

    def all_stored(self, items: Iterable[bytes]) -> None:
        for item in items:
            self.stored(item)

    def _note(self, item: bytes, is_stored: bool) -> None:
        with self._lock:
            super()._note(item, is_stored)

    def take(self, most: int) -> tuple[list[bytes], list[bytes]]:
        with self._lock:
            return super().take(most)
