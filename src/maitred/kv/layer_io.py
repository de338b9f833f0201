"""Reads and writes of some layers of some blocks of an executor's pool, from a thread of its own beside a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.kv.layout import CellLayout


class LayerIO(Protocol):
    """Blocks of a KV pool, layer by layer: rows are [layers][blocks][layout.layer_bytes], contiguous.

    Only for blocks that no step writes meanwhile. Raises KernelError for layers, blocks or sizes that are not there.
    """

    @property
    def layout(self) -> CellLayout: ...

    @property
    def num_layers(self) -> int: ...

    def read(self, layers: range, blocks: Sequence[int], into: memoryview) -> None: ...

    def write(self, layers: range, blocks: Sequence[int], rows: memoryview) -> None: ...

    @property
    def progress(self) -> tuple[int, int]:
        """Runs of the model that have begun, and the layers with KV that the last has written; without heads' runs."""


class NativeLayers:
    """Layers of a `_native.KVPool` with blocks as in `layout`; copies with the GIL released, in the calling thread."""

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
