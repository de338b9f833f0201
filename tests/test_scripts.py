"""What stands beside the package is still written for it: every script and benchmark finds what it imports."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPTS = sorted([*(ROOT / "scripts").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_finds_what_it_imports(script: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(script.parent))  # as when it is run
    runpy.run_path(str(script), run_name="imported")
