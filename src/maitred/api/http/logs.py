"""Log lines: text for people or one JSON object a line; what a client sent is escaped, prompts are never logged."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from maitred.api.http.log_stream import unblock_stderr
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
