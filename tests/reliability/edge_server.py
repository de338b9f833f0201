"""A server without a model, in a process of its own, to attack: its memory is its own, and so are its files.

`python -m tests.reliability.edge_server '{"log_level": "error"}'` prints its port when it listens. Answers are `ok`,
except those to the prompt `hold`, of which three tokens come, and to `flood`, which never end.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from maitred.api import serving
from maitred.api.http import server
from maitred.api.http.logs import configure_logging
from maitred.config import ServerConfig
from maitred.core.request import RequestSpec
from maitred.core.step import RequestProgress
from maitred.engine.limits import hand_over_quickly
from tests import ROOT
from tests.fakes_api import EOS, FakeReplica, make_model
from tests.waiting import HANGS_S

NUM_FLOOD_TOKENS = 20_000  # four megabytes as a stream
NUM_HELD_TOKENS = 3


def answer(request: RequestSpec) -> list[int]:
    prompt = bytes(request.prompt_token_ids)
    num_tokens = {b"hold": 2 * NUM_HELD_TOKENS, b"flood": NUM_FLOOD_TOKENS}.get(prompt)
    return [*b"ok", EOS] if num_tokens is None else [ord("x")] * num_tokens


class AttackedReplica(FakeReplica):
    """Keeps a note of who is to be held, and how many turns each had."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.num_turns: dict[asyncio.Event, int] = {}

    def submit(self, *samples: RequestSpec) -> list[AsyncIterator[RequestProgress]]:
        progress = super().submit(*samples)
        for request in samples:
            if bytes(request.prompt_token_ids) == b"hold":
                self.num_turns[self.live[request.request_id]] = 0
        return progress

    async def _turn(self, ended: asyncio.Event) -> None:
        await asyncio.sleep(0)
        if ended not in self.num_turns:
            return
        self.num_turns[ended] += 1
        if self.num_turns[ended] > NUM_HELD_TOKENS:
            await ended.wait()
            del self.num_turns[ended]


def main() -> None:
    config = ServerConfig(port=0, **json.loads(sys.argv[1]))
    replica = AttackedReplica(answer=answer)
    model = make_model(max_model_len=100_000)

    def say(host: str, port: int) -> None:
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()

    num_log_lines_dropped = configure_logging(config)
    hand_over_quickly()
    app = serving.create_app(replica, model, config)
    app.app.observer.metrics.num_log_lines_dropped = num_log_lines_dropped
    server.HttpServer(app, config, on_open=say).run()


@dataclass
class Attacked:
    """The server, from outside."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rss_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def in_flight(self) -> int:
        """Requests, without the one that asks."""
        page = httpx.get(f"{self.url}/metrics", timeout=HANGS_S).text
        return int(float(page.split("\nmaitred_http_requests_in_flight ")[1].split("\n")[0])) - 1

    def is_well(self) -> bool:
        body = {"model": "tiny", "prompt": "hi"}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=HANGS_S)
        return answer.status_code == 200 and answer.json()["choices"][0]["text"] == "ok"


@contextmanager
def attacked(stderr: int = subprocess.DEVNULL, **config: Any) -> Iterator[Attacked]:
    """The server, ended with the block, which fails unless the server ends well."""
    words = [sys.executable, "-m", "tests.reliability.edge_server", json.dumps({"log_level": "error", **config})]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            yield Attacked(process, int(process.stdout.readline()))
            process.terminate()
            assert process.wait(HANGS_S) == 0
        finally:
            process.kill()


if __name__ == "__main__":
    main()
