"""The path of every tool, with a tool that copies its parent."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

from maitred.cli.optimize import tool_command
from maitred.config.optimize import ToolConfig
from maitred.core.errors import ConfigError, OutOfMemory
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.optimize.job import Job, JobReport, Tool, run_tool


@dataclass(frozen=True)
class Own:
    noise: float = 0.0


class Ended(BaseException):
    """As if killed: nothing catches it to tidy up."""


class Copy:
    """Copies the parent, and notes in its state how often it began; may be ended, or damage the weights."""

    def __init__(self, *, ends_at: str = "", writer: str = "copy", bytes_wanted: int = 0) -> None:
        self.ends_at, self.writer, self.bytes_wanted = ends_at, writer, bytes_wanted

    def make(self, job: Job) -> None:
        job.need_memory(self.bytes_wanted, "a copy")
        with (job.state / "begun").open("a") as begun:
            begun.write("x")
        if self.writer == "safetensors":
            save_file({"weights": np.zeros(2**20)}, job.folder / "model.safetensors")
        for file in sorted(Path(job.parent.path).iterdir()):
            if file.name == self.ends_at:
                raise Ended
            shutil.copy(file, job.folder)
        if job.own.noise:
            weights = job.folder / "model.safetensors"
            raw = bytearray(weights.read_bytes())
            middle = np.frombuffer(raw, np.uint16)[len(raw) // 4 :]
            middle ^= np.uint16(0x0040)  # a bit of each mantissa
            weights.write_bytes(raw)
        job.notes["begun"] = len((job.state / "begun").read_text())


def config(folder: Path, **more: object) -> ToolConfig:
    data = folder / "data.jsonl"
    if not data.exists():
        lines = [json.dumps({"text": f"What do {n} soups and {m} teas cost?"}) for n in range(20) for m in range(11)]
        data.write_text("\n".join(lines))
    fields = {"model": str(BUILTIN_FOLDER), "out": str(folder / "out"), "data": str(data), **more}
    return ToolConfig(**fields)  # type: ignore[arg-type]


def run(asked: ToolConfig, own: Own = Own(), **copy: object) -> JobReport:
    tool = Tool("copy", Copy(**copy).make)  # type: ignore[arg-type]
    return run_tool(tool, asked, own, lambda done, total, words: None)


def beside(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()} - {"data.jsonl", "rules.yaml", "tasks.yaml"}


def test_what_the_gate_lets_through_appears_whole_with_its_report(tmp_path: Path):
    report = run(config(tmp_path))
    assert report.passed
    assert beside(tmp_path) == {"out"}
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "data.jsonl").stat().st_mode}  # for all who may read what a user writes
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    assert told["passed"]
    assert told["figures"]["flips"]["drawn"] == 22
    assert told["data"]["learnt"]["documents"] == 198
    assert len(told["data"]["sha256"]["data"]) == 64
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (BUILTIN_FOLDER / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="out is there already"):
        run(config(tmp_path))


def test_what_the_gate_refuses_leaves_a_report_and_no_folder(tmp_path: Path):
    (tmp_path / "rules.yaml").write_text("max_kl: 0.05")
    report = run(config(tmp_path, gate=str(tmp_path / "rules.yaml")), Own(noise=1.0))
    assert [failure.rule for failure in report.failures] == ["max_kl"]
    assert beside(tmp_path) == {"out.rejected.json"}
    told = json.loads((tmp_path / "out.rejected.json").read_text())
    assert told["gate"]["failures"][0]["figure"]["high"] > 0.05


def test_a_command_tells_its_figures_and_what_was_refused_and_leaves_with_3(tmp_path: Path, capsys, monkeypatch):
    module = ModuleType("maitred.optimize.copy")
    module.TOOL = Tool("copy", Copy().make)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    command = tool_command("copy", Own, "copy", "Copy a model.", ())
    asked = config(tmp_path)
    words = [asked.model or "", "--out", asked.out, "--data", asked.data or ""]
    (tmp_path / "rules.yaml").write_text("max_kl: 0.05")
    assert command.run(command.parse([*words, "--noise", "1", "--gate", str(tmp_path / "rules.yaml")])) == 3
    out, err = capsys.readouterr()
    assert "refused " in out
    assert "max_kl 0.05: kl is " in out
    assert f"nothing is at {asked.out}, the report is {asked.out}.rejected.json" in err
    assert command.run(command.parse([*words, "--json"])) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["passed"]
    assert f"written: {asked.out}" in err
    assert beside(tmp_path) == {"out"}


@pytest.mark.parametrize("ends_at", ["config.json", "tokenizer.json"])
def test_the_same_command_goes_on_after_any_end(ends_at: str, tmp_path: Path):
    with pytest.raises(Ended):
        run(config(tmp_path), ends_at=ends_at)
    assert beside(tmp_path) == {"out.part"}
    assert run(config(tmp_path)).fields["copy"]["begun"] == 2
    assert beside(tmp_path) == {"out"}


def test_a_killed_process_leaves_the_folder_to_the_next_one(tmp_path: Path):
    script = (
        "import os, signal, sys; from pathlib import Path; from tests.optimize.test_job import *\n"
        "make = lambda job: ((job.state / 'begun').write_text('x'), os.kill(os.getpid(), signal.SIGKILL))\n"
        "run_tool(Tool('copy', make), config(Path(sys.argv[1])), Own(), print)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert run(config(tmp_path)).fields["copy"]["begun"] == 2


def test_another_command_does_not_go_on_with_it(tmp_path: Path):
    with pytest.raises(Ended):
        run(config(tmp_path), ends_at="config.json")
    with pytest.raises(ConfigError, match=r"out.part was begun by another command \(seed 0 there, 7 here\)"):
        run(config(tmp_path, seed=7))
    (tmp_path / "data.jsonl").write_text("changed")
    with pytest.raises(ConfigError, match=r"another command \(data '"):
        run(config(tmp_path))


def test_a_second_process_at_the_same_folder_is_refused(tmp_path: Path):
    asked, refusals = config(tmp_path), []

    def make(job: Job) -> None:
        with pytest.raises(ConfigError, match=r"another process is at work in .*out.part") as refused:
            run(asked)
        refusals.append(refused)
        assert (tmp_path / "out.part" / "asked.json").is_file()
        raise Ended

    with pytest.raises(Ended):
        run_tool(Tool("copy", make), asked, Own(), lambda done, total, words: None)
    assert len(refusals) == 1


@pytest.mark.parametrize("writer", ["copy", "safetensors"])
def test_a_full_disk_is_told_and_what_was_made_stays(writer: str, tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(ConfigError, match="File too large; make room, and give the same command again"):
            run(config(tmp_path), writer=writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run(config(tmp_path)).fields["copy"]["begun"] == 2


def test_what_cannot_work_leaves_nothing_behind(tmp_path: Path):
    asked = config(tmp_path)
    (tmp_path / "rules.yaml").write_text("max_kk: 1")
    (tmp_path / "tasks.yaml").write_text("max_task_drop: 0.02")
    few = tmp_path / "few"
    few.mkdir()
    (few / "rules.yaml").write_text("max_kl: 1")
    (few / "data.jsonl").write_text("\n".join(json.dumps({"text": f"{n} soups"}) for n in range(50)))
    for wrong, told in [
        (replace(asked, gate=str(tmp_path / "rules.yaml")), "no rule 'max_kk'"),
        (replace(asked, gate=str(tmp_path / "tasks.yaml")), "0 tasks are too few to judge by"),
        (replace(asked, data=str(tmp_path / "none.jsonl")), "No such file"),
        (replace(asked, held_out=asked.data), "as well"),
        (
            replace(asked, data=str(few / "data.jsonl"), gate=str(few / "rules.yaml")),
            "5 held-out documents are too few to judge by",
        ),
    ]:
        with pytest.raises(ConfigError, match=told):
            run(wrong)
        assert beside(tmp_path) == {"few"}, told
    (few / "current").symlink_to("1")
    (few / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    for wrong, told in [
        (replace(asked, out=str(few / "1" / "out")), "lies in a shelf; name a folder outside"),
        (replace(asked, out=str(tmp_path / "data.jsonl" / "out")), "out cannot be made: Not a directory; name another"),
        (replace(asked, data=str(few / "latin.jsonl")), "latin.jsonl:1: .* can't decode byte 0xe9"),
    ]:
        with pytest.raises(ConfigError, match=told):
            run(wrong)
    assert {each.name for each in few.iterdir()} == {"rules.yaml", "data.jsonl", "latin.jsonl", "current"}

    def slip(job: Job) -> None:
        (job.state / "own.jsonl").touch()
        raise ConfigError("a flag's value that only the tool can judge")

    with pytest.raises(ConfigError, match="only the tool"):
        run_tool(Tool("copy", slip), asked, Own(), lambda done, total, words: None)
    assert beside(tmp_path) == {"few"}
    data = tmp_path / "data.jsonl"
    data.write_bytes(b"\xef\xbb\xbf" + data.read_bytes().replace(b"\n", b"\r\n"))  # as Windows' editors write
    assert run(asked).passed


def test_what_memory_cannot_hold_is_refused_with_both_numbers(tmp_path: Path):
    with pytest.raises(OutOfMemory, match=r"copy needs 1024\.00 GiB for a copy, and .* are available"):
        run(config(tmp_path), bytes_wanted=2**40)
