"""Signals at moments that nobody chose: in the middle of a start, twice, while the server ends, for nobody."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cli.running import environment
from tests.conftest import ServerProcess
from tests.waiting import HANGS_S, is_gone, until

TERM_BIT = 1 << (signal.SIGTERM - 1)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[ServerProcess]:
    """On its way, with a ledger; it leaves nothing in its temporary folder, which is as short as sockets need it."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "maitred", "serve", "--port", "0", "--ledger", str(tmp_path / "ledger.sqlite")]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(TMPDIR=folder)
        ) as process:
            yield ServerProcess(process)
            process.kill()
        assert not os.listdir(folder)


def hears(process: subprocess.Popen[str]) -> bool:
    """Whether it handles SIGTERM: before, while Python itself starts, there is nothing to put away."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) & TERM_BIT)


def has_child(process: subprocess.Popen[str]) -> bool:
    return bool(psutil.Process(process.pid).children())


def listens(process: subprocess.Popen[str]) -> bool:
    return any(c.status == psutil.CONN_LISTEN for c in psutil.Process(process.pid).net_connections())


def flooded(process: subprocess.Popen[str], number: int) -> int:
    """Told again and again until it has ended, and how it did."""
    ends_at = time.monotonic() + HANGS_S
    while process.poll() is None:
        assert time.monotonic() < ends_at
        process.send_signal(number)
        time.sleep(0.003)
    return process.returncode


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc")
@pytest.mark.parametrize(
    ("moment", "number"), [(hears, signal.SIGTERM), (has_child, signal.SIGTERM), (listens, signal.SIGINT)]
)
def test_a_server_that_is_told_to_end_while_it_starts_does_so_well(serving, moment, number, tmp_path):
    until(lambda: moment(serving.process))
    children = psutil.Process(serving.process.pid).children()
    assert flooded(serving.process, number) == 0
    until(lambda: all(is_gone(child) for child in children))
    if moment is not hears:
        assert_whole(tmp_path)


def test_signals_while_a_server_ends_and_hangups_before_change_nothing(serving: ServerProcess, tmp_path: Path):
    serving.read_until_listening()
    for _ in range(3):
        serving.process.send_signal(signal.SIGHUP)
        assert httpx.get(f"{serving.url}/ready", timeout=HANGS_S).status_code == 200
    body = {"model": "maitred-mini", "prompt": "one soup", "max_tokens": 5, "ignore_eos": True}
    assert httpx.post(f"{serving.url}/v1/completions", json=body, timeout=HANGS_S).status_code == 200
    assert flooded(serving.process, signal.SIGTERM) == 0
    assert assert_whole(tmp_path) == 5


def assert_whole(folder: Path) -> int:
    """The ledger, and how many tokens it knows of."""
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return int(db.execute("SELECT coalesce(sum(generated_tokens), 0) FROM request").fetchone()[0])
