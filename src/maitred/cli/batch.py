"""The lines of a batch: what is asked (with every slip as an answerable error), and what is written."""

from __future__ import annotations

import asyncio
import fcntl
import os
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from maitred.api.batch_lines import (
    RETRIED,
    BadLine,
    BatchRequest,
    answer_id,
    answer_line,
    error_line,
    read_line,
    told_body,
    wait_s,
)
from maitred.cli.endpoint import Endpoint, TimedOut
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
    return read_line(file.readline(), line.number, URLS)


class _Response(msgspec.Struct):
    status_code: int


class _Answered(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None = None

    @property
    def key(self) -> str:
        return self.id if self.custom_id is None else f"custom_id {self.custom_id}"

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


_DECODER = msgspec.json.Decoder(_Answered)


class OutputFile:
    """Opened for one run. A line torn by a kill is cut off, everything before it counts as done.

    Raises ConfigError when the file is not a batch's output, or another run has it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror}; choose another file") from None
        try:
            self._lock()
            self.failed: set[str] = set()  # of those that are done
            self.done = set(self._keys())
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"--output {self._path}: another run writes it; wait for it, or choose another") from None

    def _keys(self) -> Iterator[str]:
        whole = 0  # bytes of complete lines
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self._check_torn(number, line)
                    break
                answered = self._answered(number, line)
                if answered.failed:
                    self.failed.add(answered.key)
                yield answered.key
                whole += len(line)
        os.ftruncate(self._fd, whole)

    def _check_torn(self, number: int, line: bytes) -> None:
        """Raise ConfigError unless this is the beginning of a line of ours: anything else is another file."""
        if line[: len(LINE_START)] != LINE_START[: len(line)]:
            raise ConfigError(self._not_ours(number))

    def _not_ours(self, number: int) -> str:
        return f"{self._path}:{number}: is not a line of a batch's output; move the file, or choose another --output"

    def _answered(self, number: int, line: bytes) -> _Answered:
        try:
            return _DECODER.decode(line)
        except msgspec.DecodeError:
            raise ConfigError(self._not_ours(number)) from None

    def append(self, line: bytes) -> None:
        """One system call for a line, so that a kill leaves at most the last one torn."""
        written = os.write(self._fd, line)
        while written < len(line):
            written += os.write(self._fd, line[written:])

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)


MAX_ATTEMPTS = 8


@dataclass(slots=True)
class Tally:
    """Counts of this run's lines, by how they ended."""

    num_answered: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def failed(self, kind: str) -> None:
        self.num_failed += 1
        self.failures[kind] += 1


@dataclass(slots=True)
class BatchLines:
    """One run over the lines that have no answer yet."""

    endpoint: Endpoint
    source: BinaryIO
    write: Callable[[bytes], None]
    on_done: Callable[[], None] = lambda: None
    tally: Tally = field(default_factory=Tally)

    async def answer_all(self, lines: Iterable[InputLine], *, concurrency: int) -> None:
        """Raises Unreachable when the server is gone: lines without an answer stay for the next run."""
        waiting = iter(lines)
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(concurrency):
                    workers.create_task(self._work(waiting))
        except ExceptionGroup as group:  # not `except*`, which would wrap what is raised in another
            raise group.exceptions[0] from None

    async def _work(self, waiting: Iterable[InputLine]) -> None:
        for line in waiting:  # the workers share one iterator
            self.write(await self._answer(line))
            self.on_done()

    async def _answer(self, line: InputLine) -> bytes:
        try:
            request = read_request(self.source, line)
            status, headers, body = await self._ask(request)
        except BadLine as error:
            self.tally.failed(error.code)
            return error_line(line.number, line.custom_id, error)
        answer = told_body(body)
        if status == 200:
            self.tally.num_answered += 1
            self.tally.num_output_tokens += _output_tokens(answer)
        else:
            self.tally.failed(f"HTTP {status}")
        return answer_line(line.number, line.custom_id, status, headers.get("x-request-id", ""), answer)

    async def _ask(self, request: BatchRequest) -> tuple[int, dict[str, str], bytes]:
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self.endpoint.post(request.url, request.body) as reply:
                    body = await reply.read()
            except TimedOut as error:
                raise BadLine("timeout", str(error)) from None
            if reply.status not in RETRIED or attempt == MAX_ATTEMPTS:
                return reply.status, dict(reply.headers), body
            await asyncio.sleep(wait_s(reply.headers.get("retry-after"), attempt))


def _output_tokens(answer: object) -> int:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    return int(usage.get("completion_tokens") or 0) if isinstance(usage, dict) else 0
