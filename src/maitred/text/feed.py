"""Text that comes in pieces, read by generators that wait for more of it where it does not decide yet.

A reader yields for more text, and reads on when there is more or the end was told. So what it finds depends on the text
alone, never on how it was cut.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Found = TypeVar("_Found")
Reading = Generator[None, None, _Found]
_SPACE = re.compile(r"\s*")
_STOPS = re.compile(r'["{}\[\]]')
_STRING_STOPS = re.compile(r'["\\]')
_PRIMITIVE = re.compile(r"[^\s,{}\[\]\":]*")


@dataclass(slots=True)
class Feed:
    """The text that is not done with."""

    text: str = ""
    ended: bool = False

    def cut(self, at: int) -> str:
        """Takes away, and returns, the text before `at`."""
        before, self.text = self.text[:at], self.text[at:]
        return before


def words(literal: str) -> list[str]:
    """A literal's parts; a model may space them otherwise."""
    return literal.split()


def skip_space(feed: Feed, at: int) -> Reading[int]:
    """Past all white space."""
    while True:
        at = _SPACE.match(feed.text, at).end()  # type: ignore[union-attr]
        if at < len(feed.text) or feed.ended:
            return at
        yield


def skip_words(feed: Feed, at: int, parts: Sequence[str]) -> Reading[int | None]:
    """Past these words and the white space before each; None where other text stands."""
    for part in parts:
        at = yield from skip_space(feed, at)
        while not feed.text.startswith(part, at):
            if feed.ended or not part.startswith(feed.text[at:]):
                return None
            yield
        at += len(part)
    return at


def skip_one(feed: Feed, at: int, characters: str) -> Reading[int | None]:
    """Past white space and one of these characters."""
    at = yield from skip_space(feed, at)
    return at + 1 if feed.text[at : at + 1] in characters and at < len(feed.text) else None


def match(feed: Feed, at: int, pattern: re.Pattern[str]) -> Reading[tuple[str, int]]:
    """Return the pattern's match at `at`, when a character behind it shows that the match is complete."""
    while True:
        end = pattern.match(feed.text, at).end()  # type: ignore[union-attr]
        if end < len(feed.text) or feed.ended:
            return feed.text[at:end], end
        yield


def find(feed: Feed, at: int, parts: Sequence[str]) -> Reading[tuple[int, str] | None]:
    """Return the place of the first of these texts, and which it is; None when the text ends before."""
    pattern = _any_of(tuple(parts))
    longest = max(map(len, parts))
    since = at
    while True:
        found = pattern.search(feed.text, since)
        begun = len(feed.text) if feed.ended or longest == 1 else held_from(feed.text, parts)
        if found is not None and found.start() <= begun:
            return found.start(), found[0]
        if feed.ended:
            return None
        since = begun if found is not None else max(at, len(feed.text) - longest + 1)
        yield


@functools.lru_cache(maxsize=256)
def _any_of(parts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(parts, key=len, reverse=True))))


def held_from(text: str, parts: Sequence[str]) -> int:
    """Return where an end of the text begins that one of the parts may begin with; the text's length for none."""
    found = len(text)
    for part in parts:
        if len(part) == 1:
            continue
        at = text.find(part[0], max(0, len(text) - len(part) + 1))
        while 0 <= at < found:
            if part.startswith(text[at:]):
                found = at
                break
            at = text.find(part[0], at + 1)
    return found


def json_string(feed: Feed, at: int) -> Reading[tuple[str, int] | None]:
    """The JSON string at `at`, decoded; None for none."""
    at = yield from skip_space(feed, at)
    if feed.text[at : at + 1] != '"':
        return None
    scan = at + 1
    while True:
        stop = _STRING_STOPS.search(feed.text, scan)
        if stop is not None and stop[0] == '"':
            try:
                return json.loads(feed.text[at : stop.end()], strict=False), stop.end()
            except ValueError:
                return None
        if stop is not None and stop.end() < len(feed.text):
            scan = stop.end() + 1
            continue
        if feed.ended:
            return None
        scan = stop.start() if stop is not None else len(feed.text)
        yield


def skip_json(feed: Feed, at: int) -> Reading[int | None]:
    """Past one JSON value of any kind; None for what is none."""
    at = yield from skip_space(feed, at)
    first = feed.text[at : at + 1]
    if first == '"':
        found = yield from json_string(feed, at)
        return None if found is None else found[1]
    if first not in ("{", "["):
        text, end = yield from match(feed, at, _PRIMITIVE)
        return end if text else None
    scan = JsonScan()
    while (behind := scan.end_in(feed.text, at)) is None:
        if feed.ended:
            return None
        at = len(feed.text)
        yield
    return behind


def pass_json(feed: Feed, emit: Callable[[str], None], depth: int = 0) -> Reading[None]:
    """Hands on the array or object that the text begins with as it comes, or its rest, `depth` brackets in."""
    scan = JsonScan(depth)
    while (end := scan.end_in(feed.text, 0)) is None:
        emit(feed.cut(len(feed.text)))
        if feed.ended:
            return
        yield
    emit(feed.cut(end))


@dataclass(slots=True)
class JsonScan:
    """Place of a text in JSON: `depth` open brackets, in a string, behind a backslash."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def end_in(self, text: str, at: int) -> int | None:
        """Reads on from `at`; where the last bracket is closed, or None when it is not in `text`."""
        while at < len(text):
            if self.escaped:
                self.escaped = False
                at += 1
                continue
            stop = (_STRING_STOPS if self.in_string else _STOPS).search(text, at)
            if stop is None:
                return None
            at = stop.end()
            self._read(stop[0])
            if self.depth <= 0 and not self.in_string:
                return at
        return None

    def _read(self, character: str) -> None:
        if character == '"':
            self.in_string = not self.in_string
        elif character == "\\":
            self.escaped = True
        else:
            self.depth += 1 if character in "{[" else -1
