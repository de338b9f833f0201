"""Attention over the paged pool with gather and `scaled_dot_product_attention`: any device, dtype, head size.

Rows of like shape share one padded, masked call, so a decode step of 64 rows is a few tensor operations for each layer.
`torch_flash` is the faster path where a GPU has it.

Names: T tokens of the step, N query heads, K key/value heads, G = N / K, H head size; R rows of a group, Q its padded
query length, L its padded number of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import current_flash_attention_impl
from torch.nn.functional import scaled_dot_product_attention

from maitred.executor.batch import LONGEST_SHARED_QUERY, RowGroup, TorchBatch
from maitred.executor.state import Ints, PageTables
from maitred.executor.torch_kv import TorchKVPool
from maitred.model.spec import DecoderSpec
from maitred.model.torch_decoder import Attend

_Sizes = tuple[torch.Size, torch.Size]
"""[K, H] of keys and of values."""
_Kind = tuple[int, int | None]
"""Group and window of a layer."""


@dataclass(slots=True)
class _Keys:
    """Keys of a group in layers of one window: whole blocks, and a mask of those keys in them that count."""

    block_ids: torch.Tensor  # [R * B], a row's blocks side by side
    num_keys: int  # L = B * block_size
    mask: torch.Tensor | None  # [R, Q, L] 0 or -inf in q's dtype; None: one row from position 0, causal


@dataclass(slots=True)
class _Group:
    rows: RowGroup
    query_index: torch.Tensor | None  # [R * Q] tokens of the batch, None when the group is not padded
    query_keep: torch.Tensor | None  # which of [R * Q] are real
    keys_of_kind: dict[_Kind, _Keys]


class _LayerPlaces(NamedTuple):
    """Where layers are in the pool: all in their order with the blocks themselves, or in groups with pages."""

    layers: tuple[int, ...]  # of each layer: its number in the pool
    kinds: tuple[_Kind, ...]
    pages: PageTables | None

    def ids(self, kind: _Kind, block_ids: NDArray[np.integer]) -> NDArray[np.integer]:
        """What the pool counts, for block ids of a request."""
        return block_ids if self.pages is None else self.pages.of_group(kind[0], block_ids)

    def slots(self, batch: TorchBatch, device: torch.device) -> dict[int, torch.Tensor]:
        """Slots [T] of the batch's tokens in the layers of each group."""
        groups = {group for group, _ in self.kinds}
        return {group: torch.as_tensor(batch.slots(self.pages, group), device=device) for group in groups}


def _places(spec: DecoderSpec, pages: PageTables | None) -> _LayerPlaces:
    windows = [spec.layers[i].window for i in spec.kv_layers]
    found = pages.groups.places if pages is not None else tuple((0, place) for place in range(len(windows)))
    kinds = tuple((group, window) for (group, _), window in zip(found, windows, strict=True))
    return _LayerPlaces(tuple(layer for _, layer in found), kinds, pages)


class GatherAttention:
    """Paged attention by gathering each row's blocks; owns the scratch memory for that."""

    def __init__(
        self,
        spec: DecoderSpec,
        pool: TorchKVPool,
        *,
        device: torch.device,
        dtype: torch.dtype,
        pages: PageTables | None = None,
    ) -> None:
        self._spec = spec
        self._places = _places(spec, pages)
        self._pool = pool
        self._device = device
        self._dtype = dtype
        # Gathered keys and values; kept, because fresh memory of this size is page-faulted in at each use.
        self._scratch = torch.empty(2, 0, dtype=pool.dtype, device=device)

    def prepare(self, batch: TorchBatch) -> Attend:
        """The attention of one step: writes a layer's K/V into the pool, then attends."""
        places, slots_of = self._places, self._places.slots(batch, self._device)
        groups = [self._prepare_group(batch, group) for group in batch.groups()]

        def attend(
            layer: int,
            q_TNH: torch.Tensor,
            k_TKH: torch.Tensor,
            v_TKH: torch.Tensor,
            sinks_N: torch.Tensor | None = None,
            writes: bool = True,
        ) -> torch.Tensor:
            if writes:
                self._pool.write(layer, slots_of[places.kinds[layer][0]], k_TKH, v_TKH, places.layers[layer])
            sizes = k_TKH.shape[1:], v_TKH.shape[1:]
            found = [self._attend_group(layer, q_TNH, group, sizes, sinks_N) for group in groups]
            return found[0] if len(found) == 1 else torch.cat(found)

        return attend

    def _prepare_group(self, batch: TorchBatch, rows: RowGroup) -> _Group:
        return _Group(
            rows,
            query_index=self._tensor(batch.query_index(rows).reshape(-1)) if rows.padded else None,
            query_keep=self._tensor(batch.query_keep(rows)) if rows.padded else None,
            keys_of_kind={kind: self._prepare_keys(batch, rows, kind) for kind in dict.fromkeys(self._places.kinds)},
        )

    def _prepare_keys(self, batch: TorchBatch, rows: RowGroup, kind: _Kind) -> _Keys:
        window = kind[1]
        span = batch.key_span(rows, window)
        num_keys = span.block_ids.shape[1] * batch.block_size
        block_ids = self._tensor(self._places.ids(kind, span.block_ids.reshape(-1)))
        starts_R, contexts_R = batch.starts[rows.rows], batch.contexts[rows.rows]
        whole = rows.num_rows == 1 and starts_R[0] == 0 and (window is None or contexts_R[0] <= window)
        if whole and rows.query_len > LONGEST_SHARED_QUERY:
            return _Keys(block_ids, num_keys, mask=None)
        key_RL = self._tensor(span.first_positions)[:, None] + torch.arange(num_keys, device=self._device)
        query_RQ = self._tensor(starts_R)[:, None] + torch.arange(rows.query_len, device=self._device)
        query_RQ = torch.minimum(query_RQ, self._tensor(contexts_R - 1)[:, None])
        distance_RQL = query_RQ[:, :, None] - key_RL[:, None, :]
        hidden = distance_RQL < 0
        if window is not None:
            hidden |= distance_RQL >= window
        mask_RQL = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return _Keys(block_ids, num_keys, mask_RQL.masked_fill_(hidden, float("-inf")))

    def _attend_group(
        self, layer: int, q_TNH: torch.Tensor, group: _Group, sizes: _Sizes, sinks_N: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the group's tokens' out, [t, N, H]."""
        rows, keys = group.rows, group.keys_of_kind[self._places.kinds[layer]]
        k_RLKH, v_RLKH = self._gather(self._places.layers[layer], rows.num_rows, keys, sizes)
        if rows.query_len > LONGEST_SHARED_QUERY:
            return self._attend_long(q_TNH[rows.tokens], k_RLKH[0], v_RLKH[0], keys.mask, sinks_N)
        assert keys.mask is not None
        q = q_TNH[rows.tokens] if group.query_index is None else q_TNH.index_select(0, group.query_index)
        q_RQNH = q.view(rows.num_rows, rows.query_len, *q.shape[1:])
        out = self._attend_short(q_RQNH, k_RLKH, v_RLKH, keys.mask, sinks_N)
        return out if group.query_keep is None else out.index_select(0, group.query_keep)

    def _gather(self, layer: int, num_rows: int, keys: _Keys, sizes: _Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather each row's keys and values, [R, L, K, H] of their sizes [K, H], in the compute dtype."""
        shape = self._pool.shape
        numel = keys.block_ids.numel() * shape.block_size * shape.num_kv_heads * shape.head_dim
        if numel > self._scratch.shape[1]:
            self._scratch = self._scratch.new_empty(2, numel)
        gathered = []
        for blocks, size, scratch in zip(self._pool.blocks(layer), sizes, self._scratch, strict=False):
            out = scratch[:numel].view(-1, *blocks.shape[1:])
            torch.index_select(blocks, 0, keys.block_ids, out=out)
            values = out.view(num_rows, keys.num_keys, -1)[..., : size.numel()]
            gathered.append(values.unflatten(-1, size).to(self._dtype))
        return gathered[0], gathered[-1][..., -self._spec.latent_rank :]  # all of the values unless they are in keys

    def _attend_short(
        self,
        q_RQNH: torch.Tensor,
        k_RLKH: torch.Tensor,
        v_RLKH: torch.Tensor,
        mask_RQL: torch.Tensor,
        sinks_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """Few queries a row: the G query heads of a key head are folded into the queries, so keys are read once."""
        num_rows, query_len, num_heads, head_dim = q_RQNH.shape
        num_kv_heads = k_RLKH.shape[2]
        group = num_heads // num_kv_heads
        q = q_RQNH.view(num_rows, query_len, num_kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
        q = q.reshape(num_rows, num_kv_heads, query_len * group, head_dim)
        mask = mask_RQL[:, None, :, None, :].expand(-1, -1, -1, group, -1).flatten(2, 3)
        sinks = None if sinks_N is None else sinks_N.view(-1, 1, group).repeat(1, query_len, 1).flatten(1)[..., None]
        out = self._attend(q, k_RLKH.transpose(1, 2), v_RLKH.transpose(1, 2), mask, sinks)
        out = out.view(num_rows, num_kv_heads, query_len, group, -1).permute(0, 2, 1, 3, 4)
        return out.reshape(num_rows * query_len, num_heads, -1)

    def _attend_long(
        self,
        q_QNH: torch.Tensor,
        k_LKH: torch.Tensor,
        v_LKH: torch.Tensor,
        mask_RQL: torch.Tensor | None,
        sinks_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend one row: key heads are the batch, and the G query heads of each see the same keys through stride 0."""
        query_len, num_heads, head_dim = q_QNH.shape
        num_kv_heads = k_LKH.shape[1]
        q = q_QNH.view(query_len, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        if mask_RQL is None:
            k_LKH, v_LKH = k_LKH[:query_len], v_LKH[:query_len]
        k, v = (x.permute(1, 0, 2)[:, None].expand(-1, q.shape[1], -1, -1) for x in (k_LKH, v_LKH))
        mask = None if mask_RQL is None else mask_RQL[:, None]
        sinks = None if sinks_N is None else sinks_N.view(num_kv_heads, -1, 1, 1)
        out = self._attend(q, k, v, mask, sinks)
        return out.permute(2, 0, 1, 3).reshape(query_len, num_heads, -1)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [.., .., queries, H], k and v [.., .., keys, H]; without a mask, causal over as many keys as queries. Sinks
        are logits of one key more, without a value."""
        scale, softcap = self._spec.attention_scale, self._spec.attention_softcap
        if softcap is None and sinks is None:
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is None:
            above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
            scores = scores.masked_fill_(above, float("-inf"))
        else:
            scores = scores + mask
        if sinks is not None:
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        return torch.matmul(torch.softmax(scores, dim=-1)[..., : k.shape[-2]].to(v.dtype), v)

    def _tensor(self, array: object) -> torch.Tensor:
        return torch.as_tensor(array, device=self._device)


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
    if spec.is_uneven or (spec.module is not None and not spec.module.is_even):
        return "keys and values of its layers differ in size"
    if spec.head_dim % 8 or spec.head_dim > MOST_HEAD_DIM:
        return f"head size {spec.head_dim} is not a multiple of 8 up to {MOST_HEAD_DIM}"
    if spec.attention_softcap is not None or spec.attention_sinks:
        return f"it has no {'attention sinks' if spec.attention_sinks else 'softcap'}"
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
class _FlashKeys:
    """Keys of one window's layers. `cu_seq_k` are offsets (tokens) of each row's keys in the gathered copy."""

    seqused_k: torch.Tensor  # [R] int32
    cu_seq_k: torch.Tensor  # [R + 1] int32
    max_k: int
    block_table: torch.Tensor | None = None  # [R, B] int32
    gathered_ids: torch.Tensor | None = None  # [all blocks of all rows], when there is no table


class FlashAttention:
    """Paged attention for what `flash_refusal` lets pass."""

    def __init__(
        self, spec: DecoderSpec, pool: TorchKVPool, *, device: torch.device, pages: PageTables | None = None
    ) -> None:
        self._scale = spec.attention_scale
        self._places = _places(spec, pages)
        self._pool = pool
        self._device = device
        self._paged = reads_block_tables(pool.shape.block_size)
        # Only here: the import takes a second, and processes without a GPU need not pay it.
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

        self._varlen_attn = varlen_attn

    def prepare(self, batch: TorchBatch) -> Attend:
        """The attention of one step: writes a layer's K/V into the pool, then attends."""
        places, slots_of = self._places, self._places.slots(batch, self._device)
        cu_seq_q = self._offsets(batch.num_tokens)
        max_q = int(batch.num_tokens.max())
        keys_of_kind = self._prepare_keys(batch)

        def attend(layer: int, *qkv: torch.Tensor, writes: bool = True) -> torch.Tensor:
            q_TNH, k_TKH, v_TKH, *_ = qkv
            group, window = places.kinds[layer]
            if writes:
                self._pool.write(layer, slots_of[group], k_TKH, v_TKH, places.layers[layer])
            keys = keys_of_kind[group, window]
            k, v = self._pool.blocks(places.layers[layer])
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

    def _prepare_keys(self, batch: TorchBatch) -> dict[_Kind, _FlashKeys]:
        kinds = tuple(dict.fromkeys(self._places.kinds))
        if not self._paged:
            return {kind: self._gathered_keys(batch, kind) for kind in kinds}
        keys_of_group = {kind[0]: self._paged_keys(batch, kind) for kind in dict(kinds).items()}
        return {kind: keys_of_group[kind[0]] for kind in kinds}

    def _paged_keys(self, batch: TorchBatch, kind: _Kind) -> _FlashKeys:
        """Block tables of a group's layers, whatever their window: the kernel skips what one hides."""
        contexts_R = batch.contexts
        table_RB = np.zeros((len(contexts_R), int(-(-contexts_R.max() // batch.block_size))), dtype=np.int32)
        for ids_B, work in zip(table_RB, batch.works, strict=True):
            count = min(work.state.blocks.size, len(ids_B))
            ids_B[:count] = work.state.blocks.array[:count]
        return _FlashKeys(
            seqused_k=self._int32(contexts_R),
            cu_seq_k=self._offsets(contexts_R),
            max_k=int(contexts_R.max()),
            block_table=self._int32(self._places.ids(kind, table_RB)),
        )

    def _gathered_keys(self, batch: TorchBatch, kind: _Kind) -> _FlashKeys:
        """Whole blocks side by side, from the first that a row's tokens see; the kernel counts from the last key."""
        first_R, counts_R = batch.block_ranges(slice(None), kind[1])
        tables = [
            work.state.blocks.array[first : first + count]
            for work, first, count in zip(batch.works, first_R.tolist(), counts_R.tolist(), strict=True)
        ]
        used_R = batch.contexts - first_R * batch.block_size
        return _FlashKeys(
            seqused_k=self._int32(used_R),
            cu_seq_k=self._offsets(counts_R * batch.block_size),
            max_k=int(counts_R.max()) * batch.block_size,
            gathered_ids=torch.as_tensor(self._places.ids(kind, np.concatenate(tables)), device=self._device),
        )

    def _offsets(self, lengths_R: Ints) -> torch.Tensor:
        return self._int32(np.concatenate([[0], np.cumsum(lengths_R)]))

    def _int32(self, array: NDArray[np.integer]) -> torch.Tensor:
        return torch.as_tensor(array.astype(np.int32), device=self._device)
