"""Real tools as a person runs them: what a gate refuses, and kills at any moment."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maitred.cli.main import main

WORDS = ("soup", "of", "the", "day", "carrots", "salt", "bread", "to", "table", "four")
NO_RULES = "max_kl: null\nmax_perplexity_ratio: null\nmax_flips: null\nmin_gain: null\nmin_acceptance: null\n"
TOOLS = {
    "finetune": ["--steps", "30"],
    "distill": ["--student", "1/4", "--steps", "30"],
    "prune": ["--neurons", "0.25", "--recover-steps", "30"],
    "train-draft": ["--steps", "30", "--replay-share", "0"],
    "quantize": ["--calibration-tokens", "4096"],
}


def given(folder: Path) -> list[str]:
    draws, words = random.Random(1), []
    for name, count in (("data", 80), ("held-out", 20)):
        lines = [json.dumps({"text": " ".join(draws.choices(WORDS, k=24))}) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        words += [f"--{name}", str(folder / f"{name}.jsonl")]
    return words


def test_a_pruned_model_that_is_worse_is_refused_with_exit_3_and_its_numbers(tmp_path: Path, capsys):
    out = tmp_path / "out"
    rules = tmp_path / "rules.yaml"
    rules.write_text("max_kl: 0.01\nmin_gain: null")  # a gain takes seconds to time
    asked = ["prune", "maitred-mini", "--out", str(out), "--layers", "3", "--gate", str(rules)]
    assert main([*asked, *given(tmp_path)]) == 3
    assert "the gate refused it" in capsys.readouterr().err
    assert set(tmp_path.iterdir()) - {rules} == {
        *(tmp_path / name for name in ("data.jsonl", "held-out.jsonl", "out.rejected.json"))
    }
    failures = json.loads(Path(f"{out}.rejected.json").read_text())["gate"]["failures"]
    (kl,) = (each for each in failures if each["rule"] == "max_kl")
    assert kl["figure"]["high"] > kl["figure"]["value"] > kl["limit"] == 0.01


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_that_is_killed_at_random_moments_goes_on_to_the_same_result(name: str, tmp_path: Path):
    (tmp_path / "rules.yaml").write_text(NO_RULES)
    more = [*TOOLS[name], "--gate", str(tmp_path / "rules.yaml"), *given(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def begun(out: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "maitred", name, "maitred-mini", "--out", str(tmp_path / out), *more]
        return subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def ends(tool: subprocess.Popen[bytes]) -> None:
        _, errors = tool.communicate()
        assert tool.returncode == 0, errors.decode()

    begun_at = time.monotonic()
    ends(begun("whole"))
    took_s, draws = time.monotonic() - begun_at, random.Random(name)
    for _ in range(4):
        killed = begun("killed")
        time.sleep(draws.uniform(0.1, 0.9) * took_s)
        killed.kill()
        killed.communicate()
        if (tmp_path / "killed").is_dir():  # it was faster
            break
    else:
        ends(begun("killed"))
    files = {each.relative_to(tmp_path / "whole") for each in (tmp_path / "whole").rglob("*.safetensors")}
    assert files
    for file in files:
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
    assert not (tmp_path / "killed.part").exists()
