"""LoRA adapters of the native executor: packed as the library reads them, and resident by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.executor.native_program import Int32s, LowRankPart, NativeProgram
from maitred.executor.sampler import SampledToken
from maitred.executor.state import RowWork
from maitred.kernels.linear import allocate
from maitred.model.adapters import Adapter, LowRank
from maitred.model.program import Weight

PANEL = 16  # output channels, and values of A that lie together
RANKS_AT_ONCE = 4
TILE = 32
ALIGNMENT = 64
PAGE = 4096
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter in the form that the program reads; immutable, so several threads may pass it on."""

    digest: str
    num_bytes: int
    parts: tuple[LowRankPart | None, ...]  # of each adapted linear; None where nothing is added
    memory: NDArray[np.uint8]  # in which all of them lie

    def moved(self, memory: NDArray[np.uint8]) -> PackedAdapter:
        """The same in other memory."""
        memory[:] = self.memory[: self.num_bytes]
        start = self.memory.ctypes.data

        def there(part: NDArray[np.uint8]) -> NDArray[np.uint8]:
            first = part.ctypes.data - start
            return memory[first : first + part.nbytes]

        parts = tuple(part and part._replace(a=there(part.a), b=there(part.b)) for part in self.parts)
        return PackedAdapter(self.digest, self.num_bytes, parts, memory)


class Resident(NamedTuple):
    slot: int
    adapter: PackedAdapter  # as the library reads it
    offset: int  # in memory that ranks share

    @property
    def end(self) -> int:
        """End of the adapter there, where the next may begin."""
        return _round_up(self.offset + self.adapter.num_bytes, PAGE)


class NativeAdapters:
    """The resident adapters of an executor. `pack` and `num_bytes` are for any thread; the rest for the one that calls
    `execute`, between steps. An adapter that is unloaded must be no running request's, or that request ends."""

    def __init__(self, runner: NativeProgram) -> None:
        self._runner = runner
        self._adapted = runner.adapted
        self._resident: dict[str, Resident] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self._resident)

    def num_bytes(self, adapter: Adapter) -> int:
        """Memory of the adapter once it is resident."""
        return _layout(plans(self._adapted, adapter))[-1]

    def pack(self, adapter: Adapter) -> PackedAdapter:
        return pack_adapter(self._adapted, adapter)

    def load(self, name: str, adapter: Adapter | PackedAdapter) -> None:
        """Make it resident. Raises KernelError for a name that is, or where ranks share no room for it."""
        if name in self._resident:
            raise KernelError(f"adapter {name} is loaded already; unload it first")
        packed = adapter if isinstance(adapter, PackedAdapter) else self.pack(adapter)
        taken = {resident.slot for resident in self._resident.values()}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        memory, offset = self._runner.adapter_memory, 0
        if memory is not None:
            offset = self._room_for(packed.num_bytes, memory)
        self._put(name, Resident(slot, packed, offset), memory)

    def unload(self, name: str) -> None:
        """Free it. Raises KernelError for a name that is not resident."""
        if name not in self._resident:
            raise KernelError(f"adapter {name} is not loaded")
        gone = self._resident.pop(name)
        self._runner.unload_adapter(gone.slot)
        if self._runner.adapter_memory is not None:
            self._runner.release_adapter_memory(gone.offset, gone.adapter.num_bytes)

    def _put(self, name: str, resident: Resident, memory: NDArray[np.uint8] | None) -> None:
        """Lay it down where it says, for the program to read there. Raises KernelError."""
        slot, packed, offset = resident
        if memory is not None:
            packed = packed.moved(memory[offset : offset + packed.num_bytes])
        try:
            self._runner.load_adapter(slot, packed.parts)
        except ValueError as error:
            raise KernelError(f"adapter {name} cannot be loaded: {error}") from None
        self._resident[name] = Resident(slot, packed, offset)

    def _room_for(self, num_bytes: int, memory: NDArray[np.uint8]) -> int:
        """A page's start before so many free bytes. Where only several gaps together have them, all move together."""
        at = self._free_offset(num_bytes)
        if at + num_bytes > len(memory):
            at = self._compact(memory)
        if at + num_bytes > len(memory):
            raise KernelError(
                f"an adapter takes {num_bytes} bytes, and of {len(memory)} that ranks share for adapters {at} are "
                "taken; lower --lora-memory-bytes"
            )
        return at

    def _free_offset(self, num_bytes: int) -> int:
        """The first room for so many bytes between those that are resident, else their end."""
        at = 0
        for resident in self._by_offset().values():
            if resident.offset - at >= num_bytes:
                break
            at = resident.end
        return at

    def _compact(self, memory: NDArray[np.uint8]) -> int:
        """Move those that are resident to the memory's beginning; where the last one ends."""
        at = 0
        for name, resident in self._by_offset().items():
            if resident.offset > at:
                self._put(name, resident._replace(offset=at), memory)
                free = max(resident.offset, self._resident[name].end)
                self._runner.release_adapter_memory(free, resident.end - free)
            at = self._resident[name].end
        return at

    def _by_offset(self) -> dict[str, Resident]:
        return dict(sorted(self._resident.items(), key=lambda item: item[1].offset))

    def slots(self, names: Sequence[str]) -> Int32s:
        """Return the slot of each row, by the name of its adapter, which is resident; -1 for no name."""
        return np.array([self._resident[name].slot if name else -1 for name in names], dtype=np.int32)


def refuse(works: Sequence[RowWork], adapters: NativeAdapters | None) -> dict[int, SampledToken]:
    """Return the rows with an adapter that is not resident, by place, and their reports: they end, and no others."""
    known = adapters.names() if adapters is not None else frozenset()
    return {
        index: SampledToken(0, error=f"adapter {work.state.adapter} is not loaded")
        for index, work in enumerate(works)
        if work.state.adapter and work.state.adapter not in known
    }


# ---- packing


class AdapterRun(NamedTuple):
    """Panels of B, one after the other: `b` [rows, ranks] of the matrices that reach them, None where none does."""

    num_panels: int
    first_rank: int
    b: Floats | None


class PartPlan(NamedTuple):
    """Parts that are packed for one linear."""

    dtype: str
    a: tuple[Floats, ...]  # stacked
    width: int
    runs: tuple[AdapterRun, ...]

    @property
    def rank(self) -> int:
        """Rows of A with their padding."""
        return _round_up(sum(len(a) for a in self.a), RANKS_AT_ONCE)

    @property
    def a_bytes(self) -> int:
        return self.rank * _round_up(self.width, PANEL) * self.item_bytes

    @property
    def b_bytes(self) -> int:
        return sum(run.num_panels * _num_ranks(run) for run in self.runs) * PANEL * self.item_bytes

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2


class LoraPiece(NamedTuple):
    """Rows of B from `row` of the linear's on, which the ranks from `rank` on reach."""

    row: int
    rank: int
    b: Floats


def pack_adapter(adapted: Sequence[Weight], adapter: Adapter) -> PackedAdapter:
    """Pack an adapter in one piece of memory, linear after linear, A before B."""
    planned = plans(adapted, adapter)
    offsets = _layout(planned)
    memory = allocate(offsets[-1])
    packed = [_packed(plan, memory[first:]) if plan else None for plan, first in zip(planned, offsets, strict=False)]
    return PackedAdapter(adapter.digest, offsets[-1], tuple(packed), memory)


def plans(adapted: Sequence[Weight], adapter: Adapter) -> list[PartPlan | None]:
    return [_plan(weight, adapter.tensors) for weight in adapted]


def _layout(planned: Sequence[PartPlan | None]) -> list[int]:
    """Return where each part begins, and the end of all."""
    offsets = [0]
    for plan in planned:
        offsets.append(offsets[-1] + (_aligned(plan.a_bytes) + _aligned(plan.b_bytes) if plan else 0))
    return offsets


def _plan(weight: Weight, tensors: Mapping[str, tuple[LowRank, ...]]) -> PartPlan | None:
    a: list[Floats] = []
    pieces: list[LoraPiece] = []
    row = rank = 0
    for part in weight.parts:
        for low_rank in tensors.get(part.parameter, ()):
            first, end = max(low_rank.row, part.first), min(low_rank.row + len(low_rank.b), part.first + part.rows)
            if first < end:
                b = low_rank.b[first - low_rank.row : end - low_rank.row]
                pieces.append(LoraPiece(row + first - part.first, rank, b))
                a.append(low_rank.a)
                rank += len(low_rank.a)
        row += part.rows
    if not pieces:
        return None
    dtype = "float32" if weight.format.operand == "float32" else "bfloat16"
    return PartPlan(dtype, tuple(a), weight.width, tuple(_runs(weight, pieces)))


def _runs(weight: Weight, pieces: Sequence[LoraPiece]) -> Iterator[AdapterRun]:
    """Return the runs over the panels of the weight's tiles; those of a gated pair half by half."""
    if not weight.gated:
        yield from _runs_of(pieces, 0, weight.rows, _round_up(weight.rows, TILE))
        return
    half = weight.rows // 2
    for first in (0, half):
        yield from _runs_of(pieces, first, first + half, _round_up(half, PANEL))


def _runs_of(pieces: Sequence[LoraPiece], first: int, end: int, padded_rows: int) -> Iterator[AdapterRun]:
    """Rows [first, end): a run for each piece where they meet at panels' borders, else one over all their ranks."""
    here = [_within(piece, first, end) for piece in pieces if piece.row < end and first < piece.row + len(piece.b)]
    if not all(p.row % PANEL == 0 and (len(p.b) % PANEL == 0 or p.row + len(p.b) == end - first) for p in here):
        here = [_joined(here)]
    at = 0
    for piece in here:
        if piece.row > at:
            yield AdapterRun((piece.row - at) // PANEL, 0, None)
        at = piece.row + _round_up(len(piece.b), PANEL)
        yield AdapterRun((at - piece.row) // PANEL, piece.rank, piece.b)
    if at < padded_rows:
        yield AdapterRun((padded_rows - at) // PANEL, 0, None)


def _within(piece: LoraPiece, first: int, end: int) -> LoraPiece:
    """The part of it in rows [first, end), counted from there."""
    begin = max(piece.row, first)
    return LoraPiece(begin - first, piece.rank, piece.b[begin - piece.row : end - piece.row])


def _joined(pieces: Sequence[LoraPiece]) -> LoraPiece:
    """Return one matrix from row 0 on, with zeros where a rank does not reach a row."""
    first = min(piece.rank for piece in pieces)
    ranks = max(piece.rank + piece.b.shape[1] for piece in pieces) - first
    b = np.zeros((max(piece.row + len(piece.b) for piece in pieces), ranks), dtype=np.float32)
    for piece in pieces:
        b[piece.row : piece.row + len(piece.b), piece.rank - first : piece.rank - first + piece.b.shape[1]] = piece.b
    return LoraPiece(0, first, b)


def _packed(plan: PartPlan, memory: NDArray[np.uint8]) -> LowRankPart:
    a, behind = memory[: plan.a_bytes], _aligned(plan.a_bytes)
    b = memory[behind : behind + plan.b_bytes]
    _put(a, plan, _tiled_a(plan))
    at = 0
    for run in plan.runs:
        if run.b is not None:
            panels = _panels(run.b)
            _put(b[at : at + panels.size * plan.item_bytes], plan, panels)
            at += panels.size * plan.item_bytes
    runs = np.array([(run.num_panels, run.first_rank, _num_ranks(run)) for run in plan.runs], dtype=np.int32)
    return LowRankPart(plan.dtype, plan.rank, a, b, runs)


def _tiled_a(plan: PartPlan) -> Floats:
    """[rank / 4][k / 16][4][16]"""
    stacked = np.zeros((plan.rank, _round_up(plan.width, PANEL)), dtype=np.float32)
    np.concatenate(plan.a, out=stacked[: sum(len(a) for a in plan.a), : plan.width])
    return stacked.reshape(plan.rank // RANKS_AT_ONCE, RANKS_AT_ONCE, -1, PANEL).swapaxes(1, 2)


def _panels(b_NR: Floats) -> Floats:
    """[rows / 16][ranks][16]"""
    rows = np.zeros((_round_up(len(b_NR), PANEL), b_NR.shape[1]), dtype=np.float32)
    rows[: len(b_NR)] = b_NR
    return rows.reshape(-1, PANEL, b_NR.shape[1]).swapaxes(1, 2)


def _put(out: NDArray[np.uint8], plan: PartPlan, values: Floats) -> None:
    if plan.dtype == "float32":
        out.view(np.float32).reshape(values.shape)[:] = values
        return
    bits = np.ascontiguousarray(values).view(np.uint32)
    out.view(np.uint16).reshape(values.shape)[:] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest even


def _num_ranks(run: AdapterRun) -> int:
    return run.b.shape[1] if run.b is not None else 0


def _aligned(num_bytes: int) -> int:
    return _round_up(num_bytes, ALIGNMENT)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
