"""A model's folder with Python code in it, in which a user stands: no command runs any of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.running import environment
from tests.conftest import copied_model
from tests.waiting import HANGS_S

OURS = ("maitred_tips", "msgspec", "numpy", "sitecustomize", "tokenizers", "usercustomize", "uvloop", "zmq")
CONSOLE = "import sys\nfrom maitred.cli.main import main\nsys.exit(main())"  # what the installed `maitred` is
OFFLINE = "from maitred import LLM\nwith LLM('.') as llm: print(llm.generate('one')[0].outputs[0].text)"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Soup, please."}], "max_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, and a file for every module that anybody might import, which leaves a trace and ends all."""
    folder = copied_model(tmp_path_factory.mktemp("hostile"))
    code = f"import os\nopen({str(folder / 'ran')!r}, 'a').write(__name__ + ' ')\nos._exit(66)"
    for name in {*OURS, *sys.stdlib_module_names} - {"os"}:
        (folder / f"{name}.py").write_text(code)
    (folder / "tips.pth").write_text("import maitred_tips\n")
    (folder / "tips-1.0.dist-info").mkdir()
    (folder / "tips-1.0.dist-info" / "METADATA").write_text("Name: tips\nVersion: 1.0\n")
    (folder / "tips-1.0.dist-info" / "entry_points.txt").write_text("[maitred.policies]\ntips = maitred_tips:policy\n")
    (folder / "in.jsonl").write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": ASK}) + "\n"
    )
    return folder


def script(folder: Path, text: str) -> list[str]:
    """As a file in another folder, whose own folder Python then searches."""
    path = folder.parent / "elsewhere" / "script.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return [sys.executable, str(path)]


def run(folder: Path, words: Sequence[str], stdin: str = "") -> str:
    """What it prints, when it ends well."""
    done = subprocess.run(
        words, cwd=folder, input=stdin, capture_output=True, text=True, env=environment(), timeout=HANGS_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _nothing_ran(folder: Path):
    yield
    assert not (folder / "ran").exists(), (folder / "ran").read_text()


@pytest.mark.parametrize("processes", [[], pytest.param(["--in-process"], marks=pytest.mark.soak)], ids=["two", "one"])
def test_serve_runs_nothing_of_the_folder_it_stands_in(folder: Path, processes: list[str]):
    words = [*script(folder, CONSOLE), "serve", ".", "--port", "0", *processes]
    with subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment()) as server:
        assert server.stderr is not None
        told = []
        for line in server.stderr:
            told.append(line)
            if "maitred serves" in line:
                server.send_signal(signal.SIGTERM)
        assert server.wait(HANGS_S) == 0, told
    assert any("maitred serves" in line for line in told)


def test_chat_run_and_a_script_run_nothing_of_the_folder_they_stand_in(folder: Path):
    console = script(folder, CONSOLE)
    assert run(folder, [*console, "chat", "."], "Soup, please.\n")
    run(folder, [*console, "run", ".", "-i", "in.jsonl", "-o", "out.jsonl", "--served-model-name", "tiny"])
    assert json.loads((folder / "out.jsonl").read_text())["response"]["status_code"] == 200
    assert run(folder, script(folder, OFFLINE))


def test_python_m_maitred_imports_nothing_from_the_folder_it_stands_in(tmp_path: Path):
    """But for what Python itself imports before: runpy and importlib."""
    for name in ("typing", "json", "argparse", "maitred_tips"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(__name__)")
    assert run(tmp_path, [sys.executable, "-m", "maitred", "policies"])
