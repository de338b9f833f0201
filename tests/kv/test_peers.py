"""KV pulled from another engine: the same text, and whatever is damaged, silent, unlike or late is computed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import count
from math import lcm

import pytest

from maitred.kv import fetching, giving, peers
from maitred.kv.host import KVHost
from maitred.kv.leases import Readable
from maitred.kv.tiers import FetchMeter
from maitred.kv.transports import ShmOutbox
from maitred.kv.wire import PieceHeader
from tests.kv.engines import PROMPT, Engine, engines
from tests.model.checkpoints import make_checkpoint
from tests.waiting import until

TORCH = {"executor": "torch", "device": "cpu"}


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    with engines(transport="auto") as one:
        yield one


@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "n": 4}])
def test_an_engine_goes_on_with_what_another_computed(make, transport, sampling):
    if transport == "nixl":
        pytest.importorskip("nixl_cu12", reason="nixl-cu12 is not installed")
    first, second = make(transport=transport), make(transport=transport, speculative="off")
    said = first.complete("a", **sampling)
    first.rest_in_thread()
    assert second.complete("b", PROMPT, first.peers.gives.addresses, **sampling) == said
    assert second.cached[0] == 192
    assert second.peers.counts.outcomes["moved"] == 1
    assert second.peers.counts.num_bytes[transport] > 12 * 16 * 1024
    turn = [*PROMPT, *said[0], 5]
    again = second.complete("c", turn, first.peers.gives.addresses, **sampling)
    assert second.cached[0] == 208
    alone = make()
    assert alone.complete("d", turn, **sampling) == again


def test_a_peer_that_is_gone_or_has_nothing_costs_no_token(make):
    first, second = make(), make()
    said = first.complete("a")
    addresses = first.peers.gives.addresses
    first.rest_in_thread()
    other = list(range(700, 900))
    assert second.complete("b", other, addresses) == make().complete("c", other)
    assert second.cached == [0]
    first.close()
    assert second.complete("d", PROMPT, addresses) == said
    assert second.cached == [0]
    assert second.peers.counts.outcomes == {"recomputed": 2}


def test_a_peer_gives_what_its_tier_alone_has(make):
    first, second = make(num_blocks=24, make_tier=partial(KVHost, 40)), make(num_blocks=24)
    tiers = first.tiers
    tiers._tiers[0].meter = FetchMeter(bandwidth=1e12, latency_s=0.0)  # quicker than computing
    said = first.complete("a")
    first.complete("other", list(range(700, 1000)))  # leaves no room for it
    first.rest_in_thread()
    assert second.complete("b", PROMPT, first.peers.gives.addresses) == said
    assert second.cached == [192]
    until(lambda: first.is_left_alone)


def test_heads_are_pulled_along(make):
    first, second = make(speculative="mtp"), make(speculative="mtp")
    said = first.complete("a")
    first.rest_in_thread()
    assert second.complete("b", PROMPT, first.peers.gives.addresses) == said
    assert second.cached == [192]


@pytest.fixture(params=[{}])
def pair(make, request):
    """One that computes "a", of which it has done nothing, and one that expects the KV, having asked for it."""
    first, second = make(**request.param), make(**request.param)
    first.add("a")
    second.expect("a", first.peers.gives.addresses)
    first.hear(lambda: first.peers.gives.follows_steps)
    return first, second


def test_kv_leaves_while_its_prompt_is_computed(pair, make):
    first, second = pair
    first.step()  # the first chunk
    until(lambda: first.num_pieces > 0)
    assert first.tokens["a"] == []
    first.run()
    second.hear(lambda: not second.core.has_work)
    assert second.complete("a", PROMPT, first.peers.gives.addresses) == [first.tokens["a"]]
    assert second.cached[0] == 192
    assert second.handovers == ["moved"]
    first.hear(lambda: first.is_left_alone)
    assert second.is_left_alone
    assert make().complete("a") == [first.tokens["a"]]


@pytest.mark.parametrize("pair", [{}, {"speculative": "mtp"}, {"tensor_parallel": 2}, TORCH], indirect=True, ids=str)
def test_layers_leave_before_the_step_that_computes_them_has_ended(pair, monkeypatch):
    first, second = pair
    layers_leave_in_step(first, monkeypatch)
    first.run()
    second.hear(lambda: not second.core.has_work)
    assert second.kv() == first.kv()
    assert second.complete("a", PROMPT, first.peers.gives.addresses) == [first.tokens["a"]]
    assert second.cached[0] == 192


def test_a_step_with_drafts_is_one_run_of_the_model(make, monkeypatch):
    """Those of a head are not counted, so they are not taken for the next run, whose layers would be read too early."""
    engine, seen = make(speculative="mtp"), set()
    execute = engine.core._executor.execute

    def execute_and_count(plan):
        before = engine._io.progress[0]
        output = execute(plan)
        seen.add((any(row.num_drafts for row in plan.rows), engine._io.progress[0] - before))
        return output

    monkeypatch.setattr(engine.core._executor, "execute", execute_and_count)
    turns = count()
    while not any(has_drafts for has_drafts, _ in seen):  # on a busy machine none may pay at first
        engine.complete(f"turn {next(turns)}", temperature=0.0)
    assert seen == {(False, 1), (True, 1)}


def layers_leave_in_step(engine, monkeypatch):
    """Of its next step, while it goes on."""
    execute = engine.core._executor.execute

    def execute_and_see(plan):
        output = execute(plan)
        until(lambda: engine.num_pieces > 0)  # nobody was told yet that the step is done
        return output

    monkeypatch.setattr(engine.core._executor, "execute", execute_and_see)
    engine.step()
    monkeypatch.undo()


@pytest.mark.parametrize("pair", [TORCH], indirect=True)
def test_a_layer_of_torch_leaves_before_the_next_one_is_written(pair, monkeypatch):
    first, second = pair
    pool = first.core._executor.pool
    write, seen = pool.write, []

    def write_when_all_before_has_left(layer, *written):
        until(lambda: first.num_pieces >= len(seen))
        seen.append(layer)
        write(layer, *written)

    monkeypatch.setattr(pool, "write", write_when_all_before_has_left)
    first.step()
    monkeypatch.undo()
    assert seen == [0, 1, 2, 3, 4]
    first.run()
    second.hear(lambda: not second.core.has_work)
    assert second.kv() == first.kv()


def test_who_goes_on_before_all_has_come_waits_along(pair):
    first, second = pair
    second.add("a", PROMPT, first.peers.gives.addresses)
    assert not second.core.can_step
    first.run()
    second.run()
    assert second.tokens["a"] == first.tokens["a"]
    assert second.peers.counts.outcomes == {"moved": 1}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_prompt_that_is_given_up_at_either_end_leaves_nothing_behind(pair, num_steps):
    first, second = pair
    for _ in range(num_steps):
        first.step()
    first.core.abort("a")
    first.hear(lambda: first.is_left_alone)
    second.hear(lambda: second.is_left_alone)
    first.add("b")
    second.expect("b", first.peers.gives.addresses)
    first.hear(lambda: first.peers.gives.follows_steps or num_steps > 2)
    second.core.abort("b~kv")
    second.hear(lambda: second.is_left_alone)
    first.run()
    first.hear(lambda: first.is_left_alone)


def test_a_pull_that_is_slower_than_computing_is_abandoned(make, monkeypatch):
    monkeypatch.setattr(peers, "PATIENCE_S", 0.05)
    monkeypatch.setattr(giving, "Readable", lambda num_blocks: Readable(0))  # and no more comes
    first, second = make(), make()
    said = first.complete("a")
    first.rest_in_thread()
    second.complete("measured", range(900, 1100))
    assert second.complete("b", PROMPT, first.peers.gives.addresses) == said
    assert second.cached == [0]
    assert second.peers.counts.outcomes["recomputed"] == 1
    assert second.peers.counts.dropped["slow"] == 12
    assert second.peers.tier_views()[0].hit_tokens == 0


def test_what_came_from_peers_is_seen_as_a_tier(make):
    first, second = make(), make()
    first.complete("a")
    first.rest_in_thread()
    second.complete("measured", range(900, 1100))
    second.complete("b", PROMPT, first.peers.gives.addresses)
    view = second.peers.tier_views()[0]
    assert (view.name, view.hit_tokens) == ("peer", 192)
    assert view.break_even_tokens is None or view.break_even_tokens > 0


# -- peers that damage what they give, or fall silent


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "n": 4}])
@pytest.mark.parametrize("place", [0, *(pytest.param(place, marks=pytest.mark.soak) for place in (0.5, 1))])
def test_a_bit_that_flips_in_shared_memory_costs_no_token(make, monkeypatch, sampling, place):
    first, second = make(transport="shm"), make(transport="shm")
    said = first.complete("a", **sampling)
    first.rest_in_thread()
    show = ShmOutbox.send

    def flipping(outbox: ShmOutbox, piece: PieceHeader, rows: memoryview) -> None:
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
    monkeypatch.setattr(peers, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(fetching, "NUM_PULLS", 1)
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


# -- layers of windows, and latent keys

CHAT = [(7 * i + i * i // 5) % 250 for i in range(120)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    @cache
    def folder(family: str) -> str:
        sizes = {"max_position_embeddings": 512, **({} if family == "deepseek_v3" else {"sliding_window": 24})}
        return str(make_checkpoint(family, tmp_path_factory.mktemp(family), seed=3, **sizes))

    return folder


@pytest.mark.parametrize(
    ("family", "takes", "model"),
    [
        *(("gemma3", 8, {}), ("gemma3", 16, {}), ("mistral", 8, {}), ("mistral", 12, {}), ("deepseek_v3", 16, {})),
        *(("gemma3", 8, TORCH), ("gemma3", 8, {"tensor_parallel": 2})),
    ],
)
def test_what_the_next_token_sees_is_pulled(make, folders, family: str, takes: int, model: dict[str, object]):
    """A prompt, whose source has just that, and a turn, of which it has the beginning."""
    always = {"model": folders(family), "num_blocks": 160, **model}
    first, second, plain = make(block_size=8, **always), make(block_size=takes, **always), make(**always)
    said = first.complete("a", CHAT)
    first.rest_in_thread()
    addresses = first.peers.gives.addresses
    assert second.complete("b", CHAT, addresses) == plain.complete("b", CHAT) == said
    unit = lcm(8, takes)
    assert (second.cached, second.handovers) == ([119 // unit * unit], ["moved"])
    third, turn = make(block_size=takes, **always), [*CHAT, *said[0], 5, 6, 7]
    assert third.complete("c", turn, addresses) == plain.complete("c", turn)
    assert third.cached == [143 // unit * unit]
    cells = third.peers.counts.num_bytes["shm"] // third._io.layout.layer_bytes
    if family != "deepseek_v3":
        assert cells < (1 if family == "mistral" else 2) * 143 // takes * (third._io.num_layers - 1)


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_windows_leave_while_their_prompt_is_computed(make, folders, family: str):
    always = {"model": folders(family), "num_blocks": 96, "block_size": 8}
    first, second = make(**always), make(**always)
    first.add("a", CHAT[:118])
    second.expect("a", first.peers.gives.addresses, CHAT[:118])
    first.hear(lambda: first.peers.gives.follows_steps)
    first.run()
    second.hear(lambda: not second.core.has_work)
    assert second.complete("a", CHAT[:118], first.peers.gives.addresses) == [first.tokens["a"]]
    assert (second.cached, second.handovers) == ([112], ["moved"])
    first.hear(lambda: first.is_left_alone)
    assert make(**always).complete("a", CHAT[:118]) == [first.tokens["a"]]


# -- engines that are not like this one


@pytest.fixture
def make_alike() -> Iterator[Callable[..., Engine]]:
    with engines(transport="tcp", max_model_len=400, dtype="float32", kv_dtype="float32") as one:
        yield one


@pytest.mark.parametrize(("gives", "takes", "num_cached"), [(16, 64, 192), (64, 16, 192), (32, 48, 192), (10, 16, 160)])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "n": 4}])
def test_blocks_of_another_size_are_converted(make_alike, gives, takes, num_cached, sampling):
    first, second = make_alike(block_size=gives), make_alike(block_size=takes)
    said = first.complete("a", **sampling)
    first.rest_in_thread()
    assert second.complete("b", PROMPT, first.peers.gives.addresses, **sampling) == said
    assert (second.cached[0], second.handovers[0]) == (num_cached, "moved")


def test_a_turn_is_found_under_the_names_that_the_source_gave_it(make_alike):
    first, second = make_alike(block_size=32), make_alike(block_size=16)
    said = first.complete("a")
    first.rest_in_thread()
    turn = [*PROMPT, *said[0], 5]
    assert second.complete("b", turn, first.peers.gives.addresses) == make_alike().complete("c", turn)
    assert second.cached == [192]
    second.complete("d", turn, first.peers.gives.addresses)
    assert second.handovers == ["local"]


def test_a_prompt_counts_as_moved_when_an_expecting_pull_brought_all_whole_blocks_of_the_source(make_alike):
    first, second = make_alike(block_size=64), make_alike(block_size=16)
    prompt = [*PROMPT, *range(500, 545)]
    said = first.complete("a", prompt)
    first.rest_in_thread()
    addresses = first.peers.gives.addresses
    second.expect("expected", addresses, prompt)
    second.hear(lambda: not second.core.has_work)
    for outcome, num_cached in (("moved", 192), ("local", 240)):
        assert second.complete(outcome, prompt, addresses) == said
        assert (second.cached, second.handovers) == ([num_cached], [outcome])


@pytest.mark.parametrize(("gives", "takes"), [("mtp", "off"), ("off", "mtp")])
def test_a_draft_head_at_one_end_is_left_out(make_alike, gives, takes):
    first, second = make_alike(speculative=gives), make_alike(speculative=takes)
    said = first.complete("a")
    first.rest_in_thread()
    assert second.complete("b", PROMPT, first.peers.gives.addresses) == said
    assert (second.cached, second.handovers) == ([192], ["moved"])


@pytest.mark.parametrize(
    ("takes", "sides"),
    [
        ({"kv_dtype": "bfloat16"}, "kv_dtype is 'float32' here, 'bfloat16' there"),
        pytest.param({"max_model_len": 256}, "context 400' here, ", marks=pytest.mark.soak),
        pytest.param({"dtype": "int8"}, "weight_dtype is 'float32' here, 'int8' there", marks=pytest.mark.soak),
        ({"revision": "abc"}, "' here, 'abc' there"),
        ({"executor": "torch", "device": "cpu"}, "executor is 'native' here, 'torch' there"),
    ],
)
def test_first_contact_refuses_what_is_unlike_and_names_both_sides(make_alike, caplog, takes, sides):
    first, second = make_alike(), make_alike(**takes)
    first.complete("a")
    first.rest_in_thread()
    for name, prompt in {"b": PROMPT, "c": PROMPT[::-1]}.items():
        assert second.complete(name, prompt, first.peers.gives.addresses) == make_alike(**takes).complete(name, prompt)
        assert second.handovers == ["recomputed"]
    (told,) = [each.getMessage() for each in caplog.records if each.name == "maitred.kv.peers"]
    assert sides in told
    assert second.peers.counts.dropped["unlike"] == 24
