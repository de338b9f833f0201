"""Frames between an engine and the process of a Python model: frames over a socket, numbers in shared memory."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import msgspec
import numpy as np

ALIGNMENT = 64  # of an array's first byte
_LENGTH = struct.Struct("<I")
FINALIZE_S = 5.0  # that a process has to end, once its engine no longer wants it
Predict = Callable[[Mapping[str, np.ndarray], tuple[str, ...]], Mapping[str, np.ndarray]]  # wanted outputs; none is all


class Model(NamedTuple):
    """A model, loaded in its process."""

    predict: Predict
    finalize: Callable[[], object] = lambda: None
    config: dict[str, Any] | None = None  # as its code completes it


class ArrayAt(msgspec.Struct, frozen=True, array_like=True):
    """An array: numbers lie in shared memory, texts stand here."""

    name: str
    kind: str  # numpy's, "|O" for texts
    shape: tuple[int, ...]
    offset: int = 0
    texts: tuple[bytes, ...] = ()


class LoadInstance(msgspec.Struct, frozen=True, tag=True):
    """The first frame: what the process is to be."""

    folder: str  # of the version
    file: str  # of its code; empty for an installed class
    entry_point: str
    config: dict[str, Any]  # a ModelConfig as Triton's JSON
    parameters: dict[str, str]
    instance: str
    version: int
    kind: str = "CPU"
    device: int = 0


class Run(msgspec.Struct, frozen=True, tag=True):
    inputs: tuple[ArrayAt, ...]
    num_bytes: int  # of the shared memory that they lie in
    outputs: tuple[str, ...]  # that are wanted; none is all


class InstanceReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    config: dict[str, Any] | None = None  # as the model's code completes it


class InstanceRan(msgspec.Struct, frozen=True, tag=True):
    outputs: tuple[ArrayAt, ...]
    num_bytes: int


class InstanceFailed(msgspec.Struct, frozen=True, tag=True):
    """Loading, or one batch, raised."""

    reason: str
    by_client: bool = False  # the model finds that the inputs are wrong


decode_command: Callable[[bytes], LoadInstance | Run] = msgspec.msgpack.Decoder(LoadInstance | Run).decode
decode_answer: Callable[[bytes], InstanceReady | InstanceRan | InstanceFailed] = msgspec.msgpack.Decoder(
    InstanceReady | InstanceRan | InstanceFailed
).decode


def send(connection: socket.socket, frame: msgspec.Struct) -> None:
    content = msgspec.msgpack.encode(frame)
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> bytes:
    """The next frame. Raises EOFError when the other end is gone, TimeoutError as the socket is set."""
    return _exactly(connection, _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0])


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < num_bytes:
        piece = connection.recv(num_bytes - len(content))
        if not piece:
            raise EOFError
        content += piece
    return bytes(content)


class SharedArrays:
    """Anonymous shared memory that arrays of one batch lie in, one after another; it grows as they do."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._memory: mmap.mmap | None = None

    def put(self, arrays: Mapping[str, np.ndarray]) -> tuple[tuple[ArrayAt, ...], int]:
        """Write arrays; returns where each lies, and how much memory the other side must map."""
        offsets, end = [], 0
        for array in arrays.values():
            offsets.append(end)
            end += 0 if array.dtype.hasobject else -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if end > self._size:
            os.ftruncate(self.file, 1 << (end - 1).bit_length())
        placed = tuple(self._placed(*item, at) for item, at in zip(arrays.items(), offsets, strict=True))
        return placed, end

    def _placed(self, name: str, array: np.ndarray, offset: int) -> ArrayAt:
        if array.dtype.hasobject:
            return ArrayAt(name, array.dtype.str, array.shape, texts=tuple(map(bytes, array.reshape(-1).tolist())))
        if array.size:
            place = np.frombuffer(self._mapped(offset + array.nbytes), array.dtype, array.size, offset)
            place.reshape(array.shape)[...] = array
        return ArrayAt(name, array.dtype.str, array.shape, offset)

    def get(self, arrays: Sequence[ArrayAt], num_bytes: int) -> dict[str, np.ndarray]:
        """Arrays as views of where they lie, until the next batch is put there."""
        memory = self._mapped(num_bytes) if num_bytes else b""
        return {each.name: _found(each, memory) for each in arrays}

    @property
    def _size(self) -> int:
        return os.fstat(self.file).st_size

    def _mapped(self, num_bytes: int) -> mmap.mmap:
        """An old mapping stays as long as an array looks at it."""
        if self._memory is None or len(self._memory) < num_bytes:
            self._memory = mmap.mmap(self.file, self._size)
        return self._memory


def _found(each: ArrayAt, memory: mmap.mmap | bytes) -> np.ndarray:
    kind = np.dtype(each.kind)
    if kind.hasobject:
        return texts_array(each.texts).reshape(each.shape)
    count = int(np.prod(each.shape, dtype=np.int64))
    if not count:
        return np.empty(each.shape, kind)
    return np.frombuffer(memory, kind, count, each.offset).reshape(each.shape)


def texts_array(texts: Iterable[bytes]) -> np.ndarray:
    """Return an array of one dimension, of objects."""
    listed = list(texts)
    array = np.empty(len(listed), object)
    array[:] = listed
    return array


# ---- models of installed packages


GROUP = "maitred.models"


def installed(name: str) -> EntryPoint | None:
    """Found in what packages tell of themselves: none of their code is run."""
    return next(iter(entry_points(group=GROUP, name=name)), None)


def not_installed(name: str) -> str:
    known = ", ".join(sorted(entry.name for entry in entry_points(group=GROUP))) or "none"
    return f"no installed package has {name!r} in the group {GROUP!r} of entry points; there are: {known}"
