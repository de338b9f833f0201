"""Drafts for speculative decoding: a small model, or a head that reads what the served model computes.

A head is EAGLE-3's: one layer, trained on what it said a step before as in serving (Li et al. 2025, arXiv:2503.01840),
in a folder as the package `speculators` lays it out. T tokens of whole documents, E values of all taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from torch import Tensor, nn

from maitred.config.optimize import DistillConfig
from maitred.model.families import spec_from_config
from maitred.model.head import LAYER_IDS, head_spec
from maitred.model.spec import DecoderSpec
from maitred.model.torch_decoder import Attend, RMSNorm, TorchDecoder, load_torch_decoder
from maitred.model.weight_map import head_sources
from maitred.optimize import distill
from maitred.optimize.calibrate import attend_of
from maitred.optimize.data import Document, own_documents, parted
from maitred.optimize.evaluate import Evaluation
from maitred.optimize.job import Job, Tool, measured
from maitred.optimize.trainer import HAS_BF16, Budget, TokenBatch, batches_of, train
from maitred.optimize.write import write_json

MINUTES = 10.0
DRAFT_VOCAB = 32_000  # most tokens that a head drafts
BATCH_TOKENS, BATCH_LOGITS = 1024, 2**24
NUM_STEPS = 4  # tokens ahead that a head learns: what it said one step before is what the next step reads
STEP_DECAY = 0.8  # weight of a step beside the one before it
LONG_DOCUMENT = 1024  # documents of so many tokens learn one token ahead: what further steps take grows with them
MLP_SHARE = 2  # the model's MLP is so many times as wide as its head's


def make(job: Job) -> None:
    mixed = _with_replay(job)
    if job.own.kind == "draft":
        distill.make(replace(mixed, own=DistillConfig(student=job.own.student)))
    else:
        _make_head(mixed)


def measure(job: Job) -> Evaluation:
    """Acceptance on the held-out documents, and on general text as well where some was replayed."""
    asked: dict[str, Any] = {"draft": str(job.folder), "against": None, "tasks": ()}
    found = measured(job, **asked)
    if job.own.replay_share and not job.corpus.is_own:
        general = measured(job, documents=_general(job)[1], gain=False, **asked).figures["acceptance"]
        found = replace(found, figures={**found.figures, "acceptance, general": general})
    return found


TOOL = Tool("train-draft", make, measure)


def _general(job: Job) -> tuple[list[Document], list[Document]]:
    """What the parent writes: learnt, and held out."""
    own = own_documents(job.parent, job.state / "own.jsonl", seed=job.config.seed, progress=job.progress)
    return parted(own, "the parent's own documents")


def _with_replay(job: Job) -> Job:
    """The job, whose learnt documents are general text to the share that is asked for, repeated or cut."""
    share = job.own.replay_share
    if not share or job.corpus.is_own:
        return job
    general, learn = _general(job)[0], job.corpus.learn
    own, asked = (sum(int(each.learnt.sum()) for each in of) for of in (general, learn))
    count = round(len(general) * share / (1 - share) * asked / own)
    job.notes["replayed_documents"] = count
    replayed = [general[number % len(general)] for number in range(count)]
    return replace(job, corpus=replace(job.corpus, learn=(*learn, *replayed)))


# ---- a head


def _make_head(job: Job) -> None:
    spec, documents = spec_from_config(job.parent.config), job.corpus.learn
    drafted = _frequent(documents, spec.vocab_size, DRAFT_VOCAB)
    config = head_config(spec, len(drafted))
    num_batch = min(BATCH_TOKENS, BATCH_LOGITS // len(drafted))
    num_head = head_spec(config, spec.num_layers).decoder.num_parameters() + 3 * spec.hidden_size**2
    num_bytes = 4 * spec.num_parameters() + 20 * num_head + 16 * NUM_STEPS * num_batch * len(drafted)
    job.need_memory(num_bytes, "the model, its head with gradients, and their logits")
    torch.manual_seed(job.config.seed)
    model = load_torch_decoder(spec, job.parent, dtype=torch.bfloat16 if HAS_BF16 else torch.float32)
    head = Head(model, config, drafted)
    budget = Budget(steps=job.config.steps, minutes=job.config.minutes or MINUTES)
    draw = batches_of(documents, seed=job.config.seed, num_tokens=num_batch)
    run = train(head, lambda batch: head_loss(head, model, batch), draw, budget, job.state, job.progress)
    save_head(head, config, job.folder)
    job.notes |= {"steps": run.step, "tokens": run.num_tokens, "minutes": round(run.elapsed_s / 60, 2)}
    job.notes |= {"drafted_tokens": len(drafted), "curve": run.curve}


def _frequent(documents: Sequence[Document], vocab_size: int, most: int) -> Tensor:
    """Ids of the tokens that a head drafts, in order."""
    if vocab_size <= most:
        return torch.arange(vocab_size)
    counts = sum(np.bincount(each.ids[each.learnt], minlength=vocab_size) for each in documents)
    return torch.from_numpy(np.sort(np.argsort(-np.asarray(counts), kind="stable")[:most]))


def head_config(model: DecoderSpec, num_drafted: int) -> dict[str, Any]:
    """config.json of a head for this model, as `speculators` 0.9 writes and reads it."""
    size, rope = model.num_layers, next((layer.rope for layer in reversed(model.layers) if layer.rope), None)
    taps = (2, size // 2, size - 3) if size > 7 else sorted({min(1, size - 1), (size + 1) // 2, size - 1})
    layer = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "head_dim": model.head_dim,
        "hidden_size": model.hidden_size,
        "intermediate_size": -(-model.intermediate_size // MLP_SHARE),
        "max_position_embeddings": model.max_position_embeddings,
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": model.num_kv_heads,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_theta": rope.theta if rope is not None else 1e4, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": model.vocab_size,
    }
    method = {"proposal_type": "greedy", "speculative_tokens": NUM_STEPS, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": num_drafted,
        "dtype": "bfloat16",
        LAYER_IDS: list(taps),
        "norm_before_fc": False,
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": [model.architecture], "name_or_path": None},
        },
        "speculators_model_type": "eagle3",
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }


class Head(TorchDecoder):
    """What the model's taps and the next token give: the token after that. It embeds as the model does, and its output
    begins as the model's; parameters are named as `HeadSpec` says.
    """

    def __init__(self, model: TorchDecoder, config: dict[str, Any], drafted: Tensor) -> None:
        """`drafted` are the ids that it can draft, in order."""
        self.head_spec = head_spec(config, model.spec.num_layers)
        super().__init__(self.head_spec.decoder)
        del self.embedding
        self.drafted = nn.Buffer(drafted, persistent=False)
        width, layer = self.spec.hidden_size, self._layer
        self.fc = nn.Linear(self.head_spec.tap_width, width, bias=False)
        layer.qkv = nn.Linear(2 * width, layer.qkv.out_features, bias=False)
        layer.hidden_norm = RMSNorm(width, self.spec.norm_eps, "cpu")
        self.requires_grad_(True)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02) if weight.ndim == 2 else nn.init.ones_(weight)
        assert self.output is not None
        self.output.weight.data.copy_((model.output or model.embedding).weight[drafted])

    @property
    def _layer(self) -> Any:
        return self.layers[0]

    def ahead(self, embedded_TD: Tensor, x_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """The next state, of token and state."""
        layer, rotations = self._layer, {rope.spec: rope(positions_T) for rope in self.ropes}
        both = torch.cat((layer.attention_norm(embedded_TD), layer.hidden_norm(x_TD)), dim=-1)
        x_TD = x_TD + layer.attention(both, rotations, attend)
        next_TD: Tensor = x_TD + layer.mlp(layer.mlp_norm(x_TD))
        return next_TD


class StepsAhead:
    """Attention of a head over whole documents, step after step: a token sees the first step's keys as a decoder does,
    and of later steps those of its own position alone, which in serving are the positions after it.
    """

    def __init__(self, spec: DecoderSpec, lengths: Sequence[int]) -> None:
        self._spec, self._lengths, self._steps = spec, list(lengths), list[tuple[Tensor, Tensor]]()

    def __call__(self, index: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        groups = self._spec.num_heads // self._spec.num_kv_heads
        self._steps.append((k_TKH.repeat_interleave(groups, 1), v_TKH.repeat_interleave(groups, 1)))
        steps = [
            torch.split(x_TNH, self._lengths) for x_TNH in (q_TNH * self._spec.attention_scale, *chain(*self._steps))
        ]
        return torch.cat([self._attend(q, k, v, *later) for q, k, v, *later in zip(*steps, strict=True)])

    @staticmethod
    def _attend(q_LNH: Tensor, k_LNH: Tensor, v_LNH: Tensor, *later: Tensor) -> Tensor:
        """One document; `later` are keys and values of later steps in turn."""
        length = len(q_LNH)
        hidden_LL = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores_LNL = torch.einsum("lnh,mnh->lnm", q_LNH, k_LNH).masked_fill(hidden_LL[:, None], float("-inf"))
        own = [(q_LNH * k).sum(-1, keepdim=True) for k in later[::2]]
        weights = torch.cat((scores_LNL, *own), dim=-1).float().softmax(-1).to(v_LNH.dtype)
        out = torch.einsum("lnm,mnh->lnh", weights[..., :length], v_LNH)
        return sum((weights[..., length + i, None] * v for i, v in enumerate(later[1::2])), out)


def drafting(batch: TokenBatch, step: int) -> tuple[Tensor, Tensor]:
    """Weights [N] of the tokens that draft within their own document, and which these are, [T]."""
    ahead = step + 2  # from the state of a token to the token that it drafts
    document_T = torch.arange(len(batch.lengths)).repeat_interleave(torch.tensor(batch.lengths))
    weight_T = _shifted(batch.learnt_T.float(), ahead) * (_shifted(document_T, ahead) == document_T)
    weight_T[-ahead:] = 0.0
    kept_T = weight_T > 0
    return weight_T[kept_T] / weight_T.sum().clamp(min=1e-6), kept_T


@torch.no_grad()
def tapped(model: TorchDecoder, batch: TokenBatch, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The taps [T, E], and the model's last hidden states [T, D]."""
    states: list[Tensor] = []
    hidden_TD = model(batch.ids_T, batch.positions_T, attend_of(model.spec, batch.lengths), states)
    return torch.cat([states[tap] for tap in taps], dim=-1), hidden_TD


def head_loss(head: Head, model: TorchDecoder, batch: TokenBatch) -> Tensor:
    """Distance to what the model says, some tokens ahead; and for the curve how often the first of them is the same."""
    num_steps = NUM_STEPS if max(batch.lengths) < LONG_DOCUMENT else 1
    taps_TE, hidden_TD = tapped(model, batch, head.head_spec.taps)
    attend = StepsAhead(head.spec, batch.lengths) if num_steps > 1 else attend_of(head.spec, batch.lengths)
    x_TD, loss, first_same = head.fc(taps_TE), torch.zeros(()), torch.zeros(())
    for step in range(num_steps):
        embedded_TD = model.embedding.weight[_shifted(batch.ids_T, step + 1)]
        x_TD = head.ahead(embedded_TD, x_TD, batch.positions_T + step, attend)
        weight_N, kept_T = drafting(batch, step)
        logits_NV = head.logits(head.norm(x_TD[kept_T]))
        with torch.no_grad():
            taught_NV = model.logits(_shifted(hidden_TD, step + 1)[kept_T])[:, head.drafted]
        log_taught_NV = taught_NV.log_softmax(-1)
        divergence_N = F.kl_div(logits_NV.log_softmax(-1), log_taught_NV, reduction="none", log_target=True).sum(-1)
        loss = loss + STEP_DECAY**step * (divergence_N * weight_N).sum()
        if step == 0:
            first_same = (logits_NV.argmax(-1) == taught_NV.argmax(-1)).sum() / max(1, len(weight_N))
    return torch.stack((loss, first_same))


def save_head(head: Head, config: dict[str, Any], folder: Path) -> None:
    """Weights in bfloat16 and config.json; the embedding is the model's."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters, weights = dict(head.named_parameters()), dict[str, Tensor]()
    for source in head_sources(head.head_spec):
        if source.parameter in parameters:
            rows = parameters[source.parameter].detach()[source.row : source.row + source.shape[0]]
            weights[source.tensor] = rows.to(torch.bfloat16).contiguous()
    num_drafted, num_tokens = len(head.drafted), head.head_spec.num_embeddings
    if num_drafted < num_tokens:
        marked = torch.zeros(num_tokens, dtype=torch.bool).index_fill_(0, head.drafted, value=True)
        weights |= {"d2t": head.drafted - torch.arange(num_drafted), "t2d": marked}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_json(folder / "config.json", config)


def _shifted(values: Tensor, by: int) -> Tensor:
    """What stands `by` tokens later [T, ...]; the last ones come from the begin, and are not read."""
    return values.roll(-by, 0)
