"""A disk tier, simulated: which blocks are there; what reading them takes is a link's (`links.DISK`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class SimulatedDisk:
    """Blocks on disk by their names, the least recently used dropped first; written behind the engines."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def num_known(self, names: Sequence[bytes]) -> int:
        """Return how many from the front are there."""
        return next((i for i, name in enumerate(names) if name not in self._kept), len(names))

    def store(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):  # so that a chain is dropped from its end
            self._kept[name] = None
            self._kept.move_to_end(name)
        while len(self._kept) > self._max_blocks:
            self._kept.popitem(last=False)
