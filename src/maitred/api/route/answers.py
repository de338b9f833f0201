"""What a replica's answer says besides its bytes: failure or not, usage, where its events end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from maitred.api.http.results import HEADER as CACHE
from maitred.cluster.fleet_request import Failure, FailureKind, Usage
from maitred.cluster.told_tokens import MAX_COUNT, ToldUsage, usage_in
from maitred.cluster.upstream import Answer

RETRIED = (500, 502, 503)  # others are the request's own doing: 501 never works, 504 was its time limit
MAX_RETRY_AFTER_S = 60.0
MAX_EVENT_BYTES = 1024 * 1024  # what is no whole event and longer is passed on as it is
_USAGE = b'"usage":'


class _HasUsage(msgspec.Struct):
    usage: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_HasUsage).decode


def failure(answer: Answer) -> Failure | None:
    """Why another replica should be asked; None is an answer for the client. 503 with Retry-After is full."""
    if answer.status not in RETRIED:
        return None
    if answer.status == 503:
        after = next((value for name, value in answer.headers if name == b"retry-after"), None)
        if after is not None:
            return Failure(FailureKind.FULL, retry_after_s=_seconds(after))
    return Failure(FailureKind.ERROR, message=f"status {answer.status}")


def _seconds(value: bytes) -> float:
    """Of a Retry-After; a date, or nonsense, is taken for a second."""
    text = value.strip()
    return min(float(text), MAX_RETRY_AFTER_S) if text.isdigit() and len(text) < 8 else 1.0


def is_stream(answer: Answer) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in answer.headers)


class WholeEvents:
    """Cuts a stream of a server that tells no tokens into whole events."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest = b""  # begins an event

    def feed(self, piece: bytes) -> bytes:
        """What the client gets now."""
        whole, self.rest = whole_events(self.rest + piece if self.rest else piece)
        return whole


def message_of(body: bytes) -> str:
    """What an error says, at most a line of it."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return body[:200].decode("utf-8", "replace").strip()
    for key in ("error", "message", "detail"):
        if isinstance(found, Mapping) and key in found:
            found = found[key]
    return str(found)[:200]


def whole_events(piece: bytes) -> tuple[bytes, bytes]:
    """What of it is whole events, and what begins one."""
    if piece.endswith((b"\n\n", b"\r\n\r\n")):
        return piece, b""
    end = max(piece.rfind(b"\n\n") + 2, piece.rfind(b"\r\n\r\n") + 4)
    if end < 4:  # none
        return (b"", piece) if len(piece) < MAX_EVENT_BYTES else (piece, b"")
    return piece[:end], piece[end:]


def usage_of_whole(body: bytes) -> Usage:
    """Of an answer as one JSON object; nothing where there is none."""
    try:
        return _told(_decode(body).usage, None)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return Usage()


def usage_of_stream(last_events: bytes, num_tokens: int) -> Usage:
    """Of a stream's last piece, where its usage is if it was asked for; else as many tokens as events were counted."""
    at = last_events.rfind(_USAGE)
    begin = last_events.rfind(b"data: ", 0, at) if at >= 0 else -1
    if begin < 0:
        return Usage(num_output_tokens=num_tokens)
    line = last_events[begin + 6 :].split(b"\n", 1)[0]
    try:
        return _told(_decode(line).usage, num_tokens)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return Usage(num_output_tokens=num_tokens)


def _told(usage: Mapping[str, Any] | None, num_tokens: int | None) -> Usage:
    """Fields that are no number of tokens count as not told; without output tokens there are `num_tokens`."""
    if usage is None:
        return Usage(num_output_tokens=num_tokens)
    details = usage.get("prompt_tokens_details")
    prompt, output = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
    if cached is not None:
        cached = min(cached, prompt or 0)
    return Usage(prompt, num_tokens if output is None else output, cached)


def _count(told: object) -> int | None:
    return int(told) if type(told) in (int, float) and 0 <= told <= MAX_COUNT else None  # type: ignore[call-overload,operator]


def as_usage(told: ToldUsage, *, complete: bool = True) -> Usage:
    return Usage(told.num_prompt_tokens, told.num_output_tokens, told.num_cached_tokens, complete)


def cost_told(answer: Answer, *, is_ours: bool) -> Usage | None:
    """As the head of an answer of ours tells it: nothing, where its result cache had it."""
    if not is_ours:
        return None
    if (CACHE, b"hit") in answer.headers:
        return Usage(0, 0, 0)
    told = usage_in(answer.headers)
    return None if told is None else as_usage(told)
