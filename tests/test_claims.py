"""docs/claims.md: its table is that of the data which `maitred explain` reads, and simulated figures are as said."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DATA = ROOT / "src" / "maitred" / "cli" / "claims.toml"
PAGE = ROOT / "docs" / "claims.md"
ROWS = tomllib.loads(DATA.read_text(encoding="utf-8"))
QUICK = ("lengths", "no-cache", "chunked", "gqa", "windows", "kv-int8", "critical-batch", "prefix")
SLOW = ("continuous", "dynamic", "paged", "speculation")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return runpy.run_path(str(ROOT / "benchmarks" / "claims.py"), run_name="imported")


def test_the_pages_table_is_that_of_the_data(script):
    assert script["table"]() in PAGE.read_text(encoding="utf-8"), "write it anew: python benchmarks/claims.py --write"


def test_every_row_runs_by_a_command_and_ends_with_a_verdict(script):
    known = {*script["RUNS"], *script["BENCHMARKS"], "results"}
    for name, row in ROWS.items():
        assert name in known or row["command"].startswith("maitred plan "), name
        assert row["verdict"].startswith(("holds", "does not hold", "speed holds")), name
        assert row["source"], name


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.soak) for name in SLOW)])
def test_a_simulated_figure_is_what_the_page_says(script, name: str):
    assert script["RUNS"][name]() == pytest.approx(ROWS[name]["figures"], rel=0.1)


def test_a_third_of_the_rows_run_in_every_suite():
    assert len(QUICK) >= len(ROWS) / 3
