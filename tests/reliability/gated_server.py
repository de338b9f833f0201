"""A server without a model, in a process of its own, whose answers wait for a word: SIGUSR1 lets them go on.

`python -m tests.reliability.gated_server PORT DRAIN_TIMEOUT_S` prints its port when it listens. Three tokens of each
answer come at once; the others wait, so that a test decides what is in flight when, and no clock does.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import httpx

from maitred.api import serving
from maitred.api.http import server
from maitred.config import ServerConfig
from tests import ROOT
from tests.fakes_api import FakeReplica, make_model, says
from tests.waiting import HANGS_S

ANSWER = "x" * 20
FREE_TOKENS = 3


class GatedReplica(FakeReplica):
    """Opened by SIGUSR1, for good."""

    gate_is_open = False

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.num_turns: Counter[asyncio.Event] = Counter()

    async def _turn(self, ended: asyncio.Event) -> None:
        self.num_turns[ended] += 1
        await asyncio.sleep(0)
        while self.num_turns[ended] > FREE_TOKENS and not self.gate_is_open and not ended.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def open(self) -> None:
        self.gate_is_open = True


def main() -> None:
    replica = GatedReplica(answer=says(ANSWER))
    if sys.argv[3:] == ["open"]:
        replica.open()
    signal.signal(signal.SIGUSR1, lambda number, frame: replica.open())
    config = ServerConfig(port=int(sys.argv[1]), drain_timeout_s=float(sys.argv[2]), log_level="error")
    app = serving.create_app(replica, make_model(), config)
    server.HttpServer(app, config, on_open=lambda host, port: say(str(port))).run()
    say("ended")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class GatedServer:
    """The process, as a test sees it."""

    def __init__(self, *, port: int = 0, drain_timeout_s: float = 600.0, is_open: bool = False) -> None:
        words = [str(port), str(drain_timeout_s), *(["open"] if is_open else [])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.gated_server", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def open(self) -> None:
        self.signal(signal.SIGUSR1)

    def status(self, path: str) -> int:
        """0 when nobody answers."""
        try:
            return httpx.get(self.url + path, timeout=HANGS_S).status_code
        except httpx.TransportError:
            return 0

    def end(self) -> tuple[int, str]:
        """Waits for it: the exit code, and what it printed last."""
        assert self.process.stdout is not None
        code = self.process.wait(HANGS_S)
        with self.process.stdout as stdout:
            return code, stdout.read()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.end()


if __name__ == "__main__":
    main()
