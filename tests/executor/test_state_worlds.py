"""The scheduler's random worlds on real executors: tokens are those of each request alone, without a prefix cache.

Prefix hits at snapshots, drafts right and wrong, preemption, chunks, aborts, samples; `make soak` runs a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from maitred.core.request import RequestState
from maitred.executor.state import DraftAsk, Proposer
from tests.executor.native_worlds import load_native, make_native
from tests.executor.test_native_identity import a_decoder
from tests.fakes import make_scheduler
from tests.model.checkpoints import make_checkpoint
from tests.scheduler.running import Run
from tests.scheduler.test_scheduler_properties import World, make_world


class Knowing(Proposer):
    """Drafts of what the request will say, and at some positions of something else."""

    name = "knowing"

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}  # prompt and output

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        return [self._drafts(ask.request.request_id, ask.request.tokens.size, ask.num_drafts) for ask in asks]

    def _drafts(self, request_id: str, done: int, count: int) -> list[int]:
        coming = enumerate(self.texts[request_id][done : done + count], done)
        return [token if position % 3 else token - 1 if token else 1 for position, token in coming]


@dataclass
class RealWorld(World):
    """A world whose executor computes, beside another for each request that nothing disturbs."""

    beside: Any = None

    def a_prompt(self, max_tokens: int) -> list[int]:
        return [token % self.executor.vocab_size for token in super().a_prompt(max_tokens)]

    def add(self, samples: int) -> None:
        before = len(self.requests)
        super().add(samples)
        for request in self.requests[before:]:
            text = [*request.spec.prompt_token_ids, *self.alone(request)]
            self.executor.proposer.texts[request.request_id] = text

    def alone(self, request: RequestState) -> list[int]:
        again = RequestState(request.spec)
        settings = {"enable_prefix_caching": False, "num_state_slots": 1, "max_num_seqs": 1}
        run = Run(make_scheduler(block_size=self.block_size, **settings), again, executor=self.beside)
        run.to_end()
        run.step()  # the executor forgets the request
        return again.output_token_ids

    def run(self, num_acts: int) -> None:
        for _ in range(num_acts):
            self.act()
        self.drain()
        self.step()
        for request in self.requests:
            told = [token for each in self.told.get(request.request_id, []) for token in each.new_token_ids]
            text = self.executor.proposer.texts[request.request_id][request.num_prompt_tokens :]
            assert told == (text[: len(told)] if request.stop_reason == "found outside" else text)


RunWorld = Callable[..., RealWorld]


@pytest.fixture(scope="module")
def run_world(tmp_path_factory: pytest.TempPathFactory) -> RunWorld:
    @cache
    def folder(family: str) -> Path:
        return make_checkpoint(family, tmp_path_factory.mktemp(family), seed=3)

    @cache
    def load(family: str, block_size: int, use: str) -> Any:
        sizes = {"num_blocks": 64, "block_size": block_size, "num_state_slots": 32, "num_drafts": 4}
        return (
            make_native(a_decoder(family), **sizes) if family == "recurrent" else load_native(folder(family), **sizes)
        )

    def run(seed: int, num_acts: int, family: str = "recurrent") -> RealWorld:
        planned = make_world(Random(seed), with_states=True)
        executor, beside = (load(family, planned.block_size, use) for use in ("shared", "alone"))
        executor.proposer = Knowing()
        world = RealWorld(
            planned.chooser, planned.scheduler, executor, planned.block_size, planned.largest, beside=beside
        )
        world.run(num_acts)
        return world

    return run


def test_tokens_are_those_of_each_request_alone(run_world: RunWorld) -> None:
    worlds = [run_world(seed, 1 + 7 * seed % 80) for seed in range(10)]
    stats = [world.scheduler.stats for world in worlds]
    assert min(len([s for s in stats if getattr(s, name)]) for name in ("num_preemptions", "num_state_evictions")) > 2
    assert sum(s.drafts.num_accepted for s in stats) > 20
    assert sum(s.num_prefix_hit_tokens for s in stats) > 100


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_tokens_are_those_of_each_request_alone_in_a_thousand_worlds(run_world: RunWorld) -> None:
    for seed in range(1000):
        run_world(seed, 20 + seed % 60, ("qwen3_next", "qwen3_5", "qwen3_5_moe")[seed % 3])
