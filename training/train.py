"""Train the built-in model; with --draft its small sibling, with --mtp a head, which learn from the model in --teacher.

    python -m training.train --out DIR --minutes 70 --seed 0 --new-tokenizer
    python -m training.train --out DIR --minutes 12 --seed 0 --draft --teacher src/maitred/builtin/maitred-mini
    python -m training.train --out DIR --minutes 15 --seed 0 --mtp --teacher src/maitred/builtin/maitred-mini

Writes DIR/curve.jsonl as it goes, DIR/checkpoint.pt every few minutes (a run started again goes on from there) and,
each time and at the end, a model directory DIR/model that a server can load.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.batches import Batch, Batches
from training.checkpoint import export, load
from training.head import export_head, head_loss, new_head
from training.model import DRAFT, MINI, Decoder
from training.optimizer import lr_factor, make_optimizers, set_lr
from training.tokenizer import train_tokenizer

TOKENIZER = Path(__file__).parent.parent / "src/maitred/builtin/maitred-mini/tokenizer.json"
"""Kept unless a new one is asked for: token ids stay what they are, and words that are new cost more tokens."""
TOKENIZER_SEED = 0
SAVE_EVERY_S = 240.0
LOG_EVERY = 20
"""Steps between two points of the curve, each a mean over these steps."""
DISTIL_SHARE = 0.9
"""Of the draft's loss, the part that is the distance to the teacher; the rest is the data's own."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The shape of a batch: rows, and tokens in each."""

    num_rows: int
    length: int


FIRST_SHARE = 0.3
FIRST_ROWS = Rows(20, 208)
"""In the first share of a run: chats of a few turns, or of one with a call, because attention over them is cheap."""
MIXED_ROWS = (*[Rows(16, 256)] * 7, *[Rows(8, 512)] * 2, Rows(2, 2048))
"""After it, in turn: mostly a few turns, and steadily the whole context, so that it really works."""


@dataclass(slots=True, eq=False)
class Run:
    """A training run in progress. `budget` counts seconds of training, or steps when `by_steps`."""

    model: nn.Module
    tokenizer: Tokenizer
    loss: Callable[[Batch], tuple[Tensor, Tensor]]  # to minimise, and what the curve shows
    export: Callable[[Path], None]  # writes a directory that can be loaded
    out: Path
    seed: int
    budget: float
    by_steps: bool
    optimizers: list[torch.optim.Optimizer]
    shown: str = "reply_loss"
    stop_after: int | None = None
    # written by train()
    step: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    recent: list[Tensor] = field(default_factory=list)

    @property
    def progress(self) -> float:
        return (self.step if self.by_steps else self.elapsed_s) / self.budget


def train(run: Run, clock: Callable[[], float]) -> None:
    """Take steps until the budget is spent, then save."""
    before, saved_at = clock(), clock()
    while run.progress < 1 and run.step != run.stop_after:
        take_step(run)
        now = clock()
        run.elapsed_s += now - before
        before = now
        if run.step % LOG_EVERY == 0:
            log(run)
        if now - saved_at > SAVE_EVERY_S:
            save(run)
            saved_at = now
    if run.recent:
        log(run)
    save(run)


def take_step(run: Run) -> None:
    """One batch, drawn from the seed and the number of the step alone."""
    rows = FIRST_ROWS if run.progress < FIRST_SHARE else MIXED_ROWS[run.step % len(MIXED_ROWS)]
    set_lr(run.optimizers, lr_factor(run.progress))
    batch = Batches(run.tokenizer, Random(run.seed * 1_000_003 + run.step)).draw(rows.num_rows, rows.length)
    loss, shown = run.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    run.step += 1
    run.num_tokens += batch.num_tokens
    run.recent.append(shown.detach())


def batch_loss(model: Decoder, batch: Batch, teacher: Decoder | None) -> tuple[Tensor, Tensor]:
    """The loss to minimise, and for the curve the mean cross-entropy (nats) of the reply tokens."""
    mask = batch.mask()
    weight_N = batch.weight_BT[:, 1:].flatten()
    target_N = batch.tokens_BT[:, 1:].flatten()
    kept = weight_N > 0
    weight_N = weight_N[kept] / weight_N.sum()
    with torch.autocast("cpu", torch.bfloat16):
        hidden_ND = model.hidden(batch.tokens_BT, mask=mask)[:, :-1].flatten(0, 1)[kept]
        logits_NV = model.logits(hidden_ND)
    logits_NV = logits_NV.float()
    entropy_N = F.cross_entropy(logits_NV, target_N[kept], reduction="none")
    is_reply = weight_N > weight_N.max() / 2
    reply_loss = entropy_N[is_reply].mean()
    loss = (entropy_N * weight_N).sum()
    if teacher is not None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            taught_NV = teacher.logits(teacher.hidden(batch.tokens_BT, mask=mask)[:, :-1].flatten(0, 1)[kept])
        divergence_N = F.kl_div(
            logits_NV.log_softmax(-1), taught_NV.float().log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        loss = (1 - DISTIL_SHARE) * loss + DISTIL_SHARE * (divergence_N * weight_N).sum()
    return loss, reply_loss


def log(run: Run) -> None:
    point = {
        "step": run.step,
        "elapsed_s": round(run.elapsed_s, 1),
        "num_tokens": run.num_tokens,
        run.shown: round(torch.stack(run.recent).mean().item(), 5),
        "lr_factor": round(lr_factor(run.progress), 4),
    }
    run.recent.clear()
    with (run.out / "curve.jsonl").open("a") as curve:
        curve.write(json.dumps(point) + "\n")
    print(json.dumps(point), flush=True)


def save(run: Run) -> None:
    state = {
        "model": run.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "step": run.step,
        "num_tokens": run.num_tokens,
        "elapsed_s": run.elapsed_s,
    }
    torch.save(state, run.out / "checkpoint.pt.new")
    (run.out / "checkpoint.pt.new").rename(run.out / "checkpoint.pt")
    run.export(run.out / "model")


def resume(run: Run) -> None:
    """Go on from the last checkpoint, if there is one."""
    path = run.out / "checkpoint.pt"
    if not path.exists():
        return
    state = torch.load(path, weights_only=True)
    run.model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    run.step, run.num_tokens, run.elapsed_s = state["step"], state["num_tokens"], state["elapsed_s"]


def make_run(arguments: argparse.Namespace) -> Run:
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    make = _head_run if arguments.mtp else _model_run
    return make(
        arguments,
        out=arguments.out,
        seed=arguments.seed,
        budget=arguments.steps or arguments.minutes * 60,
        by_steps=arguments.steps is not None,
        stop_after=arguments.stop_after,
    )


def _model_run(arguments: argparse.Namespace, **settings: Any) -> Run:
    model, teacher = Decoder(DRAFT if arguments.draft else MINI), None
    if arguments.teacher is not None:
        teacher, tokenizer = load(arguments.teacher, torch.float32)
    elif arguments.new_tokenizer:
        tokenizer = train_tokenizer(MINI.vocab_size, TOKENIZER_SEED)
    else:
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
    return Run(
        model=model,
        tokenizer=tokenizer,
        loss=lambda batch: batch_loss(model, batch, teacher),
        export=lambda directory: export(model, tokenizer, directory),
        optimizers=make_optimizers(model),
        **settings,
    )


def _head_run(arguments: argparse.Namespace, **settings: Any) -> Run:
    if arguments.teacher is None:
        raise SystemExit("--mtp needs --teacher: the model that the head is for")
    model, tokenizer = load(arguments.teacher, torch.float32)
    model.requires_grad_(False)
    head = new_head(model)
    return Run(
        model=head,
        tokenizer=tokenizer,
        loss=lambda batch: head_loss(head, model, batch),
        export=lambda directory: export_head(head, directory),
        optimizers=make_optimizers(head),
        shown="first_same",
        **settings,
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the run; an unfinished run goes on")
    parser.add_argument("--minutes", type=float, default=65, help="training time, without start and saving")
    parser.add_argument("--steps", type=int, help="number of steps, in place of --minutes")
    parser.add_argument("--stop-after", type=int, help="stop at this step, to go on later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draft", action="store_true", help="train the draft's shape")
    parser.add_argument("--mtp", action="store_true", help="train a head beside the teacher, which stays as it is")
    parser.add_argument(
        "--new-tokenizer",
        action="store_true",
        help="learn a tokenizer of the world as it is now; with --teacher it is the teacher's",
    )
    parser.add_argument("--teacher", type=Path, help="model directory whose predictions and tokenizer to learn from")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    run = make_run(parse_arguments(argv))
    resume(run)
    print(f"{sum(weight.numel() for weight in run.model.parameters()):,} parameters", flush=True)
    train(run, time.monotonic)


if __name__ == "__main__":
    main()
