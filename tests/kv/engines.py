"""Small engines with tiers and peers, stepped here or in a thread that rests in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from maitred.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from maitred.core.clock import ManualClock
from maitred.core.request import SamplingParams
from maitred.engine.build import build_parts
from maitred.engine.client import expecting
from maitred.engine.intake import make_requests
from maitred.engine.kv import layout_of
from maitred.engine.step_meter import StepMeter
from maitred.kv.fetching import KVThreads
from maitred.kv.giving import PeerConfig
from maitred.kv.keeping import KVTiers
from maitred.kv.peers import KVPeers
from maitred.kv.tiers import KVTier
from maitred.kv.wire import Identity
from maitred.scheduler.engine_core import EngineCore
from tests.engine.worlds import with_blocks
from tests.waiting import until

PROMPT = list(range(300, 500))


class Engine:
    """`transport` is for one that gives KV to peers and takes it; `make_tier` is given the bytes of a block."""

    def __init__(
        self,
        tier: Any = None,
        *,
        num_blocks: int = 64,
        speculative: str = "off",
        block_size: int = 16,
        transport: str = "",
        revision: str = "",
        make_tier: Callable[[int], KVTier] | None = None,
        **model: object,
    ) -> None:
        """`model` are fields of ModelConfig; another `revision` is told to peers alone."""
        chunk = {"max_num_batched_tokens": 64} if transport else {}
        config = EngineConfig(
            model=ModelConfig(num_threads=1, **model),
            cache=CacheConfig(block_size=block_size),
            scheduler=SchedulerConfig(max_num_seqs=4, **chunk),
            speculative=SpeculativeConfig(speculative=speculative),
        )
        self.parts = build_parts(with_blocks(config, num_blocks))
        built: Any = self.parts.core
        executor, io, clock, threads = built._executor, built._executor.block_io(), built.clock, KVThreads()
        self.woken = threading.Event()
        self.clock = ManualClock()  # of fetches from tiers
        self.tier = tier if tier is not None or make_tier is None else make_tier(io.bytes_per_block)
        listeners: list[Any] = []
        if self.tier is not None:
            sizes = {"block_size": block_size, "staging_bytes": 2**28}
            self.tiers = KVTiers(io, [self.tier], **sizes, threads=threads, clock=self.clock)
            listeners = [self.tiers]
        if transport:
            layout = layout_of(self.parts.facts, self.parts.spec, executor)
            if revision:
                agreed = msgspec.structs.replace(layout.agreed, revision=revision)
                layout = msgspec.structs.replace(layout, agreed=agreed)
            self._io = executor.layer_io(layout.of_layer())
            self.peers = KVPeers(
                self._io,
                PeerConfig(Identity(layout, None), transport),
                knows=self.tiers.knows if self.tier is not None else lambda key: False,
                block_size=block_size,
                threads=threads,
                clock=clock,
                is_one_run=executor.is_one_run,
            )
            listeners = [self.peers.gives, self.peers, *listeners]
        meters = [each for each in built.moments.listeners if isinstance(each, StepMeter)]
        self.core = EngineCore(built.scheduler, executor, clock, *meters, *listeners, wake=self.woken.set)
        self.tokens: dict[str, list[int]] = {}
        self._stopped = False
        self._resting: threading.Thread | None = None

    def specs(self, name: str, prompt: Sequence[int], **sampling: object):
        of_request = {each: sampling.pop(each) for each in ("cache_salt", "terms") if each in sampling}
        params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": 7} | sampling)
        now = self.core.clock.now()
        return make_requests(self.parts.model, prompt, params, request_id=name, now=now, **of_request)

    def add(
        self, name: str, prompt: Sequence[int] = PROMPT, kv_from: Sequence[str] = (), **sampling: object
    ) -> list[str]:
        specs = self.specs(name, prompt, **sampling)
        for spec in specs:
            self.tokens[spec.request_id] = []
            self.core.add(msgspec.structs.replace(spec, kv_from=tuple(kv_from)))
        return [spec.request_id for spec in specs]

    def expect(self, name: str, kv_from: Sequence[str], prompt: Sequence[int] = PROMPT) -> None:
        """The KV of a prompt that is computed there, for the request of that name."""
        (spec,) = self.specs(name, prompt)
        self.core.add(expecting(spec, tuple(kv_from)))

    def kv(self) -> bytes:
        """Of the prompt's whole blocks, in the model's own layers."""
        (spec,) = self.specs("look", PROMPT)
        blocks, layers = self.core.hold("look", spec.block_hashes[:12]), range(self.parts.spec.num_layers)
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

    def rest(self) -> None:
        """Until all is stored."""
        self.hear(lambda: self.tier is None or not self.tiers._stores)
        self.core.scheduler.check_invariants()

    def complete(self, name: str, *args: Any, **sampling: object) -> list[list[int]]:
        names = self.add(name, *args, **sampling)
        states = [self.core.scheduler.request(each) for each in names]
        self.run()
        self.cached = [state.num_cached_tokens for state in states]
        self.handovers = [state.handover for state in states]
        self.rest()
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
        if self.tier is not None:
            self.tiers._thread = self._resting  # the engine's from here on

    def close(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self.woken.set()
        if self._resting is not None:
            self._resting.join(20)
        self.core.close()


@contextmanager
def engines(**always: object) -> Iterator[Callable[..., Engine]]:
    """Makes engines, and closes them at the end."""
    made: list[Engine] = []

    def make(*args: object, **fields: object) -> Engine:
        made.append(Engine(*args, **{**always, **fields}))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            each.close()
