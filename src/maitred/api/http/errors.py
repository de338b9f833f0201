"""Convert our exceptions to HTTP: status, headers, and what every dialect's error body says in its own way."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from maitred.core import errors

MAX_MESSAGE_CHARS = 1000
MAX_NAMES = 20  # in an error
CLIENT_GONE_STATUS = 499  # nginx's number for a client that went away; only logs and metrics see it


class ClientGone(Exception):
    """The client closed the connection; no answer can be sent."""


class BrokenOff(errors.Unavailable):
    """The answer stops in the middle, without an end: a router goes on with it elsewhere."""


class ReplicaFailed(errors.ServerError):
    """A replica gave no answer that a client can have, and no other replica may go on with the request."""


class MethodNotAllowed(errors.RequestError):
    """The path exists, but not with this method; `allow` are those it has."""

    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class UnsupportedMediaType(errors.RequestError):
    """The body is not announced as JSON. Browsers can't announce that across origins without asking first (CORS)."""

    code = "unsupported_media_type"


class RequestTooSlow(errors.RequestError):
    """The rest of the request did not come in time."""

    code = "request_too_slow"


class HeadTooLarge(errors.RequestError):
    """The request line and headers are more than any request needs."""

    code = "head_too_large"


class HttpError(NamedTuple):
    """An error before it is written; `AnswerFormat` makes a body of it."""

    status: int
    message: str
    param: str | None  # the field at fault
    code: str | None  # names the fault, for programs
    headers: tuple[tuple[bytes, bytes], ...] = ()
    request_id: str = ""


# The first match counts, so subclasses stand before their bases.
_STATUS: tuple[tuple[type[BaseException], int, str | None], ...] = (
    (errors.InvalidApiKey, 401, None),
    (errors.PermissionDenied, 403, None),
    (errors.RateLimited, 429, None),
    (errors.ModelNotFound, 404, None),
    (errors.RouteNotFound, 404, None),
    (errors.RegionNotFound, 404, None),
    (MethodNotAllowed, 405, None),
    (errors.CannotResume, 409, None),
    (errors.RequestTooLarge, 413, None),
    (UnsupportedMediaType, 415, None),
    (RequestTooSlow, 408, None),
    (errors.ReadTooSlowly, 408, None),
    (HeadTooLarge, 431, None),
    (errors.RequestError, 400, None),
    (errors.RequestTimeout, 504, None),
    (errors.Unavailable, 503, "server_unavailable"),
    (errors.EngineDead, 503, "engine_dead"),
    (ReplicaFailed, 502, "bad_gateway"),
    (errors.GenerationFailed, 500, "generation_failed"),
)


def http_error(error: BaseException, names: Mapping[str, str] | None = None) -> HttpError:
    """Status, text and headers for `error`; what we did not raise on purpose tells the client nothing of its inside.

    `names` are those of the client's fields, see `renamed`.
    """
    status, code = next((entry[1:] for entry in _STATUS if isinstance(error, entry[0])), (500, "internal_error"))
    message = str(error) if isinstance(error, errors.MaitredError) else "internal error; the server's log has the cause"
    message, param = shortened(message, MAX_MESSAGE_CHARS), getattr(error, "param", None)
    if names and isinstance(error, errors.RequestError):
        message, param = renamed(message, names), param and renamed(param, names)
    return HttpError(
        status,
        _printable(message),
        param,
        getattr(error, "code", None) or code,
        _headers(error),
    )


def renamed(text: str, names: Mapping[str, str]) -> str:
    """`text`, an error's or a field's path, with the client's `names` of fields, by ours, in their place; a name that
    may be a word of a sentence counts at the beginning alone.
    """
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    ours = re.compile(rf"""(?<![\w.'"])(?:{known})(?!\w)""")
    return ours.sub(lambda of: of[0] if of.start() and of[0].isalpha() else names[of[0]], text) if names else text


def shortened(text: str, limit: int = 200) -> str:
    """`text` as an error may quote it: never more than `limit` characters of what the client sent."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def told_names(names: Sequence[str]) -> str:
    """A list for an error: the first `MAX_NAMES`, and how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _printable(text: str) -> str:
    """A lone surrogate cannot be encoded as UTF-8; show it escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _headers(error: BaseException) -> tuple[tuple[bytes, bytes], ...]:
    if isinstance(error, errors.Overloaded | errors.QueueTimeout):
        return (*_when_to_retry(error.retry_after_s), (b"x-should-retry", b"true"))
    if isinstance(error, errors.RequestTimeout):
        return _when_to_retry(None)
    if isinstance(error, errors.Unavailable):
        return ((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()),)
    if isinstance(error, errors.RateLimited):
        return _when_to_retry(error.retry_after_s)
    if isinstance(error, errors.InvalidApiKey):
        return ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, MethodNotAllowed):
        return ((b"allow", error.allow.encode()),)
    return ()


def _when_to_retry(after_s: float | None) -> tuple[tuple[bytes, bytes], ...]:
    """OpenAI's clients obey the milliseconds first; `x-should-retry: false` keeps them from trying in vain."""
    if after_s is None:
        return ((b"x-should-retry", b"false"),)
    milliseconds = max(1, math.ceil(after_s * 1000))
    return ((b"retry-after", str(max(1, math.ceil(after_s))).encode()), (b"retry-after-ms", str(milliseconds).encode()))
