"""A replica's side of prefix keys: which of them end in KV blocks that can be found, told as the blocks come and go.

The router hashes bytes of JSON, the replica has tokens of a rendered prompt. A message's content is looked for in the
prompt, the end of a piece in the content; what a template made unrecognisable is shared out by proportion.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from maitred.fleet.prefix_keys import PrefixKeys, RoutedBody, texts_of
from maitred.kv.prefix_cache import Changes

LONGEST_ESCAPE = 12  # bytes: \ud83d\ude00
_decode_text = msgspec.json.Decoder(str).decode


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    content: Raw | UnsetType = UNSET


class _Place(NamedTuple):
    """The place of a text in the prompt (bytes), and the part of its JSON that stands there."""

    start: int
    end: int
    sent: bytes  # of the whole message
    content_start: int  # in `sent`
    content: bytes  # JSON between the quotes; empty where only proportion helps
    num_skipped: int = 0  # bytes at the content's beginning that the template took away


_decode_message = msgspec.json.Decoder(_Message).decode
_decode_parts = msgspec.json.Decoder(list[_Part]).decode
_WRONG = (msgspec.DecodeError, ValueError, RecursionError)


def tokens_of_keys(
    body: RoutedBody, found: PrefixKeys, prompt: str | Sequence[int], token_ends: Callable[[], Sequence[int]]
) -> list[int]:
    """Count, for each key, tokens that every prompt with this key begins with, but for the tokenizer's freedom at
    the very end.

    `prompt` is what was tokenised; `token_ends()` where each token ends in its UTF-8, see `ends_of_tokens`.
    """
    texts = texts_of(body)
    if not isinstance(prompt, str):
        sent = bytes(texts[0]) if texts else b""
        return _counted(sent, found.ends)
    ends = token_ends()
    return [_num_tokens(ends, at, is_cut=is_cut) for at, is_cut in _places_of_keys(texts, found, prompt.encode())]


class TokenLengths(dict[int, int]):
    """Bytes of text that each token stands for, as they are asked for; threads may share it."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes

    def __missing__(self, token: int) -> int:
        length = self[token] = len(self._token_bytes(token))
        return length


def ends_of_tokens(prompt: str, token_ids: Sequence[int], lengths: Mapping[int, int]) -> Sequence[int]:
    """Where each token ends in the UTF-8 of `prompt`; scaled where a normaliser made more or less of it.

    A first token that the prompt does not begin with was put there by the tokenizer, and has no bytes.
    """
    each = [lengths[token] for token in token_ids]
    num_bytes, total = len(prompt.encode()), sum(each)
    if each and total - each[0] == num_bytes:
        each[0], total = 0, num_bytes
    ends = list(accumulate(each))
    return ends if total == num_bytes else [end * num_bytes // (total or 1) for end in ends]


def _num_tokens(ends: Sequence[int], at: int, *, is_cut: bool) -> int:
    """Tokens that end there or before. Where a text goes on, its last token could be another with other text behind."""
    return max(0, bisect_right(ends, at) - is_cut)


def _counted(sent: bytes, key_ends: Sequence[int]) -> list[int]:
    """Tokens of a list of token ids: those that a comma ends."""
    numbers = accumulate(sent.count(b",", start, end) for start, end in zip((0, *key_ends), key_ends, strict=False))
    return list(numbers)


def _places_of_keys(texts: Sequence[Raw], found: PrefixKeys, prompt: bytes) -> Iterator[tuple[int, bool]]:
    """(where the key's piece ends in the prompt, whether its text goes on there)."""
    key_ends, number, before = found.ends, 0, 0
    for place in _places(texts, prompt):
        after = before + len(place.sent)
        first = number
        while number < len(key_ends) and key_ends[number] <= after:
            number += 1
        yield from _within(place, [end - before for end in key_ends[first:number]])
        before = after


def _within(place: _Place, piece_ends: Sequence[int]) -> Iterator[tuple[int, bool]]:
    if not place.content:
        length = max(1, len(place.sent))
        for end in piece_ends:
            yield place.start + (place.end - place.start) * end // length, end < length
        return
    content_end = place.content_start + len(place.content)
    read, at = place.content_start, place.start - place.num_skipped
    for end in piece_ends:
        if end > read:
            read, num_bytes = _unescaped(place.sent, read, min(end, content_end))
            at += num_bytes
        yield min(max(at, place.start), place.end), end < content_end


def _unescaped(sent: bytes, start: int, end: int) -> tuple[int, int]:
    """(how far it could be read, how many bytes of text that is): no cut goes through an escape or a character."""
    for stop in range(end, max(start, end - LONGEST_ESCAPE), -1):
        with suppress(*_WRONG):
            return stop, len(_decode_text(b'"' + sent[start:stop] + b'"').encode())
    return start, 0


def _places(texts: Sequence[Raw], prompt: bytes) -> list[_Place]:
    """Places of texts, in order; one that is not found lies between its neighbours."""
    places: list[_Place | bytes] = []
    at = 0
    for text in texts:
        sent = bytes(text)
        place = _find(sent, prompt, at)
        places.append(sent if place is None else place)
        at = at if place is None else place.end
    return _between(places, len(prompt))


def _between(places: Sequence[_Place | bytes], num_bytes: int) -> list[_Place]:
    known: list[_Place] = []
    for number, place in enumerate(places):
        if isinstance(place, _Place):
            known.append(place)
            continue
        start = known[-1].end if known else 0
        rest = places[number:]
        end = next((each.start for each in rest if isinstance(each, _Place)), num_bytes)
        alike = next((i for i, each in enumerate(rest) if isinstance(each, _Place)), len(rest))
        known.append(_Place(start, start + (end - start) // alike, place, 0, b""))
    return known


def _find(sent: bytes, prompt: bytes, at: int) -> _Place | None:
    """The place in `prompt`, from `at` on, of the content of one message, or a prompt."""
    raw = sent if sent.startswith(b'"') else _content_of(sent)
    text = _text_of(raw)
    if text is None:
        return None
    needle = text.strip().encode()  # as many templates do
    start = prompt.find(needle, at)
    if start < 0:
        return None
    if not raw.startswith(b'"'):
        return _Place(start, start + len(needle), sent, 0, b"")
    num_skipped = len(text.encode()) - len(text.lstrip().encode())
    return _Place(start, start + len(needle), sent, sent.index(raw) + 1, raw[1:-1], num_skipped)


def _content_of(sent: bytes) -> bytes:
    with suppress(*_WRONG):
        content = _decode_message(sent).content
        return b"" if isinstance(content, UnsetType) else bytes(content)
    return b""


def _text_of(raw: bytes) -> str | None:
    with suppress(*_WRONG):
        if raw.startswith(b'"'):
            return _decode_text(raw)
        return "\n".join(part.text for part in _decode_parts(raw))
    return None


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
