"""Attention over the paged pool with gather and `scaled_dot_product_attention`: any device, dtype, head size.

Rows of like shape share one padded, masked call, so a decode step of 64 rows is a few tensor operations for each layer.
`torch_flash` is the faster path where a GPU has it.

Names: T tokens of the step, N query heads, K key/value heads, G = N / K, H head size; R rows of a group, Q its padded
query length, L its padded number of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from maitred.executor.batch import LONGEST_SHARED_QUERY, Batch, RowGroup
from maitred.executor.torch_kv import TorchKVPool
from maitred.model.spec import DecoderSpec
from maitred.model.torch_decoder import Attend


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
    keys_of_window: dict[int | None, _Keys]


class GatherAttention:
    """Paged attention by gathering each row's blocks; owns the scratch memory for that."""

    def __init__(self, spec: DecoderSpec, pool: TorchKVPool, *, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._windows = [layer.window for layer in spec.layers]
        self._pool = pool
        self._device = device
        self._dtype = dtype
        # Gathered keys and values; kept, because fresh memory of this size is page-faulted in at each use.
        self._scratch = torch.empty(2, 0, dtype=pool.dtype, device=device)

    def prepare(self, batch: Batch) -> Attend:
        """The attention of one step: writes a layer's K/V into the pool, then attends."""
        slots_T = self._tensor(batch.slots)
        groups = [self._prepare_group(batch, group) for group in batch.groups()]

        def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            self._pool.write(layer, slots_T, k_TKH, v_TKH)
            if len(groups) == 1:
                return self._attend_group(layer, q_TNH, groups[0])
            return torch.cat([self._attend_group(layer, q_TNH, group) for group in groups])

        return attend

    def _prepare_group(self, batch: Batch, rows: RowGroup) -> _Group:
        return _Group(
            rows,
            query_index=self._tensor(batch.query_index(rows).reshape(-1)) if rows.padded else None,
            query_keep=self._tensor(batch.query_keep(rows)) if rows.padded else None,
            keys_of_window={window: self._prepare_keys(batch, rows, window) for window in dict.fromkeys(self._windows)},
        )

    def _prepare_keys(self, batch: Batch, rows: RowGroup, window: int | None) -> _Keys:
        span = batch.key_span(rows, window)
        num_keys = span.block_ids.shape[1] * batch.block_size
        block_ids = self._tensor(span.block_ids.reshape(-1))
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

    def _attend_group(self, layer: int, q_TNH: torch.Tensor, group: _Group) -> torch.Tensor:
        """Returns the group's tokens' out, [t, N, H]."""
        rows, keys = group.rows, group.keys_of_window[self._windows[layer]]
        k_RLKH, v_RLKH = self._gather(layer, rows.num_rows, keys)
        if rows.query_len > LONGEST_SHARED_QUERY:
            return self._attend_long(q_TNH[rows.tokens], k_RLKH[0], v_RLKH[0], keys.mask)
        assert keys.mask is not None
        q = q_TNH[rows.tokens] if group.query_index is None else q_TNH.index_select(0, group.query_index)
        q_RQNH = q.view(rows.num_rows, rows.query_len, *q.shape[1:])
        out = self._attend_short(q_RQNH, k_RLKH, v_RLKH, keys.mask)
        return out if group.query_keep is None else out.index_select(0, group.query_keep)

    def _gather(self, layer: int, num_rows: int, keys: _Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather each row's keys and values, [R, L, K, H] in the compute dtype."""
        shape = self._pool.shape
        numel = keys.block_ids.numel() * shape.block_size * shape.num_kv_heads * shape.head_dim
        if numel > self._scratch.shape[1]:
            self._scratch = self._scratch.new_empty(2, numel)
        gathered = []
        for blocks, scratch in zip(self._pool.blocks(layer), self._scratch, strict=True):
            out = scratch[:numel].view(-1, *blocks.shape[1:])
            torch.index_select(blocks, 0, keys.block_ids, out=out)
            gathered.append(out.view(num_rows, keys.num_keys, *blocks.shape[2:]).to(self._dtype))
        return gathered[0], gathered[1]

    def _attend_short(
        self, q_RQNH: torch.Tensor, k_RLKH: torch.Tensor, v_RLKH: torch.Tensor, mask_RQL: torch.Tensor
    ) -> torch.Tensor:
        """Few queries a row: the G query heads of a key head are folded into the queries, so keys are read once."""
        num_rows, query_len, num_heads, head_dim = q_RQNH.shape
        num_kv_heads = k_RLKH.shape[2]
        group = num_heads // num_kv_heads
        q = q_RQNH.view(num_rows, query_len, num_kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
        q = q.reshape(num_rows, num_kv_heads, query_len * group, head_dim)
        mask = mask_RQL[:, None, :, None, :].expand(-1, -1, -1, group, -1).flatten(2, 3)
        out = self._attend(q, k_RLKH.transpose(1, 2), v_RLKH.transpose(1, 2), mask)
        out = out.view(num_rows, num_kv_heads, query_len, group, head_dim).permute(0, 2, 1, 3, 4)
        return out.reshape(num_rows * query_len, num_heads, head_dim)

    def _attend_long(
        self, q_QNH: torch.Tensor, k_LKH: torch.Tensor, v_LKH: torch.Tensor, mask_RQL: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend one row: key heads are the batch, and the G query heads of each see the same keys through stride 0."""
        query_len, num_heads, head_dim = q_QNH.shape
        num_kv_heads = k_LKH.shape[1]
        q = q_QNH.view(query_len, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        if mask_RQL is None:
            k_LKH, v_LKH = k_LKH[:query_len], v_LKH[:query_len]
        k, v = (x.permute(1, 0, 2)[:, None].expand(-1, q.shape[1], -1, -1) for x in (k_LKH, v_LKH))
        mask = None if mask_RQL is None else mask_RQL[:, None]
        out = self._attend(q, k, v, mask)
        return out.permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """q [.., .., queries, H], k and v [.., .., keys, H]; without a mask, causal over as many keys as queries."""
        scale, softcap = self._spec.attention_scale, self._spec.attention_softcap
        if softcap is None:
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        scores = softcap * torch.tanh(torch.matmul(q, k.transpose(-1, -2)).float() * (scale / softcap))
        if mask is None:
            above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
            scores = scores.masked_fill_(above, float("-inf"))
        else:
            scores = scores + mask
        return torch.matmul(torch.softmax(scores, dim=-1).to(v.dtype), v)

    def _tensor(self, array: object) -> torch.Tensor:
        return torch.as_tensor(array, device=self._device)
