"""`maitred serve` whose engines pull KV over tcp through a relay (`tests/kv/relay.py`), and soon notice silence.

`python -m tests.reliability.faulty_server RELAY_PORT PULL_TIMEOUT_S serve ...`; with `engine` for `serve`, an engine.
"""

from __future__ import annotations

import socket
import sys

from maitred.cli.main import main as maitred
from maitred.engine import child, child_process, restarts, supervisor
from maitred.kv import giving, peers, puller

BEAT_S, SILENT_S = 0.05, 0.75


def command(relay_port: int, pull_timeout_s: float) -> tuple[str, ...]:
    """The words that start it, before a server's own."""
    return (sys.executable, "-m", "tests.reliability.faulty_server", str(relay_port), str(pull_timeout_s), "serve")


def serve(words: list[str]) -> int:
    engines = (sys.executable, "-m", "tests.reliability.faulty_server", *words[:2], "engine")
    child_process.in_child_process.__defaults__ = (engines,)
    supervisor.SILENT_S, restarts.FIRST_DELAY_S = SILENT_S, 0.01
    sys.argv = ["maitred", *words[2:]]
    return maitred()


def engine(relay_port: str, pull_timeout_s: str, words: list[str]) -> int:
    dial = puller.dial_tcp

    def through_the_relay(host: str, port: int, *, timeout_s: float) -> socket.socket:
        sock = dial("127.0.0.1", int(relay_port), timeout_s=timeout_s)
        sock.sendall(f"{host}:{port}\n".encode())
        return sock

    puller.dial_tcp = through_the_relay
    child.BEAT_S = BEAT_S
    peers.TIMEOUT_S = giving.TIMEOUT_S = float(pull_timeout_s)
    return child.main(words, child.build_from_config, child.import_engine)


if __name__ == "__main__":
    port, timeout_s, what, *more = sys.argv[1:]
    sys.exit(engine(port, timeout_s, more) if what == "engine" else serve(sys.argv[1:]))
