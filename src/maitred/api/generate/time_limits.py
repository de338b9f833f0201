"""Time limits of a request: body fields where its dialect has them, or headers for clients that cannot add any.

`x-slo-ttft-ms` is the header of the Gateway API's endpoint picker, so that an objective set there holds here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from maitred.api.http.errors import shortened
from maitred.core.errors import InvalidRequest
from maitred.gate.terms import TimeLimits

MAX_MS = 24 * 3600 * 1000
HEADERS: Mapping[str, str] = {  # in the order of TimeLimits
    "ttft_slo_ms": "x-slo-ttft-ms",
    "queue_timeout_ms": "x-queue-timeout-ms",
    "timeout_ms": "x-request-timeout-ms",
}


class AskedLimits(Protocol):
    """Milliseconds from arrival, as a body may have them; None was not sent."""

    @property
    def ttft_slo_ms(self) -> float | None: ...

    @property
    def queue_timeout_ms(self) -> float | None: ...

    @property
    def timeout_ms(self) -> float | None: ...


def time_limits(asked: AskedLimits | None, headers: Mapping[bytes, bytes]) -> TimeLimits:
    """The request's limits; a field outranks its header. Raises InvalidRequest for no number of milliseconds."""
    return TimeLimits(*(_asked(field, asked, headers) for field in HEADERS))


def _asked(field: str, asked: AskedLimits | None, headers: Mapping[bytes, bytes]) -> float | None:
    """One limit in seconds."""
    value, name = getattr(asked, field, None), field
    if value is None:
        name = HEADERS[field]
        sent = headers.get(name.encode())
        if sent is None:
            return None
        value = _number(sent, name)
    if not 0 < value <= MAX_MS:
        shown = shortened(str(value), 40)
        raise InvalidRequest(f"{name} is {shown}; it must be over 0 and at most {MAX_MS} (milliseconds)", param=name)
    return float(value) / 1000.0


def _number(sent: bytes, name: str) -> float:
    try:
        return float(sent.decode("ascii"))
    except (ValueError, UnicodeDecodeError):
        shown = shortened(sent.decode("latin-1"), 40)
        raise InvalidRequest(f"the header {name} is {shown!r}; it must be milliseconds", param=name) from None
