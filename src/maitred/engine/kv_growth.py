"""Leases on prompts that are being computed: what can be read grows with each step, and layer by layer within one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from maitred.core.request import RequestState
from maitred.core.step import ModelOutput, RequestProgress, ScheduledRow, SchedulerOutput
from maitred.kv.layout import LayerIO, layers_of_next_run
from maitred.kv.leases import Readable
from maitred.kv.source import Offers
from maitred.scheduler.engine_core import EngineCore, StepListener, StepTimes

IsOneRun = Callable[[SchedulerOutput], bool]


@dataclass(slots=True, eq=False)
class _Growing:
    hashes: Sequence[bytes]  # of all that there will be
    blocks: list[int]  # told so far
    is_in_step: bool = False  # the step under way computes some of it


class GrowingLeases(StepListener):
    """Follows steps while there is such a lease. All methods are the engine thread's.

    Blocks of finished steps are held by their hashes, those of the step under way are their request's until it ends.
    """

    follows_steps = False

    def __init__(self, io: LayerIO, offers: Offers, here: Iterable[RequestState], *, is_one_run: IsOneRun) -> None:
        """`here` are the requests there are; `is_one_run` the executor's."""
        self._io, self._offers, self._here, self._is_one_run = io, offers, here, is_one_run
        self._growing: dict[str, _Growing] = {}

    def begin(self, core: EngineCore) -> None:
        self._core = core

    def grow(self, lease: str, hashes: Sequence[bytes], blocks: Sequence[int]) -> bool:
        """Grow a lease on `hashes`, whose first `blocks` it holds. False where no request computes the rest."""
        if not self._is_computed_here(hashes):
            return False
        self._growing[lease] = _Growing(hashes, list(blocks))
        self._core.follow(self, True)
        return True

    def forget(self, lease: str) -> None:
        """Forget a lease that has ended."""
        self._growing.pop(lease, None)
        self._core.follow(self, bool(self._growing))

    def look(self) -> None:
        """After a request's end: end the leases on blocks that no request computes any more."""
        for lease, growing in list(self._growing.items()):
            if not self._is_computed_here(growing.hashes):
                self._end(lease)

    def scheduled(self, plan: SchedulerOutput) -> None:
        layers = layers_of_next_run(self._io) if self._is_one_run(plan) else None
        for row in plan.rows:
            request = self._core.scheduler.request(row.request_id)
            for lease, growing in self._growing.items():
                if request is not None and _computes(request, growing.hashes):
                    growing.is_in_step = True
                    if layers is not None and not request.spec.adapter:  # the executor may refuse an adapter's row
                        self._offer_step(lease, growing, request, row, layers)

    def _offer_step(
        self, lease: str, growing: _Growing, request: RequestState, row: ScheduledRow, layers: Callable[[], int]
    ) -> None:
        end = min((row.start + row.num_tokens) // self._io.layout.block_size, len(growing.hashes))
        more = request.block_table[len(growing.blocks) : end]
        if more:
            self._offers.grow(lease, Readable(len(growing.blocks), end), more, layers)
            growing.blocks += more

    def stepped(
        self, plan: SchedulerOutput, output: ModelOutput, progress: list[RequestProgress], times: StepTimes
    ) -> None:
        for lease, growing in list(self._growing.items()):
            if not growing.is_in_step:
                continue
            growing.is_in_step = False
            if not self._offers.has(lease):
                self.forget(lease)
                continue
            num_told = len(growing.blocks)
            blocks = self._core.hold(lease, growing.hashes)
            if list(blocks[:num_told]) != growing.blocks:  # another request's of the same tokens, or it did not get on
                self._end(lease)
                continue
            self._offers.grow(lease, Readable(len(blocks)), blocks[num_told:])
            growing.blocks = list(blocks)
            if len(blocks) == len(growing.hashes):
                self.forget(lease)

    def _is_computed_here(self, hashes: Sequence[bytes]) -> bool:
        return any(_computes(request, hashes) and not request.finished for request in self._here)

    def _end(self, lease: str) -> None:
        self.forget(lease)
        self._offers.revoke(lease)
        self._core.release(lease)


def _computes(request: RequestState, hashes: Sequence[bytes]) -> bool:
    """Whether all of this prefix belongs to the request's prompt."""
    last = len(hashes) - 1
    return not request.spec.kv_only and last < len(request.block_hashes) and request.block_hashes[last] == hashes[last]
