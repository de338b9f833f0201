"""How tests run the command line: in a process of its own, or in this one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import NamedTuple

from maitred.cli.main import main


class Result(NamedTuple):
    code: int
    out: str
    err: str


def environment(**extra: str) -> dict[str, str]:
    """This process's, without what would change a command."""
    kept = {name: value for name, value in os.environ.items() if name != "MAITRED_API_KEY"}
    return kept | {"COLUMNS": "100", "PYTHONUNBUFFERED": "1"} | extra


def maitred_process(*words: str, stdin: str = "", **extra: str) -> Result:
    done = subprocess.run(
        [sys.executable, "-m", "maitred", *words],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(**extra),
        timeout=120,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


async def maitred_thread(*words: str) -> int:
    """In this process, in a thread with an event loop of its own, so that a fake server can run beside it."""
    return await asyncio.to_thread(main, list(words))
