"""A head beside a frozen model, which drafts its next tokens from what the model computed: EAGLE-3, one layer.

Source: Li et al. 2025, arXiv:2503.01840. The layout on disk is that of the package `speculators` (eagle3), so that what
serves this head serves those that others train. Dimension letters as in `model`; E is the width of all taps.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.batches import Batch
from training.checkpoint import llama_config, write_json
from training.model import Attention, Decoder, DecoderShape, Mlp, RMSNorm, Where, rope_tables, rotate

TAPS = (1, 3, 4)
"""Layers whose output the head reads; 0 is the embedding."""
MLP_WIDTH = 320
NUM_STEPS = 4
"""Tokens ahead that it learns: what it said one step before is what the next step reads."""
STEP_DECAY = 0.8
"""Weight of a step beside the one before it."""
LONG_ROW = 1024
"""Rows from here on learn one token ahead: what further steps take grows with them."""


class HeadAttention(Attention):
    """Reads token and state side by side, so its projections are twice as wide.

    A row sees the first step's keys as a decoder does, and of later steps those of its own position alone: in serving,
    these are the positions after it.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self, name).out_features
            setattr(self, name, nn.Linear(2 * shape.hidden_size, width, bias=False))

    def ahead(self, x_BTE: Tensor, at: Where, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One step more; `steps` has keys and values [B, N, T, H] of those before, and gets this one's."""
        shape = self.shape
        q_BNTH = rotate(self._heads(self.q_proj(x_BTE)), at.cos_TH, at.sin_TH) * shape.head_dim**-0.5
        group = shape.num_heads // shape.num_kv_heads
        k_BKTH = rotate(self._heads(self.k_proj(x_BTE)), at.cos_TH, at.sin_TH)
        v_BKTH = self._heads(self.v_proj(x_BTE))
        steps.append((k_BKTH.repeat_interleave(group, dim=1), v_BKTH.repeat_interleave(group, dim=1)))
        (k_BNTH, v_BNTH), *later = steps
        assert at.mask is not None
        scores = [q_BNTH @ k_BNTH.transpose(-1, -2) + at.mask]
        scores += [(q_BNTH * k).sum(-1, keepdim=True) for k, _ in later]
        weights_BNTS = torch.cat(scores, dim=-1).float().softmax(-1).to(v_BNTH.dtype)
        length = k_BNTH.shape[2]
        out_BNTH = weights_BNTS[..., :length] @ v_BNTH
        for index, (_, v) in enumerate(later):
            out_BNTH = out_BNTH + weights_BNTS[..., length + index, None] * v
        return self.o_proj(out_BNTH.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class HeadLayer(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = Mlp(shape)

    def ahead(self, embedded_BTD: Tensor, x_BTD: Tensor, at: Where, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded_BTD), self.hidden_norm(x_BTD)), dim=-1)
        x_BTD = x_BTD + self.self_attn.ahead(both, at, steps)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))  # type: ignore[no-any-return]


class Head(nn.Module):
    """What the model's taps and the next token give: the token after that. It embeds as the model does."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(TAPS) * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(shape)])  # one, named as the package names it
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def head_shape(model: DecoderShape) -> DecoderShape:
    return DecoderShape(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=1,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate_size=MLP_WIDTH,
        max_positions=model.max_positions,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
    )


def new_head(model: Decoder) -> Head:
    """Its output begins as the model's."""
    head = Head(head_shape(model.shape))
    head.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    return head


@torch.no_grad()
def tapped(model: Decoder, tokens_BT: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The taps [B, T, E], and the model's last hidden states [B, T, D]."""
    states: list[Tensor] = []
    hidden_BTD = model.hidden(tokens_BT, mask=mask, states=states)
    return torch.cat([states[index] for index in TAPS], dim=-1), hidden_BTD


def head_loss(head: Head, model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Distance to what the model says, some tokens ahead; and for the curve how often the first of them is the same."""
    tokens_BT, num_steps = batch.tokens_BT, NUM_STEPS if batch.tokens_BT.shape[1] < LONG_ROW else 1
    with torch.autocast("cpu", torch.bfloat16):
        mask = batch.mask()
        taps_BTE, hidden_BTD = tapped(model, tokens_BT, mask)
        steps, x_BTD = list[tuple[Tensor, Tensor]](), head.fc(taps_BTE)
        loss, first_same = torch.zeros(()), torch.zeros(())
        for step in range(num_steps):
            embedded_BTD = model.model.embed_tokens(_shifted(tokens_BT, step + 1))
            x_BTD = head.layers[0].ahead(embedded_BTD, x_BTD, where(head, step, mask), steps)
            weight_N, kept = _weights(batch, step)
            logits_NV = head.lm_head(head.norm(x_BTD).flatten(0, 1)[kept])
            with torch.no_grad():
                taught_NV = model.logits(_shifted(hidden_BTD, step + 1).flatten(0, 1)[kept]).float()
            divergence_N = F.kl_div(
                logits_NV.float().log_softmax(-1), taught_NV.log_softmax(-1), reduction="none", log_target=True
            ).sum(-1)
            loss = loss + STEP_DECAY**step * (divergence_N * weight_N).sum()
            if step == 0:
                first_same = (logits_NV.argmax(-1) == taught_NV.argmax(-1)).float().mean()
    return loss, first_same


@torch.no_grad()
def survival(head: Head, model: Decoder, batch: Batch, num_steps: int) -> tuple[Tensor, int]:
    """How many drafts of replies were still right at each depth [num_steps], fed back as in serving; of how many."""
    mask = batch.mask()
    taps_BTE, hidden_BTD = tapped(model, batch.tokens_BT, mask)
    steps = list[tuple[Tensor, Tensor]]()
    said_BT = model.logits(hidden_BTD).argmax(-1)  # after each token
    x_BTD, drafted_BT = head.fc(taps_BTE), _shifted(batch.tokens_BT, 1)
    alive_BT = (batch.weight_BT >= 1.0).roll(-num_steps - 1, 1) & (batch.weight_BT >= 1.0).roll(-1, 1)
    alive_BT[:, -num_steps - 1 :] = False
    total, right = int(alive_BT.sum()), []
    for step in range(num_steps):
        x_BTD = head.layers[0].ahead(model.model.embed_tokens(drafted_BT), x_BTD, where(head, step, mask), steps)
        drafted_BT = head.lm_head(head.norm(x_BTD)).argmax(-1)
        alive_BT = alive_BT & (drafted_BT == _shifted(said_BT, step + 1))
        right.append(alive_BT.sum())
    return torch.stack(right), total


def export_head(head: Head, directory: Path) -> None:
    """Weights in bf16 and a config, as `speculators` 0.9 writes and reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in head.state_dict().items()}
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    layer = llama_config(head.shape) | {"tie_word_embeddings": False}
    method = {"proposal_type": "greedy", "speculative_tokens": NUM_STEPS, "verifier_accept_k": 1}
    verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": None}
    write_json(
        directory / "config.json",
        {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": head.shape.vocab_size,
            "dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": list(TAPS),
            "norm_before_fc": False,
            "norm_before_residual": False,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [method],
                "verifier": verifier,
            },
            "speculators_model_type": "eagle3",
            "tie_word_embeddings": False,
            "transformer_layer_config": layer,
        },
    )


def load_head(directory: Path, model: Decoder) -> Head:
    """Read what `export_head` wrote."""
    config = json.loads((directory / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == list(TAPS), config
    head = Head(head_shape(model.shape))
    head.load_state_dict(load_file(str(directory / "model.safetensors")))
    return head.to(next(model.parameters()).dtype).eval()


def where(head: Head, step: int, mask: Tensor) -> Where:
    """Rows stand one position later with each step."""
    cos, sin = rope_tables(head.shape, step + torch.arange(mask.shape[-1]))
    return Where(cos.to(mask.dtype), sin.to(mask.dtype), mask)


def _shifted(values: Tensor, by: int) -> Tensor:
    """What stands `by` positions later [B, T, ...]; the last ones come from the row's begin, for nobody to read."""
    return values.roll(-by, 1)


def _weights(batch: Batch, step: int) -> tuple[Tensor, Tensor]:
    """Weights of rows that draft within their own document, and which these are; both flat."""
    ahead = step + 2  # from the state of a row to the token that it drafts
    weight_BT = _shifted(batch.weight_BT, ahead) * (_shifted(batch.document_BT, ahead) == batch.document_BT)
    weight_BT[:, -ahead:] = 0.0
    kept = (weight_BT > 0).flatten()
    weight_N = weight_BT.flatten()[kept]
    return weight_N / weight_N.sum().clamp(min=1e-6), kept
