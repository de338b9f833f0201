"""The lines of a batch: what is asked (with every slip as an answerable error), and what is written."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from maitred.core.errors import ConfigError

LINE_START = b'{"id":"batch_req_line_'  # of every line we write
URLS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line of the input, found but not kept: a file of millions of lines stays on disk."""

    number: int  # from 1
    offset: int  # bytes
    custom_id: str | None  # None when the line has none we can read

    @property
    def key(self) -> str:
        """The line's key in the output. A line without custom_id goes by its number."""
        return answer_id(self.number) if self.custom_id is None else f"custom_id {self.custom_id}"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    url: str
    body: bytes


class BadLine(Exception):
    """A line that cannot be asked; becomes its own error line."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def answer_id(number: int) -> str:
    """The `id` of an answer: the same in every run of the same file."""
    return f"batch_req_line_{number}"


def scan(path: Path) -> list[InputLine]:
    """All lines that are not blank. Raises ConfigError when two have one custom_id."""
    lines: list[InputLine] = []
    first_seen: dict[str, int] = {}
    for number, offset, text in _enumerate(path):
        custom_id = _custom_id(text)
        if custom_id is not None and custom_id in first_seen:
            raise ConfigError(
                f"{path}: custom_id {custom_id!r} stands in line {first_seen[custom_id]} and again in line {number}; "
                "give each line its own"
            )
        if custom_id is not None:
            first_seen[custom_id] = number
        lines.append(InputLine(number, offset, custom_id))
    return lines


def _enumerate(path: Path) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                start = len(BOM_UTF8) if offset == 0 and text.startswith(BOM_UTF8) else 0
                if text[start:].strip():
                    yield number, offset + start, text[start:]
                offset += len(text)
    except OSError as error:
        raise ConfigError(f"--input {path}: {error.strerror}; give a file of JSON lines") from None


class _Head(msgspec.Struct):
    custom_id: str | None = None


_HEAD = msgspec.json.Decoder(_Head)


def _custom_id(text: bytes) -> str | None:
    try:
        return _HEAD.decode(text).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_request(file: BinaryIO, line: InputLine) -> BatchRequest:
    """Raises BadLine."""
    file.seek(line.offset)
    try:
        found = msgspec.json.decode(file.readline())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLine("invalid_json_line", f"line {line.number} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadLine("invalid_json_line", f"line {line.number} is not a JSON object")
    where = f"line {line.number}"
    if line.custom_id is None:
        raise BadLine("missing_custom_id", f"{where} has no custom_id that is a string")
    if found.get("method", "POST") != "POST":
        raise BadLine("invalid_method", f"{where}: method is {found['method']!r}; it must be POST")
    if found.get("url") not in URLS:
        raise BadLine("invalid_url", f"{where}: url is {found.get('url')!r}; it must be one of {', '.join(URLS)}")
    if not isinstance(found.get("body"), dict):
        raise BadLine("invalid_body", f"{where}: body is not a JSON object")
    if found["body"].get("stream"):
        raise BadLine("invalid_body", f"{where}: a batch cannot stream; leave `stream` out")
    return BatchRequest(str(found["url"]), msgspec.json.encode(found["body"]))


def answer_line(line: InputLine, status: int, headers: Mapping[str, str], body: object) -> bytes:
    response = {"status_code": status, "request_id": headers.get("x-request-id", ""), "body": body}
    return _line(line, response, None)


def error_line(line: InputLine, error: BadLine) -> bytes:
    return _line(line, None, {"code": error.code, "message": str(error)})


def _line(line: InputLine, response: object, error: object) -> bytes:
    answer = {"id": answer_id(line.number), "custom_id": line.custom_id, "response": response, "error": error}
    return msgspec.json.encode(answer) + b"\n"
