"""Traces: JSON lines with timestamp (ms), input_length, output_length and hash_ids of 512-token blocks.

The format is Mooncake's (Qin et al. 2024, arXiv:2407.00079), with tenant, priority, weight, max_tokens, deadline_s and
ttft_slo_s as extra, optional fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from maitred.errors import ConfigError
from maitred.sim.workload import Arrival, chain
from maitred.tenancy.tenant import Tenant

BLOCK_TOKENS = 512
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


def parse_trace(lines: Iterable[bytes], name: str) -> list[TraceLine]:
    """In order of time. Raises ConfigError with the line at fault."""
    decode = msgspec.json.Decoder(TraceLine).decode
    parsed: list[TraceLine] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed.append(_checked(decode(line)))
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError(
                f"{name}:{number}: {error}; a line needs timestamp (ms), input_length and output_length (tokens)"
            ) from None
    if not parsed:
        raise ConfigError(f"{name}: holds no requests; give a file of JSON lines")
    return sorted(parsed, key=lambda line: line.timestamp)


def _checked(line: TraceLine) -> TraceLine:
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
    return line


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """A trace as a workload, `rate_scale` times as fast."""

    lines: list[TraceLine]
    rate_scale: float = 1.0
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
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
                spans=chain(line.hash_ids, BLOCK_TOKENS, root=line.tenant),
                own=b"t" + number.to_bytes(8, "little"),
            )
