"""What adapters cost a decode step: `python benchmarks/bench_lora.py [MODEL] [--requests 32] [--context 512]`.

Steps of the native executor with every request under an adapter of its own, all under one, and under none, in turns of
a few steps each, for what else the machine does changes within seconds. Each turn is held against the turn of none
beside it; medians of the ratios are printed, with what the bytes that a step reads would allow. With one thread,
processor time is counted, so that a busy machine does not spoil the figures. Without MODEL, random weights of
Qwen3-0.6B's shape. Caches hold zeros: nothing is prefilled.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench_start import make_checkpoint

from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.core.request import RequestSpec, SamplingParams
from maitred.core.step import NewRequest, ScheduledRow, SchedulerOutput
from maitred.engine.memory import usable_cores
from maitred.executor.native_plan import NativePlan, plan_native_executor
from maitred.model.adapters import Adapter, LowRank
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.spec import DecoderSpec
from maitred.model.weight_map import linear_sources

BLOCK_SIZE = 16
ROOM = 512  # positions behind the context


class Load(NamedTuple):
    """How the requests are adapted: `count` adapters of that rank on those linears, dealt in turn."""

    name: str
    count: int
    rank: int = 0
    linears: tuple[str, ...] = ("proj",)


class Bench:
    """An executor with all adapters resident, and requests that stand in it with some context each."""

    def __init__(self, plan: NativePlan, options: argparse.Namespace, loads: list[Load]) -> None:
        self.plan, self.options = plan, options
        self.blocks_each = -(-(options.context + ROOM) // BLOCK_SIZE)
        self.executor = plan.build(
            num_blocks=self.blocks_each * options.requests, max_model_len=self.blocks_each * BLOCK_SIZE
        )
        self.adapter_bytes: dict[str, int] = {"": 0}
        assert self.executor.adapters is not None
        for load in loads:
            adapter = random_adapter(plan.spec, load)
            for i in range(load.count):  # alike, but each in memory of its own
                packed = self.executor.adapters.pack(adapter)
                self.executor.adapters.load(f"{load.name} {i}", packed)
                self.adapter_bytes[f"{load.name} {i}"] = packed.num_bytes
        self._step = 0
        self._clock = time.process_time if plan.num_threads == 1 else time.perf_counter

    def names(self, load: Load) -> list[str]:
        return [f"{load.name} {i % load.count}" if load.count else "" for i in range(self.options.requests)]

    def turn(self, load: Load) -> float:
        """Median seconds of a step."""
        rows, requests = range(self.options.requests), []
        sampling = SamplingParams(temperature=0.0, max_tokens=ROOM)
        for i, adapter in zip(rows, self.names(load), strict=True):
            length = self.options.context
            spec = RequestSpec(
                request_id=f"r{i}",
                arrived_at=0.0,
                num_prompt_tokens=length,
                max_tokens=ROOM,
                prompt_token_ids=[(i * 977 + p) % self.plan.spec.vocab_size for p in range(length)],
                sampling=sampling,
                adapter=adapter,
            )
            requests.append(NewRequest(request_id=spec.request_id, spec=spec))
        times, new = [], tuple(requests)
        for step in range(self.options.steps):
            position = self.options.context - 1 + step
            at = [tuple(range(i * self.blocks_each, (i + 1) * self.blocks_each)) if not step else () for i in rows]
            times.append(self.execute(tuple(ScheduledRow(f"r{i}", position, 1, True, at[i]) for i in rows), new))
            new = ()
        self.execute((), (), tuple(f"r{i}" for i in rows))
        return statistics.median(times[1:])

    def execute(
        self, rows: tuple[ScheduledRow, ...], new: tuple[NewRequest, ...], forgotten: tuple[str, ...] = ()
    ) -> float:
        self._step += 1
        plan = SchedulerOutput(step=self._step, rows=rows, new_requests=new, forgotten_request_ids=forgotten)
        began = self._clock()
        self.executor.execute(plan)
        return self._clock() - began

    def bytes_read(self, load: Load) -> int:
        """By a step, of weights, cache and adapters, each once."""
        cache = self.plan.bytes_per_block / BLOCK_SIZE * self.options.context * self.options.requests
        return int(self.plan.weights_bytes + cache + sum(self.adapter_bytes[name] for name in set(self.names(load))))


def random_adapter(spec: DecoderSpec, load: Load) -> Adapter:
    random, tensors = np.random.default_rng(0), {}
    for name, source in linear_sources(spec).items():
        if any(part in name for part in load.linears):
            rows, width = source.shape
            a = random.standard_normal((load.rank, width), dtype=np.float32) * np.float32(0.01)
            b = random.standard_normal((rows, load.rank), dtype=np.float32) * np.float32(0.01)
            tensors.setdefault(source.parameter, []).append(LowRank(source.row, a, b))
    return Adapter(load.rank, 0, "", {name: tuple(parts) for name, parts in tensors.items()})


def make_plan(model: str, options: argparse.Namespace) -> NativePlan:
    checkpoint = open_checkpoint(model)
    return plan_native_executor(
        ModelConfig(dtype=options.dtype, num_threads=options.threads, weight_cache="off", bind_threads="on"),
        checkpoint,
        spec_from_config(checkpoint.config),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(),
        num_threads=usable_cores(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=9, help="in a turn")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    none, many = Load("none", 0), options.requests
    loads = [
        Load("one, rank 16", 1, 16),
        Load(f"{many}, rank 16", many, 16),
        Load(f"{many}, rank 8 on q, v", many, 8, ("q_proj", "v_proj")),
    ]
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(options.model or str(make_checkpoint(Path(folder) / "model")), options)
        bench = Bench(plan, options, loads)
    print(plan.describe())
    print(
        f"{options.requests} requests at {options.context}; medians of {options.turns} turns of {options.steps} steps"
    )
    ratios: dict[str, list[float]] = {load.name: [] for load in loads}
    taken: dict[str, list[float]] = {load.name: [] for load in (none, *loads)}
    for _ in range(options.turns):
        for load in loads:
            before, with_them, after = bench.turn(none), bench.turn(load), bench.turn(none)
            taken["none"] += [before, after]
            taken[load.name].append(with_them)
            ratios[load.name].append((before + after) / 2 / with_them)
    print(f"none{statistics.median(taken['none']) * 1e3:26.2f} ms")
    for load in loads:
        allowed = bench.bytes_read(none) / bench.bytes_read(load)
        print(
            f"{load.name:24}{statistics.median(taken[load.name]) * 1e3:6.2f} ms  "
            f"{statistics.median(ratios[load.name]):.1%} of none ({min(ratios[load.name]):.1%} to "
            f"{max(ratios[load.name]):.1%}); their bytes allow {allowed:.1%}"
        )


if __name__ == "__main__":
    main()
