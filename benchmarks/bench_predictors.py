"""How well each predictor puts requests in order of their output length, what it costs, and what it is worth.

    python benchmarks/bench_predictors.py [--chats 400] [--requests 3000]

Workloads: `chats`, answered by the built-in model itself; `mixture`, in which words tell short answers from long ones;
`tenants`, in which only the tenant does; `blind`, in which nothing does. Each request is predicted before its length is
told, as in a server. Then the same requests are served by the real scheduler on a made-up machine at 0.9 of its
capacity, under sjf with that predictor, against fcfs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from random import Random

from maitred.config import SchedulerConfig
from maitred.core.clock import ManualClock
from maitred.core.request import FinishReason, RequestSpec, RequestState, SamplingParams
from maitred.core.step import ModelOutput, SampledRow, SchedulerOutput
from maitred.kv.manager import KVCacheManager
from maitred.policy.features import prompt_features
from maitred.policy.predictor import PREDICTORS, Predictor, bounded_prediction, predictor_named
from maitred.scheduler.engine_core import EngineCore
from maitred.scheduler.scheduler import Scheduler

NUM_SEQS, BLOCK_SIZE = 16, 16


@dataclass(frozen=True)
class Job:
    """A request of which the output is known."""

    text: str
    num_prompt_tokens: int
    length: int
    max_tokens: int = 1024
    tenant: str = ""


def mixture(rng: Random, count: int) -> list[Job]:
    kinds = (
        (0.5, ("What is {}?", "Is {} good? Answer yes or no.", "Thanks, and {}?"), 2.3, 0.6),
        (0.3, ("Explain how {} works.", "Give me a list of ideas for {}."), 4.6, 0.5),
        (0.2, ("Write a long story about {}.", "Write a detailed report on {}."), 6.2, 0.4),
    )
    topics = ("bread", "rain", "trains", "a small town", "winter", "music", "the sea", "soup")
    jobs = []
    for _ in range(count):
        _, texts, mean, spread = rng.choices(kinds, [kind[0] for kind in kinds])[0]
        text = "You are a helpful assistant. " + rng.choice(texts).format(rng.choice(topics))
        jobs.append(Job(text, 12 + len(text) // 4, _length(rng, mean, spread)))
    return jobs


def tenants(rng: Random, count: int) -> list[Job]:
    """A chat app and a writer of documents, whose prompts look alike."""
    jobs = []
    for _ in range(count):
        name, mean = rng.choice((("chat", 3.0), ("documents", 5.8)))
        jobs.append(Job("go on", rng.randint(20, 400), _length(rng, mean, 0.5), tenant=name))
    return jobs


def blind(rng: Random, count: int) -> list[Job]:
    return [Job("go on", rng.randint(20, 400), _length(rng, 4.0, 1.2)) for _ in range(count)]


def _length(rng: Random, mean: float, spread: float) -> int:
    return max(1, min(1000, int(rng.lognormvariate(mean, spread))))


def chats(rng: Random, count: int) -> list[Job]:
    """Chats of up to four turns of the built-in model's world, with the lengths of its own greedy answers."""
    from maitred import LLM, SamplingParams
    from training.world import training_chat

    messages = [training_chat(rng, 4).messages()[:-1] for _ in range(count)]
    with LLM("maitred-mini", num_threads=1) as llm:
        template = llm.model.chat_template
        assert template is not None
        prompts = [template.render(m, add_generation_prompt=True) for m in messages]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=256), add_special_tokens=False)
    return [
        Job(prompt, len(output.prompt_token_ids), len(output.outputs[0].token_ids), max_tokens=256)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def spec_of(job: Job, number: int, arrived_at: float = 0.0, *, features: tuple[float, ...]) -> RequestSpec:
    return RequestSpec(
        request_id=f"r{number}",
        prompt_token_ids=range(number * 1000, number * 1000 + job.num_prompt_tokens),
        sampling=SamplingParams(max_tokens=job.max_tokens),
        arrived_at=arrived_at,
        num_prompt_tokens=job.num_prompt_tokens,
        max_tokens=job.max_tokens,
        tenant=job.tenant,
        features=features,
    )


def accuracy(name: str, jobs: list[Job]) -> tuple[float, float, float]:
    """Pairwise accuracy (ties half) and Kendall's tau of the second half, and microseconds for each request."""
    predictor = predictor_named(name, lambda request: jobs[int(request.request_id[1:])].length)
    told, seconds = [], 0.0
    for number, job in enumerate(jobs):
        started = time.process_time()
        features = prompt_features(job.text)
        request = RequestState(spec_of(job, number, features=features))
        predicted = bounded_prediction(predictor, request)
        request.output_token_ids = [0] * job.length
        predictor.observe(request)
        seconds += time.process_time() - started
        told.append((predicted, job.length))
    sample = told[len(told) // 2 :][:600]
    score = [_order(a, b) for a, b in combinations(sample, 2) if a[1] != b[1]]
    return sum((s + 1) / 2 for s in score) / len(score), sum(score) / len(score), seconds / len(jobs) * 1e6


def _order(a: tuple[float, int], b: tuple[float, int]) -> int:
    """1 for a pair in order, -1 for one the wrong way round, 0 where the predictions tie."""
    if a[0] == b[0]:
        return 0
    return 1 if (a[0] < b[0]) == (a[1] < b[1]) else -1


class Machine:
    """A step costs 10 ms, 0.1 ms for each token and 0.5 ms for each row; an answer is as long as its job says."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self._clock.advance(0.010 + 0.0001 * plan.num_tokens + 0.0005 * len(plan.rows))
        return ModelOutput(tuple(SampledRow(row.request_id, (0,)) for row in plan.rows if row.samples))

    def close(self) -> None:
        """Nothing to give back."""


def serve(
    jobs: list[Job], policy: str, make: Callable[[], Predictor] | None, load: float
) -> tuple[float, float, float]:
    """Mean and 99th percentile of arrival to last token, and the longest wait for a first one, in seconds."""
    work_s = sum(job.length * 0.0185 / NUM_SEQS + job.num_prompt_tokens * 0.0001 for job in jobs) / len(jobs)
    rng, clock, at = Random(5), ManualClock(), 0.0
    config = SchedulerConfig(max_num_seqs=NUM_SEQS, policy=policy)
    kv_cache = KVCacheManager(
        num_blocks=8192, block_size=BLOCK_SIZE, hasher=lambda r, n: (), enable_prefix_caching=False
    )
    lengths = {f"r{number}": job.length for number, job in enumerate(jobs)}

    def ends(request: RequestState) -> FinishReason | None:
        return FinishReason.STOP if request.num_output_tokens >= lengths[request.request_id] else None

    core = EngineCore(Scheduler(config, kv_cache, ends, make() if make else None), Machine(clock), clock)
    pending = []
    for number, job in enumerate(jobs):
        at += rng.expovariate(load / work_s)
        pending.append(spec_of(job, number, at, features=prompt_features(job.text)))
    requests: list[RequestState] = []
    pending.reverse()
    while pending or core.has_work:
        if not core.has_work and pending[-1].arrived_at > clock.now():
            clock.advance(pending[-1].arrived_at - clock.now())
        while pending and pending[-1].arrived_at <= clock.now():
            requests.append(core.add(pending.pop()))
        core.step()
    stays = sorted((r.finished_at or 0.0) - r.arrived_at for r in requests)
    longest = max((r.first_token_at or 0.0) - r.arrived_at for r in requests)
    return sum(stays) / len(stays), stays[int(0.99 * len(stays))], longest


def report(name: str, jobs: list[Job], load: float) -> None:
    mean = sum(job.length for job in jobs) / len(jobs)
    print(
        f"\n{name}: {len(jobs)} requests, {mean:.0f} tokens on average, the longest {max(job.length for job in jobs)}"
    )
    print("  predictor     pairs in order   tau    us/request   mean (s)  p99 (s)  longest wait (s)   against fcfs")
    fcfs = serve(jobs, "fcfs", None, load)
    print(f"  {'(fcfs)':12} {'':44} {fcfs[0]:8.2f} {fcfs[1]:8.2f} {fcfs[2]:12.2f}")
    for predictor in PREDICTORS:
        pairs, tau, cost_us = accuracy(predictor, jobs)

        def make(predictor: str = predictor) -> Predictor:
            return predictor_named(predictor, lambda request: jobs[int(request.request_id[1:])].length)

        stay = serve(jobs, "sjf", make, load)
        print(
            f"  {predictor:12} {pairs:13.1%} {tau:9.2f} {cost_us:11.1f} {stay[0]:12.2f} {stay[1]:8.2f} {stay[2]:12.2f} "
            f"     mean {stay[0] / fcfs[0] - 1:+.0%}, p99 {stay[1] / fcfs[1] - 1:+.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=400, help="answered by the built-in model; 0 leaves them out")
    parser.add_argument("--requests", type=int, default=3000, help="of each other workload")
    parser.add_argument("--load", type=float, default=0.9, help="of the made-up machine's capacity")
    arguments = parser.parse_args()
    for make in (mixture, tenants, blind) if arguments.requests else ():
        report(make.__name__, make(Random(1), arguments.requests), arguments.load)
    if arguments.chats:
        known = chats(Random(1), arguments.chats)
        report("chats", known, arguments.load)


if __name__ == "__main__":
    main()
