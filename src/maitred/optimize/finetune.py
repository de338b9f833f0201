"""Fine-tuning on documents: adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) in PEFT's files, or all weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from maitred.model.adapters import CONFIG_NAME, WEIGHTS_NAME
from maitred.model.checkpoint import Checkpoint
from maitred.model.families import spec_from_config
from maitred.model.torch_decoder import TorchDecoder, load_torch_decoder
from maitred.model.weight_map import WeightSource, decoder_sources, linear_sources
from maitred.optimize.job import Job, Tool
from maitred.optimize.trainer import ADAMW_LR, Budget, batches_of, reading, train
from maitred.optimize.write import save_decoder, write_json

BATCH_TOKENS = 2048
PASSES = 3  # over the data, where neither steps nor minutes are given
LORA_LR, FULL_LR = 1e-3, 1e-4
LORA_SCALE = 2.0  # alpha / rank
_TOKEN_BYTES = 100
"""Of a training step for each token, layer and hidden value: what a step of the built-in model adds to its process."""


class LoraLinear(nn.Linear):
    """A stacked linear with an adapter for each of its parts: y += scale * B (A x) in the part's rows.

    Weight and bias are those of `base`, frozen.
    """

    def __init__(
        self, base: nn.Linear, parts: Sequence[WeightSource], rank: int, scale: float, a: torch.Generator
    ) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.parts, self.scale = tuple(parts), scale
        self.lora_a, self.lora_b = nn.ParameterList(), nn.ParameterList()
        for part in parts:
            drawn_RK = torch.empty(rank, base.in_features).uniform_(-1, 1, generator=a) / math.sqrt(base.in_features)
            self.lora_a.append(drawn_RK)  # as PEFT's: Kaiming's, with a of sqrt(5)
            self.lora_b.append(torch.zeros(part.shape[0], rank))

    def forward(self, x: Tensor) -> Tensor:
        both = zip(self.lora_a, self.lora_b, strict=True)
        added = [linear(linear(x, a_RK), b_NR * self.scale) for a_RK, b_NR in both]  # parts fill the rows, in order
        out = linear(x, self.weight, self.bias)
        return out + torch.cat(added, dim=-1).to(out.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapters to the weight."""
        for part, a_RK, b_NR in zip(self.parts, self.lora_a, self.lora_b, strict=True):
            self.weight[part.row : part.row + part.shape[0]] += self.scale * b_NR @ a_RK


def attach_lora(decoder: TorchDecoder, rank: int, seed: int) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Give all dense linears of `decoder` adapters; A is drawn from the seed, B is zero. Returns (A, B) by linear, as
    layers.0.self_attn.q_proj."""
    by_parameter: dict[str, list[tuple[str, WeightSource]]] = {}
    for name, source in linear_sources(decoder.spec).items():
        by_parameter.setdefault(source.parameter.removesuffix(".weight"), []).append((name, source))
    generator, found = torch.Generator().manual_seed(seed), {}
    for path, parts in by_parameter.items():
        base = decoder.get_submodule(path)
        assert isinstance(base, nn.Linear)
        sources = sorted((source for _, source in parts), key=lambda source: source.row)
        made = LoraLinear(base, sources, rank, LORA_SCALE, generator)
        decoder.set_submodule(path, made)
        names = {source: name for name, source in parts}
        for part, a, b in zip(made.parts, made.lora_a, made.lora_b, strict=True):
            found[names[part]] = (a, b)
    return found


def save_adapter(matrices: Mapping[str, tuple[Tensor, Tensor]], parent: Checkpoint, folder: Path, rank: int) -> None:
    """Write (A, B) by linear as PEFT saves an adapter of `parent`."""
    spec, names = spec_from_config(parent.config), parent.tensor_names()
    prefix = next(source.tensor for source in decoder_sources(spec, names)).removesuffix("embed_tokens.weight")
    tensors = {
        f"base_model.model.{prefix}{linear}.lora_{side}.weight": matrix.detach().float().contiguous()
        for linear, pair in matrices.items()
        for side, matrix in zip("AB", pair, strict=True)
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(parent.path),
        "r": rank,
        "lora_alpha": LORA_SCALE * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in matrices}),
        "bias": "none",
        "inference_mode": True,
    }
    write_json(folder / CONFIG_NAME, config)


def _make(job: Job) -> None:
    own, config, documents = job.own, job.config, job.corpus.learn
    spec = spec_from_config(job.parent.config)
    kept = BATCH_TOKENS * spec.num_layers * spec.hidden_size * _TOKEN_BYTES
    job.need_memory((16 if own.full else 4) * spec.num_parameters() + kept, "training in float32")
    decoder = load_torch_decoder(spec, job.parent)
    matrices = {} if own.full else attach_lora(decoder, own.lora_rank, config.seed)
    if own.full:
        decoder.requires_grad_(True)
    num_trained = sum(p.numel() for p in decoder.parameters() if p.requires_grad)
    lr = own.learning_rate or (FULL_LR if own.full else LORA_LR)
    steps = config.steps
    if steps is None and config.minutes is None:
        steps = math.ceil(PASSES * sum(len(each.ids) for each in documents) / BATCH_TOKENS)
    budget = Budget(steps=steps, minutes=config.minutes, lr_scale=lr / ADAMW_LR, use_muon=False)
    batches = batches_of(documents, seed=config.seed, num_tokens=BATCH_TOKENS)
    run = train(decoder, reading(decoder), batches, budget, job.state, job.progress)
    job.notes |= {
        "method": "full" if own.full else f"lora of rank {own.lora_rank}" + (", merged" if own.merge else ""),
        "trained_parameters": num_trained,
        "share_of_parameters": round(num_trained / spec.num_parameters(), 5),
        "learning_rate": lr,
        "steps": run.step,
        "curve": run.curve,
    }
    if own.full or own.merge:
        for module in decoder.modules():
            if isinstance(module, LoraLinear):
                module.merge()
        save_decoder(decoder, job.parent, job.folder)
        return
    save_adapter(matrices, job.parent, job.folder, own.lora_rank)
    job.served |= {"lora": {"adapter": str(job.folder)}, "max_lora_rank": own.lora_rank}


TOOL = Tool("finetune", _make)
