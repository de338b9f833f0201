"""Compatibility of two workers' KV: what must agree at first contact, what is converted, what only `mixed` takes."""

from __future__ import annotations

import hashlib
from math import lcm
from typing import NamedTuple

import msgspec

from maitred.errors import KernelError
from maitred.executor.kv_layout import CellLayout
from maitred.transfer.pieces import Refusal

EXACT, MIXED = "exact", "mixed"


class Agreed(msgspec.Struct, frozen=True, kw_only=True):
    """Where two differ here, the KV of one means nothing to the other."""

    revision: str
    positions: str  # rope and context setting, in one line
    kv_dtype: str
    num_layers: int  # the model's own
    num_kv_heads: int
    head_dim: int


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """Where two differ here, their KV of the same tokens differs in its last bits."""

    weight_dtype: str
    executor: str
    isa: str  # of PyTorch the device


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the bytes of a worker's KV, as peers tell each other. Cells and block size are converted."""

    agreed: Agreed
    numerics: Numerics
    cells: str
    block_size: int
    num_head_layers: int = 0  # behind the model's, of a head that drafts; a head without its KV only guesses worse

    def of_layer(self) -> CellLayout:
        """Raises KernelError for cells that no executor has."""
        agreed = self.agreed
        return CellLayout(self.cells, agreed.kv_dtype, self.block_size, agreed.num_kv_heads, agreed.head_dim)


class Terms(NamedTuple):
    """What two peers agreed on."""

    source: CellLayout
    target: CellLayout
    namespace: str  # of the prefix cache, for blocks whose bits are not our own; empty for those that are
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


def agree(own: Layout, peer: Layout, *, compat: str, receives: bool) -> Terms:
    """Terms for KV that we receive from, or else give to, the peer. Raises Refusal naming both sides."""
    _refuse("cannot be shared", own.agreed, peer.agreed)
    if compat == EXACT:
        _refuse("would differ in its last bits (--kv-compat mixed takes it)", own.numerics, peer.numerics)
    source, target = (peer, own) if receives else (own, peer)
    namespace = "" if own.numerics == peer.numerics else f"mixed:{_digest(source.numerics)}"
    num_layers = own.agreed.num_layers + min(own.num_head_layers, peer.num_head_layers)
    return Terms(source.of_layer(), target.of_layer(), namespace, num_layers)


def _refuse(why: str, own: msgspec.Struct, peer: msgspec.Struct) -> None:
    ours, theirs = msgspec.structs.asdict(own), msgspec.structs.asdict(peer)
    unlike = [f"{name} is {ours[name]!r} here, {theirs[name]!r} there" for name in ours if ours[name] != theirs[name]]
    if unlike:
        raise Refusal("unlike", f"KV {why}: {'; '.join(unlike)}")


def _digest(numerics: Numerics) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(numerics), digest_size=8).hexdigest()


# made here, once: two threads that each have msgspec look at the type for the first time crash the process
_decode = msgspec.msgpack.Decoder(Layout).decode


def layout_of(encoded: bytes) -> Layout:
    """Of its msgpack. Raises Refusal."""
    try:
        layout = _decode(encoded)
        layout.of_layer()
    except (msgspec.DecodeError, ValueError, RecursionError, KernelError) as error:
        raise Refusal("garbage", f"the peer told no layout: {error}") from None
    return layout
