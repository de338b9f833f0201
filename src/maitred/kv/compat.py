"""Compatibility of two workers' KV: what must agree at first contact, and blocks of another size."""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

import msgspec

from maitred.core.errors import KernelError
from maitred.kv.layout import CellLayout
from maitred.kv.pieces import Refusal


class Agreed(msgspec.Struct, frozen=True, kw_only=True):
    """Two workers that differ in a field have KV that means nothing to the other, or differs in its last bits."""

    revision: str
    positions: str  # rope and context setting, in one line
    kv_dtype: str
    num_layers: int  # the model's own
    num_kv_heads: int
    head_dim: int
    weight_dtype: str
    executor: str
    isa: str  # of PyTorch the device


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that decide the bytes of a worker's KV, as peers tell each other. Block sizes are converted."""

    agreed: Agreed
    block_size: int
    num_head_layers: int = 0  # behind the model's, of a head that drafts; a head without its KV only guesses worse

    def of_layer(self) -> CellLayout:
        """Raises KernelError for cells that no executor has."""
        agreed = self.agreed
        return CellLayout(agreed.executor, agreed.kv_dtype, self.block_size, agreed.num_kv_heads, agreed.head_dim)


class Terms(NamedTuple):
    """Terms that two peers agreed on."""

    source: CellLayout
    target: CellLayout
    num_layers: int  # the first of both

    @property
    def unit(self) -> int:
        """Blocks of the source that are whole blocks of the receiver."""
        return lcm(self.source.block_size, self.target.block_size) // self.source.block_size

    def pulled(self, blocks: range) -> range:
        """Blocks of the source, in whole units, that hold the receiver's `blocks`, or as many of the first as fit."""
        tokens = self.unit * self.source.block_size
        first, end = blocks.start * self.target.block_size // tokens, blocks.stop * self.target.block_size // tokens
        return range(first * self.unit, end * self.unit)


def agree(own: Layout, peer: Layout, *, receives: bool) -> Terms:
    """Terms for KV that we receive from, or else give to, the peer. Raises Refusal naming both sides."""
    ours, theirs = msgspec.structs.asdict(own.agreed), msgspec.structs.asdict(peer.agreed)
    unlike = [f"{name} is {ours[name]!r} here, {theirs[name]!r} there" for name in ours if ours[name] != theirs[name]]
    if unlike:
        raise Refusal("unlike", f"KV cannot be shared: {'; '.join(unlike)}")
    source, target = (peer, own) if receives else (own, peer)
    num_layers = own.agreed.num_layers + min(own.num_head_layers, peer.num_head_layers)
    return Terms(source.of_layer(), target.of_layer(), num_layers)


# made here, once: two threads that each have msgspec look at the type for the first time crash the process
_decode = msgspec.msgpack.Decoder(Layout).decode


def layout_of(encoded: bytes) -> Layout:
    """Layout from its msgpack. Raises Refusal."""
    try:
        layout = _decode(encoded)
        layout.of_layer()
    except (msgspec.DecodeError, ValueError, RecursionError, KernelError) as error:
        raise Refusal("garbage", f"the peer told no layout: {error}") from None
    return layout
