"""Where a server seldom runs: as a user whom nobody knows, in another century, with temporary files in an odd place."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path

import httpx
import pytest

from maitred.storage.ledger import Ledger
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


Run = Callable[..., subprocess.CompletedProcess[str]]
# every argument before -- becomes a read-only mount that only this command and its children see
READ_ONLY = """
while [ "$1" != -- ]; do mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 99; cd "$1"; shift; done
shift; exec "$@"
"""


@pytest.fixture
def maitred(tmp_path: Path) -> Run:
    """Runs a command with `tmp_path` (and more) read-only."""

    def run(*words: str, folders: tuple[str, ...] = (), **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["unshare", "-rm", "sh", "-c", READ_ONLY, "sh", *folders, str(tmp_path), "--", *words],
            input="one soup\n",
            capture_output=True,
            text=True,
            env=environment(**extra),
            timeout=HANGS_S,
            check=False,
        )

    if shutil.which("unshare") is None or run("true").returncode != 0:
        pytest.skip("this user may not mount anything in a namespace of its own")
    return partial(run, sys.executable, "-m", "maitred")


@pytest.mark.parametrize(
    ("flag", "name", "told"),
    [
        ("--ledger", "old.sqlite", "cannot open the ledger"),
        ("--ledger", "new.sqlite", "cannot open the ledger"),
        ("--decision-log", "log", "cannot write the decision log in"),
    ],
)
def test_what_was_asked_for_and_cannot_be_written_ends_the_server_with_a_remedy(maitred, tmp_path, flag, name, told):
    with closing(Ledger(tmp_path / "old.sqlite")):
        pass
    done = maitred("serve", "--port", "0", "--log-level", "error", flag, str(tmp_path / name))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {told} {tmp_path / name}: Read-only file system; choose another ")
    assert done.stderr.count("\n") == 1


def test_a_chat_needs_no_place_to_write_and_a_server_names_the_one_it_needs(maitred: Run, tmp_path: Path):
    nowhere = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    folders = tuple(folder for folder in ("/tmp", "/var/tmp") if Path(folder).is_dir())
    chat = maitred("chat", folders=folders, **nowhere)
    assert (chat.returncode, bool(chat.stdout.strip())) == (0, True), chat.stderr
    serve = maitred("serve", "--port", "0", "--log-level", "error", folders=folders, **nowhere)
    assert serve.returncode == 1
    assert serve.stderr.startswith("error: No usable temporary directory found in ")
    assert serve.stderr.endswith(
        "; set TMPDIR to a folder that can be written, or give a container one: --tmpfs /tmp\n"
    )
