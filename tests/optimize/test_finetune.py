"""Adapters and weights that learn documents, as PEFT and the server load them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from maitred import LLM
from maitred.config.optimize import FinetuneConfig, ToolConfig
from maitred.core.errors import ConfigError
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.torch_decoder import load_torch_decoder
from maitred.optimize.evaluate import logits
from maitred.optimize.finetune import TOOL, attach_lora
from maitred.optimize.job import JobReport, run_tool
from maitred.optimize.trainer import batch_of, learnt_logits
from tests.model.checkpoints import load_reference, make_checkpoint
from tests.optimize.test_trainer import document

torch.set_num_threads(1)


def write_counting(file: Path) -> Path:
    """Every third number, from each number: a rule, so that it can be learnt of documents what is held out."""
    lines = [{"token_ids": [(first + step * 3) % 240 for step in range(10)]} for first in range(240)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def ask(folder: Path, family: str = "llama", **more: object) -> ToolConfig:
    if not (folder / "parent").exists():
        make_checkpoint(family, folder / "parent")
        write_counting(folder / "data.jsonl")
    given = {"steps": 30, "data": str(folder / "data.jsonl"), **more}
    return ToolConfig(model=str(folder / "parent"), out=str(folder / "out"), **given)  # type: ignore[arg-type]


def tune(asked: ToolConfig, **own: object) -> JobReport:
    given = {"learning_rate": 0.02, **own}
    return run_tool(TOOL, asked, FinetuneConfig(**given), lambda *_: None)  # type: ignore[arg-type]


IDS = [3, 6, 9, 12, 15, 18, 21, 24]


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("llama", {}),
        ("phi3", {"lora_rank": 3}),
        pytest.param("gemma3", {}, marks=pytest.mark.soak),
    ],
)
def test_an_adapter_answers_as_in_peft_in_whatever_parts_of_the_stacked_weights(family: str, own: dict, tmp_path: Path):
    from peft import PeftModel

    report = tune(ask(tmp_path, family), **own)
    assert report.passed, report.fields["gate"]
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "report.json",
    }
    model = PeftModel.from_pretrained(load_reference(tmp_path / "parent"), str(tmp_path / "out"))
    with torch.no_grad():
        theirs = model(torch.tensor([IDS])).logits[0].float().numpy()
    served = {"dtype": "float32", "kv_dtype": "float32", "speculative": "off", "weight_cache": "off"}
    with LLM(str(tmp_path / "parent"), lora={"mine": str(tmp_path / "out")}, **served) as llm:
        np.testing.assert_allclose(np.stack(list(logits(llm, IDS))), theirs, atol=2e-3, rtol=2e-3)
    figure = report.fields["figures"]["perplexity_ratio"]
    assert figure["high"] < 0.7, "it was measured with its adapter"
    trained = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert report.fields["finetune"]["trained_parameters"] == trained


def test_its_gradient_is_that_of_peft(tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    parent = make_checkpoint("qwen2", tmp_path)
    theirs = get_peft_model(load_reference(parent), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    with open_checkpoint(str(parent)) as checkpoint:
        decoder = load_torch_decoder(spec_from_config(checkpoint.config), checkpoint)
    matrices = attach_lora(decoder, 4, seed=0)
    named = {"layers" + name.split("layers", 1)[1]: p for name, p in theirs.named_parameters() if "lora_" in name}
    assert len(named) == 2 * len(matrices)
    with torch.no_grad():
        for linear, pair in matrices.items():
            for side, matrix in zip("AB", pair, strict=True):
                matrix.normal_(std=0.1, generator=torch.Generator().manual_seed(len(linear)))
                named[f"{linear}.lora_{side}.default.weight"].copy_(matrix)
    batch = batch_of([document(20, 5)])
    cross_entropy(learnt_logits(decoder, batch), batch.ids_T[batch.learnt_T]).backward()
    cross_entropy(theirs(batch.ids_T[None]).logits[0, :-1].float(), batch.ids_T[1:]).backward()
    for linear, pair in matrices.items():
        for side, matrix in zip("AB", pair, strict=True):
            torch.testing.assert_close(
                matrix.grad, named[f"{linear}.lora_{side}.default.weight"].grad, atol=1e-5, rtol=1e-3
            )
    assert all(p.grad is None for name, p in decoder.named_parameters() if "lora" not in name)


@pytest.mark.parametrize("own", [{"merge": True}, {"full": True, "learning_rate": 0.005}], ids=["merge", "full"])
def test_a_merged_or_wholly_trained_model_is_an_ordinary_folder(own: dict, tmp_path: Path):
    report = tune(ask(tmp_path), **own)
    assert report.passed, report.fields["gate"]
    assert report.fields["figures"]["perplexity_ratio"]["high"] < 0.7
    model = load_reference(tmp_path / "out")
    with torch.no_grad():
        found = model(torch.tensor([IDS])).logits[0].argmax(-1).tolist()
    assert found[3:] == [15, 18, 21, 24, 27]
    with pytest.raises(ConfigError, match="full and merge exclude each other"):
        FinetuneConfig(full=True, merge=True)


def test_what_learns_nothing_of_what_is_held_out_is_refused(tmp_path: Path):
    report = tune(ask(tmp_path, steps=1), learning_rate=1e-9)
    (failure,) = report.failures
    assert failure.rule == "max_perplexity_ratio"
    assert not (tmp_path / "out").exists()


def test_an_ended_run_goes_on_to_the_same_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from maitred.optimize import finetune, trainer

    assert tune(ask(tmp_path)).passed
    whole = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "out").rename(tmp_path / "whole")

    def cut(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "save_adapter", cut)
    with pytest.raises(KeyboardInterrupt):
        tune(ask(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "hard_loss", cut)  # nothing is trained again
    assert tune(ask(tmp_path)).passed
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == whole
