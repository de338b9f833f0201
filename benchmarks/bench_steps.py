"""Steps of the native executor: where their time goes, and what adapters cost.

    python benchmarks/bench_steps.py [MODEL] [--dtype int8] [--requests 1 8 32] [--prefill 512]          # a profile
    python benchmarks/bench_steps.py [MODEL] --adapters [--requests 32] [--threads 1]

The profile prints, for a prefill and for decode steps of so many requests around a context, the median step, the time
in the native call and outside of it (batch, sampling, reports), and the share of each kind of operation, of linears
and attention with the bytes of packed weights and of KV a second. Prompts are random and no prefix is shared.

`--adapters` decodes with every request under an adapter of its own, all under one, and under none, in turns of a few
steps each, since what else the machine does changes within seconds; each turn is held against the turns of none beside
it, and what the bytes that a step reads would allow stands beside. With one thread, processor time is counted, so that
a busy machine does not spoil the figures. Without MODEL, random weights of Qwen3-0.6B's shape.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from harness import make_checkpoint

from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.core.request import RequestSpec, SamplingParams
from maitred.core.step import NewRequest, ScheduledRow, SchedulerOutput
from maitred.engine.memory import usable_cores
from maitred.executor.native_plan import plan_native_executor
from maitred.model.adapters import Adapter, LowRank
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.packed import packed_bytes
from maitred.model.program import Linear
from maitred.model.spec import DecoderSpec
from maitred.model.weight_map import linear_sources

BLOCK_SIZE, ROOM = 16, 512  # positions behind the context


class Bench:
    """An executor, and requests that stand in it with some context each."""

    def __init__(self, model: str, options: argparse.Namespace) -> None:
        checkpoint = open_checkpoint(model)
        self.spec = spec_from_config(checkpoint.config)
        self.plan = plan_native_executor(
            ModelConfig(
                dtype=options.dtype,
                kv_dtype=options.kv_dtype,
                num_threads=options.threads,
                tensor_parallel=options.ranks,
                weight_cache="off",
                bind_threads="on",
            ),
            checkpoint,
            self.spec,
            cache=CacheConfig(block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_batched_tokens=512),
            num_threads=usable_cores(),
        )
        self.blocks_each = -(-(max([options.context, *options.prefill]) + ROOM) // BLOCK_SIZE)
        self.executor = self.plan.build(
            num_blocks=self.blocks_each * max([1, *options.requests]), max_model_len=self.blocks_each * BLOCK_SIZE
        )
        self.native_s, self._random, self._step = 0.0, Random(0), 0
        self._clock = time.process_time if self.plan.num_threads == 1 else time.perf_counter
        self._run, self.executor.runner.run = self.executor.runner.run, self._timed  # type: ignore[method-assign]

    def _timed(self, *args: Any) -> Any:
        began = self._clock()
        logits = self._run(*args)
        self.native_s = self._clock() - began
        return logits

    def new_request(self, name: str, length: int, adapter: str = "") -> NewRequest:
        spec = RequestSpec(
            request_id=name,
            arrived_at=0.0,
            num_prompt_tokens=length,
            max_tokens=ROOM,
            prompt_token_ids=[self._random.randrange(self.spec.vocab_size) for _ in range(length)],
            sampling=SamplingParams(temperature=0.0, max_tokens=ROOM),
            adapter=adapter,
        )
        return NewRequest(request_id=name, spec=spec)

    def row(self, index: int, name: str, first: int, end: int, samples: bool = True, since: int | None = None) -> Any:
        """Positions [first, end), with the blocks that positions from `since` (else `first`) on need first."""
        have, need = -(-(first if since is None else since) // BLOCK_SIZE), -(-end // BLOCK_SIZE)
        blocks = tuple(range(index * self.blocks_each + have, index * self.blocks_each + need))
        return ScheduledRow(name, first, end - first, samples, blocks)

    def execute(self, **plan: Any) -> float:
        self._step += 1
        began = self._clock()
        self.executor.execute(SchedulerOutput(step=self._step, **plan))
        return self._clock() - began

    def prefill(self, length: int) -> float:
        """Seconds of all chunks of 512."""
        new, took = (self.new_request("p", length),), 0.0
        for start in range(0, length, 512):
            end = min(start + 512, length)
            took += self.execute(rows=(self.row(0, "p", start, end, end == length),), new_requests=new)
            new = ()
        self.execute(rows=(), forgotten_request_ids=("p",))
        return took

    def decode(self, adapters: list[str], context: int, num_steps: int) -> tuple[list[float], list[float]]:
        """Seconds of each step but the first, and in its native call; a request each, over a cache of zeros."""
        names = [f"r{i}" for i in range(len(adapters))]
        new = tuple(self.new_request(name, context, adapter) for name, adapter in zip(names, adapters, strict=True))
        steps, natives = [], []
        for position in range(context - 1, context + num_steps):
            since = 0 if new else None
            rows = tuple(self.row(i, name, position, position + 1, since=since) for i, name in enumerate(names))
            steps.append(self.execute(rows=rows, new_requests=new))
            natives.append(self.native_s)
            new = ()
        self.execute(rows=(), forgotten_request_ids=tuple(names))
        return steps[1:], natives[1:]


# ---- a profile


def profile(bench: Bench, options: argparse.Namespace) -> None:
    bench.executor.runner.set_profiling(True)
    for length in options.prefill:
        best = min(bench.prefill(length) for _ in range(3))
        print(f"prefill {length}: {best * 1e3:.1f} ms, {length / best:,.0f} tokens/s (best of 3)")
        print_operations(bench)
    for number in options.requests:
        steps, natives = bench.decode([""] * number, options.context, options.steps)
        step, native = statistics.median(steps), statistics.median(natives)
        outside = statistics.median(s - n for s, n in zip(steps, natives, strict=True))
        print(
            f"decode {number} at {options.context}: {step * 1e3:.2f} ms (best {min(steps) * 1e3:.2f}), "
            f"{number / step:,.0f} tokens/s; native {native * 1e3:.2f} ms, outside {outside * 1e3:.3f} ms "
            f"({outside / step:.1%})"
        )
        print_operations(bench, number * (options.context + options.steps))


def print_operations(bench: Bench, num_cached: int = 0) -> None:
    """Of the last native call; `num_cached` tokens' keys and values were read by attention."""
    linear_bytes = {op.weight.name: packed_bytes(op.weight) for op in bench.plan.program.ops if isinstance(op, Linear)}
    linear_bytes["output"] = linear_bytes[next(reversed(linear_bytes))]
    times, sizes = defaultdict(float), defaultdict(int)
    for name, nanoseconds in bench.executor.runner.profile():
        kind = name.split(".")[-1]
        times[kind] += nanoseconds
        sizes[kind] += linear_bytes.get(name, 0)
    total = max(sum(times.values()), 1)
    for kind, nanoseconds in sorted(times.items(), key=lambda item: -item[1]):
        if kind == "attention":
            sizes[kind] = int(bench.plan.bytes_per_block / BLOCK_SIZE * num_cached)
        rate = f"{sizes[kind] / nanoseconds:7.1f} GB/s" if sizes[kind] else ""
        print(f"    {kind:18} {nanoseconds / 1e6:8.3f} ms {nanoseconds / total:6.1%} {rate}")


# ---- adapters


class Load(NamedTuple):
    """How requests are adapted: `count` adapters of that rank on those linears, dealt in turn."""

    name: str
    count: int
    rank: int = 0
    linears: tuple[str, ...] = ("proj",)

    def names(self, num_requests: int) -> list[str]:
        return [f"{self.name} {i % self.count}" if self.count else "" for i in range(num_requests)]


def adapters(bench: Bench, options: argparse.Namespace) -> None:
    num_requests, none = max(options.requests), Load("none", 0)
    loads = [
        Load("one, rank 16", 1, 16),
        Load(f"{num_requests}, rank 16", num_requests, 16),
        Load(f"{num_requests}, rank 8 on q, v", num_requests, 8, ("q_proj", "v_proj")),
    ]
    num_bytes = {"": 0}
    assert bench.executor.adapters is not None
    for load in loads:
        adapter = random_adapter(bench.spec, load)
        for name in sorted({*load.names(num_requests)}):  # alike, but each in memory of its own
            packed = bench.executor.adapters.pack(adapter)
            bench.executor.adapters.load(name, packed)
            num_bytes[name] = packed.num_bytes
    cache = bench.plan.bytes_per_block / BLOCK_SIZE * options.context * num_requests

    def turn(load: Load) -> float:
        return statistics.median(bench.decode(load.names(num_requests), options.context, options.steps)[0])

    def read(load: Load) -> float:
        """Bytes of a step: weights, cache and adapters, each once."""
        return bench.plan.weights_bytes + cache + sum(num_bytes[name] for name in {*load.names(num_requests)})

    print(f"{num_requests} requests at {options.context}; medians of {options.turns} turns of {options.steps} steps")
    for load in loads:
        turns = [(turn(none), turn(load), turn(none)) for _ in range(options.turns)]
        shares = sorted((before + after) / 2 / own for before, own, after in turns)
        print(
            f"{load.name:24}{statistics.median(own for _, own, _ in turns) * 1e3:8.2f} ms  "
            f"{statistics.median(shares):.1%} of none ({shares[0]:.1%} to {shares[-1]:.1%}); their bytes allow "
            f"{read(none) / read(load):.1%}",
            flush=True,
        )


def random_adapter(spec: DecoderSpec, load: Load) -> Adapter:
    random, tensors = np.random.default_rng(0), {}
    for name, source in linear_sources(spec).items():
        if any(part in name for part in load.linears):
            rows, width = source.shape
            a = random.standard_normal((load.rank, width), dtype=np.float32) * np.float32(0.01)
            b = random.standard_normal((rows, load.rank), dtype=np.float32) * np.float32(0.01)
            tensors.setdefault(source.parameter, []).append(LowRank(source.row, a, b))
    return Adapter(load.rank, 0, "", {name: tuple(parts) for name, parts in tensors.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ranks", type=int, default=1, help="processes of so many threads each")
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--steps", type=int, default=16, help="in a turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--adapters", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="maitred-bench-") as folder:
        bench = Bench(options.model or str(make_checkpoint(Path(folder) / "model")), options)
        print(bench.plan.describe())
        (adapters if options.adapters else profile)(bench, options)


if __name__ == "__main__":
    main()
