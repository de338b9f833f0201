"""What many tests share: the built-in model as an LLM, and a real server in a process of its own."""

from __future__ import annotations

import compileall
import contextlib
import functools
import gc
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import hypothesis
import pytest
from _pytest.assertion import rewrite

from maitred.model.checkpoint import BUILTIN_FOLDER
from tests import ROOT
from tests.waiting import HANGS_S

# What names no model, here or in a process that a test starts, takes the small one, also where others are installed.
os.environ["MAITRED_MODEL"] = "maitred-mini"

# What a process here imports is compiled once. Those that tests start only read that: some may write no more than a
# thousand bytes to a file, and Python would keep a module cut off there.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.dont_write_bytecode = False

# BLAS's threads wait spinning, and beside another process of tests they do little else.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# PyTorch's threads spin for each other where several processes share the processors.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# In CI few examples and the same every time, so that a red run is the change's doing; elsewhere new ones each time.
# Neither minds a machine that is slow to make examples.
SLOW = (hypothesis.HealthCheck.too_slow,)
hypothesis.settings.register_profile(
    "ci", max_examples=25, derandomize=True, deadline=None, print_blob=True, suppress_health_check=SLOW
)
hypothesis.settings.register_profile("here", deadline=None, print_blob=True, suppress_health_check=SLOW)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")

# A server that answers late is still right: the client's own five seconds are the machine's affair, not the test's.
for _wait in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _wait, HANGS_S)

# A client reads the system's certificates anew, which takes thirty times as long as to ask a server here something.
httpx._transports.default.create_ssl_context = functools.cache(httpx._config.create_ssl_context)

# A shell's background job ignores Ctrl-C, and so would every command that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

START_TIMEOUT_S = 200


def free_port() -> int:
    """One that the system gives to nobody by itself, so that it is free when a server comes to it, or comes back."""
    for port in random.sample(range(15_000, 32_000), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a thousand ports are in use")


def copied_model(folder: Path, **config: object) -> Path:
    """The built-in model in a folder of its own, whose config says something else: a longer context, say."""
    shutil.copytree(BUILTIN_FOLDER, folder, dirs_exist_ok=True)
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    return folder


@dataclass
class ServerProcess:
    """`maitred serve` in a child process, with what it printed so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    url: str = ""

    def read_until_listening(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"http://[\w.]+:\d+", line):
                self.url = found[0]
                break
        else:
            raise AssertionError("the server did not start:\n" + "".join(self.lines))
        threading.Thread(target=self.lines.extend, args=(self.process.stdout,), daemon=True).start()

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.terminate()
        return self.process.wait(timeout=120)


SERVE = (sys.executable, "-m", "maitred", "serve")


def start_server(*arguments: str, command: Sequence[str] = SERVE) -> ServerProcess:
    """Start `maitred serve` on a free port of the loopback interface and wait until it listens."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    server = ServerProcess(process)
    watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        server.read_until_listening()
    finally:
        watchdog.cancel()
    return server


def pytest_configure(config: pytest.Config) -> None:
    """Half of a server's start would be compiling maitred."""
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(ROOT / "src", quiet=2, workers=0)
        if getattr(config.option, "numprocesses", 0):
            rewrite_tests(config)


def rewrite_tests(config: pytest.Config) -> None:
    """As pytest does when it imports them; all of its processes, which begin at once, would do it to each file."""
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("tests/**/conftest.py")]

    def work(files: Sequence[Path]) -> None:
        for file in files:
            kept = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(file, kept) is None and rewrite.try_makedirs(kept.parent):
                source_hash, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, kept)

    num_processes, forking = os.cpu_count() or 1, multiprocessing.get_context("fork")
    processes = [forking.Process(target=work, args=(files[at::num_processes],)) for at in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def pytest_collection(session: pytest.Session) -> None:
    """What is collected stays to the end: looking through it for garbage, now or later, finds none."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def no_log_handler_is_left() -> Iterator[None]:
    """A command that a test calls sends the log to the stderr of that test, which ends with it."""
    root = logging.getLogger()
    level, before = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in before:
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """The built-in model, served with default flags."""
    running = start_server()
    yield running
    running.stop()
