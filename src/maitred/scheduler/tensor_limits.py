"""Bounds on the batches that run at once: instances of a model, resources that instances share, and the LLM's share.

Source of resources and turns: triton-inference-server/server, docs/user_guide/rate_limiter.md; core, rate_limiter.cc.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from maitred.core.tensor_request import BatchRules, Instance


class Instances:
    """Free instances of a model, by number."""

    def __init__(self, rules: BatchRules) -> None:
        self._busy: dict[int, Instance] = {}  # as it was when it began
        self.replace(rules)

    def __bool__(self) -> bool:
        """Return whether any is free."""
        return bool(self._free)

    @property
    def busy(self) -> list[int]:
        return sorted(self._busy)

    @property
    def all(self) -> tuple[Instance, ...]:
        """Instances as the model's rules have them."""
        return self._all

    @property
    def any_unlimited(self) -> bool:
        """Return whether an instance is free that needs no resources."""
        return not self.resource_names or any(not self._all[number].resources for number in self._free)

    def replace(self, rules: BatchRules) -> None:
        """The model was loaded anew; batches under way end on what they began on."""
        self._all = rules.instances
        self._free = [number for number in range(len(self._all)) if number not in self._busy]
        self.resource_names = frozenset(name for instance in self._all for name, _ in instance.resources)

    def find(self, resources: Resources) -> int | None:
        """Return the first free instance with free resources; preferably one that needs none."""
        if not self.resource_names:
            return self._free[0] if self._free else None
        fitting = (number for number in self._free if resources.has(self._all[number]))
        return min(fitting, key=lambda number: (bool(self._all[number].resources), number), default=None)

    def begin(self, number: int) -> Instance:
        if number == self._free[0]:
            heappop(self._free)
        else:
            self._free.remove(number)
            heapify(self._free)
        self._busy[number] = self._all[number]
        return self._busy[number]

    def end(self, number: int) -> Instance:
        if number < len(self._all):
            heappush(self._free, number)
        return self._busy.pop(number)


class Resources:
    """Triton's rate limiter: of each resource there is as much as the most that one instance needs."""

    def __init__(self) -> None:
        self._total: dict[str, int] = {}
        self._used: dict[str, int] = {}

    def count(self, instances: Iterable[Instance]) -> None:
        """Count the resources of all loaded models."""
        self._total = {}
        for name, needed in (each for instance in instances for each in instance.resources):
            self._total[name] = max(needed, self._total.get(name, 0))

    def has(self, instance: Instance) -> bool:
        return all(self._used.get(name, 0) + count <= self._total.get(name, 0) for name, count in instance.resources)

    def take(self, instance: Instance) -> None:
        for name, count in instance.resources:
            self._used[name] = self._used.get(name, 0) + count

    def give_back(self, instance: Instance) -> None:
        for name, count in instance.resources:
            self._used[name] -= count
            if not self._used[name]:
                del self._used[name]


class TensorShare:
    """Share of the machine for batches while the LLM has rows: over any stretch of time the share, and one batch.

    A batch that begins delays the next one by its time over the share, so many small ones run
    at once and a large one is followed by a rest (generic cell rate algorithm, ITU-T I.371).
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.next_at = 0.0  # s, when a batch may begin beside the LLM

    def begin(self, seconds: float, now: float) -> None:
        """Begin, beside the LLM, a batch that is to take so much of the machine's time."""
        self.next_at = max(self.next_at, now) + seconds / self.share

    def correct(self, more_seconds: float) -> None:
        """Correct the time of a batch by so much more than was expected, or less."""
        self.next_at += more_seconds / self.share
