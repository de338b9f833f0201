"""Muon for the hidden matrices, AdamW for the rest, one learning-rate schedule for both."""

from __future__ import annotations

import math

import torch
from torch import nn

MUON_LR = 4e-3
"""Peak, with updates scaled to the root mean square of AdamW's. Source: Liu et al. 2025, arXiv:2502.16982."""
ADAMW_LR = 3e-3
WARMUP_SHARE = 0.01
DECAY_SHARE = 0.5


def make_optimizers(model: nn.Module, lr_scale: float = 1.0) -> list[torch.optim.Optimizer]:
    """[Muon, AdamW]. Source of Muon: Jordan et al. 2024, kellerjordan.github.io/posts/muon."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and not _is_table(name)]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or _is_table(name)]
    muon = torch.optim.Muon(
        hidden, lr=MUON_LR * lr_scale, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=ADAMW_LR * lr_scale, betas=(0.9, 0.98), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adamw]


def _is_table(name: str) -> bool:
    """A row a token."""
    return "embed" in name or "lm_head" in name


def lr_factor(progress: float) -> float:
    """Warm up, stay, then fall as 1 - sqrt, to 1% (WSD). Source: Haegele et al. 2024, arXiv:2405.18392."""
    if progress < WARMUP_SHARE:
        return max(progress / WARMUP_SHARE, 0.02)
    if progress < 1 - DECAY_SHARE:
        return 1.0
    fallen = min((progress - 1 + DECAY_SHARE) / DECAY_SHARE, 1.0)
    return max(1 - math.sqrt(fallen), 0.01)


def set_lr(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
