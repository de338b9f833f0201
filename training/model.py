"""A Llama decoder small enough to train on one CPU core; its names and layout are those of Hugging Face Llama.

Dimension letters: B rows, T tokens, D hidden, N query heads, K key/value heads, H head size, F MLP width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Everything that fixes the number of parameters, and the constants of norm and RoPE."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


MINI = DecoderShape(
    vocab_size=1536,
    hidden_size=256,
    num_layers=5,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=640,
)
DRAFT = DecoderShape(
    vocab_size=1536,
    hidden_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    intermediate_size=256,
)


class RMSNorm(nn.Module):
    """x / rms(x) * weight. Source: Zhang and Sennrich 2019, arXiv:1910.07467."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, (x_BTD.shape[-1],), self.weight.to(x_BTD.dtype), self.eps)


def rope_tables(shape: DecoderShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., T, H] in the half-split layout. Source: Su et al. 2021, arXiv:2104.09864."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    inverse_frequency = shape.rope_theta ** (-half / shape.head_dim)
    angle = positions.float()[..., None] * torch.cat((inverse_frequency, inverse_frequency))
    return angle.cos(), angle.sin()


def rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Turn each pair (i, i + H/2) by its position's angle."""
    first, second = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_TH + torch.cat((-second, first), dim=-1) * sin_TH


@dataclass(frozen=True, slots=True, eq=False)
class Where:
    """Where the tokens stand: RoPE tables [T, H], and who may see whom [B, 1, T, S] if not plainly causal.

    `mask` is additive, in the dtype of the queries.
    """

    cos_TH: Tensor  # noqa: N815
    sin_TH: Tensor  # noqa: N815
    mask: Tensor | None


@dataclass(slots=True, eq=False)
class KVCache:
    """Keys and values [B, K, T, H] of one layer, grown by concatenation; only evaluation uses it."""

    k_BKTH: Tensor | None = None  # noqa: N815
    v_BKTH: Tensor | None = None  # noqa: N815

    def extend(self, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        if self.k_BKTH is not None and self.v_BKTH is not None:
            k_BKTH = torch.cat((self.k_BKTH, k_BKTH), dim=2)
            v_BKTH = torch.cat((self.v_BKTH, v_BKTH), dim=2)
        self.k_BKTH, self.v_BKTH = k_BKTH, v_BKTH
        return k_BKTH, v_BKTH


class Attention(nn.Module):
    """Grouped-query attention. Source: Ainslie et al. 2023, arXiv:2305.13245."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, at: Where, cache: KVCache | None) -> Tensor:
        q_BNTH = rotate(self._heads(self.q_proj(x_BTD)), at.cos_TH, at.sin_TH)
        k_BKTH = rotate(self._heads(self.k_proj(x_BTD)), at.cos_TH, at.sin_TH)
        v_BKTH = self._heads(self.v_proj(x_BTD))
        if cache is not None:
            k_BKTH, v_BKTH = cache.extend(k_BKTH, v_BKTH)
        group = self.shape.num_heads // self.shape.num_kv_heads
        k_BNTH, v_BNTH = (x.repeat_interleave(group, dim=1) for x in (k_BKTH, v_BKTH))
        # With a cache, the new tokens are one step (T = 1) or the whole prompt, so plain causality is enough.
        causal = at.mask is None and q_BNTH.shape[2] > 1
        out_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, attn_mask=at.mask, is_causal=causal)
        return self.o_proj(out_BNTH.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x_BTD: Tensor) -> Tensor:
        rows, length, _ = x_BTD.shape
        return x_BTD.view(rows, length, -1, self.shape.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    """SwiGLU. Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x_BTD: Tensor, at: Where, cache: KVCache | None) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), at, cache)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """Everything but the output projection; the name of its place in the checkpoint is `model`."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Decoder(nn.Module):
    """Tokens [B, T] to logits [B, T, V]; input and output embeddings are tied."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self._initialise()

    def forward(self, tokens_BT: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.logits(self.hidden(tokens_BT, mask=mask))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def hidden(
        self,
        tokens_BT: Tensor,
        *,
        mask: Tensor | None = None,
        caches: list[KVCache] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The normed last hidden states [B, T, D]; positions [T] or [B, 1, T] count from 0 when absent."""
        x_BTD = self.model.embed_tokens(tokens_BT)
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1])
        cos, sin = rope_tables(self.shape, positions)
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x_BTD.dtype
        at = Where(cos.to(dtype), sin.to(dtype), None if mask is None else mask.to(dtype))
        for index, layer in enumerate(self.model.layers):
            x_BTD = layer(x_BTD, at, None if caches is None else caches[index])
        return self.model.norm(x_BTD)  # type: ignore[no-any-return]

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def _initialise(self) -> None:
        scale = 0.02
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = scale / (2 * self.shape.num_layers) ** 0.5 if into_stream else scale
                nn.init.normal_(weight, std=std)
