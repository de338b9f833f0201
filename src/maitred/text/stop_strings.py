"""Finds stop strings in a stream of text, across the borders of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """Text that may be shown now, and the stop string that ended it, if any."""

    text: str
    stopped: str | None


class StopStringMatcher:
    """Holds back exactly the longest end of the text that could still become a stop string.

    The first stop string to be complete wins, and the longest of those complete at the same character, so the outcome
    does not depend on how the text was cut into pieces. Time is linear in the text for each stop string
    (Knuth, Morris, Pratt 1977), however long the strings.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = sorted({s for s in stop if s}, key=len, reverse=True)  # the longest is found first
        self._include = include
        self._fallbacks = [_fallback_table(s) for s in self._stop]
        self._matched = [0] * len(self._stop)  # characters of each stop string that end the text so far
        self._first_characters = frozenset(s[0] for s in self._stop)
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str) -> StopResult:
        """Add `text`; once `stopped` is given it stays, and there is no more text."""
        if self._stopped is not None:
            return StopResult("", self._stopped)
        if not self._held and self._first_characters.isdisjoint(text):
            return StopResult(text, None)
        known = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            found = self._advance(character)
            if found is not None:
                self._held, self._stopped = "", found
                return StopResult(known[: end if self._include else end - len(found)], found)
        shown = len(known) - max(self._matched, default=0)
        self._held = known[shown:]
        return StopResult(known[:shown], None)

    def flush(self) -> str:
        """Return the text that was held back, when the text has ended."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stop)
        return held

    def _advance(self, character: str) -> str | None:
        for index, stop in enumerate(self._stop):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = self._fallbacks[index][matched]
            if stop[matched] == character:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop):
                return stop
        return None


def _fallback_table(stop: str) -> list[int]:
    """table[m]: how much of `stop` still matches when the character after its first m does not."""
    table = [0] * (len(stop) + 1)
    matched = 0
    for end in range(1, len(stop)):
        while matched and stop[matched] != stop[end]:
            matched = table[matched]
        if stop[matched] == stop[end]:
            matched += 1
        table[end + 1] = matched
    return table
