"""Requests for tensor models, as the client of their engine sees them."""

from __future__ import annotations

from typing import Protocol

import msgspec

from maitred.engine.owner import Loss
from maitred.engine.tensor_counts import TensorCounts
from maitred.errors import EngineDead


class TensorsOfEngine(Protocol):
    """`tensor.client.TensorClient` is one. Told everything on the event loop, once there is one."""

    counts: TensorCounts

    @property
    def busy(self) -> bool:
        """Whether anybody waits for an answer."""

    def heard(self, message: msgspec.Raw) -> None:
        """What `OfTensors` brought."""

    def lost(self, cause: str, *, own_fault: bool) -> Loss:
        """The engine died."""

    def regained(self) -> int:
        """There is an engine again: how many requests run again."""

    def ended(self, error: EngineDead) -> None:
        """There will be none any more."""
