"""`maitred fleet ...` against a router that answers what it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from maitred.cli.main import main
from maitred.config.bounds import Bounds
from maitred.core.errors import ConfigError

REPLICA = {
    "name": "replica-1",
    "url": "http://127.0.0.1:9001",
    "kind": "maitred",
    "state": "ready",
    "pid": 4711,
    "in_flight": 3,
    "slots": 64,
    "models": ["maitred-mini"],
    "tier": "",
    "prefix_keys": 12_345,
    "error": None,
}
FOREIGN = {**REPLICA, "name": "vllm", "kind": "foreign", "state": "ejected", "pid": None, "error": "reset\x1b[31m"}
FLEET = {"target": 2, "held": 5, "oldest_held_s": 1.25, "replicas": [REPLICA, FOREIGN]}


@dataclass
class FakeRouter:
    """Notes what it is asked."""

    status: int = 202
    answer: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    url: str = ""


@contextmanager
def routing(status: int = 202, answer: dict[str, Any] | None = None) -> Iterator[FakeRouter]:
    router = FakeRouter(status, answer if answer is not None else {"status": "accepted"})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def reply(self, body: Any) -> None:
            router.asked.append((self.path, body))
            content = json.dumps(router.answer).encode()
            self.send_response(router.status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        router.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield router
        finally:
            server.shutdown()


def test_the_status_is_a_table_or_the_routers_own_json(capsys):
    with routing(200, FLEET) as router:
        assert main(["fleet", "status", router.url]) == 0
        assert router.asked == [("/admin/fleet", None)]
    head, names, first, second, error = capsys.readouterr().out.splitlines()
    assert head == "1 ready of 2 wanted; 5 held, the oldest for 1.2 s"
    assert names.split()[:2] == ["NAME", "STATE"]
    assert first.split("   ")[0] == "replica-1"
    assert "3 of 64" in first
    assert "12,345" in first
    assert "ejected (foreign)" in second
    assert error == "vllm: reset[31m"

    with routing(200, FLEET) as router:
        assert main(["fleet", "status", "--url", router.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == FLEET


@pytest.mark.parametrize(
    ("words", "path", "body"),
    [
        (["drain", "replica-1"], "drain", {"name": "replica-1"}),
        (["restart"], "restart", {}),
        (["restart", "replica-1"], "restart", {"name": "replica-1"}),
        (["scale", "0:8"], "scale", {"min": 0, "max": 8}),
        (["scale", "4"], "scale", {"min": 4, "max": 4}),
    ],
)
def test_an_order_goes_to_the_router_and_begins_at_once(words: list[str], path: str, body: dict[str, Any], capsys):
    with routing() as router:
        assert main(["fleet", *words, "--url", router.url]) == 0
        assert router.asked == [(f"/admin/fleet/{path}", body)]
    assert capsys.readouterr().out.endswith("; maitred fleet status shows how far it is\n")


@pytest.mark.parametrize(("status", "hint"), [(404, "is it maitred route"), (403, "--api-key")])
def test_a_refusal_says_what_may_be_wrong(status: int, hint: str, capsys):
    with routing(status, {"error": {"message": "no"}}) as router:
        assert main(["fleet", "restart", "--url", router.url]) == 1
    assert hint in capsys.readouterr().err


def test_what_is_no_fleet_is_said_to_be_none(capsys):
    with routing(200, {"hello": 1}) as router:
        assert main(["fleet", "status", router.url]) == 1
    assert "in a form unknown here" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["", "x", "-1", "0", "5:2", "0:0", "1:2:3"])
def test_a_wrong_number_of_replicas_is_refused(word: str):
    with pytest.raises(ConfigError, match="is no number of replicas"):
        Bounds.parse(word)


def test_a_number_or_a_range_are_bounds():
    assert (Bounds.parse("3"), Bounds.parse("0:8")) == ((3, 3), (0, 8))


def test_top_shows_the_replicas_of_a_router_and_who_is_held(capsys):
    with routing(200, {**FLEET, "version": "1", "name": "maitred-route"}) as router:
        assert main(["top", router.url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "1 ready of 2 wanted; 5 held, the oldest for 1.2 s" in shown
    assert "3 of 64" in shown
    assert "ejected (foreign)" in shown
    assert "\x1b" not in shown
