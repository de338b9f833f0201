"""One loop for all that trains: from a seed, within a budget, and after any end it goes on as if there had been none.

Weights and the optimisers' tensors are kept a minute apart in one safetensors file, with numbers as JSON in its header.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import safe_open
from torch import Tensor, nn

from maitred.core.errors import ConfigError
from maitred.model.torch_decoder import TorchDecoder
from maitred.optimize.calibrate import attend_of, save_whole
from maitred.optimize.data import Document, Progress

B = TypeVar("B")
LOG_EVERY = 20  # steps between two points of the curve, each a mean over these steps
MUON_LR = 4e-3
"""Peak, with updates scaled to the root mean square of AdamW's. Source: Liu et al. 2025, arXiv:2502.16982."""
ADAMW_LR = 3e-3
WARMUP_SHARE = 0.01
DECAY_SHARE = 0.5
MAX_NORM = 1.0
HAS_BF16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
TABLES = ("embedding.weight", "output.weight", "embed_tokens.weight", "lm_head.weight")
"""Parameters with a row for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long is trained, and how boldly."""

    steps: int | None = None
    minutes: float | None = None  # where steps are not given; training alone, without start and saving
    lr_scale: float = 1.0  # multiplies the peaks MUON_LR and ADAMW_LR, which are for weights that begin at random
    use_muon: bool = True  # Muon for hidden matrices; else AdamW for all, as suits adapters
    stop_after: int | None = None  # return at this step, to go on later
    save_every_s: float = 60.0

    @property
    def total(self) -> float:
        return self.steps or self.minutes or 1.0

    def share(self, run: Trained) -> float:
        return (run.step if self.steps else run.elapsed_s / 60) / self.total


@dataclass(slots=True)
class Trained:
    """How far a run has come."""

    step: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)  # losses since the last point of the curve

    def told(self) -> str:
        return f"{self.step} steps, {self.num_tokens:,} tokens, {self.elapsed_s / 60:.1f} minutes"


def train(
    module: nn.Module,
    loss: Callable[[B], Tensor],
    batches: Callable[[int, float], B],
    budget: Budget,
    state: Path,
    progress: Progress,
    *,
    num_tokens: Callable[[B], int] = lambda batch: batch.num_tokens,  # type: ignore[attr-defined]
    on_save: Callable[[Trained], None] = lambda run: None,
) -> Trained:
    """Train those parameters of `module` that require a gradient, or go on from what `state` keeps.

    `batches(step, share of the budget)` draws from a seed and the step alone. `loss(batch)` is a number, or a vector of
    which the first is minimised and the last shown; it is computed under bfloat16 autocast where the processor has it.
    Raises ConfigError where loss or gradient is no number.
    """
    run, optimizers = Trained(), make_optimizers(module, budget)
    file = state / "training.safetensors"
    if file.is_file():
        run = _load(file, module, optimizers)
    before = saved_at = time.monotonic()
    while budget.share(run) < 1 and run.step != budget.stop_after:
        batch = batches(run.step, budget.share(run))
        _set_lr(optimizers, lr_factor(budget.share(run)))
        run.recent.append(_step(module, optimizers, loss, batch, run))
        run.step += 1
        run.num_tokens += num_tokens(batch)
        now = time.monotonic()
        run.elapsed_s, before = run.elapsed_s + now - before, now
        if len(run.recent) == LOG_EVERY or budget.share(run) >= 1:
            _log(run, budget)
        progress(budget.share(run) * budget.total, budget.total, "training")
        if now - saved_at > budget.save_every_s:
            _save(file, module, optimizers, run)
            on_save(run)
            before = saved_at = time.monotonic()
    _save(file, module, optimizers, run)
    on_save(run)
    return run


def _step(
    module: nn.Module, optimizers: Iterable[torch.optim.Optimizer], loss: Callable[[B], Tensor], batch: B, run: Trained
) -> float:
    with autocast():
        values = loss(batch).flatten()
    values[0].backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
    if not (math.isfinite(values[0].item()) and math.isfinite(norm.item())):
        last = run.recent[-1] if run.recent else run.curve[-1]["loss"] if run.curve else math.nan
        raise ConfigError(
            f"training came apart at step {run.step}: loss {values[0].item():.4g}, gradient {norm.item():.4g}, after a "
            f"loss of {last:.4g}; lower the learning rate, or look for damaged weights or documents"
        )
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return values[-1].item()


def _log(run: Trained, budget: Budget) -> None:
    point = {"step": run.step, "elapsed_s": round(run.elapsed_s, 1), "num_tokens": run.num_tokens}
    mean = round(sum(run.recent) / len(run.recent), 5)
    run.curve.append({**point, "loss": mean, "lr_factor": round(lr_factor(budget.share(run)), 4)})
    run.recent.clear()


def autocast() -> torch.autocast:
    """bfloat16 for matrix products where the processor multiplies it."""
    return torch.autocast("cpu", torch.bfloat16, enabled=HAS_BF16)


# ---- optimisers and their schedule


def make_optimizers(module: nn.Module, budget: Budget) -> list[torch.optim.Optimizer]:
    """[Muon, AdamW] or [AdamW]. Source of Muon: Jordan et al. 2024, kellerjordan.github.io/posts/muon."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    hidden = [p for name, p in trained.items() if budget.use_muon and p.ndim == 2 and not name.endswith(TABLES)]
    others = [p for p in trained.values() if not any(p is each for each in hidden)]
    found: list[torch.optim.Optimizer] = []
    if hidden:
        lr = MUON_LR * budget.lr_scale
        found += [torch.optim.Muon(hidden, lr=lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw")]
    if others:
        found += [torch.optim.AdamW(others, lr=ADAMW_LR * budget.lr_scale, betas=(0.9, 0.98), weight_decay=0.0)]
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return found


def lr_factor(share: float) -> float:
    """Warm up, stay, then fall as 1 - sqrt, to 1% (WSD). Source: Haegele et al. 2024, arXiv:2405.18392."""
    if share < WARMUP_SHARE:
        return max(share / WARMUP_SHARE, 0.02)
    if share < 1 - DECAY_SHARE:
        return 1.0
    fallen = min((share - 1 + DECAY_SHARE) / DECAY_SHARE, 1.0)
    return max(1 - math.sqrt(fallen), 0.01)


def _set_lr(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


# ---- what is kept


def _save(file: Path, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], run: Trained) -> None:
    tensors = {f"weight.{name}": p.detach() for name, p in module.named_parameters() if p.requires_grad}
    for number, optimizer in enumerate(optimizers):
        for index, kept in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{index}.{name}": torch.as_tensor(value) for name, value in kept.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_whole(tensors, file, {"run": json.dumps(asdict(run))})


def _load(file: Path, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Trained:
    parameters = dict(module.named_parameters())
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    with safe_open(file, "pt") as opened, torch.no_grad():
        for key in opened.keys():  # noqa: SIM118  no mapping
            kind, _, rest = key.partition(".")
            if kind == "weight":
                parameters[rest].copy_(opened.get_tensor(key))
            else:
                number, index, name = rest.split(".")
                states[int(number)].setdefault(int(index), {})[name] = opened.get_tensor(key)
        run = Trained(**json.loads(opened.metadata()["run"]))
    for optimizer, kept in zip(optimizers, states, strict=True):
        groups: Any = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": kept, "param_groups": groups})
    return run


# ---- batches of documents for TorchDecoder


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """Whole documents, one behind the other."""

    ids_T: Tensor  # noqa: N815
    learnt_T: Tensor  # noqa: N815
    """bool, or weights of heads' batches; never the first token of a document"""
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)

    @property
    def positions_T(self) -> Tensor:  # noqa: N802
        """Of each token in its document."""
        return torch.cat([torch.arange(length) for length in self.lengths])


def batch_of(documents: Sequence[Document]) -> TokenBatch:
    ids = np.concatenate([each.ids for each in documents])
    learnt = np.concatenate([each.learnt for each in documents])
    return TokenBatch(
        torch.from_numpy(ids).long(), torch.from_numpy(learnt), tuple(len(each.ids) for each in documents)
    )


def batches_of(documents: Sequence[Document], *, seed: int, num_tokens: int) -> Callable[[int, float], TokenBatch]:
    """Batches of about `num_tokens` tokens; every epoch has the same ones in an order of its own."""
    order = list(documents)
    Random(seed).shuffle(order)
    groups: list[list[Document]] = []
    room = 0
    for each in order:
        if not groups or len(each.ids) > room:
            groups.append([])
            room = num_tokens
        groups[-1].append(each)
        room -= len(each.ids)

    def draw(step: int, share: float) -> TokenBatch:
        epoch, place = divmod(step, len(groups))
        return batch_of(groups[Random(f"{seed} {epoch}").sample(range(len(groups)), len(groups))[place]])

    return draw


def learnt_logits(decoder: TorchDecoder, batch: TokenBatch) -> Tensor:
    """Logits [N, V] before each token that is learnt."""
    hidden_TD = decoder(batch.ids_T, batch.positions_T, attend_of(decoder.spec, batch.lengths))
    return decoder.logits(hidden_TD[:-1][batch.learnt_T[1:]])


def reading(decoder: TorchDecoder) -> Callable[[TokenBatch], Tensor]:
    """Loss of a decoder that learns its documents."""
    return lambda batch: hard_loss(learnt_logits(decoder, batch), batch)


def imitation(student: TorchDecoder, teacher: TorchDecoder) -> Callable[[TokenBatch], Tensor]:
    """Loss of a student that learns its teacher's distributions."""

    def loss(batch: TokenBatch) -> Tensor:
        with torch.no_grad():
            taught_NV = learnt_logits(teacher, batch)
        return soft_loss(learnt_logits(student, batch), taught_NV)

    return loss


def hard_loss(logits_NV: Tensor, batch: TokenBatch) -> Tensor:
    """Mean cross-entropy (nats) of the tokens that are learnt."""
    return F.cross_entropy(logits_NV, batch.ids_T[batch.learnt_T])


def soft_loss(logits_NV: Tensor, taught_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean KL(teacher || student), at a temperature as Hinton et al. 2015 (arXiv:1503.02531) scale it."""
    ours, theirs = ((x.float() / temperature).log_softmax(-1) for x in (logits_NV, taught_NV))
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2
