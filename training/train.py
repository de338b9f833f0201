"""Train the built-in model; with --draft its small sibling, with --mtp a head, which learn from the model in --teacher.

    python -m training.train --out DIR --minutes 70 --seed 0 --new-tokenizer
    python -m training.train --out DIR --minutes 12 --seed 0 --draft --teacher src/maitred/builtin/maitred-mini
    python -m training.train --out DIR --minutes 15 --seed 0 --mtp --teacher src/maitred/builtin/maitred-mini

Every few minutes and at the end it writes DIR/training.safetensors (a run started again goes on from there),
DIR/curve.jsonl, and a model directory DIR/model that a server can load.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor, nn

from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.torch_decoder import load_torch_decoder
from maitred.optimize.draft import Head, head_config, head_loss, save_head
from maitred.optimize.trainer import Budget, Trained, train
from training.batches import Batch, Batches
from training.checkpoint import export, load
from training.model import DRAFT, MINI, Decoder
from training.tokenizer import train_tokenizer

TOKENIZER = Path(__file__).parent.parent / "src/maitred/builtin/maitred-mini/tokenizer.json"
"""Kept unless a new one is asked for: token ids stay what they are, and words that are new cost more tokens."""
TOKENIZER_SEED = 0
SAVE_EVERY_S = 240.0
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
    """What is trained, on what, and where it is written."""

    model: nn.Module
    tokenizer: Tokenizer
    loss: Callable[[Batch], Tensor]  # to minimise, and then what the curve shows
    export: Callable[[Path], None]  # writes a directory that can be loaded
    out: Path
    seed: int
    budget: Budget
    shown: str = "reply_loss"


def train_run(run: Run) -> None:
    """Train until the budget is spent, or go on; writes curve and model each time that the state is kept."""
    printed = [0]

    def on_save(trained: Trained) -> None:
        points = [{run.shown if key == "loss" else key: value for key, value in p.items()} for p in trained.curve]
        lines = [json.dumps(point) for point in points]
        (run.out / "curve.jsonl").write_text("".join(f"{line}\n" for line in lines))
        print("\n".join(lines[printed[0] :]), flush=True)
        printed[0] = len(lines)
        run.export(run.out / "model")

    train(run.model, run.loss, lambda step, share: draw(run, step, share), run.budget, run.out, no_bar, on_save=on_save)


def draw(run: Run, step: int, share: float) -> Batch:
    """One batch, drawn from the seed and the number of the step alone."""
    rows = FIRST_ROWS if share < FIRST_SHARE else MIXED_ROWS[step % len(MIXED_ROWS)]
    return Batches(run.tokenizer, Random(run.seed * 1_000_003 + step)).draw(rows.num_rows, rows.length)


def no_bar(done: float, total: float, words: str) -> None:
    """The curve's points tell how far it is."""


def batch_loss(model: Decoder, batch: Batch, teacher: Decoder | None) -> Tensor:
    """The loss to minimise, and for the curve the mean cross-entropy (nats) of the reply tokens."""
    mask = batch.mask()
    weight_N = batch.weight_BT[:, 1:].flatten()
    target_N = batch.tokens_BT[:, 1:].flatten()
    kept = weight_N > 0
    weight_N = weight_N[kept] / weight_N.sum()
    hidden_ND = model.hidden(batch.tokens_BT, mask=mask)[:, :-1].flatten(0, 1)[kept]
    logits_NV = model.logits(hidden_ND).float()
    entropy_N = F.cross_entropy(logits_NV, target_N[kept], reduction="none")
    is_reply = weight_N > weight_N.max() / 2
    reply_loss = entropy_N[is_reply].mean()
    loss = (entropy_N * weight_N).sum()
    if teacher is not None:
        with torch.no_grad():
            taught_NV = teacher.logits(teacher.hidden(batch.tokens_BT, mask=mask)[:, :-1].flatten(0, 1)[kept])
        divergence_N = F.kl_div(
            logits_NV.log_softmax(-1), taught_NV.float().log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        loss = (1 - DISTIL_SHARE) * loss + DISTIL_SHARE * (divergence_N * weight_N).sum()
    return torch.stack((loss, reply_loss.detach()))


def make_run(arguments: argparse.Namespace) -> Run:
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    make = _head_run if arguments.mtp else _model_run
    return make(
        arguments,
        out=arguments.out,
        seed=arguments.seed,
        budget=Budget(
            steps=arguments.steps,
            minutes=None if arguments.steps else arguments.minutes,
            stop_after=arguments.stop_after,
            save_every_s=SAVE_EVERY_S,
        ),
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
        **settings,
    )


def _head_run(arguments: argparse.Namespace, **settings: Any) -> Run:
    if arguments.teacher is None:
        raise SystemExit("--mtp needs --teacher: the model that the head is for")
    with open_checkpoint(str(arguments.teacher)) as checkpoint:
        model = load_torch_decoder(spec_from_config(checkpoint.config), checkpoint)
    config = head_config(model.spec, model.spec.vocab_size)
    head = Head(model, config, torch.arange(model.spec.vocab_size))
    return Run(
        model=head,
        tokenizer=Tokenizer.from_file(str(arguments.teacher / "tokenizer.json")),
        loss=lambda batch: head_loss(head, model, batch.one_behind_the_other()),
        export=lambda directory: save_head(head, config, directory),
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
    print(f"{sum(weight.numel() for weight in run.model.parameters()):,} parameters", flush=True)
    train_run(run)


if __name__ == "__main__":
    main()
