"""The page before a server that says what a test wrote down: whole deltas, one event each, held where it says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from maitred.api.ops.page import INDEX, SECURITY, page_file
from tests.waiting import HANGS_S, joined

Delta = dict[str, Any]


@dataclass
class Script:
    """Answer after answer, each the deltas of one stream and its `finish`; the last one is given again and again."""

    answers: list[list[Delta]]
    models: list[dict[str, str]] = field(default_factory=lambda: [{"id": "scripted"}])
    headers: dict[str, str] = field(default_factory=dict)  # of streams
    refuse: dict[int, str] = field(default_factory=dict)  # number of the request -> what it is refused with
    holds_after: int | None = None  # deltas; then nothing comes until `go` is set
    go: threading.Event = field(default_factory=threading.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def answer(self) -> list[Delta]:
        return self.answers[min(len(self.bodies), len(self.answers)) - 1]


def says(text: str) -> list[Delta]:
    return [{"content": text}]


def thinks(thoughts: str, text: str) -> list[Delta]:
    """Word by word, the thoughts under both of their names."""
    return [*({"reasoning_content": word, "reasoning": word} for word in thoughts.split(" ")), {"content": text}]


def calls(name: str, arguments: str, *, index: int = 0, call_id: str = "call-1") -> list[Delta]:
    """The name first, then the arguments character by character."""
    first = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
    rest = [{"index": index, "function": {"arguments": letter}} for letter in arguments]
    return [{"tool_calls": [piece]} for piece in (first, *rest)]


@contextmanager
def scripted(*answers: list[Delta], **fields: Any) -> Iterator[Script]:
    script = Script(list(answers), **fields)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"script": script}))
    script.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        script.go.set()
        server.shutdown()
        joined(thread)
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    script: Script

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._whole(200, {"data": self.script.models})
        elif self.path == "/version":
            self._whole(200, {"version": "0", "name": "scripted"})
        elif self.path == "/" or self.path.startswith("/static/"):
            file = page_file(self.path.removeprefix("/static/").strip("/") or INDEX)
            self._begin(200, file.content_type.decode(), {k.decode(): v.decode() for k, v in SECURITY})
            self.wfile.write(file.body)
        else:
            self._whole(404, {"error": {"message": "no engine to look into"}})

    def do_POST(self) -> None:
        script = self.script
        script.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if words := script.refuse.get(len(script.bodies)):
            self._whole(400, {"error": {"message": words}})
            return
        deltas = script.answer()
        self._begin(200, "text/event-stream", script.headers)
        for number, delta in enumerate(deltas):
            if number == script.holds_after:
                script.go.wait(HANGS_S)
            self._event({"choices": [{"delta": delta}]})
        finish = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
        self._event({"choices": [{"delta": {}, "finish_reason": finish}]})
        usage = {"completion_tokens": len(deltas), "completion_tokens_details": {"reasoning_tokens": 2}}
        self._event({"choices": [], "usage": usage})

    def _event(self, event: Any) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _whole(self, status: int, body: Any) -> None:
        self._begin(status, "application/json", {})
        self.wfile.write(json.dumps(body).encode())

    def _begin(self, status: int, content_type: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-type": content_type, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a test's output is for what failed."""
