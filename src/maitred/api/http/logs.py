"""Log lines: text for people or one JSON object a line; what a client sent is escaped, prompts are never logged."""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from maitred.config import ServerConfig

ACCESS = logging.getLogger("maitred.access")
ERRORS = logging.getLogger("maitred.api")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logging(config: ServerConfig) -> Callable[[], int]:
    """Send every record of this process to stderr in the format asked for; called by the command, not by the app.

    Writers to stderr never wait for its reader. Returns a function that counts the lines dropped for that.
    """
    stream = unblock_stderr()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    logging.basicConfig(level=_LEVELS[config.log_level], handlers=[handler], force=True)
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, _LEVELS[config.log_level]))
    return lambda: stream.num_dropped if stream is not None else 0


def log_fields(logger: logging.Logger, level: int, event: str, fields: dict[str, Any]) -> None:
    """Log `event` with named values, which each format writes in its own way."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={"fields": fields})


class TextFormatter(logging.Formatter):
    """`12:00:00.123 INFO access method=POST path='/v1/models' status=200`."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).astimezone()
        fields: dict[str, Any] = getattr(record, "fields", {})
        parts = [
            f"{at:%H:%M:%S}.{int(record.msecs):03d} {record.levelname} {_plain(record.getMessage())}",
            *(f"{name}={_plain(str(value))}" for name, value in fields.items() if value is not None),
        ]
        if record.exc_info:
            parts.append("\n" + self.formatException(record.exc_info))
        return " ".join(parts)


class JsonFormatter(logging.Formatter):
    """One object a line; msgspec escapes every control character."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **{name: value for name, value in getattr(record, "fields", {}).items() if value is not None},
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(_encodable(entry)).decode()


def _plain(text: str) -> str:
    """`text` without anything that could forge a line or move a terminal's cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {name: _encodable(item) for name, item in value.items()}
    return value if isinstance(value, int | float | bool) or value is None else str(value)


MAX_KEPT_CHARS = 1024 * 1024  # some 6,000 access lines
GATHER_S = 0.005  # lines that come within it leave in one write, and wake the thread once
LAST_LINES_S = 1.0  # for a reader that reads, at the end; for one that does not, the end does not wait longer
logger = logging.getLogger(__name__)


class LogStream(io.TextIOBase):
    """Takes lines and never blocks. Written to the file descriptor `fd`, which stays its owner's.

    A pipe whose reader hangs, or a stopped terminal, would otherwise hold up each thread that logs: the event loop too.
    """

    def __init__(self, fd: int, *, is_terminal: bool = False) -> None:
        self._fd, self._is_terminal = fd, is_terminal
        self._partial = ""  # of a line that is still being written
        self._waiting: list[str] = []
        self._num_chars = 0  # waiting, or being written
        self._num_dropped = 0  # lines
        self._changed = threading.Condition()
        threading.Thread(target=self._carry, name="maitred-log", daemon=True).start()

    # the stream

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        with self._changed:
            self._partial += text
            if "\n" in text:
                self._hand_over()
        return len(text)

    def flush(self) -> None:
        """Let a line that is not whole be seen; waits for nothing."""
        with self._changed:
            if self._partial:
                self._hand_over()

    # the queue

    @property
    def num_dropped(self) -> int:
        """Lines that found no room, or that could not be written."""
        return self._num_dropped

    def drain(self, limit_s: float = LAST_LINES_S) -> bool:
        """Wait until all has been written, `limit_s` seconds at most; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_chars, limit_s)

    def _hand_over(self) -> None:
        text, self._partial = self._partial, ""
        if self._num_chars + len(text) > MAX_KEPT_CHARS:
            self._num_dropped += text.count("\n")
            return
        self._waiting.append(text)
        self._num_chars += len(text)
        if len(self._waiting) == 1:
            self._changed.notify_all()

    def _carry(self) -> None:
        num_told = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
            time.sleep(GATHER_S)
            with self._changed:
                text, self._waiting = "".join(self._waiting), []
            written = self._write(text)
            with self._changed:
                self._num_chars -= len(text)
                self._num_dropped += 0 if written else text.count("\n")
                self._changed.notify_all()
            if written and self._num_dropped > num_told:
                num_told = self._num_dropped
                logger.warning("nobody read this log in time: %d of its lines were dropped so far", num_told)

    def _write(self, text: str) -> bool:
        left = memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:  # a full disk, a reader that left
            return False
        return True


def unblock_stderr() -> LogStream | None:
    """Put a LogStream in place of `sys.stderr`, once; None where that is no file."""
    if isinstance(sys.stderr, LogStream):
        return sys.stderr
    try:
        fd = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # there is none, or it is closed, or a test's
        return None
    before = sys.stderr
    before.flush()
    stream = LogStream(fd, is_terminal=before.isatty())

    def say_the_last() -> None:
        if stream.drain():
            sys.stderr = before  # what the interpreter says when there are no threads any more

    sys.stderr = stream
    atexit.register(say_the_last)
    return stream
