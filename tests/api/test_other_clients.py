"""Client libraries of PyPI, each in its own words, against the served built-in model.

`make soak` installs them, and MAITRED_OTHER_CLIENTS names the interpreter of their environment.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.api.other_clients import CLIENTS
from tests.conftest import ServerProcess
from tests.waiting import HANGS_S

PYTHON = os.environ.get("MAITRED_OTHER_CLIENTS", "")
SCRIPT = Path(__file__).with_name("other_clients.py")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not PYTHON, reason="the clients are not installed: MAITRED_OTHER_CLIENTS names no interpreter"),
]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_has_its_schema_and_its_tool_whole_and_streamed(server: ServerProcess, client: str):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [PYTHON, str(SCRIPT), client, f"{server.url}/v1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * HANGS_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
