"""A DecoderSpec as a PyTorch module, without a cache: attention is a function that the caller passes in.

So one module serves the tests, the paged executor and CUDA graphs. T tokens (of any number of
sequences), N query heads, K key/value heads, H head size, D hidden size, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, embedding, gelu, linear, rms_norm, silu, softplus

from maitred.model.rope import inverse_frequencies
from maitred.model.spec import (
    BESIDE,
    SWIGLU_SLOPE,
    Activation,
    DecoderSpec,
    LatentSpec,
    LayerSpec,
    NormPlacement,
    QKNorm,
    RecurrentSpec,
    RopeSpec,
    RoutedSpec,
    Scoring,
)
from maitred.model.weight_map import WeightSource, check_shape, weight_map

if TYPE_CHECKING:
    from maitred.model.checkpoint import Checkpoint, RawTensor

Attend = Callable[..., Tensor]
"""(layer index, q_TNH, k_TKH, v_TKH) -> out_TNH; rope is applied already, scale and softcap are in the spec. Where this
says so (`attention_sinks`), sinks_N, logits that only add to the denominator, are one argument more."""

State = tuple[Tensor, Tensor]  # of B sequences: a convolution's last inputs [B, W, C], and matrices [B, H, K, V]
Mix = Callable[[Tensor, State | None], tuple[Tensor, State]]
"""(inputs_BTI, state; None: they begin) of B sequences -> (out_BTV, their state then)"""

Recur = Callable[[int, Tensor, Mix], Tensor]
"""(place among recurrent layers, inputs_TI, mix) -> out_TV: calls `mix` with each request's tokens and state"""

Progress = Callable[[int, int], None]
"""(bytes loaded, bytes in all)"""

Rotation = Sequence[Tensor]  # cos_TR, sin_TR, R pairs of a head
Rotations = dict[RopeSpec, tuple[Tensor, Tensor, Tensor | None]]  # and the queries' factors [T, 1, 1], where there are


class TorchDecoder(nn.Module):
    """The decoder of `spec`; parameters are named and shaped as `spec.parameter_shapes` says, uninitialised.

    `max_model_len` is the served context, which `dynamic` and `longrope` frequencies depend on (see `rope.py`); None
    is the model's own. Norm weights stay float32 (with Gemma's offset added), all else is in `dtype`. Weights of a
    hollow decoder take no memory until `load_part` fills them.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_model_len: int | None = None,
        hollow: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        make = _Maker("meta" if hollow else device, dtype)
        self.embedding = make.embedding(spec.vocab_size, spec.hidden_size)
        self.by_layer = nn.ModuleDict()
        if width := spec.num_layers * spec.per_layer_width:
            self.by_layer["embedding"] = make.embedding(spec.vocab_size, width)
            self.by_layer["projection"] = make.linear(spec.hidden_size, width, bias=False)
            self.by_layer["norm"] = make.norm(spec.per_layer_width, spec)
        self.layers = nn.ModuleList(_Layer(spec, i, make) for i in range(spec.num_layers))
        self.norm = make.norm(spec.hidden_size, spec)
        self.output = None if spec.tied_embeddings else make.linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.embedding_scale = nn.Buffer(
            torch.tensor(spec.embedding_scale, dtype=dtype, device=device), persistent=False
        )
        self.ropes = nn.ModuleList(
            _Rope(rope, max_model_len or spec.max_position_embeddings, device) for rope in _distinct_ropes(spec)
        )
        self.requires_grad_(False)

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        states: list[Tensor] | None = None,
        recur: Recur | None = None,
    ) -> Tensor:
        """Returns hidden_TD after the final norm. `attend` is called once for each layer that keeps keys, in order, by
        its place among them; `states` gets what comes into the first layer, and out of each. Without `recur` the tokens
        are one sequence for recurrent layers, which begins here.
        """
        hidden_TD = embedding(token_ids_T, self.embedding.weight) * self.embedding_scale
        rotations = self.rotations(positions_T)
        inputs = self._inputs(token_ids_T, hidden_TD) if self.by_layer else [None] * len(self.layers)
        for layer, input_TW in zip(self.layers, inputs, strict=True):
            if states is not None:
                states.append(hidden_TD)
            hidden_TD = layer(hidden_TD, rotations, attend, recur, input_TW)
        if states is not None:
            states.append(hidden_TD)
        normed_TD: Tensor = self.norm(hidden_TD)
        return normed_TD

    def _inputs(self, token_ids_T: Tensor, hidden_TD: Tensor) -> Sequence[Tensor]:
        """What each layer has of the tokens, [T, W]."""
        spec, size = self.spec, self.spec.per_layer_width
        tokens = self.by_layer["embedding"](token_ids_T) * size**0.5
        context = self.by_layer["projection"](hidden_TD) * spec.hidden_size**-0.5
        normed = self.by_layer["norm"](context.unflatten(-1, (spec.num_layers, size)))
        inputs: Sequence[Tensor] = ((normed + tokens.view_as(normed)) * 2**-0.5).unbind(1)
        return inputs

    def rotations(self, positions_T: Tensor) -> Rotations:
        ropes: Any = self.ropes
        return {rope.spec: rope(positions_T) for rope in ropes}

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Returns float32 logits_TV, scaled and softcapped."""
        weight_VD = self.embedding.weight if self.output is None else self.output.weight
        logits_TV = linear(hidden_TD, weight_VD).float()
        if self.spec.logit_scale != 1.0:
            logits_TV = logits_TV * self.spec.logit_scale
        if self.spec.logit_softcap is not None:
            logits_TV = torch.tanh(logits_TV / self.spec.logit_softcap) * self.spec.logit_softcap
        return logits_TV


class _Maker:
    """Makes uninitialised modules on one device in one dtype."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def linear(self, width_in: int, width_out: int, *, bias: bool) -> nn.Linear:
        return nn.Linear(width_in, width_out, bias=bias, device="meta", dtype=self.dtype).to_empty(device=self.device)

    def embedding(self, rows: int, width: int) -> nn.Embedding:
        return nn.Embedding(rows, width, device="meta", dtype=self.dtype).to_empty(device=self.device)

    def norm(self, width: int, spec: DecoderSpec, eps: float | None = None) -> RMSNorm:
        return RMSNorm(width, spec.norm_eps if eps is None else eps, self.device)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32. Zhang and Sennrich 2019, arXiv:1910.07467."""

    def __init__(self, width: int, eps: float, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class _Rope(nn.Module):
    def __init__(self, spec: RopeSpec, max_model_len: int, device: torch.device | str) -> None:
        super().__init__()
        self.spec = spec
        frequencies = torch.tensor(inverse_frequencies(spec, max_model_len), dtype=torch.float32, device=device)
        self.frequencies_R = nn.Buffer(frequencies, persistent=False)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        angles_TR = positions_T.float()[:, None] * self.frequencies_R
        factor = self.spec.attention_factor
        return angles_TR.cos() * factor, angles_TR.sin() * factor, self._query_scale(positions_T)

    def _query_scale(self, positions_T: Tensor) -> Tensor | None:
        """Factors of the queries, [T, 1, 1], where the rope has them."""
        if not self.spec.query_beta:
            return None
        turns_T = torch.floor(positions_T / self.spec.original_max_position_embeddings)
        return (1 + self.spec.query_beta * torch.log(1 + turns_T))[:, None, None]


def rotate(x_TNH: Tensor, rotation: Rotation, *, interleaved: bool = False) -> Tensor:
    """Rotate the pairs (i, i + R) of the first 2R values of every head, in float32; the rest passes through. Pairs that
    are interleaved, (2i, 2i + 1), are taken apart first and stay so, which leaves products of queries and keys."""
    cos_T1R, sin_T1R = rotation[0][:, None], rotation[1][:, None]
    num_pairs = cos_T1R.shape[-1]
    if interleaved:
        apart = (x_TNH[..., : 2 * num_pairs : 2], x_TNH[..., 1 : 2 * num_pairs : 2], x_TNH[..., 2 * num_pairs :])
        x_TNH = torch.cat(apart, dim=-1)
    first, second = x_TNH[..., :num_pairs].float(), x_TNH[..., num_pairs : 2 * num_pairs].float()
    rotated = torch.cat((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=-1)
    rotated = rotated.to(x_TNH.dtype)
    if 2 * num_pairs == x_TNH.shape[-1]:
        return rotated
    return torch.cat((rotated, x_TNH[..., 2 * num_pairs :]), dim=-1)


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu,
    Activation.GELU: gelu,
    Activation.GELU_TANH: lambda x: gelu(x, approximate="tanh"),
}


class _Layer(nn.Module):
    """One layer. Norms that the placement does not have are None; q, k, v and gate, up are one matrix each."""

    def __init__(self, spec: DecoderSpec, index: int, make: _Maker) -> None:
        super().__init__()
        self.spec = spec
        self.layer_spec: LayerSpec = spec.layers[index]
        self.heads = spec.at(index)
        kept = index if self.layer_spec.kv_of is None else self.layer_spec.kv_of
        place = sum(layer < kept for layer in spec.kv_layers)
        self.index = place if self.layer_spec.recurrent is None else index - place
        hidden, inner = spec.hidden_size, spec.inner_width(index)
        pre = spec.norm_placement is not NormPlacement.POST
        post = spec.norm_placement is not NormPlacement.PRE
        self.attention_norm = make.norm(hidden, spec) if pre else None
        if self.layer_spec.recurrent is not None:
            self.recurrent = _Recurrent(spec, self.layer_spec.recurrent, make)
        else:
            self._make_attention(make)
        self.attention_post_norm = make.norm(hidden, spec) if post else None
        self.mlp_norm = make.norm(hidden, spec) if pre else None
        if self.layer_spec.routed is not None:
            self._make_routed(self.layer_spec.routed, make)
        else:
            self.gate_up = make.linear(hidden, 2 * inner, bias=spec.mlp_bias)
            self.down = make.linear(inner, hidden, bias=spec.mlp_bias)
        self.mlp_post_norm = make.norm(hidden, spec) if post else None
        if size := spec.per_layer_width:
            self.input_gate = make.linear(hidden, size, bias=False)
            self.input = make.linear(size, hidden, bias=False)
            self.input_norm = make.norm(hidden, spec)
        self.scale = make.norm(1, spec) if spec.layer_scales else None  # for its number

    def _make_attention(self, make: _Maker) -> None:
        spec, latent, keeps, width = (
            self.heads,
            self.layer_spec.latent,
            self.layer_spec.kv_of is None,
            self.heads.q_width,
        )
        if latent is not None:
            self.latent, width = _Latent(spec, latent, make), spec.num_heads * latent.value_dim
        else:
            self.qkv = make.linear(spec.hidden_size, spec.qkv_width if keeps else spec.q_width, bias=spec.qkv_bias)
            self.q_norm, self.k_norm = _qk_norms(spec, make)
            self.k_norm = self.k_norm if keeps else None
        self.sinks = make.norm(spec.num_heads, spec) if spec.attention_sinks else None  # for its vector
        self.attention_output = make.linear(width, spec.hidden_size, bias=spec.output_bias)

    def _make_routed(self, routed: RoutedSpec, make: _Maker) -> None:
        spec, hidden, experts, shared = self.spec, self.spec.hidden_size, routed.num_experts, routed.shared_width
        self.router = make.linear(hidden, experts, bias=routed.router_bias)
        self.correction = make.norm(experts, spec) if routed.correction_bias else None  # for its vector
        self.experts = nn.ModuleDict(
            {
                "gate_up": make.linear(hidden, experts * 2 * routed.width, bias=routed.expert_bias),
                "down": make.linear(routed.width, experts * hidden, bias=routed.expert_bias),
            }
        )
        self.shared_gate = make.linear(hidden, 1, bias=False) if routed.shared_gate else None
        matrices = {"gate_up": (hidden, 2 * shared), "down": (shared, hidden)} if shared else {}
        self.shared = nn.ModuleDict({name: make.linear(*sizes, bias=False) for name, sizes in matrices.items()})
        vectors = {name: experts if name == "expert_scale" else hidden for name in BESIDE if routed.beside_dense}
        self.beside = nn.ModuleDict({name: make.norm(size, spec) for name, size in vectors.items()})

    def forward(
        self,
        hidden_TD: Tensor,
        rotations: Rotations,
        attend: Attend,
        recur: Recur | None = None,
        input_TW: Tensor | None = None,
    ) -> Tensor:
        x_TD = _maybe(self.attention_norm, hidden_TD)
        if self.layer_spec.recurrent is None:
            part_TD = self.attention(x_TD, rotations, attend)
        else:
            part_TD = self.recurrent(x_TD, self.index, recur or _one_sequence)
        hidden_TD = self._add(hidden_TD, _maybe(self.attention_post_norm, part_TD))
        part_TD = self.mlp(_maybe(self.mlp_norm, hidden_TD), hidden_TD)
        hidden_TD = self._add(hidden_TD, _maybe(self.mlp_post_norm, part_TD))
        if input_TW is not None:
            opened_TW = _ACTIVATIONS[self.spec.activation](self.input_gate(hidden_TD))
            hidden_TD = hidden_TD + self.input_norm(self.input(opened_TW * input_TW))
        return hidden_TD if self.scale is None else hidden_TD * self.scale.weight.to(hidden_TD.dtype)

    def _add(self, hidden_TD: Tensor, part_TD: Tensor) -> Tensor:
        scale = self.spec.residual_scale
        return hidden_TD + part_TD if scale == 1.0 else hidden_TD + part_TD * scale

    def attention(self, x_TD: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        spec, latent, rope, scale = self.heads, self.layer_spec.latent, self.layer_spec.rope, None
        if self.layer_spec.kv_of is not None:
            q_TNH = _maybe(self.q_norm, self.qkv(x_TD).view(-1, spec.num_heads, spec.head_dim))
            assert rope is not None
            q_TNH = rotate(q_TNH, rotations[rope][:2], interleaved=rope.interleaved)
            like_TKH = q_TNH[:, : spec.num_kv_heads]  # for the sizes of what is kept
            out_TNH = attend(self.index, q_TNH, like_TKH, like_TKH, writes=False)
            out_TD: Tensor = self.attention_output(out_TNH.flatten(-2))
            return out_TD
        gated = spec.qkv_width - spec.q_width - 2 * spec.kv_width
        if latent is not None:
            qk_TMH = self.latent(x_TD)
        else:
            qk, v, gate = torch.split(self.qkv(x_TD), [spec.q_width + spec.kv_width, spec.kv_width, gated], dim=-1)
            qk_TMH = self._normed(qk)  # M = N + K heads: one rotation for both
        if rope is not None:
            *rotation, scale = rotations[rope]
            qk_TMH = rotate(qk_TMH, rotation, interleaved=rope.interleaved)
        q_TNH, k_TKH = torch.split(qk_TMH, [spec.num_heads, spec.num_kv_heads], dim=1)
        if scale is not None:
            q_TNH = q_TNH * scale.to(q_TNH.dtype)
        v_TKH = k_TKH[..., latent.rope_dim :] if latent else v.view(-1, spec.num_kv_heads, spec.head_dim)
        if spec.value_norm:
            v_TKH = rms_norm(v_TKH.float(), v_TKH.shape[-1:], eps=spec.norm_eps).to(v_TKH.dtype)
        sinks = () if self.sinks is None else (self.sinks.weight,)
        out_TNH = attend(self.index, q_TNH, k_TKH, v_TKH, *sinks)
        if latent is not None:
            out_TNH = _by_head("tnr,nvr->tnv", out_TNH, self.latent.expand)
        out = out_TNH.flatten(-2)
        out_TD = self.attention_output(out * torch.sigmoid(gate) if gated else out)
        return out_TD

    def _normed(self, qk: Tensor) -> Tensor:
        """Queries and keys by heads, [T, N + K, H], normalised as the family does."""
        spec = self.heads
        if spec.qk_norm is QKNorm.FULL_WIDTH:
            q, k = torch.split(qk, [spec.q_width, spec.kv_width], dim=-1)
            qk = torch.cat((_maybe(self.q_norm, q), _maybe(self.k_norm, k)), dim=-1)
        qk_TMH = qk.view(-1, spec.num_heads + spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm is QKNorm.PER_HEAD:
            q, k = torch.split(qk_TMH, [spec.num_heads, spec.num_kv_heads], dim=1)
            qk_TMH = torch.cat((_maybe(self.q_norm, q), _maybe(self.k_norm, k)), dim=1)
        return qk_TMH

    def mlp(self, x_TD: Tensor, stream_TD: Tensor | None = None) -> Tensor:
        """`stream_TD` is what was normed to x_TD."""
        if self.layer_spec.routed is not None:
            return self._routed(self.layer_spec.routed, x_TD, x_TD if stream_TD is None else stream_TD)
        out_TD: Tensor = self.down(self._gated(self.gate_up(x_TD)))
        return out_TD

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.spec.activation is not Activation.CLAMPED_SWIGLU:
            return _ACTIVATIONS[self.spec.activation](gate) * up
        limit = self.spec.activation_limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(SWIGLU_SLOPE * gate)

    def _routed(self, routed: RoutedSpec, dense_TD: Tensor, stream_TD: Tensor) -> Tensor:
        beside: Any = self.beside
        x_TD = scored_TD = dense_TD
        if beside:
            x_TD, scored_TD = beside["experts_norm"](stream_TD), beside["router_norm"](stream_TD)
            scored_TD = scored_TD * self.spec.hidden_size**-0.5
        bias = None if self.router.bias is None else self.router.bias.float()
        logits_TE = linear(scored_TD.float(), self.router.weight.float(), bias)
        weights_TE = route(routed, logits_TE, None if self.correction is None else self.correction.weight)
        if beside:
            weights_TE = weights_TE * beside["expert_scale"].weight
        out_TD = torch.zeros_like(x_TD)
        for expert in (weights_TE != 0).any(dim=0).nonzero()[:, 0].tolist():
            rows = (weights_TE[:, expert] != 0).nonzero()[:, 0]
            inner = self._gated(_expert_linear(self.experts["gate_up"], expert, routed, x_TD[rows]))
            part = _expert_linear(self.experts["down"], expert, routed, inner)
            out_TD.index_add_(0, rows, (part * weights_TE[rows, expert, None]).to(x_TD.dtype))
        if not routed.shared_width:
            return out_TD
        shared_TD = self.shared["down"](self._gated(self.shared["gate_up"](dense_TD)))
        if beside:
            out_TD, shared_TD = beside["experts_post_norm"](out_TD), beside["dense_post_norm"](shared_TD)
        if self.shared_gate is not None:
            shared_TD = torch.sigmoid(self.shared_gate(x_TD)) * shared_TD
        return out_TD.add_(shared_TD)


class _Recurrent(nn.Module):
    """A gated delta rule behind a short convolution, token by token. Its state and all between its two linears are in
    float32."""

    def __init__(self, spec: DecoderSpec, delta: RecurrentSpec, make: _Maker) -> None:
        super().__init__()
        self.delta = delta
        self.inputs = make.linear(spec.hidden_size, delta.input_width, bias=False)
        self.conv = make.norm(delta.num_channels * delta.conv_width, spec)  # as the next two, for its vector
        self.step_bias = make.norm(delta.num_value_heads, spec)
        self.rate = make.norm(delta.num_value_heads, spec)
        self.norm = make.norm(delta.value_dim, spec)
        self.output = make.linear(delta.value_width, spec.hidden_size, bias=False)

    def forward(self, x_TD: Tensor, place: int, recur: Recur) -> Tensor:
        out_TD: Tensor = self.output(recur(place, self.inputs(x_TD), self.mix).to(x_TD.dtype))
        return out_TD

    def mix(self, inputs_BTI: Tensor, state: State | None) -> tuple[Tensor, State]:
        delta, heads = self.delta, self.delta.num_value_heads
        history_BWC, matrices_BHKV = state or self._zeros(inputs_BTI)
        widths = [delta.num_channels, delta.value_width, heads, heads]
        channels, z, b, a = torch.split(inputs_BTI.float(), widths, dim=-1)
        seen = torch.cat((history_BWC, channels), dim=1)
        taps = self.conv.weight.view(delta.num_channels, 1, delta.conv_width)
        mixed = silu(conv1d(seen.transpose(1, 2), taps, groups=delta.num_channels)).transpose(1, 2)
        key_width = delta.num_key_heads * delta.key_dim
        q, k, v = torch.split(mixed, [key_width, key_width, delta.value_width], dim=-1)
        q, k = (self._directions(x) for x in (q, k))
        v, z = (x.reshape(*x.shape[:2], heads, delta.value_dim) for x in (v, z))
        q, beta = q * delta.key_dim**-0.5, torch.sigmoid(b)
        decay = torch.exp(self.rate.weight * softplus(a + self.step_bias.weight))
        out = []
        for t in range(inputs_BTI.shape[1]):
            matrices_BHKV = matrices_BHKV * decay[:, t, :, None, None]
            known = torch.einsum("bhkv,bhk->bhv", matrices_BHKV, k[:, t])
            change = (v[:, t] - known) * beta[:, t, :, None]
            matrices_BHKV = matrices_BHKV + k[:, t, :, :, None] * change[:, :, None]
            out.append(torch.einsum("bhkv,bhk->bhv", matrices_BHKV, q[:, t]))
        normed = self.norm(torch.stack(out, dim=1)) * silu(z)
        return normed.flatten(-2), (seen[:, 1 - delta.conv_width :], matrices_BHKV)

    def _directions(self, x: Tensor) -> Tensor:
        """Queries or keys of length 1, one for each value head."""
        by_head = x.reshape(*x.shape[:2], self.delta.num_key_heads, self.delta.key_dim)
        by_head = by_head * torch.rsqrt(by_head.square().sum(-1, keepdim=True) + 1e-6)
        times = self.delta.num_value_heads // self.delta.num_key_heads
        return by_head.repeat(1, 1, times, 1) if self.delta.tiled else by_head.repeat_interleave(times, dim=-2)

    def _zeros(self, inputs_BTI: Tensor) -> State:
        shapes = self.delta.state_shapes
        history, matrices = (torch.zeros(len(inputs_BTI), *shape, device=inputs_BTI.device) for shape in shapes)
        return history, matrices


def _one_sequence(place: int, inputs_TI: Tensor, mix: Mix) -> Tensor:
    return mix(inputs_TI[None], None)[0][0]


class _Latent(nn.Module):
    """What stands before and behind latent attention; queries and the key have their rotated values first."""

    def __init__(self, spec: DecoderSpec, latent: LatentSpec, make: _Maker) -> None:
        super().__init__()
        self.spec, self.num_heads, hidden, between = latent, spec.num_heads, spec.hidden_size, latent.query_rank
        queries = spec.num_heads * latent.query_dim
        self.inputs = make.linear(hidden, (between or queries) + latent.head_dim, bias=False)
        self.query_norm = make.norm(between, spec, latent.norm_eps) if between else None
        self.query = make.linear(between, queries, bias=False) if between else nn.Identity()
        self.norm = make.norm(latent.rank, spec, latent.norm_eps)
        self.absorb = make.linear(latent.key_dim, spec.num_heads * latent.rank, bias=False)
        self.expand = make.linear(latent.rank, spec.num_heads * latent.value_dim, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Queries of all heads and the key, not rotated yet, [T, N + 1, H]."""
        latent, inputs = self.spec, self.inputs(x_TD)
        q, c, k_rope = torch.split(inputs, [inputs.shape[-1] - latent.head_dim, latent.rank, latent.rope_dim], dim=-1)
        q_TNQ = self.query(_maybe(self.query_norm, q)).view(len(x_TD), self.num_heads, -1)
        q_nope, q_rope = torch.split(q_TNQ, [latent.key_dim, latent.rope_dim], dim=-1)
        q_TNH = torch.cat((q_rope, _by_head("tnk,nrk->tnr", q_nope, self.absorb)), dim=-1)
        return torch.cat((q_TNH, torch.cat((k_rope, self.norm(c)), dim=-1)[:, None]), dim=1)


def _by_head(product: str, x_TNK: Tensor, matrices: Any) -> Tensor:
    """A matrix of each head, which stand one below the other."""
    return torch.einsum(product, x_TNK, matrices.weight.view(x_TNK.shape[1], -1, x_TNK.shape[2]))


def route(routed: RoutedSpec, logits_TE: Tensor, correction_E: Tensor | None) -> Tensor:
    """Weights of the experts for each token, [T, E]: 0 for those that it does not have. Of equal scores the lower
    number's expert is chosen."""
    if routed.scoring is Scoring.SIGMOID:
        scores_TE = torch.sigmoid(logits_TE)
    else:
        scores_TE = logits_TE if routed.scoring is Scoring.SOFTMAX_OF_CHOSEN else torch.softmax(logits_TE, dim=-1)
    choice_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if routed.num_groups > 1:
        groups_TGE = choice_TE.view(len(choice_TE), routed.num_groups, -1)
        best_TG = groups_TGE.topk(routed.best_of_group, dim=-1).values.sum(dim=-1)
        chosen_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(
            1, _best(best_TG, routed.num_active_groups), True
        )
        choice_TE = groups_TGE.masked_fill(~chosen_TG[..., None], -torch.inf).flatten(1)
    chosen = _best(choice_TE, routed.num_active)
    weights = scores_TE.gather(1, chosen)
    if routed.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights = torch.softmax(weights, dim=-1)
    if routed.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return torch.zeros_like(scores_TE).scatter_(1, chosen, weights * routed.scale)


def _best(values: Tensor, count: int) -> Tensor:
    """Places of each row's largest values; of equal ones the first come first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _expert_linear(stacked: Any, expert: int, routed: RoutedSpec, x: Tensor) -> Tensor:
    """The rows of one expert in the matrix of all."""
    size = len(stacked.weight) // routed.num_experts
    rows = slice(expert * size, (expert + 1) * size)
    return linear(x, stacked.weight[rows], None if stacked.bias is None else stacked.bias[rows])


def _maybe(norm: nn.Module | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    normed: Tensor = norm(x)
    return normed


def _qk_norms(spec: DecoderSpec, make: _Maker) -> tuple[RMSNorm | None, RMSNorm | None]:
    if spec.qk_norm is QKNorm.NONE:
        return None, None
    if spec.qk_norm is QKNorm.PER_HEAD:
        return make.norm(spec.head_dim, spec), make.norm(spec.head_dim, spec)
    return make.norm(spec.q_width, spec), make.norm(spec.kv_width, spec)


def _distinct_ropes(spec: DecoderSpec) -> list[RopeSpec]:
    return list(dict.fromkeys(layer.rope for layer in spec.layers if layer.rope is not None))


def load_torch_decoder(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> TorchDecoder:
    """Build the decoder and fill it from `checkpoint`, each tensor read once, in the order of the files.

    Raises CheckpointError naming tensor, shapes and file when something is missing, surplus or of the wrong shape.
    """
    sources: dict[str, list[WeightSource]] = {}
    for source in weight_map(spec, checkpoint.tensor_names()):
        sources.setdefault(source.tensor, []).append(source)
    decoder = TorchDecoder(spec, device=device, dtype=dtype, max_model_len=max_model_len)
    parameters = dict(decoder.named_parameters())
    loaded = 0
    for name in checkpoint.tensor_names():  # in file order
        raw = checkpoint.tensor(name)
        for source in sources.get(name, ()):
            _fill(parameters[source.parameter], source, raw, checkpoint.file_of(name))
        loaded += raw.data.nbytes
        if progress is not None:
            progress(loaded, checkpoint.weight_bytes)
    checkpoint.check_unchanged()
    return decoder


def load_part(decoder: TorchDecoder, name: str, checkpoint: Checkpoint) -> nn.Module:
    """Give the named module of a hollow decoder ("layers.3", "norm") its weights and return it; `.to("meta")` frees
    them. Raises CheckpointError as `load_torch_decoder` does."""
    part = decoder.get_submodule(name).to_empty(device="cpu")
    parameters = dict(part.named_parameters(prefix=name))
    for source in weight_map(decoder.spec, checkpoint.tensor_names()):
        if source.parameter in parameters:
            raw = checkpoint.tensor(source.tensor)
            _fill(parameters[source.parameter], source, raw, checkpoint.file_of(source.tensor))
    return part


def _fill(parameter: Tensor, source: WeightSource, raw: RawTensor, file: Path) -> None:
    check_shape(source, raw.shape, file)
    values = tensor_from_raw(raw, source.tensor)
    for piece in source.pieces():
        target = parameter[piece.row : piece.row + piece.num_rows]
        target.copy_(source.take(values, piece))
        if source.is_log:
            target.exp_().neg_()
        if source.offset:
            target.add_(source.offset)


_TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def tensor_from_raw(raw: RawTensor, name: str) -> Tensor:
    """A view of the file's bytes, not to be written to; GGML's block types in float32."""
    if raw.dtype not in _TORCH_DTYPES:
        from maitred.model.packed import float32_values  # noqa: PLC0415  the native library, for GGML's block types

        return torch.from_numpy(float32_values(raw, name))
    dtype = _TORCH_DTYPES[raw.dtype]
    if raw.data.nbytes == 0:
        return torch.empty(raw.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(raw.data, dtype=dtype).view(raw.shape)
