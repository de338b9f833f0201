"""Triton's log and trace settings, as far as there is an equal: the level of our log can be changed while it runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from maitred.core.errors import InvalidRequest, UnsupportedParameter

# What an administrator's key is for, in words.
TRACES, LOGS = "see or change what is traced", "see or change what is logged"
_LEVELS = (("log_info", logging.INFO), ("log_warning", logging.WARNING), ("log_error", logging.ERROR))
_VERBOSE = "log_verbose_level"
_FIXED: Mapping[str, str] = {"log_file": "", "log_format": "default"}
_TRACED: Mapping[str, Sequence[str]] = {
    "trace_level": ("OFF",),
    "trace_rate": ("1000",),
    "trace_count": ("-1",),
    "log_frequency": ("0",),
    "trace_file": ("",),
    "trace_mode": ("opentelemetry",),
}


class ServerSettings:
    """Settings of the whole server."""

    def trace(self, changes: Mapping[str, Sequence[str]], model: str = "") -> Mapping[str, Sequence[str]]:
        """Requests are traced by OpenTelemetry's own rules; a setting can be sent as it is, and not changed."""
        for name, value in changes.items():
            if name not in _TRACED:
                raise InvalidRequest(f"{name[:80]!r} is no trace setting; there are {', '.join(_TRACED)}")
            if value and tuple(value) != tuple(_TRACED[name]):
                raise UnsupportedParameter(f"{name} cannot be changed: serve with --otlp-endpoint to trace requests")
        return _TRACED

    def log(self, changes: Mapping[str, bool | int | str]) -> Mapping[str, bool | int | str]:
        """The lowest level that is on; verbose is debug."""
        told = self._told()
        for name, value in changes.items():
            if name not in told:
                raise InvalidRequest(f"{name[:80]!r} is no log setting; there are {', '.join(told)}")
            if name in _FIXED and value != _FIXED[name]:
                raise UnsupportedParameter(f"{name} cannot be changed while the server runs")
            if isinstance(value, bool) is not isinstance(told[name], bool) or isinstance(value, str) is not (
                name in _FIXED
            ):
                raise InvalidRequest(f"{name} has a value of another type")
        if changes:
            logging.getLogger().setLevel(_level({**told, **changes}))
        return self._told()

    def _told(self) -> dict[str, bool | int | str]:
        level = logging.getLogger().level
        on: dict[str, bool | int | str] = {name: level <= least for name, least in _LEVELS}
        return {**on, _VERBOSE: int(level <= logging.DEBUG), **_FIXED}


def _level(settings: Mapping[str, bool | int | str]) -> int:
    if settings[_VERBOSE]:
        return logging.DEBUG
    return next((level for name, level in _LEVELS if settings[name]), logging.CRITICAL)
