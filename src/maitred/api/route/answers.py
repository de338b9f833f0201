"""Facts read from a replica's answer: failure or not, usage, where its events end. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from maitred.api.http.results import HEADER as CACHE
from maitred.fleet.fleet_request import Failure, FailureKind, Usage
from maitred.fleet.told_tokens import MAX_COUNT, BrokenFrame, ToldUsage, usage_in
from maitred.fleet.upstream import Answer

RETRIED = (500, 502, 503)  # others are the request's own doing: 501 never works, 504 was its time limit
MAX_RETRY_AFTER_S = 60.0
MAX_EVENT_BYTES = 4 * 1024 * 1024
_DONE = b"[DONE]"
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class _Foreign(msgspec.Struct):
    """Fields read of a foreign server's answer or event, whatever they hold."""

    usage: Any = None
    choices: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Foreign).decode


def failure(answer: Answer, *, is_ours: bool) -> Failure | None:
    """Why another replica should be asked; None is an answer for the client. 503 with Retry-After is full; 429 of one
    of ours is the tenant's own limit.
    """
    if answer.status == 429 and not is_ours:
        return Failure(FailureKind.LIMITED, message="status 429")
    if answer.status not in RETRIED:
        return None
    if answer.status == 503:
        after = next((value for name, value in answer.headers if name == b"retry-after"), None)
        if after is not None:
            return Failure(FailureKind.FULL, retry_after_s=_seconds(after))
    return Failure(FailureKind.ERROR, message=f"status {answer.status}")


def _seconds(value: bytes) -> float:
    """Seconds of a Retry-After; a date, or nonsense, is taken for one second."""
    text = value.strip()
    return min(float(text), MAX_RETRY_AFTER_S) if text.isdigit() and len(text) < 8 else 1.0


def is_stream(answer: Answer) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in answer.headers)


class ForeignStream:
    """Cuts a stream of a server that tells no tokens into whole events, and reads its end and its usage in them."""

    __slots__ = ("_num_finished", "_rest", "_usage", "has_answer", "is_done", "is_error")

    def __init__(self) -> None:
        self.has_answer = self.is_done = self.is_error = False  # by its events so far
        self._rest = b""  # begins an event
        self._num_finished = 0  # choices
        self._usage: Any = None

    def feed(self, piece: bytes) -> bytes:
        """The events that are whole now. Raises BrokenFrame when the first is no JSON, or too long to wait for."""
        data, start = self._rest + piece, 0
        for end in _EVENT_END.finditer(data):
            try:
                self._read(data[start : end.start()])
            except BrokenFrame:
                if start == 0:
                    raise
                break  # what came before is the client's; the next call raises it again
            start = end.end()
        self._rest = data[start:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BrokenFrame(f"an event has over {MAX_EVENT_BYTES} bytes")
        return data[:start]

    def has_ended(self, num_choices: int) -> bool:
        """Whether the client has all of the answer, were this the end."""
        is_done = self.is_done or self._rest.strip() == b"data: " + _DONE
        return is_done or self.is_error or self._num_finished >= num_choices

    def usage(self, num_tokens: int) -> Usage:
        """Usage as the stream told it, else as many tokens as events were counted."""
        return _told(self._usage, num_tokens)

    def _read(self, event: bytes) -> None:
        data = b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:")).strip()
        if not data or data == _DONE:  # or a comment
            self.is_done |= bool(data)
            return
        try:
            told = _decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BrokenFrame(f"an event is no JSON: {error}") from None
        self.is_error |= told.error is not None
        self.has_answer |= told.error is None
        self._usage = told.usage or self._usage
        for choice in told.choices if isinstance(told.choices, list) else ():
            self._num_finished += isinstance(choice, Mapping) and choice.get("finish_reason") is not None


def message_of(body: bytes) -> str:
    """The message of an error body, at most a line of it."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return body[:200].decode("utf-8", "replace").strip()
    for key in ("error", "message", "detail"):
        if isinstance(found, Mapping) and key in found:
            found = found[key]
    return str(found)[:200]


def read_whole(answer: Answer, body: bytes) -> Usage:
    """Usage of a foreign server's answer as one JSON object. Raises BrokenFrame where it is cut, or is an error for all
    that its status says.
    """
    if not any(name == b"content-type" and value.startswith(b"application/json") for name, value in answer.headers):
        return Usage()
    try:
        told = _decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BrokenFrame(f"no JSON: {error}") from None
    if told.error is not None and told.choices is None:
        raise BrokenFrame(f"an error with status 200: {message_of(body)}")
    return _told(told.usage, None)


def _told(usage: Any, num_tokens: int | None) -> Usage:
    """Fields that are no number of tokens count as not told; without output tokens there are `num_tokens`."""
    if not isinstance(usage, Mapping):
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
    return Usage(told.num_prompt_tokens, told.num_output_tokens, told.num_cached_tokens, complete, told.compute_us)


def cost_told(answer: Answer, *, is_ours: bool) -> Usage | None:
    """Cost by the head of our own replica's answer: nothing, where its result cache had it."""
    if not is_ours:
        return None
    if (CACHE, b"hit") in answer.headers:
        return Usage(0, 0, 0)
    told = usage_in(answer.headers)
    return None if told is None else as_usage(told)
