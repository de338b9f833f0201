"""A closed loop over HTTP against an OpenAI-compatible server: token ids in, a stream out.

The client runs on the cores that the server needs, so it is as little as can be: one thread, plain sockets, bodies made
beforehand, and of what arrives only the last token count is looked for. `client_cpu` is what it takes all the same, in
cores.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from peers.worker import Done, Prompt, loop_figures

RECEIVE_BYTES = 1 << 18
CARRY_BYTES = 64  # more than a key and its number, should they arrive in two pieces


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of server is asked for token counts in its stream, and the key before them."""

    extra: dict[str, object]
    count_key: bytes


USAGE = Dialect({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, b'"completion_tokens":')
LLAMA_SERVER = Dialect({"timings_per_token": True, "cache_prompt": False}, b'"predicted_n":')


@dataclass(slots=True)
class Exchange:
    """One request on its own connection."""

    socket: socket.socket
    sent: float
    times: list[float] = field(default_factory=list)
    carry: bytes = b""

    def receive(self, key: bytes) -> bool:
        """Note the tokens that came; returns whether the answer has ended."""
        data = self.socket.recv(RECEIVE_BYTES)
        now = time.perf_counter()
        text = self.carry + data
        if not self.times and b"HTTP/1.1 200" not in text:
            raise RuntimeError(f"the server answered {text[:400]!r}")
        at = text.rfind(key)
        if at >= 0:
            digits = text[at + len(key) : at + len(key) + 12].lstrip()
            number = digits[: len(digits) - len(digits.lstrip(b"0123456789"))]
            if number and len(number) < len(digits):  # what follows the number is there too
                self.times += [now] * (int(number) - len(self.times))
        self.carry = text[-CARRY_BYTES:] if self.times else text
        return not data or b"[DONE]" in text


def run_http_loop(
    port: int, model: str, prompts: Sequence[Prompt], clients: int, num_tokens: int, dialect: Dialect = USAGE
) -> dict[str, float]:
    """Every prompt once, `clients` of them in flight; the figures of `run_closed_loop` and the client's own load.

    Raises RuntimeError when an answer is an error or not whole.
    """
    waiting = [_message(model, prompt, num_tokens, dialect) for prompt in prompts]
    done: list[Done] = []
    with selectors.DefaultSelector() as ready:
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(min(clients, len(waiting))):
            _send(ready, port, waiting.pop())
        while ready.get_map():
            for key, _ in ready.select():
                exchange: Exchange = key.data
                if exchange.receive(dialect.count_key):
                    ready.unregister(exchange.socket)
                    exchange.socket.close()
                    done.append((exchange.sent, _whole(exchange.times, num_tokens)))
                    if waiting:
                        _send(ready, port, waiting.pop())
        took, busy = time.perf_counter() - began, time.process_time() - busy
    return {**loop_figures(done, clients, took), "client_cpu": busy / took}


def _message(model: str, prompt: Prompt, num_tokens: int, dialect: Dialect) -> bytes:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **dialect.extra,
    }
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def _send(ready: selectors.BaseSelector, port: int, message: bytes) -> None:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent = time.perf_counter()
    connection.sendall(message)
    ready.register(connection, selectors.EVENT_READ, Exchange(connection, sent))


def _whole(times: list[float], num_tokens: int) -> list[float]:
    if len(times) != num_tokens:
        raise RuntimeError(f"asked for {num_tokens} tokens, got {len(times)}")
    return times
