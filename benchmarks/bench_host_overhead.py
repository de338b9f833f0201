"""Host overhead: the share of a step that is not spent in the native call (for PyTorch: not in the executor).

    python benchmarks/bench_host_overhead.py [--model ./Qwen3-0.6B --dtype int8 --context 512 --tokens 64]

Runs the engine loop as the engine's process does: with a decision log, and with what it tells encoded. Prints, for each
count of requests, ms a step in the native call, in the rest of the executor (batch, sampling, reports) and between two
calls of the executor (commands, scheduler, log, progress encoded), the share of the last two and of the last alone,
which is what a plan made during the step before could hide, and tokens a second. Times are medians over steps; on a
machine that is busy all the time `--quantile 0.1` comes nearer to what a quiet one shows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from random import Random
from typing import Any

from maitred import LLM, SamplingParams
from maitred.core.clock import WallClock
from maitred.engine.frames import Command, Report, Stop, Submit, encode
from maitred.engine.intake import make_requests
from maitred.engine.loop import EngineLoop


class Meter:
    """Times each call of the runner and of the executor of an engine, and what is between two calls."""

    def __init__(self, core: Any) -> None:
        self.native, self.executor, self.outside = [], [], []  # s
        self._in_native, self._ended_at = 0.0, None
        executor = core._executor
        self._execute = executor.execute
        executor.execute = self._timed_execute
        if hasattr(executor, "runner"):
            self._run = executor.runner.run
            executor.runner.run = self._timed_run

    def clear(self) -> None:
        self.native.clear(), self.executor.clear(), self.outside.clear()
        self._ended_at = None

    def _timed_run(self, *args: Any) -> Any:
        began_at = time.perf_counter()
        result = self._run(*args)
        self._in_native += time.perf_counter() - began_at
        return result

    def _timed_execute(self, plan: Any) -> Any:
        began_at = time.perf_counter()
        self._in_native = 0.0
        result = self._execute(plan)
        if self._ended_at is not None:
            self.outside.append(began_at - self._ended_at)
        self._ended_at = time.perf_counter()
        took_s = self._ended_at - began_at
        self.native.append(self._in_native or took_s)
        self.executor.append(took_s - (self._in_native or took_s))
        return result


class EncodingLink:
    """A transport's end that is given all requests at once and stops when they are done; what is sent is encoded."""

    def __init__(self, commands: list[Command]) -> None:
        self.round_number = 0
        self._commands = commands

    def commands(self, *, wait: bool, at_most_s: float | None = None, beside: bool = False) -> Iterator[Command]:
        taken, self._commands = self._commands, []
        return iter(taken or ([Stop()] if wait else []))

    def send(self, report: Report) -> None:
        encode(report)

    def wake(self) -> None: ...
    def rest(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="maitred-mini", help="folder")
    parser.add_argument("--executor", default="auto", choices=("auto", "native", "torch"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int, default=64, help="prompt tokens of each request")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each request")
    parser.add_argument("--running", type=int, nargs="*", default=[1, 16, 64], help="requests running at once")
    parser.add_argument("--quantile", type=float, default=0.5, help="of the steps' times")
    options = parser.parse_args()

    def typical(times: list[float]) -> float:
        return statistics.quantiles(times, n=100)[round(100 * options.quantile) - 1]

    print(
        f"{'running':>8} {'native ms':>10} {'executor ms':>12} {'between ms':>11} {'host share':>11} "
        f"{'to hide':>8} {'tokens/s':>9}"
    )
    random = Random(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            options.model,
            executor=options.executor,
            dtype=options.dtype,
            num_threads=options.threads,
            max_num_seqs=max(options.running),
            max_model_len=options.context + options.tokens + 16,
            decision_log=folder,
        ) as llm,
    ):
        sampling = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
        parts = llm._open()
        meter, clock = Meter(parts.core), WallClock()
        for running in options.running:
            prompts = [[random.randrange(3, 250) for _ in range(options.context)] for _ in range(running)]
            specs = [
                spec
                for number, prompt in enumerate(prompts)
                for spec in make_requests(
                    parts.model, prompt, sampling, request_id=f"cmpl-{running}-{number}", now=clock.now()
                )
            ]
            meter.clear()
            EngineLoop(parts.core, EncodingLink([Submit((spec,)) for spec in specs]), clock).run()
            decode = slice(-options.tokens // 2, None)  # the second half: all prompts are done
            native, executor, between = (
                typical(times[decode]) for times in (meter.native, meter.executor, meter.outside)
            )
            step = native + executor + between
            print(
                f"{running:>8} {native * 1e3:>10.3f} {executor * 1e3:>12.3f} {between * 1e3:>11.3f} "
                f"{(executor + between) / step:>11.1%} {between / step:>8.1%} {running / step:>9,.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
