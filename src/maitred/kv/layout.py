"""KV blocks as bytes: the layout of a block, exact conversion between block sizes, and access beside a step.

No number is rounded: a conversion moves values and the scales of int8 from where one layout has them to where another
does. `kernels/csrc/kv_pool.h` has the native layout, `executor/torch_kv.py` the one of PyTorch's pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.kv.leases import Front, Refusal, Span
from maitred.kv.pages import KVGroups, first_seen

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]

NATIVE, TORCH = "native", "torch"
_NUMBERS = {"float32": "<u4", "bfloat16": "<u2", "float16": "<u2", "int8": "u1", "int4": "u1"}  # as bits: only moved
_TILE = 16


@dataclass(frozen=True, slots=True)
class CellLayout:
    """Layout of one layer of a block in memory. Raises KernelError for one that no executor has."""

    cells: str  # native or torch
    kv_dtype: str
    block_size: int
    num_kv_heads: int
    head_dim: int
    is_latent: bool = False  # values are a part of their keys

    def __post_init__(self) -> None:
        known = self.cells in (NATIVE, TORCH) and self.kv_dtype in _NUMBERS
        if not known or (self.cells == TORCH and self.kv_dtype in ("int8", "int4")):
            raise KernelError(f"KV cells of {self.cells!r} in {self.kv_dtype!r}, which no executor has")
        if min(self.block_size, self.num_kv_heads, self.head_dim) < 1:
            raise KernelError("KV cells without slots, heads or values")

    @property
    def number(self) -> np.dtype[Any]:
        return np.dtype(_NUMBERS[self.kv_dtype])

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in one layer."""
        heads_and_slots, size = self.num_kv_heads * self.block_size, self.number.itemsize
        if self.cells == TORCH:
            return self.num_parts * heads_and_slots * self.head_dim * size
        if self.is_tiled:
            return self.num_parts * heads_and_slots * (self._padded * size + self._scale_bytes)
        return _round_up(heads_and_slots * self._slot_bytes, 64)

    @property
    def num_parts(self) -> int:
        """Keys and values, or keys alone."""
        return 1 if self.is_latent else 2

    @property
    def is_tiled(self) -> bool:
        return self.block_size % _TILE == 0 and self.kv_dtype != "int4"

    @property
    def _padded(self) -> int:
        return self.head_dim if self.is_latent else _round_up(self.head_dim, _TILE)

    @property
    def _scale_bytes(self) -> int:
        return 4 if self.kv_dtype == "int8" else 0

    @property
    def _slot_bytes(self) -> int:
        """K and V of a head and slot, where there are no tiles."""
        if self.kv_dtype == "int4":  # two values a byte; scale and minimum of each 32 of K and of V
            return _round_up(self.head_dim + 8 * -(-self.head_dim // 32), 4)
        return _round_up(self.num_parts * self.head_dim * self.number.itemsize, 4) + 2 * self._scale_bytes


def convert(rows: Bytes, source: CellLayout, target: CellLayout) -> Bytes:
    """[layers, blocks, source.layer_bytes] to [layers, blocks, target.layer_bytes], of the same tokens; padding is 0.

    Raises KernelError for other cells, another dtype or other heads, and for tokens that fill no
    whole number of target blocks.
    """
    same = ("cells", "kv_dtype", "num_kv_heads", "head_dim", "is_latent")
    num_layers, num_blocks = rows.shape[:2]
    num_tokens = num_blocks * source.block_size
    if any(getattr(source, name) != getattr(target, name) for name in same) or num_tokens % target.block_size:
        raise KernelError(f"{num_tokens} tokens of {source} cannot become {target} exactly")
    shape = num_layers, num_tokens // target.block_size, target.layer_bytes
    converted = np.zeros(shape, np.uint8)
    numbers, moved = rows.view(source.number), converted.view(source.number)
    by_block = num_layers, shape[1], -1
    moved[..., _places(target)] = numbers[..., _places(source)].reshape(by_block)
    return converted


@lru_cache(maxsize=16)
def _places(layout: CellLayout) -> Places:
    """Return the place of each of a layer's numbers: by slot, then K and V, head and value; likewise of scales."""
    slot, part, head, value = np.ogrid[
        : layout.block_size, : layout.num_parts, : layout.num_kv_heads, : layout.head_dim
    ]
    if layout.cells == TORCH:
        return _flat(((part * layout.block_size + slot) * layout.num_kv_heads + head) * layout.head_dim + value)
    size, byte = layout.number.itemsize, np.arange(layout._scale_bytes)
    if not layout.is_tiled:
        cell = (head * layout.block_size + slot) * layout._slot_bytes
        if layout.kv_dtype == "int4":  # a whole cell moves
            return _flat(cell[:, :1] + np.arange(layout._slot_bytes))
        scales = cell[..., :1] + layout._slot_bytes - 8 + 4 * part + byte
        return _flat((cell // size) + part * layout.head_dim + value, scales)
    per_word, tile_bytes = 4 // size, _TILE * (layout._padded * size + layout._scale_bytes)
    num_tiles, lane = layout.block_size // _TILE, slot % _TILE
    cell = ((part * num_tiles + slot // _TILE) * layout.num_kv_heads + head) * tile_bytes
    key = (value // per_word * _TILE + lane) * per_word + value % per_word
    other = (lane // per_word * layout._padded + value) * per_word + lane % per_word
    scales = cell + _TILE * layout._padded * size + lane * 4 + byte
    return _flat(cell // size + np.where(part == 0, key, other), scales)


def _flat(values: Places, scales: Places | None = None) -> Places:
    by_slot = [values.reshape(len(values), -1)]
    if scales is not None:
        by_slot.append(scales.reshape(len(values), -1))
    return np.concatenate(by_slot, axis=1).reshape(-1)


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


# -- access to a pool


class LayerIO(Protocol):
    """Blocks of a KV pool, layer by layer: rows are [layers][blocks][layout.layer_bytes], contiguous. A block is as
    `KVCacheManager.places` has it.

    Only for blocks that no step writes meanwhile. Raises KernelError for layers, blocks or sizes that are not there.
    """

    @property
    def layout(self) -> CellLayout: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def windows(self) -> Sequence[int | None]:
        """Windows of layers, where these keep no more than what they see; else empty."""

    def read(self, layers: range, blocks: Sequence[Any], into: memoryview) -> None: ...

    def write(self, layers: range, blocks: Sequence[Any], rows: memoryview) -> None: ...

    @property
    def progress(self) -> tuple[int, int]:
        """Runs of the model that have begun, and the layers with KV that the last has written; without heads' runs."""


class BlockIO(Protocol):
    """Whole blocks of the pool, from a thread beside a step that leaves them alone."""

    bytes_per_block: int

    def read(self, blocks: Sequence[int], into: memoryview) -> None: ...

    def write(self, blocks: Sequence[int], rows: memoryview) -> None: ...


class NativeLayers:
    """Layers of a `_native.KVPool` with blocks as in `layout`; copies with the GIL released, in the calling thread."""

    windows: Sequence[int | None] = ()

    def __init__(self, pool: Any, layout: CellLayout) -> None:
        if pool.layer_bytes != layout.layer_bytes:
            raise KernelError(f"{layout} has {layout.layer_bytes} bytes a layer, the pool {pool.layer_bytes}")
        self._pool, self.layout, self.num_layers = pool, layout, int(pool.num_layers)

    def read(self, layers: range, blocks: Sequence[int], into: memoryview) -> None:
        try:
            self._pool.read_part(layers.start, len(layers), list(blocks), np.frombuffer(into, np.uint8))
        except (IndexError, ValueError) as error:
            raise KernelError(str(error)) from None

    def write(self, layers: range, blocks: Sequence[int], rows: memoryview) -> None:
        try:
            self._pool.write_part(layers.start, len(layers), list(blocks), np.frombuffer(rows, np.uint8))
        except (IndexError, ValueError) as error:
            raise KernelError(str(error)) from None

    @property
    def progress(self) -> tuple[int, int]:
        num_runs, num_layers = self._pool.progress
        return num_runs, num_layers


class HostLayers:
    """Layers of an array [layers, parts, blocks, bytes]: PyTorch's pool on a CPU (`TorchKVPool.as_bytes`, K and V
    apart), or with one part any memory of the host.
    """

    windows: Sequence[int | None] = ()

    def __init__(
        self, array: NDArray[np.uint8], layout: CellLayout, progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
    ) -> None:
        """`progress` is the pool's own, where something writes it."""
        if array.ndim != 4 or array.shape[1] * array.shape[3] != layout.layer_bytes:
            raise KernelError(f"{layout} has {layout.layer_bytes} bytes a layer; an array of {array.shape}")
        self._array, self.layout, self.num_layers, self._progress = array, layout, array.shape[0], progress

    def read(self, layers: range, blocks: Sequence[int], into: memoryview) -> None:
        rows = self._rows(layers, blocks, np.frombuffer(into, np.uint8))
        for index, block in enumerate(blocks):
            rows[:, index] = self._array[layers.start : layers.stop, :, block]

    def write(self, layers: range, blocks: Sequence[int], rows: memoryview) -> None:
        source = self._rows(layers, blocks, np.frombuffer(rows, np.uint8))
        for index, block in enumerate(blocks):
            self._array[layers.start : layers.stop, :, block] = source[:, index]

    @property
    def progress(self) -> tuple[int, int]:
        return self._progress()

    def _rows(self, layers: range, blocks: Sequence[int], rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        num_layers, num_parts, num_blocks, num_bytes = self._array.shape
        check_part(layers, num_layers, blocks, num_blocks, num_parts * num_bytes, rows.nbytes)
        return rows.reshape(len(layers), len(blocks), num_parts, num_bytes)


class PagedLayers:
    """The model's layers in a pool of pages (`kv.pages`): a block is its page of each group, -1 where it has none."""

    def __init__(self, io: LayerIO, groups: KVGroups) -> None:
        self._io, self._places, self.windows = io, groups.places, groups.layer_windows
        self.layout, self.num_layers = io.layout, len(groups.places)

    def read(self, layers: range, blocks: Sequence[tuple[int, ...]], into: memoryview) -> None:
        self._copy(self._io.read, layers, blocks, into)

    def write(self, layers: range, blocks: Sequence[tuple[int, ...]], rows: memoryview) -> None:
        self._copy(self._io.write, layers, blocks, rows)

    @property
    def progress(self) -> tuple[int, int]:
        return self._io.progress

    def _copy(
        self,
        copy: Callable[[range, Sequence[int], memoryview], None],
        layers: range,
        blocks: Sequence[tuple[int, ...]],
        rows: memoryview,
    ) -> None:
        """Layer by layer, without the first blocks where these have no page: no token will see them."""
        end = 0
        for layer in layers:
            group, place = self._places[layer]
            pages = [page for block in blocks if (page := block[group]) >= 0]
            end += len(blocks) * self.layout.layer_bytes
            if pages:
                copy(range(place, place + 1), pages, rows[end - len(pages) * self.layout.layer_bytes : end])


def in_model_order(io: LayerIO, groups: KVGroups | None) -> LayerIO:
    """The model's layers, where those of the pool are places in pages of these groups."""
    return PagedLayers(io, groups) if groups is not None else io


def check_part(
    layers: range, num_layers: int, blocks: Sequence[int], num_blocks: int, layer_bytes: int, num_bytes: int
) -> None:
    """Raises KernelError for layers or blocks that are not there, or another size than theirs."""
    if not 0 <= layers.start <= layers.stop <= num_layers:
        raise KernelError(f"layers {layers.start} to {layers.stop} of {num_layers}")
    if any(not 0 <= block < num_blocks for block in blocks):
        raise KernelError(f"blocks {list(blocks)} of {num_blocks}")
    wanted = len(layers) * len(blocks) * layer_bytes
    if num_bytes != wanted:
        raise KernelError(f"{num_bytes} bytes; these layers of these blocks have {wanted}")


def layers_of_next_run(io: LayerIO) -> Callable[[], int]:
    """Return how many layers the model's next run has written; 0 before and after it. For steps that are one run."""
    run = io.progress[0] + 1

    def num_layers_written() -> int:
        current, num_layers = io.progress
        return num_layers if current == run else 0

    return num_layers_written


class Guard:
    """Whether a thread may still touch some blocks, which are copied beside the engine's steps and can be taken back at
    any moment. Whoever copies enters it for one piece.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_given_up = False

    def give_up(self) -> None:
        """Waits for the piece under copy; from then on entering raises Refusal. By the engine's thread."""
        with self._lock:
            self._is_given_up = True

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._is_given_up:
            self._lock.release()
            raise Refusal("given_up", "the blocks were taken back while they were copied")

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class HeldBlocks(Guard):
    """Blocks [first, first + len(block_ids)) of a sequence in an executor's pool, read and written by layers until they
    are given up.
    """

    def __init__(self, io: LayerIO, block_ids: Sequence[Any], *, first: int = 0) -> None:
        super().__init__()
        self.io, self._block_ids, self._first = io, list(block_ids), first

    def extend(self, block_ids: Sequence[Any]) -> None:
        """The next ones of the sequence, by the engine's thread."""
        self._block_ids += block_ids

    def front(self, whole: Span, unit: int, block_size: int) -> Front:
        """The front of a pull in blocks of that size, which moves of each layer what is seen after its end."""
        windows = self.io.windows[whole.first_layer : whole.end_layer]
        seen = [first_seen(window, whole.end_block * block_size, block_size) - whole.first_block for window in windows]
        return Front(whole, unit, [whole.first_block + max(0, first) // unit * unit for first in seen])

    def read(self, layers: range, blocks: range, into: memoryview) -> None:
        """[layers][blocks][bytes of a layer]; `blocks` are numbers in the sequence, all of them held."""
        with self:
            self.io.read(layers, self._block_ids[blocks.start - self._first : blocks.stop - self._first], into)

    def write(self, layers: range, blocks: range, rows: memoryview) -> None:
        """The same the other way; blocks of the sequence that are not held are passed over."""
        kept = range(max(blocks.start, self._first), min(blocks.stop, self._first + len(self._block_ids)))
        if not kept:
            return
        cell, skipped = self.io.layout.layer_bytes, kept.start - blocks.start
        block_ids = self._block_ids[kept.start - self._first : kept.stop - self._first]
        with self:
            if len(kept) == len(blocks):
                self.io.write(layers, block_ids, rows)
                return
            for index, layer in enumerate(layers):
                begin = (index * len(blocks) + skipped) * cell
                self.io.write(range(layer, layer + 1), block_ids, rows[begin : begin + len(kept) * cell])
