"""Ranks against threads: `--tensor-parallel N`, a thread each, beside one process of N threads.

    python benchmarks/bench_ranks.py [MODEL] [--ranks 2] [--dtype int8] [--requests 1 8 32] [--context 512] [--quick]

Both executors stand in one run and take turns of some steps, so that what else the machine does meets both; printed are
medians of the turns' mean steps and their ratio (threads / ranks: above 1, ranks are faster), with the lowest and the
highest of the turns. MODEL is random weights of Qwen3-0.6B's shape unless it is named. Then what a rank holds for
itself: pages that are in no other process, without the memory that ranks share, which the system counts as one's own
where nobody else has touched it. `--quick` takes less of everything, in half a minute, and tells less.

Foretold for two ranks: 0.97 at 1 and 8 requests, 0.95 at 32. Both forms meet about 200 times a step on the same words
of memory, and each reads half of the weights; ranks lack huge pages where the system has none for shared memory (0.6%
of a step of 8 at 512, 2.6% of attention's share at long contexts), rank 0 samples alone (0.6% at 32), and the step is
copied to the others once. A rank has half the weights and 30 MB of Python and library.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
from pathlib import Path

import psutil
from bench_native_step import Bench, prefill
from bench_start import make_checkpoint

from maitred.core.step import ScheduledRow

MB = 1e6
LEAST_RATIO = 0.90
MOST_OF_WEIGHTS, SPARE_BYTES = 0.55, 80 * MB  # of a rank of two, of its own
QUICK = {"requests": [1, 8], "context": 128, "turns": 3, "steps": 4}
SHARED_NAME = "/memfd:maitred-ranks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    quick = " ".join(f"--{name} {value}" for name, value in QUICK.items())
    parser.add_argument("--quick", action="store_true", help=f"as with {quick}")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    with tempfile.TemporaryDirectory(prefix="maitred-bench-") as folder:
        compare(options, options.model or str(make_checkpoint(Path(folder) / "model")))


def compare(options: argparse.Namespace, model: str) -> None:
    common = {"lm_head_dtype": "auto", "group": 32, "weight_cache": "off", "chunk": 512, "prefill": [options.context]}
    most, cpus = max([1, *options.requests]), os.sched_getaffinity(0)
    benches = []
    for ranks, threads in ((1, options.ranks), (options.ranks, 1)):
        os.sched_setaffinity(0, cpus)  # the first one has bound us
        settings = vars(options) | common | {"model": model, "ranks": ranks, "threads": threads}
        benches.append(Bench(argparse.Namespace(**settings), most))
    print(benches[0].plan.describe())
    print(benches[1].plan.describe())
    times = [[prefill_once(bench, options.context) for bench in benches] for _ in range(options.turns)]
    report(f"prefill of {options.context}", times)
    for num_requests in options.requests:
        for bench in benches:
            for index in range(num_requests):
                prefill(bench, index, f"r{index}", options.context, 512)
        times = []
        for turn in range(options.turns + 1):
            first = options.context + turn * options.steps
            times.append([mean_step(bench, num_requests, first, options.steps) for bench in benches])
        report(f"decode of {num_requests} at {options.context}", times[1:])
        for bench in benches:
            bench.execute(rows=(), forgotten_request_ids=tuple(f"r{i}" for i in range(num_requests)))
    report_memory(benches[1].plan.weights_bytes, options.ranks)
    for bench in benches:
        bench.executor.close()


def prefill_once(bench: Bench, length: int) -> float:
    took = prefill(bench, 0, "p", length, 512)
    bench.execute(rows=(), forgotten_request_ids=("p",))
    return took


def mean_step(bench: Bench, num_requests: int, first: int, num_steps: int) -> float:
    took = 0.0
    for position in range(first, first + num_steps):
        rows = tuple(
            ScheduledRow(f"r{i}", position, 1, True, bench.blocks_of(i, position, position + 1))
            for i in range(num_requests)
        )
        took += bench.execute(rows=rows)
    return took / num_steps


def report(what: str, times: list[list[float]]) -> None:
    threads, ranks = (statistics.median(turn[i] for turn in times) for i in range(2))
    ratios = sorted(turn[0] / turn[1] for turn in times)
    ratio = statistics.median(ratios)
    print(
        f"{what:22} threads {threads * 1e3:8.2f} ms   ranks {ranks * 1e3:8.2f} ms   ratio {ratio:.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}), {verdict(ratio >= LEAST_RATIO, f'at least {LEAST_RATIO:.2f}')}",
        flush=True,
    )


def verdict(holds: bool, bound: str) -> str:
    return f"{'within' if holds else 'NOT within'} the bound: {bound}"


def report_memory(weights_bytes: int, num_ranks: int) -> None:
    for child in psutil.Process().children():
        if "maitred.executor.rank_process" in child.cmdline():
            own, shared = private_bytes(child.pid)
            bound = MOST_OF_WEIGHTS * 2 / num_ranks * weights_bytes + SPARE_BYTES
            print(
                f"a rank's own memory     {own / MB:.0f} MB, where all weights are {weights_bytes / MB:.0f} MB, "
                f"{verdict(own <= bound, f'at most {bound / MB:.0f} MB')}; "
                f"shared memory that it alone has touched {shared / MB:.0f} MB"
            )


def private_bytes(pid: int) -> tuple[int, int]:
    """Of mappings but the shared memory, and of that."""
    own = shared = 0
    is_shared = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_shared = SHARED_NAME in line
        elif line.startswith(("Private_Clean:", "Private_Dirty:")):
            size = 1024 * int(line.split()[1])
            own, shared = (own, shared + size) if is_shared else (own + size, shared)
    return own, shared


if __name__ == "__main__":
    main()
