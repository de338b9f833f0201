"""KV pulled from another engine: the same text, and whatever goes wrong is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import msgspec
import pytest

from maitred.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from maitred.core.request import SamplingParams
from maitred.engine import kv_giving, kv_peers
from maitred.engine.build import build_parts, layout_of
from maitred.engine.client import expecting
from maitred.engine.intake import make_requests
from maitred.engine.kv_giving import PeerConfig
from maitred.engine.kv_peers import KVPeers
from maitred.engine.kv_tiers import KVTiers
from maitred.engine.step_meter import StepMeter
from maitred.kv.host import KVHost
from maitred.kv.leases import Readable
from maitred.kv.tiers import FetchMeter
from maitred.kv.wire import Identity
from maitred.scheduler.engine_core import EngineCore
from tests.engine.worlds import with_blocks
from tests.waiting import until

PROMPT = list(range(300, 500))
TORCH = {"executor": "torch", "device": "cpu"}


class Engine:
    """A small native engine that gives and takes KV, stepped here or in a thread that rests in between."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        speculative: str = "off",
        transport: str = "auto",
        block_size: int = 16,
        revision: str = "",
        host_blocks: int = 0,
        **model: object,
    ) -> None:
        """`model` are fields of ModelConfig; another `revision` is told to peers alone."""
        config = EngineConfig(
            model=ModelConfig(num_threads=1, **model),
            cache=CacheConfig(block_size=block_size),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
            speculative=SpeculativeConfig(speculative=speculative),
        )
        self.parts = build_parts(with_blocks(config, num_blocks))
        built, executor = self.parts.core, self.parts.core._executor
        self.woken = threading.Event()
        layout = layout_of(self.parts.facts, self.parts.spec, executor)
        if revision:
            layout = msgspec.structs.replace(layout, agreed=msgspec.structs.replace(layout.agreed, revision=revision))
        peers = PeerConfig(Identity(layout, None), transport)
        self._io = io = executor.layer_io(layout.of_layer())
        clock, is_one_run, bytes_ = built.clock, executor.is_one_run, executor.block_io().bytes_per_block
        tiers = [KVHost(host_blocks, bytes_)] if host_blocks else []
        self.tiers = KVTiers(executor.block_io(), tiers, block_size=block_size, staging_bytes=2**28, clock=clock)
        self.peers = KVPeers(io, peers, tiers=self.tiers, block_size=block_size, clock=clock, is_one_run=is_one_run)
        meters = [each for each in built.moments.listeners if isinstance(each, StepMeter)]
        listeners = (self.peers.gives.growing, *meters, self.peers, self.tiers)
        self.core = EngineCore(built.scheduler, executor, clock, *listeners, wake=self.woken.set)
        self.tokens: dict[str, list[int]] = {}
        self._stopped = False
        self._resting: threading.Thread | None = None

    def add(self, name: str, prompt: Sequence[int] = PROMPT, kv_from: Sequence[str] = (), **sampling: object):
        params = SamplingParams(max_tokens=24, ignore_eos=True, seed=7, **sampling)
        specs = make_requests(self.parts.model, prompt, params, request_id=name, now=self.core.clock.now())
        for spec in specs:
            self.tokens[spec.request_id] = []
            self.core.add(msgspec.structs.replace(spec, kv_from=tuple(kv_from)))
        return [spec.request_id for spec in specs]

    def expect(self, name: str, kv_from: Sequence[str], prompt: Sequence[int] = PROMPT) -> None:
        """The KV of a prompt that is computed there, for the request of that name."""
        params = SamplingParams(max_tokens=24, ignore_eos=True, seed=7)
        (spec,) = make_requests(self.parts.model, prompt, params, request_id=name, now=self.core.clock.now())
        self.core.add(expecting(spec, tuple(kv_from)))

    def kv(self) -> bytes:
        """Of the prompt's whole blocks, in the model's own layers."""
        specs = make_requests(self.parts.model, PROMPT, SamplingParams(), request_id="look", now=0.0)
        blocks, layers = self.core.hold("look", specs[0].block_hashes[:12]), range(self.parts.spec.num_layers)
        rows = bytearray(len(layers) * len(blocks) * self._io.layout.layer_bytes)
        self._io.read(layers, blocks, memoryview(rows))
        self.core.release("look")
        assert len(blocks) == 12
        return bytes(rows)

    def hear(self, condition: Callable[[], object]) -> None:
        """Does what its threads ask for, without a step, until then."""
        until(lambda: (self.core.run_called(), condition())[1])

    @property
    def num_pieces(self) -> int:
        """That were sent to others."""
        return self.peers.gives.offers.counts["pieces"]

    @property
    def is_left_alone(self) -> bool:
        """Nothing is held, reserved or under way."""
        return not self.core.has_work and not self.core.scheduler._state.reservations

    def step(self) -> None:
        if not self.core.can_step:
            assert self.woken.wait(20)
        self.woken.clear()
        self.core.run_called()
        for told in self.core.step():
            self.tokens[told.request_id] += told.new_token_ids
        self.core.scheduler.check_invariants()

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def complete(self, name: str, *args: object, **sampling: object) -> list[list[int]]:
        names = self.add(name, *args, **sampling)
        states = [self.core.scheduler.request(each) for each in names]
        self.run()
        self.cached = [state.num_cached_tokens for state in states]
        self.handovers = [state.handover for state in states]
        return [self.tokens[each] for each in names]

    def rest_in_thread(self) -> None:
        """Answers those who ask for its KV."""

        def rest() -> None:
            while not self._stopped:
                self.woken.wait(20)
                self.woken.clear()
                self.core.run_called()

        self._resting = threading.Thread(target=rest, daemon=True)
        self._resting.start()

    def close(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self.peers.close()
        self.woken.set()
        if self._resting is not None:
            self._resting.join(20)
        self.parts.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def one(**fields: object) -> Engine:
        made.append(Engine(**fields))
        return made[-1]

    yield one
    for each in made:
        each.close()


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
    first, second = make(num_blocks=24, host_blocks=40), make(num_blocks=24)
    tiers = first.tiers
    tiers._tiers[0].meter = FetchMeter(bandwidth=1e12, latency_s=0.0)  # quicker than computing
    said = first.complete("a")
    first.hear(lambda: not tiers._stores)
    first.complete("other", list(range(700, 1000)))  # leaves no room for it
    first.hear(lambda: not tiers._stores)
    first.rest_in_thread()
    tiers._thread = first._resting  # the engine's from here on
    assert second.complete("b", PROMPT, first.peers.gives.addresses) == said
    assert second.cached == [192]
    until(lambda: first.is_left_alone)
    tiers.close()


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
    first.hear(lambda: first.peers.gives.growing.follows_steps)
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
    first.hear(lambda: first.peers.gives.growing.follows_steps or num_steps > 2)
    second.core.abort("b~kv")
    second.hear(lambda: second.is_left_alone)
    first.run()
    first.hear(lambda: first.is_left_alone)


def test_a_pull_that_is_slower_than_computing_is_abandoned(make, monkeypatch):
    monkeypatch.setattr(kv_peers, "PATIENCE_S", 0.05)
    monkeypatch.setattr(kv_giving, "Readable", lambda num_blocks: Readable(0))  # and no more comes
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
