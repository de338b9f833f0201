"""Checks of settings, for the dataclasses in `config` and `server_config`. Each raises ConfigError with the value."""

from __future__ import annotations

from dataclasses import field, fields
from math import inf
from typing import TYPE_CHECKING

from maitred.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def one_of(choices: tuple[str, ...], default: str) -> str:
    """A field that takes one of `choices`, which the command line reads too."""
    chosen: str = field(default=default, metadata={"choices": choices})
    return chosen


def require_choices(config: DataclassInstance) -> None:
    """Check every field made by `one_of`."""
    for f in fields(config):
        value, choices = getattr(config, f.name), f.metadata.get("choices", ())
        if choices and value not in choices:
            raise ConfigError(
                f"{f.name} is {value!r}{did_you_mean(value, choices)}; choose one of {', '.join(choices)}"
            )


def require_at_least(name: str, value: float | None, low: float) -> None:
    if value is not None and not low <= value < inf:
        raise ConfigError(f"{name} is {value}; it must be {'finite' if value == inf else f'at least {low}'}")


def require_between(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{name} is {value}; it must be from {low:g} to {high:g}")


def require_over_0(config: DataclassInstance, *names: str, most: float = inf) -> None:
    """Check these fields; None passes, a NaN does not."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value <= most:
            limit = "" if most == inf else f" and at most {most:g}"
            raise ConfigError(f"{name} is {value}; it must be over 0{limit}")


def host_and_port(name: str, value: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, `[::1]:PORT` too."""
    host, _, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ConfigError(f"{name} is {value!r}; write HOST:PORT, such as 10.0.0.5:9100")
    return host, int(port)
