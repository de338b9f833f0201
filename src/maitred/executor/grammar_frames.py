"""Messages between an engine and its grammar worker, and the memory that both map: a token mask a slot."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Callable

import msgspec

MAX_SLOTS = 8192  # requests with a grammar that an executor may hold at once; memory is taken by those there are
MAX_DRAFTED = 1024  # drafts of a step that have masks
_HEADER_BYTES = 64
_WORKED_ON = struct.Struct("<i")  # slot + 1; 0 is none


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One message, an array of msgpack."""


class Compile(Frame, frozen=True, array_like=True):
    grammar: str


class Compiled(Frame, frozen=True, array_like=True):
    error: str  # empty when the grammar can be used
    is_grammars_fault: bool = False


class Opened(Frame, frozen=True, array_like=True):
    """A request comes into a slot, with the output it has."""

    slot: int
    grammar: str
    token_ids: list[int]
    forces: bool  # whether tokens that a mask leaves no choice for are told


class Advanced(Frame, frozen=True, array_like=True):
    """Tokens were sampled."""

    slot: int
    token_ids: list[int]


class Drafted(Frame, frozen=True, array_like=True):
    """Tokens were made up; the masks after each are wanted in rows from `row` on, as far as the grammar allows them."""

    slot: int
    row: int  # of the memory
    token_ids: list[int]


class Step(Frame, frozen=True, array_like=True):
    """Events since the last step, in this order. `Outcomes` answers it if anything advanced, then `Filled`."""

    number: int
    closed: list[int]
    opened: list[Opened]
    advanced: list[Advanced]
    drafted: list[Drafted] = []


class Outcome(Frame, frozen=True, array_like=True):
    """Outcome of an `Advanced`."""

    slot: int
    forced: list[int]  # tokens after it that the grammar left no choice for
    complete: bool  # nothing may follow
    error: str


class Outcomes(Frame, frozen=True, array_like=True, tag=True):
    number: int
    outcomes: list[Outcome]


class Filled(Frame, frozen=True, array_like=True, tag=True):
    """The masks of all that were opened or advanced are there, but for those with an error or complete."""

    number: int
    errors: list[tuple[int, str]]
    complete: list[int]
    allowed: list[tuple[int, int]] = []  # slot, and how many of its drafts have masks


encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
decode_compile: Callable[[bytes], Compile] = msgspec.msgpack.Decoder(Compile).decode
decode_compiled: Callable[[bytes], Compiled] = msgspec.msgpack.Decoder(Compiled).decode
decode_step: Callable[[bytes], Step] = msgspec.msgpack.Decoder(Step).decode
decode_answer: Callable[[bytes], Outcomes | Filled] = msgspec.msgpack.Decoder(Outcomes | Filled).decode


class MaskMemory:
    """Shared memory of masks, one row a slot, then one a draft; and the worker's present request, to outlive it."""

    def __init__(self, fd: int, vocab_size: int) -> None:
        self.fd, self.vocab_size = fd, vocab_size
        self.num_words = -(-vocab_size // 32)
        self._row_bytes = -(-4 * self.num_words // 64) * 64
        size = _HEADER_BYTES + (MAX_SLOTS + MAX_DRAFTED) * self._row_bytes
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        self.memory = mmap.mmap(fd, size)

    def offset(self, row: int) -> int:
        return _HEADER_BYTES + row * self._row_bytes

    def write(self, row: int, mask: bytes) -> None:
        """Write as many words as there are logits."""
        start = self.offset(row)
        self.memory[start : start + 4 * self.num_words] = mask[: 4 * self.num_words]

    @property
    def worked_on(self) -> int | None:
        """The slot that the worker was at, last."""
        (number,) = _WORKED_ON.unpack_from(self.memory)
        return number - 1 if number else None

    def work_on(self, slot: int | None) -> None:
        _WORKED_ON.pack_into(self.memory, 0, 0 if slot is None else slot + 1)


def new_memory() -> int:
    """A descriptor of memory that no path names."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("maitred-grammar-masks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
