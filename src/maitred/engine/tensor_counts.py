"""Requests to tensor models and what they took, counted where answers come by; for the metrics page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from maitred.core import metrics as m
from maitred.core.metrics import Metric
from maitred.core.request import Charges, FinishReason

Samples = dict[tuple[str, ...], float]


@dataclass(slots=True)
class TensorCounts:
    """Counts of all engines so far, by model."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # by model and how they ended
    compute_us: Counter[str] = field(default_factory=Counter)  # the ledger's rows have the same
    rows: Counter[str] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)
    padding: Counter[str] = field(default_factory=Counter)  # elements along the length
    elements: Counter[str] = field(default_factory=Counter)  # of all, where lengths share buckets

    def ended(self, model: str, reason: FinishReason, charges: Charges) -> None:
        """A request that had been taken in."""
        self.requests[model, reason.value] += 1
        self.compute_us[model] += charges.compute_us

    def ran(self, model: str, num_rows: int, num_padded: int, num_elements: int) -> None:
        self.batches[model] += 1
        self.rows[model] += num_rows
        self.padding[model] += num_padded
        self.elements[model] += num_elements

    def samples(self) -> Mapping[Metric, Samples]:
        """Samples of TENSOR_METRICS."""
        return {
            m.TENSOR_REQUESTS: {labels: float(count) for labels, count in self.requests.items()},
            m.TENSOR_COMPUTE: {(model,): us / 1e6 for model, us in self.compute_us.items()},
            m.TENSOR_ROWS: _by_model(self.rows),
            m.TENSOR_BATCHES: _by_model(self.batches),
            m.TENSOR_PADDING: {
                (model,): self.padding[model] / count for model, count in self.elements.items() if count
            },
        }


def _by_model(counts: Counter[str]) -> Samples:
    return {(model,): float(count) for model, count in counts.items()}
