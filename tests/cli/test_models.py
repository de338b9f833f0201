from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from maitred.cli.main import main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    pytest.importorskip("google.protobuf", reason="the extra tensor brings it")
    path = tmp_path / "ranker.pbtxt"
    path.write_text('backend: "onnxruntime" max_batch_size: 4 optimization { eager_batching: true }')
    return path


def test_what_would_be_served_is_told_in_a_line_each(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["models", "check", str(config)]) == 0
    assert capsys.readouterr().out == (
        f"{config}: served; ignored: optimization.eager_batching: a batch is gathered when it starts\n"
    )
    config.write_text('backend: "pytorch"')
    assert main(["models", "check", str(config)]) == 1
    assert "not served; backend 'pytorch' is not supported" in capsys.readouterr().out


def test_json_is_a_list_of_verdicts(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["models", "check", str(config), str(config) + "x", "--json"]) == 1
    good, absent = json.loads(capsys.readouterr().out)
    assert list(good) == ["path", "parsed", "served", "reason", "config"]
    assert (good["parsed"], good["served"]) == (True, True)
    assert good["config"] == {"backend": "onnxruntime", "max_batch_size": 4, "optimization": {"eager_batching": True}}
    assert (absent["parsed"], absent["served"], absent["config"]) == (False, False, None)


def test_without_the_extra_one_line_names_it(tmp_path: Path):
    code = (
        "import sys; sys.modules['google.protobuf'] = None\n"
        "from maitred.cli.main import main; sys.exit(main(['models', 'check', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == "error: tensor models need the package protobuf; install it with: pip install 'maitred[tensor]'\n"
    )
