"""Host overhead: the share of a step that is not spent in the executor, built-in model, 1 and 64 running requests.

Prints a row for each count of requests: steps, ms a step in and outside the executor, the share,
and tokens a second. Greedy, end-of-sequence ignored, one thread.
"""

from __future__ import annotations

import argparse

from maitred import LLM, SamplingParams

QUESTIONS = (
    "What is maitred?",
    "I would like two soups and a tea, please.",
    "What is a prefix cache?",
    "The bill, please.",
)


def measure(llm: LLM, num_requests: int, num_tokens: int) -> tuple[int, float, float]:
    """(steps, executor s, host s) of one run."""
    core = llm._open().core
    steps, execute_s, host_s = core.stats.num_steps, core.execute_s, core.host_s
    chats = [[{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(num_requests)]
    llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
    return core.stats.num_steps - steps, core.execute_s - execute_s, core.host_s - host_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each request")
    parser.add_argument("--running", type=int, nargs="*", default=[1, 16, 64], help="requests running at once")
    options = parser.parse_args()
    print(f"{'running':>8} {'steps':>6} {'executor ms':>12} {'host ms':>9} {'host share':>11} {'tokens/s':>9}")
    with LLM(max_num_seqs=max(options.running), num_threads=1) as llm:
        measure(llm, max(options.running), 16)  # warm-up
        for running in options.running:
            steps, execute_s, host_s = measure(llm, running, options.tokens)
            rate = running * options.tokens / (execute_s + host_s)
            print(
                f"{running:>8} {steps:>6} {execute_s / steps * 1e3:>12.3f} {host_s / steps * 1e3:>9.3f} "
                f"{host_s / (execute_s + host_s):>11.1%} {rate:>9,.0f}"
            )


if __name__ == "__main__":
    main()
