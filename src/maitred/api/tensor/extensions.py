"""Triton's extensions of a tensor server: classification, shared memory, log and trace settings, parameters."""

from __future__ import annotations

import logging
import os
import re
import stat
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from maitred.core.errors import InvalidRequest, Overloaded, RegionNotFound, UnsupportedParameter
from maitred.core.tensor_request import Buffer, SequenceControl, Tensor
from maitred.engine.tensors import TensorModels
from maitred.tensor.arrays import array_of, texts_as_bytes
from maitred.tensor.repository_files import leads_out

MOST_LABEL_BYTES = 16 << 20


class Labels:
    """Labels by the line, from the file beside a model that its config names. It is read for each answer: it is small,
    rarely asked for, and may change with its model.
    """

    def __init__(self, repository: Path | None) -> None:
        self._repository = repository

    def classify(self, tensors: TensorModels, model: str, output: Tensor, count: int) -> Tensor:
        """The `count` largest of an output of `model`. Raises InvalidRequest."""
        config = tensors.config(model)
        file = next((each.label_filename for each in config.output if each.name == output.name), "")
        labels = _labels(self._repository / model, file) if file and self._repository is not None else []
        return classified(output, count, labels, batched=config.max_batch_size > 0)


def _labels(folder: Path, name: str) -> list[bytes]:
    """Labels of a file; empty if it is gone or links out of the repository by now: what is read is what was checked."""
    path = folder / name
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as lines:
            found = os.fstat(lines.fileno())
            is_ours = not leads_out(path, folder) and os.path.samestat(found, os.stat(os.path.realpath(path)))
            return lines.read(MOST_LABEL_BYTES).splitlines() if is_ours and stat.S_ISREG(found.st_mode) else []
    except OSError:
        return []


def classified(output: Tensor, count: int, labels: list[bytes], *, batched: bool) -> Tensor:
    """The `count` largest of each row, largest first; of equals the first."""
    array = array_of(output)
    if array.dtype.hasobject or output.datatype == "BF16" or count < 1:
        raise InvalidRequest(f"output {output.name!r} of {output.datatype} cannot be classified into {count} classes")
    rows = array.reshape(len(array), -1) if batched and array.ndim else array.reshape(1, -1)
    count = min(count, rows.shape[1])
    largest = np.argsort(-rows.astype(float), axis=1, kind="stable")[:, :count]
    found = [_text(row, at, labels) for row, indices in zip(rows, largest.tolist(), strict=True) for at in indices]
    shape = (len(rows), count) if batched else (count,)
    return Tensor(output.name, "BYTES", shape, texts_as_bytes(found))


def _text(row: np.ndarray, index: int, labels: list[bytes]) -> bytes:
    value = row[index].item()
    told = f"{value:f}:{index}" if isinstance(value, float) else f"{int(value)}:{index}"
    return told.encode() + (b":" + labels[index] if index < len(labels) else b"")


FOLDER = "/dev/shm"  # where shm_open's names are, on Linux
MOST_REGIONS = 1024
MOST_HELD_BYTES = 1 << 30  # copied out of regions for requests that have not ended
_KEY = re.compile(r"/?[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SystemRegion:
    """Region of shared memory. The file stays open while a request uses it, also when it is unregistered meanwhile."""

    key: str
    offset: int
    byte_size: int
    file: int


@dataclass(slots=True)
class _Held:
    """Bytes that were copied out of regions; blocks may be let go in any thread."""

    num_bytes: int = 0
    returned: deque[int] = field(default_factory=deque)
    lock: Lock = field(default_factory=Lock)

    def block(self, num_bytes: int) -> np.ndarray:
        """Memory that counts until its last view is gone. Raises Overloaded."""
        with self.lock:
            while self.returned:
                self.num_bytes -= self.returned.popleft()
            if self.num_bytes and self.num_bytes + num_bytes > MOST_HELD_BYTES:
                told = f"{self.num_bytes} bytes of shared memory are held for requests, and {num_bytes} more are asked"
                raise Overloaded(f"{told}; at most {MOST_HELD_BYTES} are")
            self.num_bytes += num_bytes
        block = np.empty(num_bytes, np.uint8)
        weakref.finalize(block, self.returned.append, num_bytes).atexit = False
        return block


@dataclass(frozen=True, slots=True)
class RegionPart:
    """The part of a region that a request names."""

    region: SystemRegion
    offset: int  # in the region's file
    byte_size: int
    held: _Held

    def read(self) -> memoryview:
        """A copy. Raises InvalidRequest where the file has become shorter, and Overloaded."""
        view, at = self.held.block(self.byte_size).data, 0
        while at < self.byte_size:
            num_read = os.preadv(self.region.file, [view[at:]], self.offset + at)
            if not num_read:
                raise self._too_short(self.offset + at)
            at += num_read
        return view

    def write(self, data: Buffer) -> None:
        """Write from the region's beginning. Raises InvalidRequest where the file has become shorter."""
        view, at = memoryview(data).cast("B"), 0
        size = os.fstat(self.region.file).st_size
        if size < self.offset + view.nbytes:
            raise self._too_short(size)
        while at < view.nbytes:
            at += os.pwrite(self.region.file, view[at:], self.offset + at)

    def _too_short(self, size: int) -> InvalidRequest:
        end = self.offset + self.byte_size
        return InvalidRequest(f"the shared memory {self.region.key!r} has {size} bytes by now, and {end} are needed")


class SystemRegions:
    """Regions by owner and name; another owner finds none. Every method raises InvalidRequest, and RegionNotFound
    for a name that is not registered.
    """

    def __init__(self, folder: str = FOLDER) -> None:
        self._folder, self._held = folder, _Held()
        self._regions: dict[str, dict[str, SystemRegion]] = {}  # by owner, the tenant whose key registered them

    def register(self, owner: str, name: str, key: str, offset: int, byte_size: int) -> None:
        own = self._regions.get(owner, {})
        if name in own:
            raise InvalidRequest(f"the shared memory region {name[:80]!r} is registered already")
        if not name or sum(map(len, self._regions.values())) >= MOST_REGIONS:
            raise InvalidRequest(f"a region needs a name, and at most {MOST_REGIONS} are registered")
        file = self._opened(key, byte_size and offset + byte_size)
        region = SystemRegion(key, offset, byte_size, file)
        weakref.finalize(region, os.close, file).atexit = False
        self._regions[owner] = {**own, name: region}

    def unregister(self, owner: str, name: str = "") -> None:
        """Remove one region, or without a name all of the owner's; unknown names are no error."""
        own = self._regions.pop(owner, {})
        if name and (left := {other: region for other, region in own.items() if other != name}):
            self._regions[owner] = left

    def status(self, owner: str, name: str = "") -> Mapping[str, SystemRegion]:
        return {name: self._found(owner, name)} if name else self._regions.get(owner, {})

    def num_bytes(self, owner: str) -> int:
        return sum(region.byte_size for region in self._regions.get(owner, {}).values())

    def view(self, owner: str, name: str, offset: int, byte_size: int) -> RegionPart:
        """A part of a region, checked against its size."""
        region = self._found(owner, name)
        if offset + byte_size > region.byte_size:
            end = offset + byte_size
            raise InvalidRequest(f"byte {end} is asked of the region {name[:80]!r}, which has {region.byte_size}")
        return RegionPart(region, region.offset + offset, byte_size, self._held)

    def _found(self, owner: str, name: str) -> SystemRegion:
        region = self._regions.get(owner, {}).get(name)
        if region is None:
            raise RegionNotFound(f"no shared memory region {name[:80]!r} is registered")
        return region

    def _opened(self, key: str, size: int) -> int:
        """A descriptor."""
        if not _KEY.fullmatch(key) or not size:
            raise InvalidRequest("a region needs a byte_size, and a key as shm_open takes it: a name after a slash")
        try:
            file = os.open(os.path.join(self._folder, key.lstrip("/")), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise InvalidRequest(f"the shared memory {key!r} cannot be opened: {error.strerror}") from None
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size < size:
            os.close(file)
            raise InvalidRequest(f"the shared memory {key!r} has {found.st_size} bytes, and {size} are registered")
        return file


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


REGION, REGION_SIZE, REGION_OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
CLASSIFICATION = "classification"
_EMPTY_FINAL = "triton_enable_empty_final_response"  # no final answer here is empty, so that it changes nothing

View = Callable[[str, int, int], RegionPart]  # of a registered region: its name, an offset, so many bytes


class RegionPlace(NamedTuple):
    """A part of a registered region."""

    region: str
    offset: int
    byte_size: int

    def told(self, num_bytes: int) -> dict[str, str | int]:
        """The place as an answer's parameters name it, with `num_bytes` written there."""
        found: dict[str, str | int] = {REGION: self.region, REGION_SIZE: num_bytes}
        return {**found, REGION_OFFSET: self.offset} if self.offset else found


class InferTerms(NamedTuple):
    """The parameters of a request, as InferRequest has them."""

    level: int
    timeout_s: float | None
    sequence: SequenceControl | None


def version_of(text: str) -> int:
    """The number of a version; empty is 0, the default. Raises InvalidRequest."""
    if text and not (text.isascii() and text.isdigit() and 0 < len(text) <= 18):
        raise InvalidRequest(f"{text[:40]!r} is no model version, which is a number over 0", param="model_version")
    return int(text or "0")


def terms_of(parameters: Mapping[str, Any]) -> InferTerms:
    """Raises InvalidRequest."""
    if not parameters:
        return _NO_TERMS
    timeout_us = integer(parameters, "timeout")
    return InferTerms(integer(parameters, "priority"), timeout_us / 1e6 if timeout_us else None, _sequence(parameters))


_NO_TERMS = InferTerms(0, None, None)


def place_of(name: str, parameters: Mapping[str, Any]) -> RegionPlace | None:
    """Place of the tensor `name` in shared memory; None where it stands in the message."""
    if REGION not in parameters:
        return None
    region, size = parameters[REGION], integer(parameters, REGION_SIZE)
    if not isinstance(region, str) or not size:
        raise InvalidRequest(f"{name!r} names a {REGION} and must say its {REGION_SIZE}")
    return RegionPlace(region, integer(parameters, REGION_OFFSET), size)


def config_to_load(parameters: Mapping[str, Any]) -> str | None:
    """The ModelConfig as JSON that a load brings. Raises InvalidRequest, UnsupportedParameter for uploads."""
    config = parameters.get("config")
    if config is not None and not isinstance(config, str):
        raise InvalidRequest("the parameter 'config' must be a string, a ModelConfig as JSON", param="config")
    for name in sorted(set(parameters) - {"config"}):
        raise UnsupportedParameter(f"the parameter {name[:80]!r} is not supported: models are not uploaded")
    return config


def check_unload(parameters: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameter."""
    if any(parameters.values()):
        raise UnsupportedParameter("unload_dependents is not supported: unload each model by its name")


def integer(parameters: Mapping[str, Any], name: str) -> int:
    """0 where it is not given."""
    value = parameters.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(f"the parameter {name!r} must be an integer of 0 or more", param=name)
    return value


def flag(parameters: Mapping[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"the parameter {name!r} must be true or false", param=name)
    return value


def _sequence(parameters: Mapping[str, Any]) -> SequenceControl | None:
    for name in parameters:
        if name.startswith("triton_") and name != _EMPTY_FINAL:
            raise InvalidRequest(f"the parameter {name[:80]!r} is Triton's own; known is {_EMPTY_FINAL}")
    start, end = flag(parameters, "sequence_start"), flag(parameters, "sequence_end")
    known = parameters.get("sequence_id", 0)
    if isinstance(known, bool) or not isinstance(known, int | str):
        raise InvalidRequest("the parameter 'sequence_id' must be an integer or a string", param="sequence_id")
    return SequenceControl(correlation_id=known, start=start, end=end) if known else None


def keep(tensor: Tensor, place: RegionPlace, into: RegionPart) -> int:
    """Writes an output into its region; how many bytes. Raises InvalidRequest where it is larger than its place."""
    num_bytes = memoryview(tensor.data).nbytes
    if num_bytes > place.byte_size:
        raise InvalidRequest(
            f"output {tensor.name!r} has {num_bytes} bytes, and its place in region {place.region!r} {place.byte_size}"
        )
    into.write(tensor.data)
    return num_bytes


NAMES = (
    "classification",
    "sequence",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)  # as the metadata of the server has them


@dataclass(frozen=True, slots=True)
class Extensions:
    """Regions, settings and labels of a server that calls itself `server_id`."""

    server_id: str
    labels: Labels
    regions: SystemRegions = field(default_factory=SystemRegions)
    settings: ServerSettings = field(default_factory=ServerSettings)
