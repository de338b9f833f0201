"""Plays a log of `record` again: the same calls give the same actions, or tell where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, get_type_hints

import msgspec

from maitred.core.errors import ConfigError
from maitred.fleet.actions import Action
from maitred.fleet.core import ClusterCore
from maitred.fleet.record import LENGTH_BYTES, VERSION, Frame, Header, checksum_of

MakeCore = Callable[[Header], ClusterCore]


class Replayed(NamedTuple):
    """One call, replayed."""

    number: int
    method: str
    arguments: tuple[Any, ...]
    actions: list[Action]
    agrees: bool  # with what came out when it was recorded


def made_alike(header: Header) -> ClusterCore:
    return ClusterCore(header.config, header.scheduler, handover=header.handover)


def replay(frames: Iterable[bytes], make: MakeCore = made_alike) -> Iterator[Replayed]:
    """`frames` as of `split`, the header first. Raises ConfigError for what is no such log."""
    source = iter(frames)
    try:
        header = msgspec.msgpack.decode(next(source, b""), type=Header)
    except msgspec.DecodeError as error:
        raise ConfigError(f"this is no log of a fleet: {error}") from None
    if header.version != VERSION:
        raise ConfigError(f"the log is of version {header.version}; this reads {VERSION}")
    core = make(header)
    types = _argument_types(core)
    for number, encoded in enumerate(source):
        frame = msgspec.msgpack.decode(encoded, type=Frame)
        arguments = msgspec.msgpack.decode(frame.arguments, type=types[frame.method])
        actions = getattr(core, frame.method)(*arguments) or []
        yield Replayed(number, frame.method, arguments, actions, checksum_of(actions) == frame.checksum)


def split(log: bytes) -> Iterator[bytes]:
    """The frames of a log; one cut short at the end is left out."""
    at = 0
    while at + LENGTH_BYTES <= len(log):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(log[at:start], "big")
        if at <= len(log):
            yield log[start:at]


def _argument_types(core: ClusterCore) -> Mapping[str, Any]:
    """Argument types of every method that `core_input` decorates."""
    inputs = [name for name, method in vars(type(core)).items() if hasattr(method, "__wrapped__")]
    return {name: tuple[_hints(getattr(core, name))] for name in inputs}  # type: ignore[misc]


def _hints(method: Callable[..., object]) -> tuple[Any, ...]:
    hints = get_type_hints(method)
    return tuple(hint for name, hint in hints.items() if name != "return")
