"""Traces: JSON lines with timestamp (ms), input_length, output_length and hash_ids of 512-token blocks, or public CSV.

The first format is Mooncake's (Qin et al. 2024, arXiv:2407.00079), with tenant, priority, weight, max_tokens,
deadline_s and ttft_slo_s as extra, optional fields. CSV is that of Azure's LLM inference traces of 2023 and 2024
(dates), or of BurstGPT (Wang et al. 2024, arXiv:2401.17644; seconds), told by the columns.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain as joined
from math import isfinite
from typing import NamedTuple

import msgspec

from maitred.core.errors import ConfigError
from maitred.sim.tensors import TensorArrival
from maitred.sim.workload import Arrival, chain
from maitred.tenancy.tenant import Tenant

BLOCK_TOKENS = 512
CSV_COLUMNS = (  # when, tokens of the prompt and of the answer
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
)
UNITS = {"ms": 1.0, "s": 1000.0}
MAX_TOKENS = 1024  # what a client allows, where the trace does not say: this, or the answer if that is longer


class TraceLine(msgspec.Struct, frozen=True):
    timestamp: float  # ms
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: tuple[int | str, ...] = ()
    tenant: str = ""
    priority: int | None = None
    weight: float = 1.0
    max_tokens: int | None = None
    deadline_s: float | None = None
    ttft_slo_s: float | None = None


def parse_trace(
    lines: Iterable[bytes], name: str, *, unit: str | None = None, block_tokens: int = BLOCK_TOKENS
) -> list[TraceLine]:
    """Read a trace in order of time, which is in ms whatever the file's `unit` is; None is ms for JSON lines and s for
    CSV. Raises ConfigError with the line at fault.
    """
    lines = iter(lines)
    first = next(lines, b"").removeprefix(b"\xef\xbb\xbf")
    if is_csv(first):
        return _parse_csv(first, lines, name, UNITS[unit or "s"])
    lines, to_ms = joined([first], lines), UNITS[unit or "ms"]
    decode = msgspec.json.Decoder(TraceLine).decode
    parsed: list[TraceLine] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed.append(_checked(decode(line), to_ms, block_tokens))
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError(
                f"{name}:{number}: {error}; a line needs timestamp (ms), input_length and output_length (tokens)"
            ) from None
    if not parsed:
        raise ConfigError(f"{name}: holds no requests; give a file of JSON lines")
    return sorted(parsed, key=lambda line: line.timestamp)


def is_csv(first: bytes) -> bool:
    """Return whether a file's first line names the columns of a known trace."""
    return any(set(columns) <= set(_cells(first)) for columns in CSV_COLUMNS)


def _cells(line: bytes) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line.decode("utf-8-sig", "replace").strip()]), [])]


def _parse_csv(head: bytes, lines: Iterable[bytes], name: str, to_ms: float) -> list[TraceLine]:
    """Read a CSV trace without the rows of failed requests, which have no tokens of a prompt or of an answer."""
    names = _cells(head)
    at, *lengths = next(columns for columns in CSV_COLUMNS if set(columns) <= set(names))
    parsed: list[TraceLine] = []
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        try:
            row = dict(zip(names, _cells(line), strict=True))
            num_inputs, num_outputs = (int(row[column]) for column in lengths)
            total = int(row.get("Total tokens", num_inputs + num_outputs))
            if total != num_inputs + num_outputs:
                raise ValueError(f"Total tokens is {total}, the sum of both is {num_inputs + num_outputs}")
            if num_inputs and num_outputs:
                found = TraceLine(timestamp=_ms(row[at], to_ms), input_length=num_inputs, output_length=num_outputs)
                parsed.append(_checked(found, 1.0, BLOCK_TOKENS))
        except ValueError as error:
            raise ConfigError(f"{name}:{number}: {error}; a row needs {at}, {' and '.join(lengths)}") from None
    if not parsed:
        raise ConfigError(f"{name}: holds no requests that were answered; give another file")
    return sorted(parsed, key=lambda line: line.timestamp)


def _ms(text: str, to_ms: float) -> float:
    """Milliseconds of a number in the file's unit, or of a date, which is UTC where it names no zone."""
    try:
        return float(text) * to_ms
    except ValueError:
        date = datetime.fromisoformat(text)
        return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp() * 1000


def _checked(line: TraceLine, to_ms: float, block_tokens: int) -> TraceLine:
    if not isfinite(line.timestamp):
        raise ValueError(f"timestamp is {line.timestamp}; it must be a number")
    if len(line.hash_ids) > -(-line.input_length // block_tokens):
        raise ValueError(
            f"{len(line.hash_ids)} hash_ids are {len(line.hash_ids) * block_tokens} tokens in blocks of "
            f"{block_tokens}, and input_length is {line.input_length}; maitred simulate takes --trace-block-size, as "
            f"{-(-line.input_length // len(line.hash_ids))}"
        )
    if line.max_tokens is not None and 0 < line.max_tokens < line.output_length:
        raise ValueError(f"max_tokens is {line.max_tokens}, and output_length is {line.output_length}, which is more")
    if line.input_length < 1 or line.output_length < 0:
        raise ValueError(f"lengths are {line.input_length} and {line.output_length}; the first must be over 0")
    if line.priority is not None and line.priority < 0:
        raise ValueError(f"priority is {line.priority}; it must be at least 0, the most urgent")
    if not line.weight > 0:
        raise ValueError(f"weight is {line.weight}; it must be over 0")
    for name in ("deadline_s", "ttft_slo_s", "max_tokens"):
        value = getattr(line, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; it must be over 0")
    return line if to_ms == 1.0 else msgspec.structs.replace(line, timestamp=line.timestamp * to_ms)


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """A trace as a workload, `rate_scale` times as fast."""

    lines: list[TraceLine]
    rate_scale: float = 1.0
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    block_tokens: int = BLOCK_TOKENS
    began_ms: float | None = None  # when it is time 0; None is at the first line

    def arrivals(self) -> Iterator[Arrival]:
        began = self.lines[0].timestamp if self.began_ms is None else self.began_ms
        for number, line in enumerate(self.lines):
            output = max(1, line.output_length)
            yield Arrival(
                at=(line.timestamp - began) / 1000 / self.rate_scale,
                request_id=f"t{number}",
                prompt_tokens=line.input_length,
                output_tokens=output,
                max_tokens=max(output, line.max_tokens or MAX_TOKENS),
                tenant=line.tenant,
                priority=line.priority,
                weight=line.weight,
                ttft_slo_s=line.ttft_slo_s,
                deadline_s=line.deadline_s,
                spans=chain(line.hash_ids, self.block_tokens, root=line.tenant),
                own=b"t" + number.to_bytes(8, "little"),
            )


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
                told = _checked_tensor(decode(line))
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


def _checked_tensor(line: TensorLine) -> TensorLine:
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
