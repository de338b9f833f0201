"""A request for a tensor model, as a workload has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorArrival:
    """One request for a tensor model."""

    at: float  # s since the workload began
    request_id: str
    model: str
    version: int = 0  # 0 is the highest
    num_rows: int = 1
    length: int = 0  # of the open dimensions of its inputs
    tenant: str = ""
    priority: int = 0
    weight: float = 1.0
    deadline_s: float | None = None  # given up if it is not done by then, after arrival
