"""An ONNX file's inputs and outputs, read without a runtime: names, types, shapes; and which files hold its weights.

The weights are stepped over, so that a file of any size costs what its graph does.
Source of field numbers: onnx.proto3 of the ONNX specification, IR version 13.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from maitred.core.errors import CheckpointError
from maitred.tensor.config import WILDCARD
from maitred.tensor.schema import message_classes, read_schema

from google.protobuf.message import DecodeError  # isort: skip

WINDOW_BYTES = 64 << 10
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}

MOST_DEPTH = 32  # of graphs in graphs (If, Loop, Scan); protobuf itself ends at 100 messages, three for each graph

_TYPES = message_classes(
    read_schema(
        "onnx_types",
        """
        message Dimension
          1 int64 value @given
          2 string name @given
        message Shape
          1 Dimension* dim
        message Tensor
          1 int32 elem_type
          2 Shape shape
        message Type
          1 Tensor tensor @kind
          4 Other sequence @kind
          5 Other map @kind
          8 Other sparse_tensor @kind
          9 Other optional @kind
        message Other
        message ValueInfo
          1 string name
          2 Type type
        message Entry
          1 string key
          2 string value
        message Opset
          1 string domain
          2 int64 version
        """,
    )
)
ELEMENT_TYPES: Mapping[int, str] = {  # ONNX's numbers of types, as a config names them
    1: "TYPE_FP32",
    2: "TYPE_UINT8",
    3: "TYPE_INT8",
    4: "TYPE_UINT16",
    5: "TYPE_INT16",
    6: "TYPE_INT32",
    7: "TYPE_INT64",
    8: "TYPE_STRING",
    9: "TYPE_BOOL",
    10: "TYPE_FP16",
    11: "TYPE_FP64",
    12: "TYPE_UINT32",
    13: "TYPE_UINT64",
    16: "TYPE_BF16",
}


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """An input or output of a graph, batch and all. -1 is a dimension of any length, None an unknown number of them."""

    name: str
    data_type: str  # TYPE_FP32
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Graph:
    """Inputs and outputs of a model. `defaults` are inputs that have a value of their own where none is sent."""

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    defaults: tuple[GraphTensor, ...] = ()
    opsets: tuple[tuple[str, int], ...] = ()  # domain ("" is ONNX's own) and version
    operators: Mapping[str, int] = field(default_factory=dict)  # how many nodes are of each, those of inner graphs too
    exact: bool = False  # shapes are those that the runtime inferred, and not only those that the file tells


@dataclass(frozen=True, slots=True)
class External:
    """Bytes of a weight in another file; `length` None is all that there is."""

    location: str
    offset: int = 0
    length: int | None = None


def read_graph(path: Path) -> Graph:
    """Raises CheckpointError for a file that is cut off, is no ONNX, or has weights in files that it may not read."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is no file")
            reading = _Reading(WireFile(file.fileno()))
            graph = reading.model(FileSpan(0, status.st_size))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, DecodeError) as error:
        raise CheckpointError(f"{path} is cut off or no ONNX file: {error}") from None
    except _Unserved as error:
        raise CheckpointError(f"{path}: {error}") from None
    for external in sorted(reading.externals, key=lambda each: (each.location, each.offset)):
        _check_external(path, external)
    return graph


class _Unserved(Exception):
    """The file is ONNX, and holds what no config can name."""


# ---- walking; the numbers are those of ONNX's messages


@dataclass(slots=True)
class _Reading:
    file: WireFile
    externals: set[External] = field(default_factory=set)
    operators: Counter[str] = field(default_factory=Counter)

    def model(self, span: FileSpan) -> Graph:
        graphs, opsets = [], []
        for number, value in self._spans(span, 7, 8, 25):
            if number == 7:
                graphs.append(self.graph(value))
            elif number == 8:
                opset = _TYPES["Opset"].FromString(self.file.read(value))
                opsets.append((opset.domain, opset.version))
            else:
                self._nodes_of_function(value)
        if len(graphs) != 1 or not opsets:
            raise ValueError(f"it holds {len(graphs)} graphs and {len(opsets)} versions of operators")
        inputs, outputs, constants = graphs[0]
        return Graph(
            inputs=_tensors("input", (each for each in inputs if each.name not in constants)),
            outputs=_tensors("output", outputs),
            defaults=_tensors("input", (each for each in inputs if each.name in constants)),
            opsets=tuple(opsets),
            operators=dict(self.operators),
        )

    def graph(self, span: FileSpan, depth: int = 0) -> tuple[list[Any], list[Any], set[str]]:
        """Inputs and outputs, and the names of constants. Raises ValueError."""
        if depth > MOST_DEPTH:
            raise ValueError(f"graphs stand in each other more than {MOST_DEPTH} deep")
        inputs: list[Any] = []
        outputs: list[Any] = []
        constants: set[str] = set()
        for number, value in self._spans(span, 1, 5, 11, 12, 15):
            if number == 1:
                self._node(value, depth)
            elif number == 5:
                constants.add(self._tensor(value))
            elif number == 15:
                constants.add(self._sparse(value))
            else:
                (inputs if number == 11 else outputs).append(_TYPES["ValueInfo"].FromString(self.file.read(value)))
        return inputs, outputs, constants

    def _node(self, span: FileSpan, depth: int) -> None:
        for field_number, attribute in self._spans(span, 4, 5):
            if field_number == 4:
                self.operators[self.file.read(attribute).decode()] += 1
                continue
            for number, value in self._spans(attribute, 5, 6, 10, 11, 22, 23):
                if number in (6, 11):
                    self.graph(value, depth + 1)
                elif number in (5, 10):
                    self._tensor(value)
                else:
                    self._sparse(value)

    def _nodes_of_function(self, span: FileSpan) -> None:
        for _, node in self._spans(span, 7):
            self._node(node, 0)

    def _tensor(self, span: FileSpan) -> str:
        """Notes where its bytes are; gives its name."""
        name, entries, is_external = "", {}, False
        for number, value in self.file.fields(span):
            if number == 8 and isinstance(value, FileSpan):
                name = self.file.read(value).decode()
            elif number == 13 and isinstance(value, FileSpan):
                entry = _TYPES["Entry"].FromString(self.file.read(value))
                entries[entry.key] = entry.value
            elif number == 14:
                is_external = value == 1
        if is_external:
            self.externals.add(_external(name, entries))
        return name

    def _sparse(self, span: FileSpan) -> str:
        names = [self._tensor(value) for _, value in self._spans(span, 1, 2)]
        return names[0] if names else ""

    def _spans(self, span: FileSpan, *numbers: int) -> Iterator[tuple[int, FileSpan]]:
        """The fields of these numbers, which are messages."""
        for number, value in self.file.fields(span):
            if number in numbers:
                if not isinstance(value, FileSpan):
                    raise ValueError(f"in bytes {span.start} to {span.end} field {number} is no message")
                yield number, value


def _tensors(side: str, infos: Iterable[Any]) -> tuple[GraphTensor, ...]:
    return tuple(_graph_tensor(side, info) for info in infos)


def _graph_tensor(side: str, info: Any) -> GraphTensor:
    """Raises _Unserved for what is no tensor, or has a type that no config can name."""
    kind = info.type.WhichOneof("kind")
    if kind != "tensor":
        raise _Unserved(f"{side} {info.name!r} is {f'a {kind}' if kind else 'of no type'}; only tensors are served")
    tensor = info.type.tensor
    if tensor.elem_type not in ELEMENT_TYPES:
        raise _Unserved(f"{side} {info.name!r} has ONNX's type {tensor.elem_type}, which has no name in a config")
    shape = tuple(map(_dimension, tensor.shape.dim)) if tensor.HasField("shape") else None
    return GraphTensor(info.name, ELEMENT_TYPES[tensor.elem_type], shape)


def _dimension(dim: Any) -> int:
    return dim.value if dim.WhichOneof("given") == "value" and dim.value >= 0 else WILDCARD


# ---- weights in other files


def _external(name: str, entries: Mapping[str, str]) -> External:
    """Raises _Unserved for numbers that are none."""
    numbers = [entries.get("offset", "0"), entries.get("length", "0")]
    if not all(number.isascii() and number.isdigit() and len(number) < 19 for number in numbers):
        raise _Unserved(f"weight {name!r} has offset {numbers[0]!r} and length {numbers[1]!r} in its external file")
    length = int(numbers[1]) if "length" in entries else None
    return External(entries.get("location", ""), int(numbers[0]), length)


def _check_external(path: Path, external: External) -> None:
    """Raises CheckpointError: the file must lie in the model's own folder, links followed, and be long enough."""
    where = f"{path} has weights in {external.location!r}"
    parts = external.location.split("/")
    if not external.location or parts[0] == "" or ".." in parts or "\0" in external.location:
        raise CheckpointError(f"{where}, which is no name in its folder")
    try:
        folder, file = path.parent.resolve(), (path.parent / external.location).resolve()
    except (OSError, RuntimeError):  # links that lead to each other
        raise CheckpointError(f"{where}, which is a link that leads nowhere") from None
    if not file.is_relative_to(folder):
        raise CheckpointError(f"{where}, which is a link that leads out of its folder to {file}")
    try:
        status = file.stat()
    except OSError as error:
        raise CheckpointError(f"{where}, which cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{where}, which is no file")
    if external.offset + (external.length or 0) > status.st_size:
        end = external.offset + (external.length or 0)
        raise CheckpointError(f"{where} up to byte {end}, and that file has {status.st_size}; it may be cut off")


class FileSpan(NamedTuple):
    """Bytes of the file from `start` up to `end`."""

    start: int
    end: int


class WireField(NamedTuple):
    """One field: the number of a varint, or where its bytes stand."""

    number: int
    value: int | FileSpan


class WireFile:
    """An open file of one protobuf message, read field by field: a model of 2 GB costs the pages that hold the heads of
    its fields. The file is read and not mapped: one that is cut short meanwhile gives an error, not a signal. Methods
    raise ValueError, with the offset, where bytes end early or fit no field.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._window, self._start = b"", 0

    def fields(self, span: FileSpan) -> Iterator[WireField]:
        """The fields of the message that stands there."""
        at, end = span
        while at < end:
            start = at
            key, at = self._varint(at, end)
            number, kind = key >> 3, key & 7
            if kind == _VARINT and number:
                value, at = self._varint(at, end)
                yield WireField(number, value)
                continue
            if not number or (kind != _BYTES and kind not in _FIXED):
                raise ValueError(f"at byte {start} no field begins")
            size, at = self._varint(at, end) if kind == _BYTES else (_FIXED[kind], at)
            if size > end - at:
                raise ValueError(f"at byte {start} a field has {size} bytes, and {end - at} are left")
            yield WireField(number, FileSpan(at, at + size))
            at += size

    def read(self, span: FileSpan, most_bytes: int = 1 << 20) -> bytes:
        if span.end - span.start > most_bytes:
            raise ValueError(f"at byte {span.start} a name or a type has {span.end - span.start} bytes")
        content = os.pread(self._descriptor, span.end - span.start, span.start)
        if len(content) < span.end - span.start:
            raise ValueError(f"the file ends at byte {span.start + len(content)}")
        return content

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """The unsigned number at an offset, and the offset after it."""
        if not self._start <= at <= self._start + len(self._window) - 10:
            self._window, self._start = os.pread(self._descriptor, WINDOW_BYTES, at), at
        value, window, first = 0, self._window, at - self._start
        for index in range(first, min(first + 10, len(window), end - self._start)):
            value |= (window[index] & 0x7F) << 7 * (index - first)
            if window[index] < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, self._start + index + 1
        raise ValueError(f"at byte {at} a number does not end")
