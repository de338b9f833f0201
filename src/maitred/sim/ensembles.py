"""Simulated ensembles: which steps of a request may go, and when it is done. Nothing is timed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from maitred.sim.tensor_arrival import TensorArrival


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A request that an ensemble makes of a model, or of another ensemble."""

    model: str
    version: int  # 0 is the highest
    needs: tuple[int, ...] = ()  # steps that give its inputs


@dataclass(frozen=True, slots=True)
class SimulatedEnsemble:
    """An ensemble's steps, without circles."""

    name: str
    steps: tuple[SimulatedStep, ...]


@dataclass(slots=True)
class Whole:
    """A request for an ensemble, from its first step to its last."""

    arrival: TensorArrival
    ensemble: SimulatedEnsemble
    begun: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    failed: bool = False

    def ready(self) -> Iterator[TensorArrival]:
        """Steps that may go now, each once: with arrival, priority and deadline of the whole."""
        for number, step in enumerate(self.ensemble.steps):
            if number not in self.begun and self.done.issuperset(step.needs):
                self.begun.add(number)
                request_id = f"{self.arrival.request_id}/{number}"
                yield replace(self.arrival, request_id=request_id, model=step.model, version=step.version)

    def answered(self, request_id: str) -> None:
        self.done.add(int(request_id.rpartition("/")[2]))

    @property
    def running(self) -> list[str]:
        return [f"{self.arrival.request_id}/{number}" for number in sorted(self.begun - self.done)]

    @property
    def is_done(self) -> bool:
        return len(self.done) == len(self.ensemble.steps)
