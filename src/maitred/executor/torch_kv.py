"""The paged KV pool as a PyTorch tensor, and host memory for the blocks of preempted requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from maitred.core.errors import ConfigError, OutOfMemory
from maitred.core.step import BlockCopy, SchedulerOutput
from maitred.executor.batch import TorchBatch
from maitred.executor.state import StateSlots, SwapBandwidth
from maitred.kv.layout import CellLayout, check_part
from maitred.model.spec import DecoderSpec
from maitred.model.torch_decoder import Mix, Recur

_MEASURED_BLOCKS = 64
_REPEATS = 3


class PoolShape(NamedTuple):
    """Axes of the pool, in order."""

    num_layers: int
    keys_and_values: int  # 2; 1 where values are a part of their keys (latent attention)
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


def pool_shape(spec: DecoderSpec, *, num_blocks: int, block_size: int, num_layers: int | None = None) -> PoolShape:
    """`num_layers` are those of a page. Raises ConfigError when there is no block, or a block without a slot."""
    if num_blocks < 1 or block_size < 1:
        raise ConfigError(
            f"the KV cache would have {num_blocks} blocks of {block_size} tokens; "
            f"both must be at least 1, so give it more memory (--kv-cache-memory-bytes)"
        )
    parts, heads = 1 if spec.latent_rank else 2, (spec.num_kv_heads, spec.head_dim)
    heads = (1, spec.widest_keys) if spec.is_uneven else heads
    return PoolShape(num_layers or len(spec.kv_layers), parts, num_blocks, block_size, *heads)


def kv_bytes_per_block(spec: DecoderSpec, block_size: int, kv_dtype_bytes: int) -> int:
    """Bytes of one block over all layers; `num_blocks` of them is the whole pool."""
    parts = 1 if spec.latent_rank else 2
    return block_size * parts * len(spec.kv_layers) * spec.widest_keys * kv_dtype_bytes


class TorchKVPool:
    """Keys and values of all layers, [layers, 2 (keys first), blocks, slots, kv heads, head size]; keys alone where
    these have the values.

    One layer's keys are [blocks, slots, heads, head size], the layout that PyTorch's
    `torch.nn.attention.varlen.varlen_attn` takes with a block table, and a slot of one layer is contiguous in memory.
    A slot number is block id * block_size + offset in the block.
    """

    def __init__(self, shape: PoolShape, *, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        try:
            self._pool = torch.zeros(tuple(shape), dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, a plain RuntimeError on a CPU
            wanted = dtype.itemsize * torch.Size(shape).numel()
            raise OutOfMemory(
                f"the KV cache of {shape.num_blocks} blocks needs {wanted} bytes on {device} and could not be had; "
                f"lower --kv-cache-memory-bytes, --max-num-seqs or --max-model-len ({error})"
            ) from error
        self.progress = 0, 0
        """Forward passes that have begun, and the layers with KV that the last has written, or told a GPU to."""
        make_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self.written = [make_event() for _ in range(shape.num_layers)] if device.type == "cuda" else []
        """Events of a GPU, one a layer: its last write is done."""
        by_slot = shape.num_blocks * shape.block_size
        self._slots = self._pool.view(*shape[:2], by_slot, shape.num_kv_heads, shape.head_dim)

    def blocks(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Keys and values of one layer, each [blocks, slots in a block, kv heads, head size]; or keys alone."""
        return tuple(self._pool[layer])

    def layers(self, layers: range) -> torch.Tensor:
        """Keys and values of some layers, [layers, 2, blocks, slots in a block, kv heads, head size]."""
        return self._pool[layers.start : layers.stop]

    def slots(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The same, each [slots, kv heads, head size]."""
        return tuple(self._slots[layer])

    def write(
        self, layer: int, slots_T: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, place: int | None = None
    ) -> None:
        """`layer` is the model's; `place` the pool's, where they differ."""
        for slots, written in zip(self.slots(layer if place is None else place), (k_TKH, v_TKH), strict=False):
            values = written.flatten(1).to(self.dtype)  # a slot is as wide as the widest layer's
            slots.flatten(1)[:, : values.shape[1]].index_copy_(0, slots_T, values)
        if self.written:
            self.written[layer if place is None else place].record()
        self.progress = self.progress[0] + (layer == 0), layer + 1

    @property
    def device(self) -> torch.device:
        return self._pool.device

    def gather(self, blocks: Sequence[int]) -> torch.Tensor:
        """Copies of blocks, [n, layers, 2, slots, kv heads, head size], each contiguous."""
        index = torch.tensor(blocks, device=self._pool.device)
        return self._pool.index_select(2, index).permute(2, 0, 1, 3, 4, 5).contiguous()

    def scatter(self, blocks: Sequence[int], contents: torch.Tensor) -> None:
        """The reverse of `gather`."""
        index = torch.tensor(blocks, device=self._pool.device)
        self._pool.index_copy_(2, index, contents.permute(1, 2, 0, 3, 4, 5))

    def as_bytes(self) -> NDArray[np.uint8]:
        """The memory itself, [layers, 2, blocks, bytes], for `layout.HostLayers`; of a pool on a CPU."""
        assert self._pool.device.type == "cpu"
        layers, both, blocks = self.shape[:3]
        array: NDArray[np.uint8] = self._pool.view(layers, both, blocks, -1).view(torch.uint8).numpy()
        return array

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, target) each, in every layer."""
        for source, target in pairs:
            self._pool[:, :, target] = self._pool[:, :, source]

    def clear(self, slots: torch.Tensor) -> None:
        """Zero these slots in every layer."""
        self._slots.index_fill_(2, slots, 0.0)


class _BesideSteps:
    """A stream of a GPU beside the steps'. Copies wait there for what steps were told to write before, for a GPU writes
    long after it was told to. On a CPU nothing waits.
    """

    def __init__(self, pool: TorchKVPool) -> None:
        self._pool = pool
        make: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
        self._stream = make(pool.device) if pool.device.type == "cuda" else None

    def after(self, layers: range) -> AbstractContextManager[object]:
        """Wait until steps have written these layers."""
        if self._stream is None:
            return nullcontext()
        if layers:
            self._stream.wait_event(self._pool.written[layers.stop - 1])
        return torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Wait until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


class TorchLayers:
    """`layout.LayerIO` of a pool on any device."""

    windows: Sequence[int | None] = ()

    def __init__(self, pool: TorchKVPool, layout: CellLayout) -> None:
        self._pool, self.layout, self.num_layers = pool, layout, pool.shape.num_layers
        self._beside = _BesideSteps(pool)

    def read(self, layers: range, blocks: Sequence[int], into: memoryview) -> None:
        self._check(layers, blocks, into)
        with self._beside.after(layers):
            found = self._pool.layers(layers).index_select(2, self._index(blocks))
            rows = found.transpose(1, 2).contiguous().view(torch.uint8).cpu()  # waits for the stream
        torch.frombuffer(into, dtype=torch.uint8).copy_(rows.flatten())

    def write(self, layers: range, blocks: Sequence[int], rows: memoryview) -> None:
        self._check(layers, blocks, rows)
        shape = self._pool.shape
        contents = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(self._pool.dtype)
        by_block = contents.view(len(layers), len(blocks), shape.keys_and_values, *shape[3:])
        with self._beside.after(layers):
            moved = by_block.to(self._pool.device).transpose(1, 2)
            self._pool.layers(layers).index_copy_(2, self._index(blocks), moved)
        self._beside.wait()

    @property
    def progress(self) -> tuple[int, int]:
        return self._pool.progress

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._pool.device)

    def _check(self, layers: range, blocks: Sequence[int], rows: memoryview) -> None:
        num_blocks = self._pool.shape.num_blocks
        check_part(layers, self.num_layers, blocks, num_blocks, self.layout.layer_bytes, rows.nbytes)


class TorchBlocks:
    """Whole blocks of a pool as bytes, [layers, 2, slots, kv heads, head size] each, beside a step."""

    def __init__(self, pool: TorchKVPool) -> None:
        self._pool, self._beside = pool, _BesideSteps(pool)
        shape = pool.shape
        self._block = (*shape[:2], *shape[3:])
        self.bytes_per_block: int = torch.Size(self._block).numel() * pool.dtype.itemsize

    def read(self, blocks: Sequence[int], into: memoryview) -> None:
        with self._beside.after(range(self._pool.shape.num_layers)):
            rows = self._pool.gather(blocks).view(torch.uint8).cpu()
        torch.frombuffer(into, dtype=torch.uint8).copy_(rows.flatten())

    def write(self, blocks: Sequence[int], rows: memoryview) -> None:
        if blocks:
            contents = torch.frombuffer(rows, dtype=torch.uint8).view(self._pool.dtype)
            by_block = contents.view(len(blocks), *self._block)
            with self._beside.after(range(self._pool.shape.num_layers)):
                self._pool.scatter(blocks, by_block.to(self._pool.device))
            self._beside.wait()


class TorchHostPool:
    """Blocks of `pool`, each contiguous, in host memory; pinned where the pool is on a GPU.

    A GPU's copies are queued on its stream, in order with everything else that touches the pool, without a wait.
    """

    def __init__(self, pool: TorchKVPool, num_blocks: int) -> None:
        self._pool = pool
        self.num_blocks = num_blocks
        self._on_gpu = pool.device.type == "cuda"
        shape = pool.shape
        sizes = (num_blocks, *shape[:2], *shape[3:])
        try:
            self._blocks = torch.empty(sizes, dtype=pool.dtype, pin_memory=self._on_gpu)
        except RuntimeError as error:
            wanted = pool.dtype.itemsize * torch.Size(sizes).numel()
            raise OutOfMemory(
                f"{wanted} bytes of host memory for swapped blocks could not be had; "
                f"lower --swap-memory-bytes ({error})"
            ) from error

    @property
    def bytes_per_block(self) -> int:
        return self._blocks[0].numel() * self._blocks.element_size()

    def copy_out(self, copies: Sequence[BlockCopy]) -> None:
        """Blocks of the pool to the host."""
        if not copies:
            return
        gathered = self._pool.gather([copy.source for copy in copies])
        if not self._on_gpu:
            self._blocks.index_copy_(0, torch.tensor([copy.target for copy in copies]), gathered)
            return
        for block, copy in zip(gathered, copies, strict=True):
            self._blocks[copy.target].copy_(block, non_blocking=True)

    def copy_in(self, copies: Sequence[BlockCopy]) -> None:
        """Blocks of the host to the pool."""
        if not copies:
            return
        if self._on_gpu:
            blocks = torch.stack([self._blocks[c.source].to(self._pool.device, non_blocking=True) for c in copies])
        else:
            blocks = self._blocks.index_select(0, torch.tensor([copy.source for copy in copies]))
        self._pool.scatter([copy.target for copy in copies], blocks)

    def measure(self) -> SwapBandwidth:
        """Times copies of some blocks, out and in; the best of a few. The pool must hold nothing of worth."""
        count = min(_MEASURED_BLOCKS, self.num_blocks, self._pool.shape.num_blocks)
        copies = [BlockCopy(i, i) for i in range(count)]
        num_bytes = count * self.bytes_per_block
        out_s = min(self._timed(lambda: self.copy_out(copies)) for _ in range(_REPEATS))
        in_s = min(self._timed(lambda: self.copy_in(copies)) for _ in range(_REPEATS))
        return SwapBandwidth(num_bytes / out_s, num_bytes / in_s)

    def _timed(self, copy: Callable[[], None]) -> float:
        self._wait()
        started = time.perf_counter()
        copy()
        self._wait()
        return max(time.perf_counter() - started, 1e-9)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._pool.device)


class TorchStates:
    """Slots of recurrent layers' states: of each layer the convolution's last inputs, and the matrices."""

    def __init__(self, spec: DecoderSpec, num_slots: int, *, device: torch.device) -> None:
        shapes = [layer.recurrent.state_shapes for layer in spec.layers if layer.recurrent is not None]
        self._layers = [[torch.zeros(num_slots, *shape, device=device) for shape in layer] for layer in shapes]
        self._slots = StateSlots()

    def take(self, plan: SchedulerOutput) -> None:
        self._slots.take(plan, self._copy)

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for part in itertools.chain.from_iterable(self._layers):
                part[target] = part[source]

    def prepare(self, batch: TorchBatch) -> Recur:
        """The recurrence of one step: rows of one length in one call, those whose state is saved one by one."""
        runs: list[tuple[torch.Tensor, list[int], int | None]] = []  # tokens [rows, n], slots, where to save
        alike: dict[int, list[tuple[int, int]]] = {}
        fresh = []
        for work, first in zip(batch.works, batch.first_tokens.tolist(), strict=True):
            count, done = work.row.num_tokens, 0
            slot, _, _ = self._slots.advance(work, work.row.start, count, 0)
            fresh += [slot] if work.row.start == 0 else []
            for end, target in self._slots.saves(work, work.row.start, count):
                runs.append((torch.arange(first + done, first + end)[None], [slot], target))
                done = end
            if done < count:
                alike.setdefault(count - done, []).append((first + done, slot))
        for count, rows in alike.items():
            tokens = torch.tensor([row for row, _ in rows])[:, None] + torch.arange(count)
            runs.append((tokens, [slot for _, slot in rows], None))
        for part in itertools.chain.from_iterable(self._layers):
            part[fresh] = 0.0

        def recur(place: int, inputs_TI: torch.Tensor, mix: Mix) -> torch.Tensor:
            history, matrices = self._layers[place]
            width = matrices.shape[1] * matrices.shape[3]
            out_TV = torch.empty(len(inputs_TI), width, device=inputs_TI.device)
            for tokens, slots, target in runs:
                state = history[slots], matrices[slots]
                if tokens.numel():  # else it is saved as it is
                    out_TV[tokens], state = mix(inputs_TI[tokens], state)
                for to in (slots, [target]) if target is not None else (slots,):
                    history[to], matrices[to] = state
            return out_TV

        return recur
