"""Distillation: a smaller model learns the distributions of a larger one, starting from a cut of its weights.

Soft labels: Hinton et al. 2015, arXiv:1503.02531. Own samples: Agarwal et al. 2024, arXiv:2306.13649. The residual
stream is cut as in SliceGPT (Ashkboos et al. 2024, arXiv:2401.15024).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from maitred.core.errors import ConfigError
from maitred.model.checkpoint import Checkpoint, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.spec import DecoderSpec, NormPlacement
from maitred.model.torch_decoder import RMSNorm, TorchDecoder, load_torch_decoder
from maitred.optimize.calibrate import attend_of
from maitred.optimize.data import Document, own_documents
from maitred.optimize.evaluate import Evaluation, evaluate
from maitred.optimize.job import Job, Tool, measured
from maitred.optimize.prune import largest, left_of_linears
from maitred.optimize.trainer import (
    HAS_BF16,
    Budget,
    TokenBatch,
    Trained,
    batch_of,
    batches_of,
    hard_loss,
    learnt_logits,
    soft_loss,
    train,
)
from maitred.optimize.write import child_config, layer_changes, save_decoder
from maitred.text.folder import vocabulary_difference

MINUTES = 10.0
SWEPT = ("1/2", "1/4", "1/9")
DEPTH_POWER = 0.16  # of the share: a student of 1/4 has 0.8 of its teacher's layers; the rest is taken off their widths
UNIT = 16
BATCH_TOKENS, BATCH_LOGITS = 2048, 2**26
OWN_EVERY, OWN_DOCUMENTS = 200, 64
"""Steps between two times that the student writes, and how much it writes each time."""
SEEN_DOCUMENTS = 64


class Student(NamedTuple):
    """A model to train: its config beside that of `parent`, and weights to start from."""

    parent: Checkpoint
    changes: dict[str, Any]
    decoder: TorchDecoder


def make(job: Job) -> None:
    spec = spec_from_config(job.parent.config)
    logits_bytes = 16 * _batch_tokens(spec) * spec.vocab_size
    job.need_memory(24 * spec.num_parameters() + logits_bytes, "the teacher, the student's gradients and their logits")
    teacher = load_torch_decoder(spec, job.parent, dtype=torch.bfloat16 if HAS_BF16 else torch.float32)
    budget = Budget(steps=job.config.steps, minutes=job.config.minutes or MINUTES, lr_scale=job.own.lr_scale)
    hard = job.own.hard_share
    run, size = _distilled(job, teacher, job.own.student, hard, budget, job.state, job.folder)
    job.notes |= {"parameters": size, "share": round(size / spec.num_parameters(), 4), "steps": run.step}
    job.notes |= {"tokens": run.num_tokens, "minutes": round(run.elapsed_s / 60, 2), "curve": run.curve}
    if job.own.sweep:
        equal = replace(budget, steps=run.step)
        asked = [("hard labels alone", job.own.student, 1.0), *((share, share, hard) for share in SWEPT)]
        job.notes["sweep"] = {"itself": _scored(job, job.folder, size)}
        for name, student, share in asked:
            if (student, share) != (job.own.student, hard):
                state = job.state / f"sweep {name.replace('/', ' of ')}"
                _, size = _distilled(job, teacher, student, share, equal, state, state / "model")
                job.notes["sweep"][name] = _scored(job, state / "model", size)


def measure(job: Job) -> Evaluation:
    """And by category how far the student is behind its teacher, or before it."""
    found = measured(job)
    job.notes["capacity_gap"] = {category: round(scores["drop"].value, 4) for category, scores in found.tasks.items()}
    job.notes["better_than_teacher"] = [category for category, scores in found.tasks.items() if scores["drop"].high < 0]
    return found


TOOL = Tool("distill", make, measure)


def _distilled(
    job: Job, teacher: TorchDecoder, asked: str, hard_share: float, budget: Budget, state: Path, folder: Path
) -> tuple[Trained, int]:
    """Train the student that is asked for, and write it to `folder`. Returns its number of parameters too."""
    with _student(job, teacher, asked) as student:
        decoder, seed, num_tokens = student.decoder.requires_grad_(True), job.config.seed, _batch_tokens(teacher.spec)
        given = batches_of(job.corpus.learn, seed=seed, num_tokens=num_tokens)

        @lru_cache(maxsize=1)
        def own(number: int) -> Callable[[int, float], TokenBatch]:
            """Batches that the student as it is now wrote; the file is kept, so that an ended run has the same."""
            file = state / f"own-{number}.jsonl"
            if not file.is_file():
                save_decoder(decoder, student.parent, state / "writer", student.changes)
            with open_checkpoint(str(state / "writer")) as writer:
                count, of = OWN_DOCUMENTS, seed * OWN_EVERY + number
                written = own_documents(writer, file, seed=of, progress=job.progress, count=count)
            return batches_of(written, seed=of, num_tokens=num_tokens)

        def batches(step: int, share: float) -> tuple[TokenBatch, float]:
            if hard_share < 1 and Random(f"{seed} own {step}").random() < job.own.own_share:
                return own(step // OWN_EVERY)(step, share), 0.0
            return given(step, share), hard_share

        def loss(drawn: tuple[TokenBatch, float]) -> Tensor:
            batch, hard = drawn
            ours_NV = learnt_logits(decoder, batch)
            told = hard * hard_loss(ours_NV, batch) if hard else torch.zeros(())
            if hard == 1:
                return told
            with torch.no_grad():
                taught_NV = learnt_logits(teacher, batch)
            return told + (1 - hard) * soft_loss(ours_NV, taught_NV, job.own.temperature)

        run = train(decoder, loss, batches, budget, state, job.progress, num_tokens=lambda drawn: drawn[0].num_tokens)
        save_decoder(decoder, student.parent, folder, student.changes)
    return run, decoder.spec.num_parameters()


def _batch_tokens(spec: DecoderSpec) -> int:
    return min(BATCH_TOKENS, BATCH_LOGITS // spec.vocab_size)


def _scored(job: Job, folder: Path, size: int) -> dict[str, Any]:
    found = evaluate(str(folder), documents=job.corpus.held_out, tasks=job.corpus.tasks, progress=job.progress)
    figures = {name: round(figure.value, 4) for name, figure in found.figures.items()}
    return {"parameters": size, **figures, "tasks": {c: round(s["score"].value, 4) for c, s in found.tasks.items()}}


# ---- the student


@contextmanager
def _student(job: Job, teacher: TorchDecoder, asked: str) -> Iterator[Student]:
    """A cut of the teacher of these sizes, or the model that `asked` names. Raises ConfigError for unlike tokens."""
    if not re.fullmatch(r"\d+(/\d*)?|[^/]*=.*", asked):
        with open_checkpoint(asked) as parent:
            difference = vocabulary_difference(parent.tokenizer_file(), job.parent.tokenizer_file())
            spec = spec_from_config(parent.config)
            if difference is not None or spec.vocab_size != teacher.spec.vocab_size:
                told = difference or f"{spec.vocab_size} tokens are not {teacher.spec.vocab_size}"
                raise ConfigError(f"{asked} cannot learn from {job.parent.name}, {told}; give a student of its tokens")
            yield Student(parent, {}, load_torch_decoder(spec, parent))
        return
    changes = sizes(job.parent, asked)
    child = spec_from_config(child_config(job.parent, changes))
    kept = np.linspace(0, teacher.spec.num_layers - 1, child.num_layers).round().astype(int).tolist()
    changes |= layer_changes(job.parent, kept)
    decoder = TorchDecoder(spec_from_config(child_config(job.parent, changes)))
    cut(teacher, decoder, kept, job.corpus.learn[:SEEN_DOCUMENTS])
    yield Student(job.parent, changes, decoder)


_NAMES = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
_NAMES |= {"kv_heads": "num_key_value_heads", "intermediate": "intermediate_size"}


def sizes(parent: Checkpoint, asked: str) -> dict[str, Any]:
    """Changes of the config for a student of `1/4` of the parameters or less, or of the sizes that are named; others
    follow the hidden size. Raises ConfigError for what cannot be cut out of the parent."""
    spec = spec_from_config(child_config(parent, {}))
    if not re.fullmatch(r"[1-9]\d*/[1-9]\d*|(\w+=\d+,?)+", asked):
        raise ConfigError(f"--student {asked} is no share such as 1/4, and no sizes such as layers=3,hidden=128")
    if "=" in asked:
        named = {name: int(value) for name, _, value in (part.partition("=") for part in asked.strip(",").split(","))}
        if unknown := sorted(named.keys() - _NAMES.keys()):
            raise ConfigError(f"--student {asked}: no size {unknown[0]!r}; sizes are {', '.join(_NAMES)}")
        whole = _in_proportion(spec, spec.num_layers, spec.hidden_size)
        found = _in_proportion(spec, named.get("layers", spec.num_layers), named.get("hidden", spec.hidden_size))
        found |= {_NAMES[name]: value for name, value in named.items()}
        per_group = spec.num_heads // spec.num_kv_heads
        fits = found["num_attention_heads"] == found["num_key_value_heads"] * per_group
        if fits and all(0 < found[name] <= whole[name] for name in found):
            return found
        told = f"each size is at most the parent's, with {per_group} heads to each of kv_heads"
        raise ConfigError(f"--student {asked} is no cut of {spec.identity()}: {told}")
    share = Fraction(asked)
    layers = max(1, round(spec.num_layers * float(share) ** DEPTH_POWER))
    for hidden in range(spec.hidden_size // UNIT * UNIT if share < 1 else 0, 0, -UNIT):
        found = _in_proportion(spec, layers, hidden)
        child = spec_from_config(child_config(parent, {**found, **layer_changes(parent, range(layers))}))
        if child.num_parameters() <= share * spec.num_parameters():
            return found
    raise ConfigError(f"--student {asked}: no model of that share of {spec.identity()}; give a share below 1, or sizes")


def _in_proportion(spec: DecoderSpec, layers: int, hidden: int) -> dict[str, Any]:
    ratio = hidden / spec.hidden_size
    groups = max(1, round(spec.num_kv_heads * ratio))
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": groups * spec.num_heads // spec.num_kv_heads,
        "num_key_value_heads": groups,
        "intermediate_size": max(UNIT, round(spec.intermediate_size * ratio / UNIT) * UNIT),
    }


@torch.no_grad()
def cut(teacher: TorchDecoder, student: TorchDecoder, kept: Sequence[int], documents: Sequence[Document]) -> None:
    """Fill the student with those of the teacher's weights that matter most on the documents: its evenly chosen layers,
    principal directions of the residual stream, KV groups and neurons by what they add to it."""
    old, new = teacher.spec, student.spec
    layers: list[Any] = [teacher.layers[number] for number in kept]
    children: Iterable[Any] = student.layers
    streams, squares = _look(teacher, documents)
    whole_DD = torch.stack([streams[number] for number in (*kept, -1)]).sum(0)
    if old.norm_placement is NormPlacement.PRE and new.hidden_size < old.hidden_size:
        stream_DC = torch.linalg.eigh(whole_DD).eigenvectors[:, -new.hidden_size :]
    else:  # norms after a part weigh channels, so that these cannot be rotated
        stream_DC = torch.eye(old.hidden_size)[:, largest(whole_DD.diagonal(), new.hidden_size)]
    for number, layer, child in zip(kept, layers, children, strict=True):
        added_Q, added_I = (
            squares[number, name] * layer.get_parameter(f"{name}.weight").float().square().sum(0)
            for name in ("attention_output", "down")
        )
        groups = largest(added_Q.view(old.num_kv_heads, -1).sum(1), new.num_kv_heads)
        places = left_of_linears(old, groups, largest(added_I, new.intermediate_size))
        _read(layer.qkv, layer.attention_norm, child.qkv, places["qkv"], stream_DC)
        _add(layer.attention_output, child.attention_output, places["attention_output"], stream_DC)
        _read(layer.gate_up, layer.mlp_norm, child.gate_up, places["gate_up"], stream_DC)
        _add(layer.down, child.down, places["down"], stream_DC)
        for name in ("attention_norm", "mlp_norm"):
            if (norm := getattr(child, name)) is not None:
                norm.weight.fill_(_rescaled(streams[number], stream_DC))
        for name in ("attention_post_norm", "mlp_post_norm"):
            if getattr(child, name) is not None:
                getattr(child, name).weight.copy_(stream_DC.square().T @ getattr(layer, name).weight)
        for name in ("q_norm", "k_norm"):
            if (norm := getattr(child, name)) is not None:
                weight = getattr(layer, name).weight
                is_whole = weight.shape == norm.weight.shape
                norm.weight.copy_(weight if is_whole else weight.view(old.num_kv_heads, -1)[groups].flatten())
    embedded = teacher.embedding.weight.float() @ stream_DC
    student.embedding.weight.copy_(embedded * (teacher.embedding_scale / student.embedding_scale))
    scale, norm_D = _rescaled(streams[-1], stream_DC), teacher.norm.weight
    if student.output is not None and teacher.output is not None:
        student.output.weight.copy_((teacher.output.weight.float() * norm_D) @ stream_DC)
        student.norm.weight.fill_(scale)
    else:
        student.norm.weight.copy_(scale * stream_DC.square().T @ norm_D)


def _look(teacher: TorchDecoder, documents: Sequence[Document]) -> tuple[list[Tensor], dict[tuple[int, str], Tensor]]:
    """Second moments [D, D] of the normalised residual stream before each layer and behind the last, and sums of
    squares of what comes into attention outputs and down matrices, by layer and name."""
    streams: list[Tensor] = [torch.zeros(())] * (teacher.spec.num_layers + 1)
    squares: dict[tuple[int, str], Tensor] = {}
    hooks = []
    for index in range(teacher.spec.num_layers):
        for name in ("attention_output", "down"):

            def add(_: nn.Module, inputs: tuple[Tensor, ...], place: tuple[int, str] = (index, name)) -> None:
                squares[place] = squares.get(place, torch.zeros(())) + inputs[0].float().square().mean(0)

            hooks.append(teacher.get_submodule(f"layers.{index}.{name}").register_forward_pre_hook(add))
    for each in documents:
        batch, states = batch_of([each]), list[Tensor]()
        teacher(batch.ids_T, batch.positions_T, attend_of(teacher.spec, batch.lengths), states)
        for place, state in enumerate(states):
            normed = state.float() * state.float().square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
            streams[place] = streams[place] + normed.T @ normed / (len(normed) * len(documents))
    for hook in hooks:
        hook.remove()
    return streams, squares


def _rescaled(stream_DD: Tensor, stream_DC: Tensor) -> float:
    """What a norm over the channels that are left multiplies, to give what the norm over all gave of them."""
    return math.sqrt(float((stream_DC * (stream_DD @ stream_DC)).sum()) / stream_DC.shape[1])


def _read(old: nn.Linear, norm: RMSNorm | None, new: nn.Linear, rows: Tensor, stream_DC: Tensor) -> None:
    weight = old.weight.float()[rows]
    new.weight.copy_((weight if norm is None else weight * norm.weight) @ stream_DC)
    if new.bias is not None:
        new.bias.copy_(old.bias[rows])


def _add(old: nn.Linear, new: nn.Linear, columns: Tensor, stream_DC: Tensor) -> None:
    new.weight.copy_(stream_DC.T @ old.weight.float()[:, columns])
    if new.bias is not None:
        new.bias.copy_(stream_DC.T @ old.bias.float())
