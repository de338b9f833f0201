"""Prefix keys: a salted hash chain over the bytes of a prompt as they stand in a request's body; no tokenizer needed.

Equal key means, but for 64-bit collisions, equal prompt up to the end of its piece. A collision sends a request to a
replica that has less of its prefix than was thought, and never shares KV: replicas find that by hashes of tokens.
Source of the hash: XXH3, Collet, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import Raw, UnsetType
from xxhash import xxh3_64_intdigest as hash_of

from maitred.fleet.routed_body import RoutedBody

PIECE_BYTES = 256  # some 64 tokens of English
MAX_KEYS = 4096  # 1 MiB of one text
MAX_LISTED = 64 * 1024  # commas of messages that are still cut apart: so many items take 3 ms

_decode_list = msgspec.json.Decoder(list[Raw]).decode


class PrefixKeys(NamedTuple):
    """A key for each piece of a prompt, in order, and where each piece ends, in bytes of all messages so far."""

    keys: tuple[int, ...]
    ends: tuple[int, ...]


NO_KEYS = PrefixKeys((), ())


def prefix_keys(body: RoutedBody, salt: str = "") -> PrefixKeys:
    """Hash a body's prefixes: at most MAX_KEYS keys of 64 bits, some 3 us for 1 KB. `salt` is the tenant's cache group.

    A key covers salt, model, tools and template variables too, and each piece up to its own. Pieces have PIECE_BYTES,
    the last of a message has what is left, so that a conversation that grows keeps all keys that it had.
    """
    texts = texts_of(body)
    if not texts:
        return NO_KEYS
    key, at = _root(body, salt), 0
    keys: list[int] = []
    ends: list[int] = []
    for text in texts:
        sent = bytes(text)
        for start in range(0, len(sent), PIECE_BYTES):
            piece = sent[start : start + PIECE_BYTES]
            key = hash_of(piece, key)
            keys.append(key)
            at += len(piece)
            ends.append(at)
        if len(keys) >= MAX_KEYS:
            break
    return PrefixKeys(tuple(keys[:MAX_KEYS]), tuple(ends[:MAX_KEYS]))


def texts_of(body: RoutedBody) -> Sequence[Raw]:
    """The JSON of each message, or of the first prompt; one text where the messages are too many to be told apart."""
    if isinstance(body.messages, UnsetType):
        return () if isinstance(body.prompt, UnsetType) else _first_of(body.prompt)
    sent = body.messages
    try:
        return _decode_list(sent) if bytes(sent).count(b",") < MAX_LISTED else (sent,)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return (sent,)


def _first_of(prompt: Raw) -> Sequence[Raw]:
    """The first of prompts in a list, texts or lists of tokens; none where they are too many to be told apart."""
    sent = bytes(prompt)
    if not sent.startswith(b"[") or sent[1:].lstrip()[:1] not in (b'"', b"["):
        return (prompt,)
    try:
        return _decode_list(sent)[:1] if sent.count(b",") < MAX_LISTED else ()
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ()


def _root(body: RoutedBody, salt: str) -> int:
    key = 0
    for text in (salt, body.model, body.cache_salt):
        key = hash_of((text or "").encode(errors="surrogatepass"), key)
    for raw in (body.tools, body.chat_template_kwargs):
        key = hash_of(b"" if isinstance(raw, UnsetType) else bytes(raw), key)
    return key
