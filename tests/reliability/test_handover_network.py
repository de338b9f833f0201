"""A live hand-over while the network loses, delays and parts: in a namespace of its own, whose loopback does that.

Run as a program, this is what happens in there; the answers of an engine that is alone come by stdin and go by stdout.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from itertools import count
from typing import Any

import pytest

from tests.conftest import ROOT, ServerProcess
from tests.reliability.test_handover_faults import Apart, complete, workers_apart
from tests.waiting import HANGS_S, until

INSIDE = ("unshare", "-rn", "sh", "-c", 'ip link set lo up mtu 1500 && exec "$@"', "sh")
# packets beyond the queue are lost, the others wait in it
NARROW = "tc qdisc add dev lo root tbf rate 200mbit burst 8kb limit 24kb"
WIDE = "tc qdisc del dev lo root"


def may(*words: str) -> bool:
    return (
        shutil.which(words[0]) is not None and subprocess.run(words, check=False, capture_output=True).returncode == 0
    )


def test_a_network_that_loses_delays_and_parts_costs_no_token(server: ServerProcess):
    if not may(*INSIDE, "sh", "-c", f"{NARROW} && ip rule add ipproto tcp sport 1 blackhole"):
        pytest.skip("this user may not shape a network in a namespace of its own")
    process = subprocess.Popen(
        [*INSIDE, sys.executable, "-m", "tests.reliability.test_handover_network"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    watchdog = threading.Timer(HANGS_S, process.kill)
    watchdog.start()
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            process.stdin.write(json.dumps(complete(server, json.loads(line))) + "\n")
            process.stdin.flush()
    watchdog.cancel()
    assert process.returncode == 0


def inside() -> None:
    lock = threading.Lock()

    def alone(body: dict[str, Any]) -> list[Any]:
        with lock:
            sys.stdout.write(json.dumps(body) + "\n")
            sys.stdout.flush()
            told: list[Any] = json.loads(sys.stdin.readline())
        return told

    with workers_apart(alone, pull_timeout_s=1.0) as apart:
        loses_and_delays(apart)
        parts(apart)


def loses_and_delays(apart: Apart) -> None:
    shell(NARROW)
    for number in count():
        apart.ask(f"Loss and delay {number}").check()
        if lost():
            break
    shell(WIDE)
    apart.settle()


def lost() -> int:
    """Packets."""
    return int(shell("tc -s qdisc show dev lo").partition("dropped ")[2].split(",")[0])


def parts(apart: Apart) -> None:
    """Amid a transfer, and what comes later is computed until the peer is there again."""

    def part(data: bytes) -> bytes:
        shell("ip rule add pref 100 lookup local && ip rule del pref 0 && " + " && ".join(cuts))
        return data

    cuts = [f"ip rule add pref 50 ipproto tcp {end} {apart.relay.port} blackhole" for end in ("sport", "dport")]
    before = apart.dropped("silent")
    apart.struck("Parted", part, after=20_000).check()
    until(lambda: apart.dropped("silent") > before)
    shell(" && ".join(cuts).replace("add", "del"))
    apart.settle()
    moved = 'handovers_total{outcome="moved"}'
    before = apart.figure(moved)
    for number in count():
        apart.ask(f"Together again {number}").check()
        apart.settle()
        if apart.figure(moved) > before:
            return


def shell(words: str) -> str:
    return subprocess.run(["sh", "-c", words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    inside()
