"""Traces in which requests for tensor models stand among those for a language model.

A line without `input_length` is for a tensor model: timestamp (ms), model, and what TensorLine has besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from maitred.core.errors import ConfigError
from maitred.sim.tensor_arrival import TensorArrival
from maitred.sim.traces import BLOCK_TOKENS, UNITS, TraceLine, parse_trace


class TensorLine(msgspec.Struct, frozen=True):
    timestamp: float  # ms
    model: str
    rows: int = 1
    length: int = 0  # of the open dimensions of its inputs
    version: int = 0  # 0 is the highest
    tenant: str = ""
    priority: int = 0
    weight: float = 1.0
    deadline_s: float | None = None


class MixedTrace(NamedTuple):
    """Requests of both kinds, in order of time."""

    chats: list[TraceLine]
    tensors: list[TensorLine]

    @property
    def began_ms(self) -> float:
        return min(lines[0].timestamp for lines in self if lines)


class _Kind(msgspec.Struct):
    input_length: object = None


def parse_mixed_trace(
    lines: Sequence[bytes], name: str, *, unit: str | None = None, block_tokens: int = BLOCK_TOKENS
) -> MixedTrace:
    """`unit` as of `parse_trace`. Raises ConfigError with the line at fault."""
    kind, decode = msgspec.json.Decoder(_Kind).decode, msgspec.json.Decoder(TensorLine).decode
    tensors: list[TensorLine] = []
    chats = [b""] * len(lines)  # those of tensor models left empty, so that errors have the file's line
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            if kind(line).input_length is None:
                told = _checked(decode(line))
                tensors.append(msgspec.structs.replace(told, timestamp=told.timestamp * UNITS[unit or "ms"]))
            else:
                chats[number] = line
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError(
                f"{name}:{number + 1}: {error}; a line needs timestamp (ms) and model, or input_length and "
                "output_length (tokens)"
            ) from None
    if not tensors and not any(chats):
        raise ConfigError(f"{name}: holds no requests; give a file of JSON lines")
    ordered = sorted(tensors, key=lambda line: line.timestamp)
    parsed = parse_trace(chats, name, unit=unit, block_tokens=block_tokens) if any(chats) else []
    return MixedTrace(parsed, ordered)


def _checked(line: TensorLine) -> TensorLine:
    if line.rows < 1 or line.length < 0 or line.version < 0 or line.priority < 0:
        raise ValueError("rows must be at least 1, and length, version and priority at least 0")
    if not line.weight > 0 or (line.deadline_s is not None and not line.deadline_s > 0):
        raise ValueError("weight and deadline_s must be over 0")
    return line


def tensor_arrivals(trace: MixedTrace, rate_scale: float = 1.0) -> Iterator[TensorArrival]:
    """`rate_scale` times as fast, from the trace's first line on."""
    began_ms = trace.began_ms
    for number, line in enumerate(trace.tensors):
        yield TensorArrival(
            at=(line.timestamp - began_ms) / 1000 / rate_scale,
            request_id=f"m{number}",
            model=line.model,
            version=line.version,
            num_rows=line.rows,
            length=line.length,
            tenant=line.tenant,
            priority=line.priority,
            weight=line.weight,
            deadline_s=line.deadline_s,
        )
