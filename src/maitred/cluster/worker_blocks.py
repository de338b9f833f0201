"""Which KV blocks several workers have: told to the core, and to a router in front as if they were one engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from maitred.cluster.prefix_index import PrefixIndex
from maitred.cluster.replicas import Report
from maitred.cluster.worker import Worker, key_of
from maitred.engine.frames import BlockChanges
from maitred.engine.replica import OnBlocks

NOTHING_KNOWN = Report(is_broken=True)


class WorkerBlocks:
    """On the event loop."""

    def __init__(self, index: PrefixIndex, workers: Sequence[Worker], report: Callable[[Worker, Report], None]) -> None:
        """`index` is the core's; `report` tells the core."""
        self._index, self._workers, self._report = index, workers, report
        self._on_blocks: OnBlocks | None = None

    def tell_router(self, on_blocks: OnBlocks | None) -> None:
        """What any worker has, all that is there first; None tells no more."""
        self._on_blocks = on_blocks
        if on_blocks is not None:
            self.learn(self._workers)

    def learn(self, workers: Iterable[Worker]) -> None:
        """They tell what they have, and what changes from now on."""
        for worker in workers:
            self._report(worker, NOTHING_KNOWN)
            worker.client.tell_router(partial(self._changed, worker))

    def _changed(self, worker: Worker, changes: BlockChanges | None) -> None:
        on_blocks = self._on_blocks
        if changes is None:
            self._report(worker, NOTHING_KNOWN)
            if on_blocks is not None:
                on_blocks(None)
                self.learn(other for other in self._workers if other is not worker)
            return
        stored = self._unheld(changes.stored) if on_blocks is not None else []
        told = Report(stored=tuple(map(key_of, changes.stored)), removed=tuple(map(key_of, changes.removed)))
        self._report(worker, told)
        if on_blocks is not None:
            on_blocks(BlockChanges(stored, self._unheld(changes.removed)))

    def _unheld(self, blocks: Sequence[bytes]) -> list[bytes]:
        return [block for block in blocks if not self._index.holders(key_of(block))]
