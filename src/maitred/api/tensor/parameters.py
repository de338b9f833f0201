"""Parameters of KServe v2 with Triton's extensions, of a request and of its tensors; for HTTP and gRPC alike.

Facts of the wire: docs/protocol of triton-inference-server/server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from maitred.api.tensor.regions import RegionPart
from maitred.core.errors import InvalidRequest, UnsupportedParameter
from maitred.core.tensor_request import SequenceControl, Tensor

REGION, REGION_SIZE, REGION_OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
CLASSIFICATION = "classification"
_EMPTY_FINAL = "triton_enable_empty_final_response"  # no final answer here is empty, so that it changes nothing

View = Callable[[str, int, int], RegionPart]  # of a registered region: its name, an offset, so many bytes


class Place(NamedTuple):
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


def place_of(name: str, parameters: Mapping[str, Any]) -> Place | None:
    """Place of the tensor `name` in shared memory; None where it stands in the message."""
    if REGION not in parameters:
        return None
    region, size = parameters[REGION], integer(parameters, REGION_SIZE)
    if not isinstance(region, str) or not size:
        raise InvalidRequest(f"{name!r} names a {REGION} and must say its {REGION_SIZE}")
    return Place(region, integer(parameters, REGION_OFFSET), size)


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


def keep(tensor: Tensor, place: Place, into: RegionPart) -> int:
    """Writes an output into its region; how many bytes. Raises InvalidRequest where it is larger than its place."""
    num_bytes = memoryview(tensor.data).nbytes
    if num_bytes > place.byte_size:
        raise InvalidRequest(
            f"output {tensor.name!r} has {num_bytes} bytes, and its place in region {place.region!r} {place.byte_size}"
        )
    into.write(tensor.data)
    return num_bytes
