"""A small OpenAI server that answers at once and always alike; also a script: `python fake_server.py PORT AT_MOST`."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeServer:
    """Answers `word0 word1 ...`, one token each; every oddity of a real server is a field."""

    model: str = "fake"
    api_key: str | None = None
    first_token_s: float = 0.0
    together: int = 1  # nobody is answered before so many are in flight at once
    at_most: int | None = None  # so many are answered, the others never
    token_s: float = 0.0
    tokens_per_chunk: int = 1
    sends_usage: bool = True
    timing_ms: dict[str, float] | None = None  # in the usage of streams
    strict: bool = False  # refuses fields that OpenAI does not have
    text_of: Callable[[int], str] = lambda position: f"word{position} "
    deltas: Callable[[int], list[dict[str, Any]]] | None = None  # request number -> of its stream, in place of words
    refuse: Callable[[int], int | None] = lambda number: None  # request number -> status to refuse it with
    break_stream: bool = False  # ends streams without their end
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    max_in_flight: int = 0
    _in_flight: int = 0
    _gathered: asyncio.Event = field(default_factory=asyncio.Event)
    _numbers: Any = field(default_factory=itertools.count)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        if not self._knows(request):
            return _error(401, "wrong key")
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    def _knows(self, request: web.Request) -> bool:
        return self.api_key is None or request.headers.get("Authorization") == f"Bearer {self.api_key}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        refused = self.refuse(next(self._numbers))
        if not self._knows(request):
            return _error(401, "wrong key")
        if refused is not None:
            return _error(refused, f"refused with {refused}")
        if self.strict and "ignore_eos" in body:
            return _error(400, "Unrecognized request argument supplied: ignore_eos")
        if body.get("model") != self.model:
            return _error(404, f"no model {body.get('model')}")
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        try:
            if self.at_most is not None and len(self.bodies) > self.at_most:
                await asyncio.Event().wait()
            if self._in_flight >= self.together:
                self._gathered.set()
            await self._gathered.wait()
            await asyncio.sleep(self.first_token_s)
            chat = request.path.endswith("chat/completions")
            return await (self._stream(request, body, chat) if body.get("stream") else self._whole(body, chat))
        finally:
            self._in_flight -= 1

    async def _whole(self, body: dict[str, Any], chat: bool) -> web.Response:
        num_tokens = body.get("max_tokens", 4)
        text = "".join(self.text_of(position) for position in range(num_tokens))
        message = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": 0, **message, "finish_reason": "length"}
        return web.json_response({"id": "fake", "choices": [choice], "usage": _usage(body, num_tokens)})

    async def _stream(self, request: web.Request, body: dict[str, Any], chat: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.deltas is not None:
            return await self._script(response, self.deltas(len(self.bodies) - 1))
        num_tokens = body.get("max_tokens", 4)
        continuous = body.get("stream_options", {}).get("continuous_usage_stats") and self.sends_usage
        for start in range(0, num_tokens, self.tokens_per_chunk):
            end = min(start + self.tokens_per_chunk, num_tokens)
            text = "".join(self.text_of(position) for position in range(start, end))
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if end == num_tokens else None}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            await _event(response, {"choices": [choice]} | ({"usage": _usage(body, end)} if continuous else {}))
            await asyncio.sleep(self.token_s * (end - start))
            if self.break_stream:
                request.transport.close()
                return response
        if body.get("stream_options", {}).get("include_usage") and self.sends_usage:
            timing = {} if self.timing_ms is None else {"timing_ms": self.timing_ms}
            await _event(response, {"choices": [], "usage": _usage(body, num_tokens) | timing})
        await response.write(b": keep-alive\n\ndata: [DONE]\n\n")
        return response

    async def _script(self, response: web.StreamResponse, deltas: list[dict[str, Any]]) -> web.StreamResponse:
        for delta in deltas:
            await _event(response, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            if self.break_stream and delta is deltas[-1]:
                return response
        finish = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
        await _event(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def _usage(body: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    prompt = body.get("prompt") or body.get("messages") or ""
    return {"prompt_tokens": len(prompt), "completion_tokens": num_tokens, "total_tokens": len(prompt) + num_tokens}


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=status)


@asynccontextmanager
async def serving(server: FakeServer, port: int = 0) -> AsyncIterator[FakeServer]:
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def _main() -> None:
    async with serving(FakeServer(at_most=int(sys.argv[2])), int(sys.argv[1])) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
