"""`maitred serve` whose engines pull KV over tcp through a relay (`tests/transfer/relay.py`), and soon notice silence.

`python -m tests.reliability.faulty_server RELAY_PORT serve ...`; with `engine` in place of `serve`, one of its engines.
"""

from __future__ import annotations

import socket
import sys

from maitred.cli.main import main as maitred
from maitred.engine import child, child_process, kv_peers, restarts, supervisor
from maitred.transfer import tcp

BEAT_S, SILENT_S, PULL_TIMEOUT_S = 0.05, 0.75, 4.0


def serve(relay_port: str) -> int:
    engines = (sys.executable, "-m", "tests.reliability.faulty_server", relay_port, "engine")
    child_process.in_child_process.__defaults__ = (engines,)
    supervisor.SILENT_S, restarts.FIRST_DELAY_S = SILENT_S, 0.01
    sys.argv = ["maitred", *sys.argv[2:]]
    return maitred()


def engine(relay_port: str, words: list[str]) -> int:
    dial = tcp.dial

    def through_the_relay(host: str, port: int, *, timeout_s: float) -> socket.socket:
        sock = dial("127.0.0.1", int(relay_port), timeout_s=timeout_s)
        sock.sendall(f"{host}:{port}\n".encode())
        return sock

    tcp.dial = through_the_relay
    child.BEAT_S, kv_peers.TIMEOUT_S = BEAT_S, PULL_TIMEOUT_S
    return child.main(words, child.build_from_config, child.import_engine)


if __name__ == "__main__":
    sys.exit(engine(sys.argv[1], sys.argv[3:]) if sys.argv[2] == "engine" else serve(sys.argv[1]))
