"""Result cache: answers that would be the same again, by tenant, model revision and whole body. Pure.

Only what is exact is kept: temperature 0 or a seed. Least recently used goes first, nothing outlives its time to live.
What a client says of it by `Cache-Control` is RFC 9111, section 5.2.1.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from hashlib import blake2b, sha256
from typing import NamedTuple

import msgspec

MAX_SHARE = 8  # an answer larger than an eighth of the cache would push out too many others
ENTRY_BYTES = 512  # of an entry besides its answer: key, dict, objects
FORMAT = b"maitred2"
CHECKSUM_BYTES = 16
MAX_AGE_S = 2**31  # more says nothing; RFC 9111, section 1.2.2
_COMMENT = re.compile(rb"(?m)^:[^\n]*\n")
_GAP = re.compile(rb"\n{3,}")


class CacheControl(NamedTuple):
    """Limits that a request sets. An answer of the cache is at most `max_age_s` old."""

    no_store: bool = False  # nothing of it is kept
    max_age_s: float | None = None  # 0 is no-cache: it is computed again, and kept


class CachedAnswer(NamedTuple):
    """A complete answer with status 200, byte by byte; a stream's events, and what ends it."""

    content_type: bytes
    body: bytes
    stored_at: float  # s
    told: tuple[tuple[bytes, bytes], ...] = ()  # headers that say something of the request


def is_exact(temperature: float | None, seed: int | None) -> bool:
    """Whether the same request has the same answer. A temperature that was not named is the model's own."""
    return temperature == 0 or seed is not None


def result_key(body: bytes, *, path: str, tenant: str, revision: str) -> bytes:
    """32 bytes. Whatever else may change an answer (the model's identity, a tenant's terms) belongs into `revision`."""
    digest = sha256()
    for part in (FORMAT, path.encode(), tenant.encode("utf-8", "surrogatepass"), revision.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(body)
    return digest.digest()


def cache_control(sent: bytes | None) -> CacheControl:
    """Parse a request's Cache-Control header; unknown directives are ignored, as the RFC wants."""
    if not sent:
        return CacheControl()
    no_store, max_age_s = False, None
    for directive in sent.decode("latin-1").lower().split(","):
        name, _, value = (part.strip() for part in directive.partition("="))
        if name == "no-store":
            no_store = True
        elif name == "no-cache":
            max_age_s = 0.0
        elif name == "max-age":
            max_age_s = min(_seconds(value), MAX_AGE_S if max_age_s is None else max_age_s)
    return CacheControl(no_store, max_age_s)


def _seconds(value: str) -> float:
    """Seconds; any text that is no number makes the answer stale: section 4.2.1."""
    text = value.strip('"')
    return float(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0.0


def without_comments(events: bytes) -> bytes:
    """Events without the comments between and in them: keep-alives, and what was for a router alone."""
    if not events.startswith(b":") and b"\n:" not in events:
        return events
    return _GAP.sub(b"\n\n", _COMMENT.sub(b"", events)).lstrip(b"\n")


class ResultCache:
    """Answers in memory, `max_bytes` in all; 0 keeps none."""

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        self.max_bytes, self.ttl_s = max_bytes, ttl_s
        self.num_bytes = 0
        self._answers: OrderedDict[bytes, CachedAnswer] = OrderedDict()  # the least recently used first

    @property
    def max_answer_bytes(self) -> int:
        return max(0, self.max_bytes // MAX_SHARE - ENTRY_BYTES)

    def find(self, key: bytes, now: float) -> CachedAnswer | None:
        """Return an answer that is not older than `ttl_s`."""
        answer = self._answers.get(key)
        if answer is None:
            return None
        if now - answer.stored_at >= self.ttl_s:
            self.drop(key)
            return None
        self._answers.move_to_end(key)
        return answer

    def keep(self, key: bytes, answer: CachedAnswer) -> None:
        """Store an answer, unless it is larger than `max_answer_bytes`."""
        self.drop(key)
        if len(answer.body) > self.max_answer_bytes:
            return
        self._answers[key] = answer
        self.num_bytes += _size(answer)
        while self.num_bytes > self.max_bytes:
            self.drop(next(iter(self._answers)))

    def drop(self, key: bytes) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self.num_bytes -= _size(answer)

    def drop_all(self, prefix: bytes) -> None:
        """Drop the answers whose keys begin so."""
        for key in [key for key in self._answers if key.startswith(prefix)]:
            self.drop(key)

    def __len__(self) -> int:
        return len(self._answers)

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls; slow."""
        assert self.num_bytes == sum(map(_size, self._answers.values())) <= self.max_bytes


def _size(answer: CachedAnswer) -> int:
    return len(answer.body) + ENTRY_BYTES


def is_fresh(answer: CachedAnswer, control: CacheControl, now: float) -> bool:
    """Whether the answer is new enough for this request."""
    return control.max_age_s is None or now - answer.stored_at < control.max_age_s


# ---- as others keep it

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, bytes, float, tuple[tuple[bytes, bytes], ...]]).decode


def packed(key: bytes, answer: CachedAnswer, unix_now: float, now: float) -> bytes:
    """Format, checksum, content type, body, time, headers. The key is in the checksum, so that it fits no other."""
    content = _encode((answer.content_type, answer.body, unix_now - (now - answer.stored_at), answer.told))
    return FORMAT + _checksum(key, content) + content


def unpacked(key: bytes, sent: bytes, unix_now: float, now: float) -> CachedAnswer | None:
    """None is what was damaged on its way, or is none of ours."""
    begin = len(FORMAT) + CHECKSUM_BYTES
    content = sent[begin:]
    if not sent.startswith(FORMAT) or sent[len(FORMAT) : begin] != _checksum(key, content):
        return None
    try:
        content_type, body, stored_at, told = _decode(content)
    except (msgspec.DecodeError, ValueError):
        return None
    return CachedAnswer(content_type, body, now - max(0.0, unix_now - stored_at), told)


def _checksum(key: bytes, content: bytes) -> bytes:
    return blake2b(content, digest_size=CHECKSUM_BYTES, key=key).digest()
