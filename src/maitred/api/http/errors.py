"""From our exceptions to HTTP: a status, and OpenAI's error body with its four keys."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from maitred.errors import (
    EngineDead,
    GenerationFailed,
    InsufficientQuota,
    InvalidApiKey,
    MaitredError,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    QueueTimeout,
    RateLimited,
    ReadTooSlowly,
    RequestError,
    RequestTimeout,
    RequestTooLarge,
    RouteNotFound,
    Unavailable,
)

MAX_MESSAGE_CHARS = 1000
CLIENT_GONE_STATUS = 499  # nginx's number for a client that went away; only logs and metrics see it


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


class MethodNotAllowed(RequestError):
    """The path exists, but not with this method; `allow` are those it has."""

    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class UnsupportedMediaType(RequestError):
    """The body is not announced as JSON. Browsers can't announce that across origins without asking first (CORS)."""

    code = "unsupported_media_type"


class RequestTooSlow(RequestError):
    """The rest of the request did not come in time."""

    code = "request_too_slow"


class HeadTooLarge(RequestError):
    """The request line and headers are more than any request needs."""

    code = "head_too_large"


class ErrorObject(msgspec.Struct, frozen=True):
    """What went wrong, as OpenAI's specification has it; all four keys are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


class HttpError(NamedTuple):
    """An error as the wire has it."""

    status: int
    body: ErrorBody
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body)


# The first match counts, so subclasses stand before their bases.
_STATUS: tuple[tuple[type[BaseException], int, str, str | None], ...] = (
    (InvalidApiKey, 401, "authentication_error", None),
    (PermissionDenied, 403, "permission_error", None),
    (InsufficientQuota, 429, "insufficient_quota", None),
    (RateLimited, 429, "rate_limit_error", None),
    (ModelNotFound, 404, "not_found_error", None),
    (RouteNotFound, 404, "not_found_error", None),
    (MethodNotAllowed, 405, "invalid_request_error", None),
    (RequestTooLarge, 413, "invalid_request_error", None),
    (UnsupportedMediaType, 415, "invalid_request_error", None),
    (RequestTooSlow, 408, "invalid_request_error", None),
    (ReadTooSlowly, 408, "invalid_request_error", None),
    (HeadTooLarge, 431, "invalid_request_error", None),
    (RequestError, 400, "invalid_request_error", None),
    (RequestTimeout, 504, "server_error", None),
    (Unavailable, 503, "server_error", "server_unavailable"),
    (EngineDead, 503, "server_error", "engine_dead"),
    (GenerationFailed, 500, "server_error", "generation_failed"),
)


def http_error(error: BaseException) -> HttpError:
    """Status, body and headers for `error`; what we did not raise on purpose tells the client nothing of its inside."""
    for kind, status, error_type, code in _STATUS:
        if isinstance(error, kind):
            return HttpError(status, _body(str(error), error_type, error, code), _headers(error))
    message = str(error) if isinstance(error, MaitredError) else "internal error; the server's log has the cause"
    return HttpError(500, _body(message, "server_error", error, "internal_error"))


def shortened(text: str, limit: int = 200) -> str:
    """`text` as an error may quote it: never more than `limit` characters of what the client sent."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _body(message: str, error_type: str, error: BaseException, code: str | None) -> ErrorBody:
    return ErrorBody(
        ErrorObject(
            message=_printable(shortened(message, MAX_MESSAGE_CHARS)),
            type=error_type,
            param=getattr(error, "param", None),
            code=getattr(error, "code", None) or code,
        )
    )


def _printable(text: str) -> str:
    """A lone surrogate cannot be encoded as UTF-8; show it escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _headers(error: BaseException) -> tuple[tuple[bytes, bytes], ...]:
    if isinstance(error, Overloaded | QueueTimeout):
        return (*_when_to_retry(error.retry_after_s), (b"x-should-retry", b"true"))
    if isinstance(error, RequestTimeout):
        return _when_to_retry(None)
    if isinstance(error, Unavailable):
        return ((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()),)
    if isinstance(error, RateLimited):
        return _when_to_retry(error.retry_after_s)
    if isinstance(error, InvalidApiKey):
        return ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, MethodNotAllowed):
        return ((b"allow", error.allow.encode()),)
    return ()


def _when_to_retry(after_s: float | None) -> tuple[tuple[bytes, bytes], ...]:
    """OpenAI's clients obey the milliseconds first; `x-should-retry: false` keeps them from trying in vain."""
    if after_s is None:
        return ((b"x-should-retry", b"false"),)
    milliseconds = max(1, math.ceil(after_s * 1000))
    return (
        (b"retry-after", str(max(1, math.ceil(after_s))).encode()),
        (b"retry-after-ms", str(milliseconds).encode()),
    )
