"""Memory for tensors that a server and its engine share: small ones go in frames, others where both have mapped it.

The server writes inputs into the first half of its arena, the engine outputs into the second, and each allocates in its
own. An input's block is free once its request has ended, which no batch that reads it outlives; an output's once its
answer was read, also where another engine has come meanwhile. Where a half is full, tensors go in frames.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from bisect import bisect, insort
from collections import deque
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from maitred.core.tensor_request import Buffer, InferRequest, Tensor
from maitred.engine.frames import Ended, Free, Infer, Keep, SharedPlace

ALIGNMENT = 64  # bytes: a line of the processor's cache
LARGEST_IN_FRAMES = 4096  # bytes of a tensor, while there is room elsewhere


class ServerMemory:
    """The server's end, on its event loop; answers may be let go in any thread."""

    def __init__(self, num_bytes: int) -> None:
        """Arena of a server; without any, or where the system gives none, tensors go in frames."""
        self._map = unnamed_memory(num_bytes) if num_bytes else None
        self._inputs = Arena(0, _half(num_bytes) if self._map is not None else 0)
        self._lent: dict[int, int] = {}  # bytes of outputs being read, by their offset
        self._returned: deque[int] = deque()  # of them, those that were read

    @property
    def file(self) -> int | None:
        """A descriptor for the engine."""
        return None if self._map is None else self._map.file

    @property
    def num_used(self) -> int:
        """Blocks of inputs and outputs."""
        return len(self._inputs) + len(self._lent) - len(self._returned)

    # -- requests

    def sent(self, request: InferRequest) -> Infer:
        """The request as it crosses, now and to later engines; to be given to `end`."""
        places = tuple(self._place(tensor.data) for tensor in request.inputs)
        return Infer(replace(request, inputs=_rest(request.inputs, places), into={}), places)

    def end(self, sent: Infer) -> None:
        for place in sent.places:
            if place is not None:
                self._inputs.free(place.offset)

    def _place(self, data: Buffer) -> SharedPlace | None:
        view = memoryview(data)
        start = self._inputs.allocate(view.nbytes) if view.nbytes > LARGEST_IN_FRAMES else None
        if start is None or self._map is None:
            return None
        memoryview(self._map)[start : start + view.nbytes] = view.cast("B")
        return SharedPlace(start, view.nbytes)

    # -- answers

    def answered(self, ended: Ended) -> Ended:
        """Return the answer with its outputs' data where they lie; their blocks are free once it was read."""
        lent = {place.offset: place.num_bytes for place in ended.places if place is not None}
        self._lent |= lent
        if ended.result is None:
            self._returned += lent
            return ended
        if not any(ended.places):
            return ended
        pairs = zip(ended.result.outputs, ended.places, strict=True)
        outputs = tuple(each if place is None else replace(each, data=self._output(place)) for each, place in pairs)
        return replace(ended, result=replace(ended.result, outputs=outputs), places=())

    def _output(self, place: SharedPlace) -> memoryview:
        assert self._map is not None
        block = np.frombuffer(self._map, np.uint8, place.num_bytes, place.offset)
        weakref.finalize(block, self._returned.append, place.offset).atexit = False
        return block.data.toreadonly()

    def freed(self) -> Free | None:
        """Return the blocks of outputs that were read, for the present engine; None is nothing."""
        offsets = tuple(self._returned.popleft() for _ in range(len(self._returned)))
        for offset in offsets:
            del self._lent[offset]
        return Free(offsets) if offsets else None

    def kept(self) -> Keep | None:
        """Memory that a new engine must not write to; None is nothing."""
        self.freed()
        return Keep(tuple(self._lent.items())) if self._lent else None


class EngineMemory:
    """The engine's end, in its thread."""

    def __init__(self, file: int | None) -> None:
        """`file` is the arena's descriptor, which stays open for an engine in this process that follows."""
        self._memory, num_bytes = memoryview(b""), 0
        if file is not None:
            os.set_inheritable(file, False)  # it came to this process, and to none that it starts
            num_bytes = os.fstat(file).st_size
            self._memory = memoryview(mmap.mmap(file, num_bytes))
        self._outputs = Arena(_half(num_bytes), num_bytes)

    def free(self, offsets: Sequence[int]) -> None:
        """Outputs that were read."""
        for offset in offsets:
            self._outputs.free(offset)

    def keep(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Outputs of an earlier engine that are being read: offsets and bytes."""
        for offset, num_bytes in blocks:
            self._outputs.take(offset, num_bytes)

    def opened(self, sent: Infer) -> InferRequest:
        """Inputs are looked at where they lie."""
        if not any(sent.places):
            return sent.request
        pairs = zip(sent.request.inputs, sent.places, strict=True)
        inputs = (
            each if place is None else replace(each, data=self._view(place).toreadonly()) for each, place in pairs
        )
        return replace(sent.request, inputs=tuple(inputs))

    def written(self, outputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[SharedPlace | None, ...]]:
        """Outputs as they cross, and where they were written."""
        places = tuple(self._write(memoryview(each.data)) for each in outputs)
        return _rest(outputs, places), places

    def _write(self, data: memoryview) -> SharedPlace | None:
        start = self._outputs.allocate(data.nbytes) if data.nbytes > LARGEST_IN_FRAMES else None
        if start is None:
            return None
        place = SharedPlace(start, data.nbytes)
        self._view(place)[:] = data.cast("B")
        return place

    def _view(self, place: SharedPlace) -> memoryview:
        return self._memory[place.offset : place.offset + place.num_bytes]


def _rest(tensors: Sequence[Tensor], places: Sequence[SharedPlace | None]) -> tuple[Tensor, ...]:
    """Tensors that are left to go in a frame."""
    return tuple(
        each if place is None else replace(each, data=b"") for each, place in zip(tensors, places, strict=True)
    )


class Arena:
    """Allocator of one stretch of memory, which it does not touch. First fit, so that few pages are ever touched."""

    def __init__(self, start: int, end: int) -> None:
        """Bytes from `start`, which is aligned, to `end`."""
        self._start, self._end = start, start + _down(end - start)
        self._holes = [(start, self._end)] if self._end > start else []  # ascending, and no two touch
        self._blocks: dict[int, int] = {}  # the end of each, by its start

    def __len__(self) -> int:
        """Blocks."""
        return len(self._blocks)

    def allocate(self, num_bytes: int) -> int | None:
        """Take a block and return its start; None where no hole is large enough."""
        size = _up(num_bytes)
        start = next((start for start, end in self._holes if end - start >= size), None)
        if start is not None:
            self.take(start, num_bytes)
        return start

    def take(self, start: int, num_bytes: int) -> None:
        """A block at a place that is known, which must be free."""
        end = start + _up(num_bytes)
        at = bisect(self._holes, (start, self._end)) - 1
        hole_start, hole_end = self._holes[at] if at >= 0 else (end, end)
        assert hole_start <= start < end <= hole_end, "two blocks would share memory"
        left = [(hole_start, start), (end, hole_end)]
        self._holes[at : at + 1] = [hole for hole in left if hole[0] < hole[1]]
        self._blocks[start] = end

    def free(self, start: int) -> None:
        """The block that starts there is a hole, one with those that it touches."""
        end = self._blocks.pop(start)
        at = bisect(self._holes, (start, end))
        if at < len(self._holes) and self._holes[at][0] == end:
            end = self._holes.pop(at)[1]
        if at and self._holes[at - 1][1] == start:
            start = self._holes.pop(at - 1)[0]
        insort(self._holes, (start, end))

    def check_invariants(self) -> None:
        """Blocks and holes cover all of it, once."""
        assert all(end < start for (_, end), (start, _) in zip(self._holes, self._holes[1:], strict=False))
        at = self._start
        for start, end in sorted([*self._holes, *self._blocks.items()]):
            assert start == at < end
            at = end
        assert at == self._end


class SharedMap(mmap.mmap):
    """A file in memory. It goes with the last view of it, and its descriptor with it: a batch ends in peace."""

    file: int


def unnamed_memory(num_bytes: int) -> SharedMap | None:
    """Return memory of that size, taken as it is touched; None where the system gives none.

    No path leads to it, so no client can register it (CVE-2025-23319) or make it shorter.
    """
    try:
        file = os.memfd_create("maitred-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(file, num_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        made = SharedMap(file, num_bytes)
    except (OSError, ValueError):
        os.close(file)
        return None
    made.file = file
    weakref.finalize(made, os.close, file).atexit = False
    return made


def _half(num_bytes: int) -> int:
    return num_bytes // 2 // ALIGNMENT * ALIGNMENT


def _up(num_bytes: int) -> int:
    return _down(max(1, num_bytes) + ALIGNMENT - 1)


def _down(num_bytes: int) -> int:
    return num_bytes // ALIGNMENT * ALIGNMENT
