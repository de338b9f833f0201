"""Leases on KV blocks that a receiver may read: expiry, what is readable so far, and the order of what is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Refusal(Exception):
    """A transfer that ends, and why: `reason` is a word of REASONS, for counting."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


REASONS = (
    "unlike",  # another model, dtype, executor, instruction set, rope or context setting
    "stranger",  # no proof of the fleet token, or another user of this machine
    "garbage",  # what is no message, or not the one that belongs here
    "oversized",
    "old_epoch",  # of a life of the peer, or of a pull, that is over
    "no_lease",  # unknown, expired or taken back
    "given_up",  # the blocks, on either side
    "damaged",  # another checksum
    "silent",
    "cut",
    "aborted",
    "busy",
)


class Span(NamedTuple):
    """Some layers of some blocks, the end of each excluded."""

    first_layer: int
    end_layer: int
    first_block: int
    end_block: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    @property
    def blocks(self) -> range:
        return range(self.first_block, self.end_block)

    @property
    def num_cells(self) -> int:
        """A layer of a block each."""
        return len(self.layers) * len(self.blocks)


class Readable(NamedTuple):
    """Readable part of a lease so far: [0, num_blocks) in all layers, and up to `end_block` the first `num_layers`,
    which a prefill that goes on has written.
    """

    num_blocks: int
    end_block: int = 0
    num_layers: int = 0

    def end_of(self, layer: int) -> int:
        """Blocks [0, end) of this layer can be read."""
        return max(self.num_blocks, self.end_block) if layer < self.num_layers else self.num_blocks


@dataclass(slots=True, eq=False)
class BlockLease:
    num_blocks: int  # when the prefill is done
    readable: Readable
    expires_at: float  # s
    num_layers_written: Callable[[], int] | None = None  # of blocks up to `readable.end_block`, by a step under way

    def readable_now(self) -> Readable:
        if self.num_layers_written is None:
            return self.readable
        return self.readable._replace(num_layers=self.num_layers_written())


class LeaseBook:
    """Leases in force; `now` in s. What is unknown, expired or taken back is refused alike."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._leases: dict[str, BlockLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def offer(self, name: str, num_blocks: int, readable: Readable, now: float) -> None:
        self._leases[name] = BlockLease(num_blocks, readable, now + self.lease_s)

    def grow(
        self, name: str, readable: Readable, now: float, num_layers_written: Callable[[], int] | None = None
    ) -> None:
        """More can be read; a prefill that goes on keeps its lease. No effect for one that is gone."""
        if (lease := self._leases.get(name)) is not None:
            lease.readable, lease.num_layers_written = readable, num_layers_written
            lease.expires_at = now + self.lease_s

    def renew(self, name: str, now: float) -> BlockLease:
        """Raises Refusal for one that is not in force."""
        lease = self.in_force(name, now)
        lease.expires_at = now + self.lease_s
        return lease

    def in_force(self, name: str, now: float) -> BlockLease:
        """Raises Refusal for one that is not."""
        lease = self._leases.get(name)
        if lease is None or now >= lease.expires_at:
            raise Refusal("no_lease", f"there is no lease {name!r}; it expired, or was taken back")
        return lease

    def end(self, name: str) -> bool:
        """End a lease; whether it was there."""
        return self._leases.pop(name, None) is not None

    def expired(self, now: float) -> list[str]:
        """Forget the leases that are over; their names."""
        names = [name for name, lease in self._leases.items() if now >= lease.expires_at]
        for name in names:
            del self._leases[name]
        return names


class Front:
    """Progress of a pull, layer by layer; both ends keep one, so that each piece is sent once and expected.

    Layers with a window begin at a later block; no part of such a pull counts.
    """

    def __init__(self, whole: Span, unit: int = 1, starts: Sequence[int] = ()) -> None:
        """`starts` are of each layer; without them all begin at the first block."""
        self.whole, self._unit, self._has_windows = whole, unit, bool(starts)
        self._next = list(starts) or [whole.first_block] * len(whole.layers)

    @property
    def num_blocks(self) -> int:
        """Number of blocks, from the first on, that are through in all layers."""
        return min(self._next) - self.whole.first_block if self.is_done or not self._has_windows else 0

    @property
    def is_done(self) -> bool:
        return min(self._next) == self.whole.end_block

    def due(self, readable: Readable, most_cells: int) -> Span | None:
        """The next piece: least blocks first, then lowest layer, of at most `most_cells` (unit or more); None to wait.

        Layers that are equally far share a piece where they fit.
        """
        best: tuple[int, int, int] | None = None  # first block, layer, end
        for index, first in enumerate(self._next):
            end = self._end(index, readable)
            if end > first and (best is None or first < best[0]):
                best = first, index, end
        if best is None:
            return None
        first, index, end = best
        end = min(end, first + most_cells // self._unit * self._unit)
        last = index + 1
        while (
            last < len(self._next)
            and (last + 1 - index) * (end - first) <= most_cells
            and self._next[last] == first
            and self._end(last, readable) >= end
        ):
            last += 1
        base = self.whole.first_layer
        return Span(base + index, base + last, first, end)

    def take(self, span: Span) -> None:
        """Note a piece that is through. Raises Refusal for one out of turn."""
        for layer in self.check(span):
            self._next[layer] = span.end_block

    def check(self, span: Span) -> range:
        """Layers of a piece, from the first of the whole. Raises Refusal for one out of turn."""
        whole = self.whole
        layers = range(span.first_layer - whole.first_layer, span.end_layer - whole.first_layer)
        fits = layers and layers.start >= 0 and layers.stop <= len(self._next) and span.blocks
        if (
            not fits
            or span.end_block > whole.end_block
            or (span.end_block - whole.first_block) % self._unit
            or any(self._next[layer] != span.first_block for layer in layers)
        ):
            raise Refusal("garbage", f"{span} is a piece whose turn it was not")
        return layers

    def _end(self, index: int, readable: Readable) -> int:
        first = self.whole.first_block
        end = min(readable.end_of(self.whole.first_layer + index), self.whole.end_block)
        return first + (end - first) // self._unit * self._unit
