"""Items that came and went since last told, net: an item that came and went again is no news."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Changes(Generic[Item]):
    """Bounded by what is held and what was: nothing in it is an event, all is a difference."""

    def __init__(self, held: Iterable[Item] = ()) -> None:
        """`held` is there already, and told first."""
        self._is_stored: dict[Item, bool] = dict.fromkeys(held, True)

    def __len__(self) -> int:
        return len(self._is_stored)

    def stored(self, item: Item) -> None:
        """Note an item that was not there before."""
        self._note(item, True)

    def removed(self, item: Item) -> None:
        """Note an item that was there."""
        self._note(item, False)

    def _note(self, item: Item, is_stored: bool) -> None:
        if self._is_stored.pop(item, is_stored) is is_stored:
            self._is_stored[item] = is_stored

    def take(self, most: int) -> tuple[list[Item], list[Item]]:
        """(stored, removed): up to `most` in all, those that wait for longest, told no more."""
        taken = {item: self._is_stored.pop(item) for item in list(islice(self._is_stored, most))}
        return [item for item, stored in taken.items() if stored], [
            item for item, stored in taken.items() if not stored
        ]
