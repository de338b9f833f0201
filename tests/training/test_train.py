"""The training script learns, resumes exactly, and writes what transformers loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from training.train import main

ROOT = Path(__file__).parents[2]


def train(out: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "training.train", "--out", str(out), "--draft", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["reply_loss"] for line in (out / "curve.jsonl").read_text().splitlines()]


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("steps", "of_the_first"), [(40, 0.65), (60, 0.6)])
def test_a_short_run_learns_and_transformers_loads_it(steps: int, of_the_first: float, tmp_path: Path):
    """Steps in place of minutes: under a minute on an idle core, and the same result on a busy one."""
    train(tmp_path, "--steps", str(steps), "--new-tokenizer")
    first, last = losses(tmp_path)[0], losses(tmp_path)[-1]
    assert last < of_the_first * first, f"the loss went from {first} to {last}"

    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "How much is the soup?"}], add_generation_prompt=True, return_tensors="pt"
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=8)
    assert output.shape[1] > prompt["input_ids"].shape[1]


def test_equal_seeds_give_equal_weights_even_when_interrupted(tmp_path: Path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = ("--draft", "--steps", "2")
    main([*common, "--out", str(whole)])
    main([*common, "--out", str(parts), "--stop-after", "1"])
    main([*common, "--out", str(parts)])
    one, two = (load_file(out / "model" / "model.safetensors") for out in (whole, parts))
    assert all(one[name].equal(two[name]) for name in one)


@pytest.mark.soak
def test_a_head_learns_beside_a_model_that_stays_as_it_is(tmp_path: Path):
    model = ROOT / "src/maitred/builtin/maitred-mini"
    before = (model / "model.safetensors").read_bytes()
    main(["--out", str(tmp_path), "--mtp", "--teacher", str(model), "--steps", "1"])
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert weights["fc.weight"].shape == (256, 3 * 256)
    assert weights["layers.0.self_attn.q_proj.weight"].shape == (256, 2 * 256)
    assert "embed_tokens.weight" not in weights, "it embeds as the model does"
    assert (model / "model.safetensors").read_bytes() == before
