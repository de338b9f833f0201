"""The HTTP edge alone: how many requests and streamed tokens a second it carries when the model costs nothing.

The server runs in a process of its own, with a replica that has the next token of every request ready at each turn of
the event loop; the client runs in another. Prints requests/s for whole answers and tokens/s for streams at
1, 8 and 64 connections, and the processor time that each took of the server, which other work on the machine changes
less.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop
from bench_route import cpu_s, load

from maitred.api.http.server import HttpServer
from maitred.api.serving import create_app
from maitred.config import ServerConfig
from maitred.core.replica import ReplicaState
from maitred.core.request import FinishReason, RequestSpec
from maitred.core.step import RequestProgress, RequestTiming
from maitred.engine.intake import ServedModel
from maitred.engine.replica import Replica
from maitred.text.chat_template import ChatTemplate
from maitred.text.parts import TextParts
from maitred.text.tokenizer import Tokenizer

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

    def submit(self, *samples: RequestSpec) -> list[InstantStream]:
        streams = [InstantStream(self, request) for request in samples]
        self._live.update((stream.request.request_id, stream) for stream in streams)
        if not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._step)
        return streams

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


def _run_server(ports: multiprocessing.Queue[int]) -> None:
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


@contextmanager
def bare_server() -> Iterator[tuple[int, psutil.Process]]:
    """The port and the process of a server whose model costs nothing."""
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    server = context.Process(target=_run_server, args=(ports,), daemon=True)
    server.start()
    try:
        yield ports.get(timeout=60), psutil.Process(server.pid)
    finally:
        server.terminate()
        server.join(15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=4000, help="whole ones of each row; of streams a sixteenth")
    parser.add_argument("--connections", type=int, nargs="*", default=[1, 8, 64])
    options = parser.parse_args()
    names = (("requests/s", 11), ("tokens/s", 10), ("CPU us/request", 15), ("CPU us/token", 13))
    print(f"{'answers':<14} {'connections':>11}", *(f"{name:>{width}}" for name, width in names))
    with bare_server() as (port, process):
        for stream, num_tokens in ((False, 1), (False, 16), (True, 256)):
            fields = {"model": "bench", "messages": MESSAGES, "max_tokens": num_tokens, "stream": stream}
            for connections in options.connections:
                num = max(connections, options.answers // (16 if stream else 1))
                uvloop.run(load(port, connections, connections, lambda number, f=fields: f))  # warm
                began, cpu = time.perf_counter(), cpu_s(process)
                uvloop.run(load(port, connections, num, lambda number, f=fields: f))
                took_s, spent_s = time.perf_counter() - began, cpu_s(process) - cpu
                rates = f"{num / took_s:>11,.0f} {num * num_tokens / took_s:>10,.0f}"
                costs = f"{spent_s / num * 1e6:>15,.0f} {spent_s / num / num_tokens * 1e6:>13,.1f}"
                kind = f"{'stream' if stream else 'whole'}, {num_tokens} tok"
                print(f"{kind:<14} {connections:>11} {rates} {costs}", flush=True)


if __name__ == "__main__":
    main()
