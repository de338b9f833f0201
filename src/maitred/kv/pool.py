"""Paged KV pool: its size and layout in plain arithmetic, so that a memory plan needs no tensor library.

The pool is one array of shape [layers, 2, blocks, slots in a block, key/value heads, head size]; index 0 of the second
axis holds keys, 1 values. So one layer's keys are [blocks, slots, heads, head size], the layout that PyTorch's
`torch.nn.attention.varlen.varlen_attn` takes with a block table, and a slot of one layer is contiguous in memory.
"""

from __future__ import annotations

from typing import NamedTuple

from maitred.core.errors import ConfigError
from maitred.model.spec import DecoderSpec


class PoolShape(NamedTuple):
    """Axes of the pool, in order."""

    num_layers: int
    keys_and_values: int  # always 2
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


def pool_shape(spec: DecoderSpec, *, num_blocks: int, block_size: int) -> PoolShape:
    """Raises ConfigError when there is no block, or a block without a slot."""
    if num_blocks < 1 or block_size < 1:
        raise ConfigError(
            f"the KV cache would have {num_blocks} blocks of {block_size} tokens; "
            f"both must be at least 1, so give it more memory (--kv-cache-memory-bytes)"
        )
    return PoolShape(spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)


def kv_bytes_per_token(spec: DecoderSpec, kv_dtype_bytes: int) -> int:
    """Bytes of keys and values of one token over all layers."""
    return spec.kv_values_per_token() * kv_dtype_bytes


def kv_bytes_per_block(spec: DecoderSpec, block_size: int, kv_dtype_bytes: int) -> int:
    """Bytes of one block over all layers; `num_blocks` of them is the whole pool."""
    return block_size * kv_bytes_per_token(spec, kv_dtype_bytes)
