"""What adds nothing is taken out, what is left makes up for the rest, and the child is an ordinary smaller model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from maitred.config.optimize import PRUNE_METHODS, PruneConfig, ToolConfig
from maitred.core.errors import ConfigError
from maitred.model.checkpoint import open_checkpoint
from maitred.optimize import prune
from maitred.optimize.data import Corpus, Document
from maitred.optimize.gate import Rules
from maitred.optimize.job import Job
from tests.model.checkpoints import load_reference, make_checkpoint
from tests.model.test_torch_decoder import assert_close, random_tokens

PLANTED = {
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 72,
    "head_dim": 12,
}
GONE_NEURONS, GONE_GROUP, GONE_LAYER = slice(40, 72), slice(24, 48), 1


def documents(count: int = 12, length: int = 40) -> tuple[Document, ...]:
    draws = np.random.default_rng(5)
    return tuple(
        Document(draws.integers(0, 256, length).astype(np.int32), np.ones(length, dtype=np.bool_)) for _ in range(count)
    )


def pruned(parent: Path, out: Path, *, steps: int | None = None, on: Any = None, **own: Any) -> Job:
    """The tool's part of the job alone, its model at `out`; `on` hears of progress."""
    with open_checkpoint(str(parent)) as checkpoint:
        corpus = Corpus(documents(), (), (), is_own=False, judged_on_own=False, hashes={})
        job = Job(
            "prune", ToolConfig(out=str(out), steps=steps), PruneConfig(**own), checkpoint, corpus, out,
            out.with_name(f"{out.name}-state"), Rules({}), on or (lambda done, total, words: None),
        )  # fmt: skip
        prune.TOOL.make(job)
    return job


def change(folder: Path, name: str, weight: Any) -> None:
    """Change each layer's weight of that name: `weight(layer, tensor)` writes into it."""
    weights = load_file(folder / "model.safetensors")
    for tensor in (each for each in weights if each.endswith(name)):
        weight(int(tensor.split("layers.")[1].split(".")[0]), weights[tensor])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def zero(columns: slice) -> Any:
    def write(layer: int, weight: torch.Tensor) -> None:
        weight[:, columns] = 0.0
        if layer == GONE_LAYER:
            weight.zero_()

    return write


@pytest.mark.parametrize("family", ["llama_tied", "qwen2_window", "gemma3", "phi3", "smollm3", "granite"])
def test_parts_that_add_nothing_are_found_and_taken_and_the_child_computes_as_before(family: str, tmp_path: Path):
    parent = make_checkpoint(family, tmp_path / "parent", **PLANTED)
    change(parent, "down_proj.weight", zero(GONE_NEURONS))
    change(parent, "o_proj.weight", zero(GONE_GROUP))
    job = pruned(parent, tmp_path / "child", neurons=0.33, heads=0.33, layers=1)
    config = json.loads((tmp_path / "child/config.json").read_text())
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [config[name] for name in sizes] == [64, 4, 2, 12]
    assert GONE_LAYER not in job.notes["layers_kept"]
    tokens = random_tokens(40)
    logits, wanted = (load_reference(tmp_path / name)(tokens[None]).logits[0].detach() for name in ("child", "parent"))
    assert_close(logits, wanted)


def test_weights_that_are_left_make_up_for_neurons_that_said_the_same(tmp_path: Path):
    def twins(_: int, weight: torch.Tensor) -> None:
        weight[64:96] = weight[:32]

    def quieter(_: int, weight: torch.Tensor) -> None:
        weight[:, 64:96] *= 0.3

    parent = make_checkpoint("llama_tied", tmp_path / "parent", **PLANTED)
    for name in ("gate_proj.weight", "up_proj.weight"):
        change(parent, name, twins)
    change(parent, "down_proj.weight", quieter)
    pruned(parent, tmp_path / "child", neurons=0.33)
    assert error(tmp_path / "child", parent) < 0.15


def error(child: Path, parent: Path) -> float:
    """Of the child's logits on the documents, as a share of the parent's."""
    tokens = torch.tensor(documents()[0].ids, dtype=torch.int64)
    logits, wanted = (load_reference(each)(tokens[None]).logits[0].detach() for each in (child, parent))
    return float((logits - wanted).norm() / wanted.norm())


def test_training_on_the_parents_distributions_brings_the_child_nearer(tmp_path: Path):
    parent = make_checkpoint("llama_tied", tmp_path / "parent", **PLANTED)
    pruned(parent, tmp_path / "cut", neurons=0.33, heads=0.33)
    job = pruned(parent, tmp_path / "trained", neurons=0.33, heads=0.33, steps=20)
    assert error(tmp_path / "trained", parent) < 0.95 * error(tmp_path / "cut", parent)
    assert job.notes["recovery"].startswith("20 steps")


def test_a_tool_that_ended_goes_on_to_the_same_child(tmp_path: Path):
    parent = make_checkpoint("llama_tied", tmp_path / "parent", **PLANTED)
    told: list[tuple[str, float]] = []

    def ends(done: float, total: float, words: str) -> None:
        told.append((words, done))
        if told[-1] == ("cutting layers", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pruned(parent, tmp_path / "child", neurons=0.33, layers=1, on=ends)
    pruned(parent, tmp_path / "child", neurons=0.33, layers=1, on=lambda done, total, words: told.append((words, done)))
    assert told.count(("cutting layers", 1)) == 1
    pruned(parent, tmp_path / "undisturbed", neurons=0.33, layers=1)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("child", "undisturbed"))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_two_of_four_weights_are_zero_and_each_method_is_nearer_than_the_one_before():
    torch.manual_seed(0)
    x_TK = torch.randn(400, 32) @ torch.randn(32, 64) * torch.linspace(0.1, 4, 64)[torch.randperm(64)]
    weight_DK = torch.randn(24, 64)
    errors = []
    for method in PRUNE_METHODS:
        sparse_DK = prune.SPARSE[method](weight_DK, x_TK.T @ x_TK, "down")
        assert ((sparse_DK.reshape(-1, 4) == 0).sum(1) == 2).all()
        errors.append(float((x_TK @ (sparse_DK - weight_DK).T).norm()))
    assert errors[2] < 0.7 * errors[1] < 0.7 * 0.9 * errors[0]


def test_a_pattern_is_stored_in_an_ordinary_folder_of_the_parents_sizes(tmp_path: Path):
    parent = make_checkpoint("llama_tied", tmp_path / "parent", **PLANTED)
    job = pruned(parent, tmp_path / "child", pattern="2:4", method="wanda")
    weights = load_file(tmp_path / "child/model.safetensors")
    sparse = [weight for name, weight in weights.items() if "proj" in name]
    assert len(sparse) == 3 * 7
    assert all(((weight.view(-1, 4) == 0).sum(1) == 2).all() for weight in sparse)
    assert "none reads 2:4" in job.notes["kernel"]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({}, "give neurons, heads or layers"),
        ({"neurons": 0.25, "pattern": "2:4"}, "or else a pattern"),
        ({"neurons": 0.1}, "takes out no whole 32; give at least 0.17"),
        ({"heads": 0.1}, "--heads 0.1 of 3 takes out no whole 1; give at least 0.1"),
        ({"layers": 3}, "--layers is 3, and the model has 3; leave at least one"),
        ({"neurons": 1.0}, "neurons is 1.0; it must be"),
        ({"pattern": "2:4", "recover_steps": 5}, "training would undo a 2:4 pattern"),
    ],
)
def test_what_cannot_be_taken_is_told_with_its_numbers(own: dict[str, Any], message: str, tmp_path: Path):
    parent = make_checkpoint("llama_tied", tmp_path / "parent", **PLANTED)
    with pytest.raises(ConfigError, match=message):
        pruned(parent, tmp_path / "child", **own)


def test_heads_that_are_normalised_together_stay(tmp_path: Path):
    parent = make_checkpoint("olmo2", tmp_path / "parent")
    with pytest.raises(ConfigError, match="normalises all heads as one vector"):
        pruned(parent, tmp_path / "child", heads=0.5)
