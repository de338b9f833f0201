"""Where a step of the native executor goes: each kind of operation, and what lies outside the native call.

    python benchmarks/bench_native_step.py MODEL [--dtype int8] [--kv-dtype auto] [--requests 1 8 32] [--prefill 512]

Prints, for a decode step of so many requests around a context and for a prefill chunk, the median step, the time in
the native call, the time outside it (batch, sampling, reports), and for each kind of operation its share, and for
linears the bytes of packed weights a second. Prompts are random and no prefix is shared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from random import Random
from typing import Any

from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.core.request import RequestSpec, SamplingParams
from maitred.core.step import NewRequest, ScheduledRow, SchedulerOutput
from maitred.engine.memory import usable_cores
from maitred.executor.native_plan import plan_native_executor
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.packed import packed_bytes
from maitred.model.program import Linear

BLOCK_SIZE = 16


class Bench:
    """An executor and requests that stand in it with some context each."""

    def __init__(self, options: argparse.Namespace, num_requests: int) -> None:
        checkpoint = open_checkpoint(options.model)
        self.spec = spec_from_config(checkpoint.config)
        self.plan = plan_native_executor(
            ModelConfig(
                dtype=options.dtype,
                kv_dtype=options.kv_dtype,
                lm_head_dtype=options.lm_head_dtype,
                num_threads=options.threads,
                tensor_parallel=options.ranks,
                weight_cache=options.weight_cache,
                bind_threads="on",
            ),
            checkpoint,
            self.spec,
            cache=CacheConfig(block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_batched_tokens=max(options.chunk, 64)),
            num_threads=usable_cores(),
        )
        self.blocks_each = -(-(max(options.context, *options.prefill) + 512) // BLOCK_SIZE)
        self.executor = self.plan.build(
            num_blocks=self.blocks_each * num_requests, max_model_len=self.blocks_each * BLOCK_SIZE
        )
        self.native_s = 0.0
        self._time_native()
        self._random = Random(0)
        self._step = 0

    def _time_native(self) -> None:
        run = self.executor.runner.run

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            logits = run(*args)
            self.native_s = time.perf_counter() - began
            return logits

        self.executor.runner.run = timed  # type: ignore[method-assign]

    def new_request(self, name: str, length: int) -> NewRequest:
        prompt = [self._random.randrange(self.spec.vocab_size) for _ in range(length)]
        sampling = SamplingParams(temperature=0.0, max_tokens=512)
        spec = RequestSpec(
            request_id=name,
            arrived_at=0.0,
            num_prompt_tokens=length,
            max_tokens=512,
            prompt_token_ids=prompt,
            sampling=sampling,
        )
        return NewRequest(request_id=name, spec=spec)

    def blocks_of(self, index: int, first: int, end: int) -> tuple[int, ...]:
        """Ids of the blocks that positions [first, end) of a request are the first to need."""
        have, need = -(-first // BLOCK_SIZE), -(-end // BLOCK_SIZE)
        return tuple(range(index * self.blocks_each + have, index * self.blocks_each + need))

    def execute(self, **plan: Any) -> float:
        self._step += 1
        began = time.perf_counter()
        self.executor.execute(SchedulerOutput(step=self._step, **plan))
        return time.perf_counter() - began


def prefill(bench: Bench, index: int, name: str, length: int, chunk: int) -> float:
    """Seconds of all chunks."""
    new, took = (bench.new_request(name, length),), 0.0
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        row = ScheduledRow(name, start, end - start, end == length, bench.blocks_of(index, start, end))
        took += bench.execute(rows=(row,), new_requests=new)
        new = ()
    return took


def decode(
    bench: Bench, num_requests: int, context: int, num_steps: int, chunk: int
) -> tuple[list[float], list[float]]:
    for index in range(num_requests):
        prefill(bench, index, f"r{index}", context, chunk)
    steps, natives = [], []
    for position in range(context, context + num_steps):
        rows = tuple(
            ScheduledRow(f"r{i}", position, 1, True, bench.blocks_of(i, position, position + 1))
            for i in range(num_requests)
        )
        steps.append(bench.execute(rows=rows))
        natives.append(bench.native_s)
    bench.execute(rows=(), forgotten_request_ids=tuple(f"r{i}" for i in range(num_requests)))
    return steps, natives


def print_profile(bench: Bench) -> None:
    """Of the last native call, where it was profiled."""
    if not any(op.nanoseconds for op in bench.executor.runner.profile()):
        return
    linear_bytes = {op.weight.name: packed_bytes(op.weight) for op in bench.plan.program.ops if isinstance(op, Linear)}
    head = next(reversed(linear_bytes))
    linear_bytes["output"] = linear_bytes[head]
    times, sizes = defaultdict(float), defaultdict(int)
    for name, nanoseconds in bench.executor.runner.profile():
        kind = name.split(".")[-1]
        times[kind] += nanoseconds
        sizes[kind] += linear_bytes.get(name, 0)
    total = max(sum(times.values()), 1)
    for kind, nanoseconds in sorted(times.items(), key=lambda item: -item[1]):
        rate = f"{sizes[kind] / nanoseconds:7.1f} GB/s" if sizes[kind] else ""
        print(f"    {kind:18} {nanoseconds / 1e6:8.3f} ms {nanoseconds / total:6.1%} {rate}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="maitred-mini")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--lm-head-dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ranks", type=int, default=1, help="processes of so many threads each")
    parser.add_argument("--weight-cache", default="off", help="auto to map packed weights from the disk")
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--no-profile", action="store_true")
    options = parser.parse_args()
    bench = Bench(options, max([1, *options.requests]))
    bench.executor.runner.set_profiling(not options.no_profile)
    print(bench.plan.describe())
    for length in options.prefill:
        name = f"p{length}"
        times = []
        for _ in range(3):
            times.append(prefill(bench, 0, name, length, options.chunk))
            bench.execute(rows=(), forgotten_request_ids=(name,))
        print(f"prefill {length}: {min(times) * 1e3:.1f} ms, {length / min(times):,.0f} tokens/s (best of 3)")
        print_profile(bench)
    for num_requests in options.requests:
        steps, natives = decode(bench, num_requests, options.context, options.steps, options.chunk)
        step, native = statistics.median(steps), statistics.median(natives)
        outside = statistics.median(s - n for s, n in zip(steps, natives, strict=True))
        print(
            f"decode {num_requests} at {options.context}: {step * 1e3:.2f} ms (best {min(steps) * 1e3:.2f}), "
            f"{num_requests / step:,.0f} tokens/s; native {native * 1e3:.2f} ms, outside {outside * 1e3:.3f} ms "
            f"({outside / step:.1%})"
        )
        print_profile(bench)


if __name__ == "__main__":
    main()
