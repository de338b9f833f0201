"""A student is cut out of its teacher, learns its distributions, and is told apart from what hard labels give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from maitred.config.optimize import DistillConfig, ToolConfig
from maitred.core.errors import ConfigError
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.torch_decoder import TorchDecoder, load_torch_decoder
from maitred.optimize.distill import TOOL, cut, sizes
from maitred.optimize.job import run_tool
from maitred.optimize.write import child_config, layer_changes
from tests.model.checkpoints import make_checkpoint
from tests.model.test_torch_decoder import assert_close, logits_of, random_tokens
from tests.optimize.test_trainer import document

torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["llama_bias", "qwen3", "gemma3", "olmo2", "phi3", "granite"])
def test_a_cut_that_leaves_everything_is_the_teacher(family: str, tmp_path: Path):
    with open_checkpoint(str(make_checkpoint(family, tmp_path))) as parent:
        spec = spec_from_config(parent.config)
        teacher = load_torch_decoder(spec, parent)
        student = TorchDecoder(spec)
        cut(teacher, student, range(spec.num_layers), [document(40, 1)])
        assert_close(logits_of(student, random_tokens(30)), logits_of(teacher, random_tokens(30)))

        changes = sizes(parent, "1/2")
        changes |= layer_changes(parent, range(changes["num_hidden_layers"]))
        smaller = TorchDecoder(spec_from_config(child_config(parent, changes)))
        cut(teacher, smaller, range(smaller.spec.num_layers), [document(40, 1)])
        assert smaller.spec.num_parameters() <= spec.num_parameters() / 2
        assert logits_of(smaller, random_tokens(30)).isfinite().all()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("3/2", "give a share below 1"),
        ("1/90000", "no model of that share"),
        ("2", "no share such as 1/4, and no sizes such as layers=3"),
        ("1/0", "no share such as"),
        ("layers=x", "no sizes such as"),
        ("layers=9", "no cut of LlamaForCausalLM"),
        ("width=3", "no size 'width'; sizes are layers, hidden"),
        ("heads=3,kv_heads=2", "2 heads to each of kv_heads"),
    ],
)
def test_sizes_that_cannot_be_cut_out_are_refused(asked: str, told: str, tmp_path: Path):
    with open_checkpoint(str(make_checkpoint("llama", tmp_path))) as parent, pytest.raises(ConfigError, match=told):
        sizes(parent, asked)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, 40 documents, 24 held out, 24 tasks of a category each, and a gate that is open."""
    folder = tmp_path_factory.mktemp("world")
    make_checkpoint("llama_tied", folder / "teacher", max_position_embeddings=256)

    def lines(name: str, number: int, first: int) -> None:
        told = [document(24, first + n).ids.tolist() for n in range(number)]
        (folder / name).write_text("".join(json.dumps({"token_ids": [t % 250 for t in ids]}) + "\n" for ids in told))

    lines("data.jsonl", 40, 0)
    lines("held.jsonl", 24, 900)
    asked = [
        {
            "messages": [{"role": "user", "content": f"n{n}"}],
            "answer": "x",
            "choices": ["x", "y"],
            "match": "choice",
            "category": "c",
        }
        for n in range(24)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    (folder / "gate.yaml").write_text("max_task_drop: 1.0\nmin_gain: null\n")
    return folder


def distil(world: Path, out: Path, steps: int, **own: Any) -> dict[str, Any]:
    files = {name: str(world / f"{file}.jsonl") for name, file in (("data", "data"), ("held_out", "held"))}
    config = ToolConfig(
        model=str(world / "teacher"),
        out=str(out),
        steps=steps,
        gate=str(world / "gate.yaml"),
        tasks=str(world / "tasks.jsonl"),
        **files,
    )
    return dict(run_tool(TOOL, config, DistillConfig(**own), lambda *_: None).fields)


def test_a_student_learns_on_its_own_samples_and_is_compared(world: Path, tmp_path: Path):
    found = distil(world, tmp_path / "student", 3, student="1/2", own_share=0.5, sweep=True)
    told = found["distill"]
    assert found["passed"]
    assert told["steps"] == 3
    assert told["share"] <= 0.5
    assert set(told["sweep"]) == {"itself", "hard labels alone", "1/4", "1/9"}
    assert (
        told["sweep"]["1/9"]["parameters"] < told["sweep"]["1/4"]["parameters"] < told["sweep"]["itself"]["parameters"]
    )
    assert set(told["capacity_gap"]) == {"c"}
    with open_checkpoint(str(tmp_path / "student")) as student:
        assert spec_from_config(student.config).num_parameters() == told["sweep"]["itself"]["parameters"]


def test_unlike_tokens_of_teacher_and_student_are_refused(world: Path, tmp_path: Path):
    other = make_checkpoint("llama", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"a": 98, "b": 97}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="cannot learn from teacher"):
        distil(world, tmp_path / "student", 1, student=str(other))
