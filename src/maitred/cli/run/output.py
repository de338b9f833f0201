"""The output file: whole lines only, each key at most once, one writer at a time; it is also the record of progress."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from maitred.cli.run.lines import LINE_START
from maitred.core.errors import ConfigError


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
