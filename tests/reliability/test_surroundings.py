"""Where a server seldom runs: as a user whom nobody knows, in another century, with temporary files in an odd place."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import pytest

from tests.cli.running import environment
from tests.conftest import ServerProcess
from tests.reliability.clock_server import COMPILER, Clock
from tests.waiting import HANGS_S

SERVE = [sys.executable, "-m", "maitred", "serve", "--port", "0"]
UNKNOWN = ["unshare", "--user", "--map-user=54321", "env", "--unset=HOME", "--unset=XDG_CACHE_HOME"]


def answered(words: list[str], env: dict[str, str]) -> httpx.Response:
    """A question to a server that starts, answers and ends well."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        server = ServerProcess(process)
        try:
            server.read_until_listening()
            body = {"model": "maitred-mini", "prompt": "one soup", "max_tokens": 5, "ignore_eos": True}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANGS_S)
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 5)
            assert server.stop() == 0
        finally:
            process.kill()
    return answer


def test_a_user_without_a_home_is_served():
    """No HOME, and a number that is not in the list of users: as in containers that choose one."""
    if shutil.which("unshare") is None or subprocess.run([*UNKNOWN, "true"], check=False).returncode != 0:
        pytest.skip("this user may have no namespace of its own")
    answered([*UNKNOWN, *SERVE], environment())


@pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="a library is built and preloaded")
def test_the_year_2100_and_a_temporary_folder_that_is_no_utf_8_are_served(tmp_path: Path):
    clock, century = Clock(tmp_path), datetime(2100, 1, 1, tzinfo=UTC).timestamp()
    clock.set(math.ceil(century - time.time()))
    with tempfile.TemporaryDirectory(prefix=os.fsdecode(b"caf\xe9")) as odd:
        words = [*SERVE, "--ledger", str(tmp_path / "ledger"), "--decision-log", str(tmp_path / "log")]
        answer = answered(words, environment(**clock.environment) | {"TMPDIR": odd})
        assert not os.listdir(odd)
    assert century <= answer.json()["created"] < century + HANGS_S * 10
    assert parsedate_to_datetime(answer.headers["date"]).year == 2100
