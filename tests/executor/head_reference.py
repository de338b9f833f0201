"""What a head drafts, in plain numpy and float32: the reference of the native one. One request, no cache, no blocks.

Dimension letters: T rows, D hidden size, E width of all taps, V tokens that can be drafted, N heads, K heads of keys
and values, H values of a head, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maitred.model.head import HeadCheckpoint
from maitred.model.packed import float32_values
from maitred.model.rope import inverse_frequencies
from maitred.model.spec import HeadSpec, QKNorm
from maitred.model.weight_map import head_map

Floats = NDArray[np.float32]


def parameters_of(head: HeadCheckpoint) -> dict[str, Floats]:
    """Parameter (as `HeadSpec` names them) -> values."""
    parts: dict[str, list[tuple[int, Floats]]] = {}
    for source in head_map(head.spec, head.tensor_names()):
        values = float32_values(head.tensor(source.tensor), source.tensor)
        parts.setdefault(source.parameter, []).append((source.row, values))
    return {
        name: np.concatenate([values for _, values in sorted(of, key=lambda p: p[0])]) for name, of in parts.items()
    }


@dataclass
class HeadReference:
    """A head that knows its parameters."""

    spec: HeadSpec
    parameters: dict[str, Floats]
    draft_to_target: NDArray[np.int32] | None = None

    def drafts(self, taps_TE: Floats, next_tokens_T: list[int], num_drafts: int) -> tuple[list[int], list[Floats]]:
        """Greedy drafts after the last row, and the logits [V] of each.

        Row t holds the served model's taps at position t and the token of position t + 1, so the first draft is the
        token of position T + 1. Every further row reads the state of the row before it, and the draft.
        """
        hidden_TD = self._linear("fc", self._normed_taps(taps_TE))
        keys_TKH, values_TKH = np.zeros((2, 0, self.spec.decoder.num_kv_heads, self.spec.decoder.head_dim), np.float32)
        token_ids, drafts, logits = list(next_tokens_T), list[int](), list[Floats]()
        for _ in range(num_drafts):
            hidden_TD, keys_TKH, values_TKH = self._layer(token_ids, hidden_TD, keys_TKH, values_TKH)
            state_D = hidden_TD[-1:]
            normed_D = self._norm("norm", state_D)
            hidden_TD = normed_D if self.spec.norms_state else state_D
            logits.append(self._linear("output", normed_D)[0])
            token_ids = [self._target(int(logits[-1].argmax()))]
            drafts += token_ids
        return drafts, logits

    def _target(self, drafted: int) -> int:
        return drafted if self.draft_to_target is None else int(self.draft_to_target[drafted])

    def _normed_taps(self, taps_TE: Floats) -> Floats:
        if self.spec.norms_taps:
            return self._norm("taps_norm", taps_TE)
        if not self.spec.norms_each_tap:
            return taps_TE
        each = np.split(taps_TE, len(self.spec.taps), axis=-1)
        return np.concatenate([self._norm(f"tap_norms.{i}", tap_TD) for i, tap_TD in enumerate(each)], axis=-1)

    def _layer(
        self, token_ids: list[int], hidden_TD: Floats, keys_TKH: Floats, values_TKH: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """The rows' states, and keys and values with theirs added."""
        embedded_TD = self.parameters["embedding.weight"][token_ids]
        normed_TD = self._norm("layers.0.hidden_norm", hidden_TD)
        both = np.concatenate([self._norm("layers.0.attention_norm", embedded_TD), normed_TD], axis=-1)
        x_TD = normed_TD if self.spec.norms_residual else hidden_TD
        attended_TD, keys_TKH, values_TKH = self._attention(both, keys_TKH, values_TKH)
        x_TD = x_TD + attended_TD
        gate, up = np.split(self._linear("layers.0.gate_up", self._norm("layers.0.mlp_norm", x_TD)), 2, axis=-1)
        return x_TD + self._linear("layers.0.down", gate / (1 + np.exp(-gate)) * up), keys_TKH, values_TKH

    def _attention(self, both: Floats, keys_TKH: Floats, values_TKH: Floats) -> tuple[Floats, Floats, Floats]:
        spec, num_past = self.spec.decoder, len(keys_TKH)
        qkv = self._linear("layers.0.qkv", both)
        q, k, v = np.split(qkv, [spec.q_width, spec.q_width + spec.kv_width], axis=-1)
        q_TNH, k_TKH, v_TKH = (x.reshape(len(both), -1, spec.head_dim) for x in (q, k, v))
        if spec.qk_norm is QKNorm.PER_HEAD:
            q_TNH, k_TKH = self._norm("layers.0.q_norm", q_TNH), self._norm("layers.0.k_norm", k_TKH)
        keys_TKH = np.concatenate([keys_TKH, self._rotated(k_TKH, num_past)])
        values_TKH = np.concatenate([values_TKH, v_TKH])
        group = spec.num_heads // spec.num_kv_heads
        keys_SNH, values_SNH = keys_TKH.repeat(group, axis=1), values_TKH.repeat(group, axis=1)
        scores_NTS = np.einsum("tnh,snh->nts", self._rotated(q_TNH, num_past), keys_SNH) * spec.attention_scale
        is_later = np.arange(len(keys_SNH))[None, :] > num_past + np.arange(len(both))[:, None]
        scores_NTS = np.where(is_later, -np.inf, scores_NTS)
        weights_NTS = np.exp(scores_NTS - scores_NTS.max(-1, keepdims=True))
        weights_NTS /= weights_NTS.sum(-1, keepdims=True)
        out_TNH = np.einsum("nts,snh->tnh", weights_NTS, values_SNH).astype(np.float32)
        return self._linear("layers.0.attention_output", out_TNH.reshape(len(both), -1)), keys_TKH, values_TKH

    def _rotated(self, x_TNH: Floats, first: int) -> Floats:
        rope = self.spec.decoder.layers[0].rope
        assert rope is not None
        frequencies = np.array(inverse_frequencies(rope, self.spec.decoder.max_position_embeddings), np.float32)
        angles_TH = np.outer(np.arange(first, first + len(x_TNH), dtype=np.float32), frequencies)
        cos, sin = (np.float32(rope.attention_factor) * f(angles_TH)[:, None] for f in (np.cos, np.sin))
        low, high = np.split(x_TNH, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def _norm(self, name: str, x: Floats) -> Floats:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.spec.decoder.norm_eps))
        normed: Floats = x / scale * self.parameters[f"{name}.weight"]
        return normed

    def _linear(self, name: str, x: Floats) -> Floats:
        out: Floats = x @ self.parameters[f"{name}.weight"].T
        return out + self.parameters[f"{name}.bias"] if f"{name}.bias" in self.parameters else out
