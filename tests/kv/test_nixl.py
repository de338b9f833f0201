"""NIXL as a transport, where it is installed: `pip install --no-deps nixl-cu12==1.5.1`."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from maitred.core.errors import ConfigError
from maitred.kv.puller import Pulled, Puller, connect
from maitred.kv.transports import Agent
from tests.kv import source_process
from tests.kv.worlds import LAYERS, STAGING, Pool, hold, identity, make_layout
from tests.waiting import joined, until

ROOT, ALL = Path(__file__).resolve().parents[2], source_process.COUNT


def test_without_nixl_one_line_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(ConfigError, match="pip install --no-deps nixl-cu12"):
        Agent()


@pytest.fixture(scope="module")
def agent() -> Agent:
    pytest.importorskip("nixl_cu12", reason="nixl-cu12 is not installed")
    return Agent()


@pytest.fixture
def peer(agent: Agent) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.kv.source_process", "nixl"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield process
        process.kill()


def meet(peer: subprocess.Popen[str], agent: Agent, *, timeout_s: float = 5.0) -> Puller:
    assert peer.stdout is not None
    address = peer.stdout.readline().split()[-1]
    return connect(address, identity(), staging_bytes=STAGING, timeout_s=timeout_s, agent=agent)


def start_pull(puller: Puller, pool: Pool) -> tuple[threading.Thread, list[Pulled]]:
    results: list[Pulled] = []
    thread = threading.Thread(target=lambda: results.append(puller.pull("prompt", LAYERS, range(ALL), hold(pool, ALL))))
    thread.start()
    return thread, results


def tell_more(peer: subprocess.Popen[str]) -> None:
    assert peer.stdin is not None
    peer.stdin.write("\n")
    peer.stdin.flush()


def check_verified(pool: Pool, count: int) -> None:
    there = Pool(make_layout(), seed=source_process.SEED)
    assert np.array_equal(pool.rows(range(4, 4 + count)), there.rows(source_process.blocks()[:count]))


def test_blocks_arrive_as_they_were_and_torch_stays_out(peer: subprocess.Popen[str], agent: Agent) -> None:
    pool, puller = Pool(make_layout()), meet(peer, agent)
    thread, results = start_pull(puller, pool)
    for _ in range(5):
        tell_more(peer)
    joined(thread)
    assert results[0].num_blocks == ALL
    check_verified(pool, ALL)
    puller.close()
    assert peer.stdout is not None
    tell_more(peer)
    assert peer.stdout.readline() == "torch: False\n"


def test_a_source_that_is_killed_leaves_what_was_verified(peer: subprocess.Popen[str], agent: Agent) -> None:
    pool, puller = Pool(make_layout()), meet(peer, agent, timeout_s=1.0)
    thread, results = start_pull(puller, pool)
    until(lambda: pool.writes)
    peer.kill()
    joined(thread)
    assert results[0].failure in ("cut", "silent")
    assert results[0].num_blocks == source_process.FIRST
    check_verified(pool, source_process.FIRST)
