"""Slots of recurrent layers' states, one of each running request, and snapshots at block boundaries (design note 0034).

A snapshot holds the state after a full block, by that block's hash. Slots are numbered 0 .. num_slots - 1; the memory
itself is the executor's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from maitred.core.request import RequestState
from maitred.core.step import BlockCopy, PoolChanges, ScheduledRow, StateSave
from maitred.kv.manager import NO_HIT, Allocation, KVCacheManager, PrefixHit

STRIDE = 512  # tokens between snapshots of a prompt
MOST_STRIDES = 8  # of a longer one: its strides are longer


class StatefulKVCacheManager(KVCacheManager):
    """Bookkeeping of a KV cache of whole blocks, and of the states beside it: a hit ends at a snapshot.

    Nothing leaves this engine: no request is swapped out, filled from elsewhere or held for others.
    """

    stride = STRIDE
    has_pool_changes = True

    def __init__(self, num_slots: int, **same: Any) -> None:
        super().__init__(**same)
        self.num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))  # the last is handed out next
        self._slots: dict[str, int] = {}  # of running requests
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # slot by hash, least recently used first
        self._saving: dict[str, list[StateSave]] = {}  # of the plan under way, by request
        self._parted: dict[str, int] = {}  # where running requests left the cached KV, for want of a state
        self._newest: dict[str, bytes] = {}  # their snapshots of decoding
        self._copies: list[BlockCopy] = []  # of the next plan
        self.num_evictions = 0

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def can_swap_out(self, num_tokens: int) -> bool:
        return False

    def reserve(
        self, request: RequestState, hit: PrefixHit, num_blocks: int, num_spared: int
    ) -> tuple[int, ...] | None:
        return None

    def hold(self, block_hashes: Sequence[bytes]) -> tuple[int, ...]:
        return ()

    def find_prefix(self, request: RequestState) -> PrefixHit:
        blocks = super().find_prefix(request).blocks
        for count in range(len(blocks), 0, -1):
            if request.block_hashes[count - 1] in self._snapshots:
                return PrefixHit(blocks[:count], count * self.block_size)
        return NO_HIT

    def fork(self, source: RequestState, target: RequestState) -> PrefixHit:
        """The source's state is past the prompt; the sample begins at the prompt's last snapshot, as others do."""
        return self.find_prefix(target)._replace(forked=True)

    def num_blocks_short(self, request: RequestState, hit: PrefixHit) -> int:
        """A slot lacks where `configure` let more requests run than there are slots; it counts as a block."""
        lacks_slot = not self._free_slots and not self._snapshots
        return max(super().num_blocks_short(request, hit), int(lacks_slot))

    def admit(self, request: RequestState, hit: PrefixHit) -> Allocation | None:
        num_cached = len(super().find_prefix(request).blocks) * self.block_size
        allocation = super().admit(request, hit)
        if allocation is None:
            return None
        source = None
        if hit.num_tokens:
            digest = request.block_hashes[hit.num_tokens // self.block_size - 1]
            self._snapshots.move_to_end(digest)
            source = self._snapshots[digest]
        slot = self._slots[request.request_id] = self._take_slot()
        if source is not None and source != slot:  # else it was the last snapshot, and is the request's now
            self._copies.append(BlockCopy(source, slot))
        if num_cached > hit.num_tokens:
            self._parted[request.request_id] = num_cached
        return allocation._replace(state_slot=slot)

    def take_pool_changes(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> PoolChanges:
        """Choose the snapshots that the plan's rows leave, as far as there are slots."""
        saves = list[StateSave]()
        if self.enable_prefix_caching:
            for row, request in zip(rows, requests, strict=True):
                if row.num_known > 1 or not row.start % self.block_size:
                    saves += self._saves(row, request)
        copies, self._copies = tuple(self._copies), []
        return PoolChanges(state_copies=copies, state_saves=tuple(saves))

    def commit(self, request: RequestState, start: int, end: int) -> None:
        """Blocks filled by [start, end) can be found, and snapshots that were saved on the way."""
        super().commit(request, start, end)
        for save in self._saving.pop(request.request_id, ()):
            digest = request.block_hashes[save.position // self.block_size - 1]
            if digest in self._snapshots:
                self._free_slots.append(save.slot)
                continue
            self._snapshots[digest] = save.slot
            if save.position > request.num_prompt_tokens:
                self._newest[request.request_id] = digest

    def free(self, request: RequestState) -> None:
        """Gives back blocks and slots; what is being saved is not known to be right."""
        super().free(request)
        request_id = request.request_id
        if request_id in self._slots:
            self._free_slots.append(self._slots.pop(request_id))
        self._free_slots += [save.slot for save in self._saving.pop(request_id, ())]
        self._parted.pop(request_id, None)
        self._newest.pop(request_id, None)

    def check_invariants(self, requests: Iterable[RequestState], leased: Iterable[Sequence[int]] = ()) -> None:
        """Assert besides that each slot is a running request's, a snapshot's, being saved, or free."""
        requests = list(requests)
        super().check_invariants(requests, leased)
        assert set(self._slots) == {request.request_id for request in requests if request.block_table}
        saving = [save.slot for saves in self._saving.values() for save in saves]
        slots = [*self._slots.values(), *self._snapshots.values(), *saving, *self._free_slots]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost, or has two uses"
        assert self._parted.keys() | self._newest.keys() | self._saving.keys() <= self._slots.keys()

    # -- snapshots

    def _saves(self, row: ScheduledRow, request: RequestState) -> Iterator[StateSave]:
        end = row.start + row.num_known - row.samples  # the last known token may be computed again
        num_prompt = request.num_prompt_tokens
        positions = {*self._strides(row.start, end, num_prompt), self._parted.get(request.request_id, 0)}
        if row.samples:
            positions.add(end // self.block_size * self.block_size)
        for position in sorted(positions):
            if not max(1, row.start) <= position <= end or self._is_saved(request, position):
                continue
            if position > num_prompt:
                self._drop(self._newest.pop(request.request_id, b""))
            if not self._free_slots and not self._snapshots:
                return
            save = StateSave(request.request_id, position, self._take_slot())
            self._saving.setdefault(request.request_id, []).append(save)
            yield save

    def _strides(self, start: int, end: int, num_prompt: int) -> range:
        """Boundaries in (start, end] at which a prompt leaves snapshots, wherever its chunks end."""
        step = self.stride * -(-num_prompt // (self.stride * MOST_STRIDES))
        step = -(-step // self.block_size) * self.block_size
        return range((start // step + 1) * step, min(end, num_prompt) + 1, step)

    def _is_saved(self, request: RequestState, position: int) -> bool:
        place = position // self.block_size - 1
        return place < len(request.block_hashes) and request.block_hashes[place] in self._snapshots

    def _drop(self, digest: bytes) -> None:
        if digest in self._snapshots:
            self._free_slots.append(self._snapshots.pop(digest))

    def _take_slot(self) -> int:
        """A free slot, else that of the snapshot used longest ago. The caller has checked that there is one."""
        if self._free_slots:
            return self._free_slots.pop()
        self.num_evictions += 1
        return self._snapshots.popitem(last=False)[1]
