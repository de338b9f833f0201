"""Host overhead: the share of a step that is not spent in the native call (for PyTorch: not in the executor).

    python benchmarks/bench_host_overhead.py                                            # built-in model
    python benchmarks/bench_host_overhead.py --model ./Qwen3-0.6B --dtype int8 --context 512 --tokens 64

Prints a row for each count of requests: steps, ms a step in the native call, in the rest of the executor (batch,
sampling, reports) and outside it (scheduler, engine), the share of the last two, and tokens a second. Greedy,
end-of-sequence ignored. Times are medians over steps, since a neighbour's time slice would spoil a mean.
"""

from __future__ import annotations

import argparse
import statistics
import time
from random import Random
from typing import Any

from maitred import LLM, SamplingParams


class Meter:
    """Times each call of the runner and of the executor of an engine."""

    def __init__(self, core: Any) -> None:
        self.native, self.executor, self.outside = [], [], []  # s
        self._in_native = 0.0
        executor = core._executor
        self._wrap(executor, "execute", self._executed)
        if hasattr(executor, "_runner"):
            self._wrap(executor._runner, "run", self._ran)
        step = core.step
        core.step = lambda: self._step(step)
        self._in_executor = 0.0

    def _wrap(self, owner: Any, name: str, told: Any) -> None:
        call = getattr(owner, name)

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            told(time.perf_counter() - began)
            return result

        setattr(owner, name, timed)

    def _ran(self, took_s: float) -> None:
        self._in_native += took_s

    def _executed(self, took_s: float) -> None:
        self._in_executor = took_s

    def _step(self, step: Any) -> Any:
        self._in_native = self._in_executor = 0.0
        began = time.perf_counter()
        result = step()
        took_s = time.perf_counter() - began
        in_native = self._in_native or self._in_executor
        self.native.append(in_native)
        self.executor.append(self._in_executor - in_native)
        self.outside.append(took_s - self._in_executor)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder; the built-in model without")
    parser.add_argument("--executor", default="auto", choices=("auto", "native", "torch"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int, default=64, help="prompt tokens of each request")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each request")
    parser.add_argument("--running", type=int, nargs="*", default=[1, 16, 64], help="requests running at once")
    options = parser.parse_args()
    print(f"{'running':>8} {'native ms':>10} {'executor ms':>12} {'outside ms':>11} {'host share':>11} {'tokens/s':>9}")
    random = Random(0)
    with LLM(
        options.model,
        executor=options.executor,
        dtype=options.dtype,
        num_threads=options.threads,
        max_num_seqs=max(options.running),
        max_model_len=options.context + options.tokens + 16,
    ) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
        core = llm._open().core
        meter = Meter(core)
        for running in options.running:
            prompts = [[random.randrange(3, 250) for _ in range(options.context)] for _ in range(running)]
            meter.native.clear(), meter.executor.clear(), meter.outside.clear()
            llm.generate(prompts, sampling)
            decode = slice(-options.tokens // 2, None)  # the second half: all prompts are done
            native, executor, outside = (
                statistics.median(times[decode]) for times in (meter.native, meter.executor, meter.outside)
            )
            step = native + executor + outside
            print(
                f"{running:>8} {native * 1e3:>10.3f} {executor * 1e3:>12.3f} {outside * 1e3:>11.3f} "
                f"{(executor + outside) / step:>11.1%} {running / step:>9,.0f}"
            )


if __name__ == "__main__":
    main()
