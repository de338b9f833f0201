"""R12 in small: no request that the OpenAPI document describes, or forbids, gets a 5xx or an answer not told there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT, ServerProcess, start_server
from tests.waiting import HANGS_S, until

# Few are the same every time; those that a schema's bounds make are for `make soak`.
FEW = ("--generation-deterministic", "--phases", "fuzzing,stateful", "--max-examples", "3", "--request-timeout", "200")
MANY = ("--max-examples", "1000", "--request-timeout", "10")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [FEW, pytest.param(MANY, marks=(pytest.mark.soak, pytest.mark.timeout(7200)))],
    ids=["few", "many"],
)
def test_the_server_does_what_its_openapi_document_says(tmp_path: Path, flags: tuple[str, ...]):
    with documented_server(tmp_path) as server:
        ran = run_schemathesis(server.url, tmp_path, *flags)
        assert ran.returncode == 0, ran.stdout
        assert int(ran.stdout.split("Tested: ")[1].split()[0]) >= NUM_OPERATIONS
        assert num_restarts(server.url) == 0


SCHEMATHESIS = (sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()")
CONFIG = Path(__file__).with_name("schemathesis.toml")
HOOKS = "tests.reliability.openapi_hooks"
NUM_OPERATIONS = 53  # at least; all but the endless streams


@contextmanager
def documented_server(folder: Path) -> Iterator[ServerProcess]:
    """The built-in model with a context so short that no answer takes long, and with a ledger to ask."""
    server = start_server("--max-model-len", "64", "--ledger", str(folder / "ledger.sqlite"))
    try:
        until(lambda: httpx.get(f"{server.url}/ready", timeout=HANGS_S).status_code == 200)
        yield server
    finally:
        ended = server.stop()
    assert ended == 0


def run_schemathesis(url: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """All checks, all phases: exit code 0 when nothing was found. `folder` takes what it leaves behind."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SCHEMATHESIS_HOOKS": HOOKS}
    words = [*SCHEMATHESIS, "--no-color", "--config-file", str(CONFIG), "run", f"{url}/openapi.json", *flags]
    return subprocess.run(
        words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )


def num_restarts(url: str) -> float:
    """Of the engine, so far."""
    page = httpx.get(f"{url}/metrics", timeout=HANGS_S).text
    return float(page.split("\nmaitred_engine_restarts_total ")[1].split("\n")[0])
