"""How many tokens of a prompt each of its prefix keys determines, found from texts alone.

The router hashes bytes of JSON, the replica has tokens of a rendered prompt. A message's content is looked for in the
prompt, the end of a piece in the content; what a template made unrecognisable is shared out by proportion.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from maitred.fleet.prefix_keys import PrefixKeys, texts_of
from maitred.fleet.routed_body import RoutedBody

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
