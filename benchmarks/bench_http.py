"""The HTTP edge alone: how many requests and streamed tokens a second it carries when the model costs nothing.

The server runs in a process of its own, with a replica that has the next token of every request ready at each turn of
the event loop; the client (aiohttp) runs in another. Prints requests/s for whole answers and tokens/s for streams at
1, 8 and 64 connections, and the processor time that each took of the server, which other work on the machine changes
less.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import aiohttp
import psutil

from maitred.api.http.server import HttpServer
from maitred.api.serving import create_app
from maitred.config import ServerConfig
from maitred.core.replica import ReplicaState
from maitred.core.request import FinishReason, RequestSpec
from maitred.core.step import RequestProgress, RequestTiming
from maitred.engine.intake import ServedModel
from maitred.engine.replica import Replica
from maitred.text import ChatTemplate, TextParts, Tokenizer

BUILTIN = Path(__file__).resolve().parents[1] / "src/maitred/builtin/maitred-mini"
MESSAGES = [{"role": "user", "content": "I would like two soups and a tea, please."}]
TIMING = RequestTiming(queue_s=0.0, prefill_s=0.0, decode_s=0.0)


@dataclass(slots=True, eq=False)
class InstantStream:
    """One request's progress: a token for each step."""

    replica: InstantReplica
    request: RequestSpec
    items: deque[RequestProgress] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None
    num_tokens: int = 0

    def step(self) -> bool:
        """Put the next token; True when it was the last."""
        self.num_tokens += 1
        token = self.replica.tokens[self.num_tokens % len(self.replica.tokens)]
        last = self.num_tokens >= self.request.max_tokens
        self.items.append(
            RequestProgress(
                self.request.request_id,
                (token,),
                finish_reason=FinishReason.LENGTH if last else None,
                timing=TIMING if last else None,
            )
        )
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
        return last

    def __aiter__(self) -> AsyncIterator[RequestProgress]:
        return self

    async def __anext__(self) -> RequestProgress:
        while not self.items:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        return self.items.popleft()


class InstantReplica(Replica):
    """An engine whose steps take no time: each turn of the loop gives every request one token."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._live: dict[str, InstantStream] = {}
        self._stepping = False

    def submit(self, request: RequestSpec) -> InstantStream:
        stream = self._live[request.request_id] = InstantStream(self, request)
        if not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._step)
        return stream

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self._live.pop(request_id, None)

    def state(self) -> ReplicaState:
        return ReplicaState(num_running=len(self._live))

    def _step(self) -> None:
        for request_id in [request_id for request_id, stream in self._live.items() if stream.step()]:
            del self._live[request_id]
        self._stepping = bool(self._live)
        if self._live:
            asyncio.get_running_loop().call_soon(self._step)


def run_server(ports: multiprocessing.Queue[int]) -> None:
    tokenizer = Tokenizer.from_folder(BUILTIN)
    model = ServedModel(
        names=("bench",),
        text=TextParts(tokenizer, ChatTemplate.from_folder(BUILTIN)),
        max_model_len=4096,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=(),
    )
    replica = InstantReplica(tokenizer.encode("Welcome! What may I bring you? Our soup of the day is onion."))
    config = ServerConfig(port=0, log_level="warning")
    HttpServer(create_app(replica, model, config), config, on_open=lambda host, port: ports.put(port)).run()


async def ask(session: aiohttp.ClientSession, url: str, num_tokens: int, stream: bool) -> int:
    """Send one chat request; how many tokens came."""
    body = {"model": "bench", "messages": MESSAGES, "max_tokens": num_tokens, "stream": stream}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        if not stream:
            return int((await response.json())["usage"]["completion_tokens"])
        events = 0
        async for piece in response.content.iter_any():
            events += piece.count(b"data: ")
        return events - 3  # the role, the reason, [DONE]


class Rate(NamedTuple):
    """What one row measured."""

    requests: int
    tokens: int
    seconds: float
    cpu_s: float  # of the server

    def __str__(self) -> str:
        return (
            f"{self.requests / self.seconds:>11,.0f} {self.tokens / self.seconds:>10,.0f} "
            f"{self.cpu_s / self.requests * 1e6:>15,.0f} {self.cpu_s / self.tokens * 1e6:>13,.1f}"
        )


async def load(url: str, pid: int, *, connections: int, num_tokens: int, stream: bool, seconds: float) -> Rate:
    """So many connections, each asking again as soon as it is answered."""
    deadline = time.perf_counter() + seconds
    counts: list[int] = []

    async def ask_again_and_again() -> None:
        while time.perf_counter() < deadline:
            counts.append(await ask(session, url, num_tokens, stream))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await ask(session, url, num_tokens, stream)
        started_at, cpu_before = time.perf_counter(), cpu_seconds(pid)
        await asyncio.gather(*(ask_again_and_again() for _ in range(connections)))
        elapsed = time.perf_counter() - started_at
        cpu_s = cpu_seconds(pid) - cpu_before
    return Rate(len(counts), sum(counts), elapsed, cpu_s)


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    parser.add_argument("--connections", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    server = context.Process(target=run_server, args=(ports,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ports.get(timeout=60)}"
    names = (("requests/s", 11), ("tokens/s", 10), ("CPU us/request", 15), ("CPU us/token", 13))
    print(f"{'answers':<14} {'connections':>11}", *(f"{name:>{width}}" for name, width in names))
    try:
        for stream, num_tokens in ((False, 1), (False, 16), (True, options.tokens)):
            for connections in options.connections:
                kind = f"{'stream' if stream else 'whole'}, {num_tokens} tok"
                shape = {"connections": connections, "num_tokens": num_tokens, "stream": stream}
                rate = asyncio.run(load(url, server.pid, seconds=options.seconds, **shape))
                print(f"{kind:<14} {connections:>11} {rate}", flush=True)
    finally:
        server.terminate()
        server.join(15)


if __name__ == "__main__":
    main()
