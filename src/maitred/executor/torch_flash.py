"""Attention on a GPU through PyTorch's own FlashAttention-2, all rows of a step in one ragged call for each layer.

`torch.nn.attention.varlen.varlen_attn` (PyTorch 2.13; one without block tables is refused).
What its kernel takes, from PyTorch's
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_varlen_fwd`: compute capability 8.0 or newer,
float16 or bfloat16, head size a multiple of 8 and at most 256, a block table only with blocks of a multiple of 256
tokens, lengths and tables int32; causal masks are aligned to the last key, a window is (keys to the left, 0). There is
no softcap. Where a block table cannot be used, the blocks are gathered and the same kernel reads the copy.

`num_splits=1` is needed with block tables: 2.13's split-KV writes only the first sequence's rows of a ragged batch
(github.com/pytorch/pytorch/issues/194167). It also makes a row's result independent of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import current_flash_attention_impl

from maitred.executor.batch import Batch
from maitred.executor.state import Ints
from maitred.executor.torch_kv import TorchKVPool
from maitred.model.spec import DecoderSpec
from maitred.model.torch_decoder import Attend

PAGE_MULTIPLE = 256  # tokens
MOST_HEAD_DIM = 256
_FULL_CAUSAL = (-1, 0)


def flash_refusal(spec: DecoderSpec, *, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why the flash kernel cannot serve this model here, or None when it can."""
    if device.type != "cuda":
        return f"{device.type} has no flash kernel for ragged batches"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if dtype not in (torch.bfloat16, torch.float16) or kv_dtype != dtype:
        return f"it computes in 16 bits, and this is {dtype} with a {kv_dtype} KV cache"
    if spec.head_dim % 8 or spec.head_dim > MOST_HEAD_DIM:
        return f"head size {spec.head_dim} is not a multiple of 8 up to {MOST_HEAD_DIM}"
    if spec.attention_softcap is not None:
        return "it has no softcap"
    from torch.nn.attention import varlen  # noqa: PLC0415  # see FlashAttention

    if lacks := {"seqused_k", "block_table", "num_splits", "enable_gqa"} - set(
        signature(varlen.varlen_attn).parameters
    ):
        return f"PyTorch {torch.__version__}'s varlen_attn has no {' and no '.join(sorted(lacks))}; 2.13 has"
    return None


def reads_block_tables(block_size: int) -> bool:
    """Return whether the kernel walks the pool itself. Other implementations, if activated, have other rules."""
    return block_size % PAGE_MULTIPLE == 0 and current_flash_attention_impl() is None


@dataclass(slots=True)
class _Keys:
    """Keys of one window's layers. `cu_seq_k` are offsets (tokens) of each row's keys in the gathered copy."""

    seqused_k: torch.Tensor  # [R] int32
    cu_seq_k: torch.Tensor  # [R + 1] int32
    max_k: int
    block_table: torch.Tensor | None = None  # [R, B] int32
    gathered_ids: torch.Tensor | None = None  # [all blocks of all rows], when there is no table


class FlashAttention:
    """Paged attention for what `flash_refusal` lets pass."""

    def __init__(self, spec: DecoderSpec, pool: TorchKVPool, *, device: torch.device) -> None:
        self._scale = spec.attention_scale
        self._windows = [layer.window for layer in spec.layers]
        self._pool = pool
        self._device = device
        self._paged = reads_block_tables(pool.shape.block_size)
        # Only here: the import takes a second, and processes without a GPU need not pay it.
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

        self._varlen_attn = varlen_attn

    def prepare(self, batch: Batch) -> Attend:
        """The attention of one step: writes a layer's K/V into the pool, then attends."""
        slots_T = torch.as_tensor(batch.slots, device=self._device)
        cu_seq_q = self._offsets(batch.num_tokens)
        max_q = int(batch.num_tokens.max())
        keys_of_window = self._prepare_keys(batch)

        def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            self._pool.write(layer, slots_T, k_TKH, v_TKH)
            window = self._windows[layer]
            keys = keys_of_window[window]
            k, v = self._pool.blocks(layer)
            if keys.gathered_ids is not None:
                k, v = (x.index_select(0, keys.gathered_ids).flatten(0, 1) for x in (k, v))
            out = self._varlen_attn(
                q_TNH.contiguous(),
                k,
                v,
                cu_seq_q,
                keys.cu_seq_k,
                max_q,
                keys.max_k,
                scale=self._scale,
                window_size=_FULL_CAUSAL if window is None else (window - 1, 0),
                enable_gqa=True,
                seqused_k=keys.seqused_k,
                block_table=keys.block_table,
                num_splits=1,
            )
            assert isinstance(out, torch.Tensor)  # a pair only with return_aux
            return out

        return attend

    def _prepare_keys(self, batch: Batch) -> dict[int | None, _Keys]:
        windows = dict.fromkeys(self._windows)
        if self._paged:  # the kernel skips what a window hides
            return dict.fromkeys(windows, self._paged_keys(batch))
        return {window: self._gathered_keys(batch, window) for window in windows}

    def _paged_keys(self, batch: Batch) -> _Keys:
        contexts_R = batch.contexts
        table_RB = np.zeros((len(contexts_R), int(-(-contexts_R.max() // batch.block_size))), dtype=np.int32)
        for ids_B, work in zip(table_RB, batch.works, strict=True):
            count = min(work.state.blocks.size, len(ids_B))
            ids_B[:count] = work.state.blocks.array[:count]
        return _Keys(
            seqused_k=self._int32(contexts_R),
            cu_seq_k=self._offsets(contexts_R),
            max_k=int(contexts_R.max()),
            block_table=self._int32(table_RB),
        )

    def _gathered_keys(self, batch: Batch, window: int | None) -> _Keys:
        """Whole blocks side by side, from the first that a row's tokens see; the kernel counts from the last key."""
        first_R, counts_R = batch.block_ranges(slice(None), window)
        tables = [
            work.state.blocks.array[first : first + count]
            for work, first, count in zip(batch.works, first_R.tolist(), counts_R.tolist(), strict=True)
        ]
        used_R = batch.contexts - first_R * batch.block_size
        return _Keys(
            seqused_k=self._int32(used_R),
            cu_seq_k=self._offsets(counts_R * batch.block_size),
            max_k=int(counts_R.max()) * batch.block_size,
            gathered_ids=torch.as_tensor(np.concatenate(tables), device=self._device),
        )

    def _offsets(self, lengths_R: Ints) -> torch.Tensor:
        return self._int32(np.concatenate([[0], np.cumsum(lengths_R)]))

    def _int32(self, array: NDArray[np.integer]) -> torch.Tensor:
        return torch.as_tensor(array.astype(np.int32), device=self._device)
