"""A read-only disk, as in many a container, under each place that is written; the weight cache has its own tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from maitred.storage.ledger import Ledger
from tests.cli.running import environment
from tests.waiting import HANGS_S

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
def test_what_was_asked_for_and_cannot_be_written_ends_the_server_with_a_remedy(
    maitred: Run, tmp_path: Path, flag: str, name: str, told: str
):
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
