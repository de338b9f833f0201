"""Lines of a batch, in OpenAI's form: what is asked, every slip as an answerable error, and what is answered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

RETRIED = frozenset((429, 503, 529))  # "not now": asked again, so that a full queue costs no line its answer
MAX_WAIT_S = 30.0
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BatchRequest(NamedTuple):
    """What one line asks."""

    custom_id: str
    url: str
    body: bytes  # JSON


class BadLine(Exception):
    """A line that cannot be asked; becomes its own error line."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_line(text: bytes, number: int, urls: Collection[str]) -> BatchRequest:
    """What line `number` (from 1) asks, at one of `urls`; its body stays as it is. Raises BadLine."""
    where = f"line {number}"
    try:
        found = _FIELDS.decode(text)
        custom_id, method, url = (_value(found, name) for name in ("custom_id", "method", "url"))
        body = bytes(found.get("body", b""))
        fields = _FIELDS.decode(body) if body[:1] == b"{" else None
    except msgspec.ValidationError:
        raise BadLine("invalid_json_line", f"{where} is not a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"{where} is not valid JSON: {error}") from None
    if not isinstance(custom_id, str):
        raise BadLine("missing_custom_id", f"{where} has no custom_id that is a string")
    if "method" in found and method != "POST":
        raise BadLine("invalid_method", f"{where}: method is {method!r}; it must be POST")
    if not isinstance(url, str) or url not in urls:
        raise BadLine("invalid_url", f"{where}: url is {url!r}; it must be one of {', '.join(urls)}")
    if fields is None:
        raise BadLine("invalid_body", f"{where}: body is not a JSON object")
    for name in ("stream", "background"):
        if bytes(fields.get(name, b"")) not in (b"", b"false", b"null"):
            raise BadLine("invalid_body", f"{where}: a batch cannot {name}; leave `{name}` out")
    return BatchRequest(custom_id, url, body)


def _value(found: Mapping[str, msgspec.Raw], name: str) -> object:
    return msgspec.json.decode(found[name]) if name in found else None


def answer_id(number: int) -> str:
    """The `id` of an answer: the same in every run of the same file."""
    return f"batch_req_line_{number}"


def answer_line(number: int, custom_id: str | None, status: int, request_id: str, body: object) -> bytes:
    """Line of an answer, whatever its status."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(number, custom_id, response, None)


def error_line(number: int, custom_id: str | None, error: BadLine) -> bytes:
    """Line of what was not answered."""
    return _line(number, custom_id, None, {"code": error.code, "message": str(error)})


def _line(number: int, custom_id: str | None, response: object, error: object) -> bytes:
    answer = {"id": answer_id(number), "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(answer) + b"\n"


def told_body(body: bytes) -> object:
    """JSON as JSON; what is none (a proxy's page) as text, so that the output stays readable."""
    try:
        found: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode("utf-8", "replace")
    return found


def wait_s(retry_after: str | None, attempt: int) -> float:
    """Seconds to wait: as the server asks, else half a second doubled each time."""
    try:
        asked = float(retry_after or "")
    except ValueError:
        asked = 0.25 * 2 ** min(attempt, 10)
    return min(max(asked, 0.05), MAX_WAIT_S)
