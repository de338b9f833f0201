"""A log of what went into a core, in order, each with a checksum of what came out; `replay` makes the same of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from zlib import crc32

import msgspec

from maitred.config import SchedulerConfig
from maitred.fleet.actions import Action
from maitred.fleet.config import FleetConfig
from maitred.fleet.disagg import DEFAULT_HANDOVER, HandoverConfig

VERSION = 1
LENGTH_BYTES = 4  # before each frame, big-endian

P = ParamSpec("P")
R = TypeVar("R")


class Recordable(Protocol):
    """A core with methods that `core_input` decorates."""

    recorder: Recorder | None


C = TypeVar("C", bound=Recordable)


class Header(msgspec.Struct, frozen=True):
    """The first frame: what the core was made of. Policy, predictor and autoscaler are the reader's to bring."""

    config: FleetConfig
    scheduler: SchedulerConfig
    handover: HandoverConfig = DEFAULT_HANDOVER
    version: int = VERSION


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One call of a method of the core."""

    method: str
    arguments: msgspec.Raw  # by position
    checksum: int  # of the actions


_encode = msgspec.msgpack.Encoder(enc_hook=lambda error: [type(error).__name__, str(error)]).encode


def checksum_of(actions: object) -> int:
    """32 bits, of a list of actions; errors count by class and text."""
    listed = actions if isinstance(actions, list) else []
    return crc32(_encode([(type(action).__name__, _fields(action)) for action in listed]))


class Recorder:
    """Hands each frame to `write`, whole, as bytes."""

    def __init__(
        self,
        config: FleetConfig,
        scheduler: SchedulerConfig,
        write: Callable[[bytes], object],
        handover: HandoverConfig = DEFAULT_HANDOVER,
    ) -> None:
        self._write = write
        self._write_frame(_encode(Header(config, scheduler, handover)))

    def arguments_of(self, method: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Encode arguments before the call, which writes to the request that it is given."""
        bound = inspect.signature(method).bind(self, *args, **kwargs)
        bound.apply_defaults()
        return _encode(bound.args[1:])

    def called(self, method: str, arguments: bytes, actions: object) -> None:
        self._write_frame(_encode(Frame(method, msgspec.Raw(arguments), checksum_of(actions))))

    def _write_frame(self, frame: bytes) -> None:
        self._write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)


def core_input(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """A method by which something goes into the core; the recorder, if there is one, hears of it."""

    def taken(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        recorder = self.recorder
        if recorder is None:
            return method(self, *args, **kwargs)
        arguments = recorder.arguments_of(method, args, kwargs)
        actions = method(self, *args, **kwargs)
        recorder.called(method.__name__, arguments, actions)
        return actions

    update_wrapper(taken, method)
    return taken


def _fields(action: Action) -> list[Any]:
    return [getattr(action, name) for name in action.__slots__]
