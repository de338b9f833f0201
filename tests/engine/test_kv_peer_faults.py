"""Peers that damage what they give, or fall silent: found, counted and computed."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from maitred.engine import kv_peers
from maitred.kv.transports import ShmOutbox
from maitred.kv.wire import Piece
from tests.engine.test_kv_peers import PROMPT, make

__all__ = ["make"]  # a fixture


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "n": 4}])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_a_bit_that_flips_in_shared_memory_costs_no_token(make, monkeypatch, sampling, place):
    first, second = make(transport="shm"), make(transport="shm")
    said = first.complete("a", **sampling)
    first.rest_in_thread()
    show = ShmOutbox.send

    def flipping(outbox: ShmOutbox, piece: Piece, rows: memoryview) -> None:
        rows[int(place * (len(rows) - 1))] ^= 16
        show(outbox, piece, rows)

    with monkeypatch.context() as damaging:
        damaging.setattr(ShmOutbox, "send", flipping)
        assert second.complete("b", PROMPT, first.peers.gives.addresses, **sampling) == said
    assert second.cached[0] == 0
    assert second.peers.counts.dropped == {"damaged": 12}
    other = list(range(700, 900))
    assert second.complete("c", other, first.peers.gives.addresses, **sampling) == make().complete(
        "d", other, **sampling
    )
    third = make(transport="shm")
    assert third.complete("e", PROMPT, first.peers.gives.addresses, **sampling) == said
    assert third.cached[0] == 192


def test_who_queued_behind_a_pull_from_a_silent_peer_does_not_wait_for_it_too(make, monkeypatch):
    monkeypatch.setattr(kv_peers, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(kv_peers, "NUM_LANES", 1)
    engine, alone = make(transport="tcp"), make()
    prompts = {str(number): [*range(300 + number, 500)] for number in range(4)}
    accepted: list[socket.socket] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                accepted.append(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        for name, prompt in prompts.items():
            engine.add(name, prompt, [address])
        engine.run()
        listener.shutdown(socket.SHUT_RDWR)
    for name, prompt in prompts.items():
        assert [engine.tokens[name]] == alone.complete(name, prompt)
    assert engine.peers.counts.outcomes == {"recomputed": 4}
    assert len(accepted) == 1
    for sock in accepted:
        sock.close()
