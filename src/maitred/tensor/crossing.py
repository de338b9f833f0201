"""Tensors between a server and its engine: small ones in frames, others in memory that both have mapped.

The server writes inputs into the first half of its arena, the engine outputs into the second, and each allocates in its
own. An input's block is free once its request has ended, which no batch that reads it outlives; an output's once nobody
looks at the answer, also where another engine has come meanwhile. Where a half is full, tensors go in frames. Regions
of clients are mapped by both, and nothing of them is copied but outputs into them.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
from msgspec.structs import replace

from maitred.errors import InvalidRequest
from maitred.tensor.arena import ALIGNMENT, Arena
from maitred.tensor.frames import Ended, Free, Infer, Keep, MemoryCommand, Unmap
from maitred.tensor.service import Buffer, InferRequest, Tensor
from maitred.tensor.shared import Place, map_of, place_of, unnamed_memory

LARGEST_IN_FRAMES = 4096  # bytes of a tensor, while there is room elsewhere


def _half(num_bytes: int) -> int:
    return num_bytes // 2 // ALIGNMENT * ALIGNMENT


class ServerMemory:
    """The server's end, on its event loop; answers may be let go in any thread."""

    def __init__(self, num_bytes: int) -> None:
        """Without any, or where the system gives none, tensors go in frames."""
        self._map = unnamed_memory(num_bytes) if num_bytes else None
        self._inputs = Arena(0, _half(num_bytes) if self._map is not None else 0)
        self._lent: dict[int, int] = {}  # bytes of outputs that somebody looks at, by their offset
        self._returned: deque[int] = deque()  # of them, those that nobody does any more
        self._regions: set[tuple[str, int]] = set()  # that engines were told of
        self.on_unused: Callable[[Unmap], object] = lambda unmap: None  # nobody looks at a region any more

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
        into = {name: place for name, view in request.into.items() if (place := self._region(view)) is not None}
        return Infer(replace(request, inputs=_rest(request.inputs, places), into={}), places, into)

    def end(self, sent: Infer) -> None:
        for place in sent.places:
            if place is not None and not place.path:
                self._inputs.free(place.offset)

    def _place(self, data: Buffer) -> Place | None:
        region = self._region(data)
        if region is not None:
            return region
        view = memoryview(data)
        start = self._inputs.allocate(view.nbytes) if view.nbytes > LARGEST_IN_FRAMES else None
        if start is None or self._map is None:
            return None
        memoryview(self._map)[start : start + view.nbytes] = view.cast("B")
        return Place(start, view.nbytes)

    def _region(self, data: Buffer) -> Place | None:
        place, shared = place_of(data), map_of(data)
        if place is None or shared is None:
            return None
        key = (place.path, place.inode)
        if key not in self._regions:
            self._regions.add(key)
            loop = asyncio.get_running_loop()
            weakref.finalize(shared, self._forget_soon, loop, key).atexit = False
        return place

    def _forget_soon(self, loop: asyncio.AbstractEventLoop, key: tuple[str, int]) -> None:
        """In whatever thread."""
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._forget, key)

    def _forget(self, key: tuple[str, int]) -> None:
        self._regions.discard(key)
        self.on_unused(Unmap(*key))

    # -- answers

    def answered(self, ended: Ended, into: Mapping[str, Buffer]) -> Ended:
        """With the data of its outputs where it lies; their blocks are free when nobody looks at them any more."""
        lent = {place.offset: place.num_bytes for place in ended.places if place is not None and not place.path}
        self._lent |= lent
        if ended.result is None:
            self._returned += lent
            return ended
        if not any(ended.places):
            return ended
        pairs = zip(ended.result.outputs, ended.places, strict=True)
        outputs = tuple(
            each if place is None else replace(each, data=self._output(each.name, place, into)) for each, place in pairs
        )
        return replace(ended, result=replace(ended.result, outputs=outputs), places=())

    def _output(self, name: str, place: Place, into: Mapping[str, Buffer]) -> memoryview:
        if place.path:
            return memoryview(into[name])[: place.num_bytes]
        assert self._map is not None
        block = np.frombuffer(self._map, np.uint8, place.num_bytes, place.offset)
        weakref.finalize(block, self._returned.append, place.offset).atexit = False
        return block.data.toreadonly()

    def freed(self) -> Free | None:
        """What nobody looks at any more, for the present engine; None is nothing."""
        offsets = tuple(self._returned.popleft() for _ in range(len(self._returned)))
        for offset in offsets:
            del self._lent[offset]
        return Free(offsets) if offsets else None

    def kept(self) -> Keep | None:
        """What a new engine must not write to; None is nothing."""
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
        self._regions: dict[tuple[str, int], memoryview] = {}

    def obey(self, command: MemoryCommand) -> None:
        match command:
            case Free(offsets):
                for offset in offsets:
                    self._outputs.free(offset)
            case Keep(blocks):
                for offset, num_bytes in blocks:
                    self._outputs.take(offset, num_bytes)
            case Unmap(path, inode):
                self._regions.pop((path, inode), None)  # what a batch reads stays mapped until it has ended

    def opened(self, sent: Infer) -> InferRequest:
        """Inputs are looked at where they lie. Raises InvalidRequest for a region that cannot be mapped."""
        for place in sent.into.values():
            self._of(place)
        if not any(sent.places):
            return sent.request
        pairs = zip(sent.request.inputs, sent.places, strict=True)
        inputs = (
            each if place is None else replace(each, data=self._view(place).toreadonly()) for each, place in pairs
        )
        return replace(sent.request, inputs=tuple(inputs))

    def written(
        self, outputs: Sequence[Tensor], into: Mapping[str, Place]
    ) -> tuple[tuple[Tensor, ...], tuple[Place | None, ...]]:
        """Outputs as they cross, and where they were written; one that does not fit its region goes as others do."""
        places = tuple(self._write(memoryview(each.data), into.get(each.name)) for each in outputs)
        return _rest(outputs, places), places

    def _write(self, data: memoryview, region: Place | None) -> Place | None:
        place: Place | None = None
        if region is not None and 0 < data.nbytes <= region.num_bytes:
            place = replace(region, num_bytes=data.nbytes)
        elif data.nbytes > LARGEST_IN_FRAMES and (start := self._outputs.allocate(data.nbytes)) is not None:
            place = Place(start, data.nbytes)
        if place is not None:
            self._view(place)[:] = data.cast("B")
        return place

    def _view(self, place: Place) -> memoryview:
        return self._of(place)[place.offset : place.offset + place.num_bytes]

    def _of(self, place: Place) -> memoryview:
        """The memory that it is a part of."""
        if not place.path:
            return self._memory
        key = (place.path, place.inode)
        if len(self._regions.get(key, b"")) < place.offset + place.num_bytes:
            self._regions[key] = memoryview(_mapped(place))
        return self._regions[key]


def _mapped(place: Place) -> mmap.mmap:
    try:
        file = os.open(place.path, os.O_RDWR)
    except OSError as error:
        raise InvalidRequest(f"the engine cannot open a shared memory region: {error.strerror}") from None
    try:
        found = os.fstat(file)
        if found.st_ino != place.inode or found.st_size < place.offset + place.num_bytes:
            raise InvalidRequest("a shared memory region is not what was registered: its owner has changed its size")
        return mmap.mmap(file, found.st_size)
    finally:
        os.close(file)


def _rest(tensors: Sequence[Tensor], places: Sequence[Place | None]) -> tuple[Tensor, ...]:
    """What is left to go in a frame."""
    return tuple(
        each if place is None else replace(each, data=b"") for each, place in zip(tensors, places, strict=True)
    )
