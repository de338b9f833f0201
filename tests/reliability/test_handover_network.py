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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.conftest import ROOT, ServerProcess
from tests.kv.relay import Strike
from tests.reliability.test_handover_faults import MOMENTS, Apart, complete, workers_apart
from tests.reliability.test_hosts_faults import Hosts, hosts_apart
from tests.waiting import HANGS_S, until

INSIDE = ("unshare", "-rn", "sh", "-c", 'ip link set lo up mtu 1500 && exec "$@"', "sh")
# packets beyond the queue are lost, the others wait in it
NARROW = "tc qdisc add dev lo root tbf rate 200mbit burst 8kb limit 24kb"
WIDE = "tc qdisc del dev lo root"


def may(*words: str) -> bool:
    return (
        shutil.which(words[0]) is not None and subprocess.run(words, check=False, capture_output=True).returncode == 0
    )


@pytest.mark.soak
@pytest.mark.parametrize("between", ["workers", "hosts"])
def test_a_network_that_loses_delays_and_parts_costs_no_token(server: ServerProcess, tmp_path: Path, between: str):
    if not may(*INSIDE, "sh", "-c", f"{NARROW} && ip rule add ipproto tcp sport 1 blackhole"):
        pytest.skip("this user may not shape a network in a namespace of its own")
    process = subprocess.Popen(
        [*INSIDE, sys.executable, "-m", "tests.reliability.test_handover_network", between, str(tmp_path)],
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


def inside(between: str, folder: Path) -> None:
    lock = threading.Lock()

    def alone(body: dict[str, Any]) -> list[Any]:
        with lock:
            sys.stdout.write(json.dumps(body) + "\n")
            sys.stdout.flush()
            told: list[Any] = json.loads(sys.stdin.readline())
        return told

    shell("ip rule add pref 100 lookup local && ip rule del pref 0")
    apart = workers_apart(alone, pull_timeout_s=1.0) if between == "workers" else hosts_apart(folder, alone)
    with apart as made:
        loses_and_delays(made)
        parts(made)
        if isinstance(made, Hosts):
            is_out_of_reach(made)


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

    before = apart.dropped("silent")
    apart.struck("Parted", without(apart.relay.port), after=20_000).check()
    until(lambda: apart.dropped("silent") > before)
    reach(apart.relay.port)
    apart.settle()
    moved = 'handovers_total{outcome="moved"}'
    before = apart.figure(moved)
    for number in count():
        apart.ask(f"Together again {number}").check()
        apart.settle()
        if apart.figure(moved) > before:
            return


def is_out_of_reach(hosts: Hosts) -> None:
    """For the router, while they hand over to each other: first the one that answers, then the one that computes."""
    for role, moment in (("decode", "after"), ("prefill", "before")):
        port = urlsplit(hosts.hosts[role].url).port
        hosts.struck(f"Out of reach, {role}", without(port), **MOMENTS[moment]).check()
        reach(port)
        hosts.settle()


def without(port: int | None) -> Strike:
    """Bytes pass; from then on none from and to that port."""

    def strike(data: bytes) -> bytes:
        shell(" && ".join(f"ip rule add {rule}" for rule in rules(port)))
        return data

    return strike


def reach(port: int | None) -> None:
    """Again."""
    shell(" && ".join(f"ip rule del {rule}" for rule in rules(port)))


def rules(port: int | None) -> list[str]:
    return [f"pref 50 ipproto tcp {end} {port} blackhole" for end in ("sport", "dport")]


def shell(words: str) -> str:
    return subprocess.run(["sh", "-c", words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    inside(sys.argv[1], Path(sys.argv[2]))
