"""What other work on the machine costs, and whether the engine finds the best number of threads by itself.

    python benchmarks/bench_busy_machine.py [--turns 7] [--seconds 3] [--requests 1] [--taken 0.9] [--core -1]

Engines of one model (random weights, 160 M parameters in int8), each in a process of its own and its threads bound as
under `maitred serve`: with 1, 2 ... threads as if asked for, and the default, which chooses. In a turn each decodes for
some seconds: first on the machine as it is, then with a process beside them that takes so much of one core (the last,
or --core). In the median of turns the default is to reach 0.97 of all threads as asked for on a quiet machine, and 0.9
of the best fixed number on the busy one. Takes three minutes on two cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_native_step import Bench, decode
from bench_start import QWEN3_06B, make_checkpoint

from maitred.engine.memory import usable_cores

CONFIG = QWEN3_06B | {"num_hidden_layers": 8, "vocab_size": 32_000}
CONTEXT, STEPS, CHUNK = 64, 64, 64
PERIOD_S = 0.02


def serve(link: Connection, num_requests: int, **options: Any) -> None:
    """An engine's process: seconds in, tokens a second out, of decoding steps alone."""
    formats = {"dtype": "int8", "kv_dtype": "auto", "lm_head_dtype": "auto", "group": 32, "weight_cache": "off"}
    lengths = {"context": CONTEXT, "prefill": [CONTEXT], "chunk": CHUNK}
    bench = Bench(argparse.Namespace(**formats, **lengths, **options), num_requests)
    link.send(None)
    while (seconds := link.recv()) is not None:
        began_at, took = time.perf_counter(), [0.0]
        while time.perf_counter() < began_at + seconds:
            took += decode(bench, num_requests, CONTEXT, STEPS, CHUNK)[0]
        link.send(num_requests * (len(took) - 1) / sum(took))


def take(share: float, cpu: int) -> None:
    """Uses that share of a core, by its own processor time, in periods of 20 ms, until it is ended."""
    os.sched_setaffinity(0, {cpu})
    while True:
        until = time.thread_time() + share * PERIOD_S
        while time.thread_time() < until:
            pass
        time.sleep((1 - share) * PERIOD_S)


@contextmanager
def other_work(share: float, cpu: int) -> Iterator[None]:
    process = multiprocessing.Process(target=take, args=(share, cpu), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def measure(links: dict[str, Connection], turns: int, seconds: float) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in links}
    for turn in range(turns + 1):
        for name, link in links.items():
            link.send(seconds)
            rate = link.recv()
            if turn > 0:  # in the first the default finds its number
                rates[name].append(rate)
    return rates


def report(title: str, rates: dict[str, list[float]], fixed: list[str], aim: float) -> None:
    """The default against the best of `fixed`, turn by turn."""
    print(title)
    for name, values in rates.items():
        print(f"  {name:10} {statistics.median(values):8.1f} tokens/s  ({min(values):.1f} to {max(values):.1f})")
    best = max(fixed, key=lambda name: statistics.median(rates[name]))
    ratios = sorted(own / other for own, other in zip(rates["default"], rates[best], strict=True))
    median = statistics.median(ratios)
    print(
        f"  default / {best}: {median:.3f} in the median ({ratios[0]:.2f} to {ratios[-1]:.2f}), aim {aim}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a checkpoint with more than 30 M parameters")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--taken", type=float, default=0.9)
    parser.add_argument("--core", type=int, default=-1)
    options = parser.parse_args()
    cores = usable_cores()
    if cores < 2:
        print("one core: there is nothing to choose")
        return
    multiprocessing.set_start_method("spawn")
    settings: dict[str, int | None] = {f"{n} threads": n for n in sorted({1, cores - 1, cores})} | {"default": None}
    links: dict[str, Connection] = {}
    with tempfile.TemporaryDirectory(prefix="maitred-bench-") as folder:
        model = options.model or str(make_checkpoint(Path(folder) / "model", CONFIG))
        for name, threads in settings.items():
            links[name], theirs = multiprocessing.Pipe()
            words = {"model": model, "threads": threads}
            multiprocessing.Process(target=serve, args=(theirs, options.requests), kwargs=words, daemon=True).start()
            theirs.close()
            links[name].recv()
    report("as it is", measure(links, options.turns, options.seconds), [f"{cores} threads"], 0.97)
    cpu = sorted(os.sched_getaffinity(0))[options.core]
    with other_work(options.taken, cpu):
        rates = measure(links, options.turns, options.seconds)
    report(f"{options.taken:.0%} of core {cpu} taken", rates, [name for name in links if name != "default"], 0.9)
    for link in links.values():
        link.send(None)


if __name__ == "__main__":
    main()
