"""Many registered adapters with room for few: `python benchmarks/bench_lora.py --registered 1000 --room 50`.

The built-in model's engine under closed-loop traffic whose requests name adapters by Zipf's law, once with all of them
resident and once with room for `--room`, in turns. Adapters are made on the spot, of rank 8 on all linears. Output
tokens a second are compared, and processor seconds a token, which a busy machine spoils less; medians of the ratios.
Checked: what is resident, or on its way, is never over the bound, and neither is what the process grew by.

Foretold, before it was run: LRU of 50 with exponent 1 finds about half of the requests' adapters in memory. A miss is
2 to 4 ms of a thread (read, digest, pack), and a request of 64 tokens in a batch of 32 about 15 ms of steps, so 85 to
92% of all resident where one core does both, more where another core reads. Growth: the bound, an adapter that is being
read, twice, and under 16 MiB of an allocator's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

import numpy as np
import psutil
from safetensors.numpy import save_file

from maitred.config import CacheConfig, EngineConfig, LoraConfig, SpeculativeConfig
from maitred.core.clock import WallClock
from maitred.core.request import RequestSpec, SamplingParams
from maitred.engine.adapters import AdapterCache
from maitred.engine.build import EngineParts, build_parts
from maitred.engine.frames import Command, Report, Stepped, Stop, Submit
from maitred.engine.intake import make_requests
from maitred.engine.loop import EngineLoop
from maitred.engine.model_facts import AdapterFacts
from maitred.model.checkpoint import BUILTIN_FOLDER, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.spec import DecoderSpec
from maitred.model.weight_map import linear_sources

RANK = 8
SLACK_BYTES = 16 * 2**20  # of an allocator
KV_BYTES = 32 * 2**20  # soon in use as a whole, so that it does not grow later
NO_BOUND = 2**50
T = TypeVar("T")


class Took(NamedTuple):
    """Of a turn, per output token."""

    wall_s: float
    processor_s: float


class Clients:
    """A `Link` to the engine's loop: so many clients, each of which asks again when it was answered."""

    def __init__(self, specs: Iterator[RequestSpec], num_clients: int) -> None:
        self._specs, self._num_clients = specs, num_clients
        self._pending: deque[Command] = deque()
        self._something = threading.Event()
        self.round_number = self.num_tokens = 0
        for _ in range(num_clients):
            self._ask()

    def _ask(self) -> None:
        spec = next(self._specs, None)
        if spec is not None:
            self._pending.append(Submit(spec))
            return
        self._num_clients -= 1
        if not self._num_clients:
            self._pending.append(Stop())

    def commands(self, *, wait: bool) -> Iterator[Command]:
        if wait and not self._pending:
            self._something.wait()
        self._something.clear()
        while self._pending:
            yield self._pending.popleft()

    def wake(self) -> None:
        self._something.set()

    def send(self, report: Report) -> None:
        for progress in report.progress if isinstance(report, Stepped) else ():
            self.num_tokens += len(progress.new_token_ids)
            if progress.finish_reason is not None:
                assert not progress.error, progress.error
                self._ask()

    def rest(self) -> None:
        """Nobody listens."""


class AdaptedEngine:
    """An engine that knows all adapters, with room for some."""

    def __init__(self, folders: list[Path], max_bytes: int, options: argparse.Namespace) -> None:
        self._options = options
        config = EngineConfig(
            cache=CacheConfig(kv_cache_memory_bytes=KV_BYTES),
            lora=LoraConfig(lora_memory_bytes=max_bytes),
            speculative=SpeculativeConfig(speculative="off"),
        )
        self.parts: EngineParts = build_parts(config)
        assert self.parts.adapters is not None
        self.cache: AdapterCache = self.parts.adapters
        self.known = [self.cache.introduce(folder.name, str(folder)) for folder in folders]
        self.cache.know(self.known)
        self.max_bytes = max_bytes

    def load_all(self) -> None:
        something, told = threading.Event(), list[str]()
        self.cache.wake = something.set
        for number, facts in enumerate(self.known):
            self.cache.acquire(str(number), facts.key, told.append)
        while len(told) < len(self.known):
            something.wait()
            something.clear()
            self.cache.settle()
        assert not any(told), told
        for number in range(len(self.known)):
            self.cache.release(str(number))

    def serve(self, chosen: Sequence[AdapterFacts | None], seed: int) -> Took:
        model, random, options = self.parts.model, Random(seed), self._options
        sampling = SamplingParams(temperature=0.0, max_tokens=options.output, ignore_eos=True)
        specs = [
            make_requests(
                model,
                [random.randrange(5, 1000) for _ in range(options.prompt)],
                sampling,
                request_id=f"{seed}-{number}",
                now=0.0,
                adapter=adapter,
            )[0]
            for number, adapter in enumerate(chosen)
        ]
        clients = Clients(iter(specs), options.requests)
        began, computed = time.perf_counter(), time.process_time()
        EngineLoop(self.parts.core, clients, WallClock(), None, self.cache).run()
        assert clients.num_tokens == options.output * len(chosen)
        assert self.cache.num_bytes <= self.max_bytes
        return Took(
            (time.perf_counter() - began) / clients.num_tokens, (time.process_time() - computed) / clients.num_tokens
        )


def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as root:
        folders = write_adapters(Path(root), options.registered)
        every = AdaptedEngine(folders, NO_BOUND, options)
        size = max(facts.num_bytes for facts in every.known)
        few = AdaptedEngine(folders, options.room * size, options)
        few.serve([None] * 200, seed=-1)  # the cache of keys and values is touched
        before = psutil.Process().memory_info().rss
        few.serve(zipf(few.known, 400, options.exponent, seed=-2), seed=-2)
        grown = psutil.Process().memory_info().rss - before
        every.load_all()
        _compare(few, every, options)
    allowed = few.max_bytes + 2 * size + SLACK_BYTES
    room, grew, most = (num_bytes / 2**20 for num_bytes in (few.max_bytes, grown, allowed))
    print(f"room for {room:.1f} MiB; the process grew by {grew:.1f} MiB, allowed are {most:.1f}")
    assert grown <= allowed, "over the bound"
    for engine in (few, every):
        engine.parts.close()


def _compare(few: AdaptedEngine, every: AdaptedEngine, options: argparse.Namespace) -> None:
    ratios: list[Took] = []
    loads = few.cache.num_loads
    for turn in range(options.turns):
        chosen = zipf(range(options.registered), options.per_turn, options.exponent, seed=turn)
        took = []
        for engine in (every, few, every):
            took.append(engine.serve([engine.known[i] for i in chosen], seed=1000 * turn + len(took)))
        ratios.append(Took(*((took[0][i] + took[2][i]) / 2 / took[1][i] for i in range(2))))
    num_served = options.turns * options.per_turn
    print(
        f"{options.registered} adapters of rank {RANK}, room for {options.room}, Zipf {options.exponent:g}; "
        f"{options.requests} clients, {options.turns} turns of {options.per_turn} requests of {options.prompt} and "
        f"{options.output} tokens; {(few.cache.num_loads - loads) / num_served:.0%} of them loaded one"
    )
    for name, at in (("tokens a second", 0), ("tokens a processor second", 1)):
        values = [ratio[at] for ratio in ratios]
        median = statistics.median(values)
        print(f"{name:27}{median:.1%} of all resident ({min(values):.1%} to {max(values):.1%})")


def zipf(items: Sequence[T], count: int, exponent: float, seed: int) -> list[T]:
    """The first is the likeliest."""
    weights = list(accumulate((rank + 1) ** -exponent for rank in range(len(items))))
    return Random(seed).choices(items, cum_weights=weights, k=count)


def write_adapters(root: Path, count: int) -> list[Path]:
    """Folders as PEFT saves them, each with other numbers."""
    with open_checkpoint(str(BUILTIN_FOLDER)) as checkpoint:
        spec = spec_from_config(checkpoint.config)
    return [_write(root / f"adapter-{number}", spec, number) for number in range(count)]


def _write(folder: Path, spec: DecoderSpec, number: int) -> Path:
    random, tensors = np.random.default_rng(number), {}
    for name, source in linear_sources(spec).items():
        rows, width = source.shape
        for part, shape in (("A", (RANK, width)), ("B", (rows, RANK))):
            values = random.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
            tensors[f"base_model.model.model.{name}.lora_{part}.weight"] = values
    targets = sorted({name.rsplit(".", 1)[1] for name in linear_sources(spec)})
    keys = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(keys))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
