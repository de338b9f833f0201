"""What a scheduling decision costs: schedule() and update() against running and waiting requests.

    python benchmarks/bench_scheduler.py [--steps 1000] [--policy priority | --policy all | --drafts | --lanes]

`--policy all`, or several names, measures each at 256 running and 10,000 waiting (aims: median 1.5 ms, p99 4 ms):
steady, under churn, which replaces a share of the running requests in each step, and "busy", in which short newcomers
that every policy favours come to full slots, with quanta of 16 tokens, so that it preempts, cuts and scores again.
`--lanes` measures tensor requests alone: 10,000 waiting in 200 lanes, batches of 16 (aim: 15 us of dispatch() a
request); a model for each lane, one model with an instance for all, or beside the language model's rows.

Every step is timed alone. Block hashes are made before, as at intake; `gc.freeze()` is called once after setup, as a
server does. Wall time has the other processes of the machine in it, the CPU time of this thread has not.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.core.request import FinishReason, RequestSpec, RequestState, SamplingParams, Terms
from maitred.core.step import ModelOutput, SampledRow, SchedulerOutput
from maitred.core.tensor_request import BatchOutcome, BatchRules, LaneKey, TensorRequest, TensorSpec
from maitred.kv.manager import KVCacheManager
from maitred.kv.prefix_cache import TokenHasher
from maitred.policy.policies import POLICIES
from maitred.scheduler.scheduler import Scheduler
from maitred.scheduler.speculation import Speculation

BLOCK_SIZE = 16
PROMPT_TOKENS = 256
MEMORY_BOUND, COMPUTE_BOUND = CostModel(weights_s=0.05), CostModel(decode_token_s=0.0005)
CHURN = 0.02  # share of the running requests replaced in each step: 256 running that live 50 steps each
SAMPLING = SamplingParams(max_tokens=None, temperature=0.0)
HASHER = TokenHasher(BLOCK_SIZE, "bench")
_ids = count()


def new_request(num_shared_tokens: int = 64, favoured: bool = False) -> RequestState:
    """A prompt that begins like all others, or like a few of them, and then is its own."""
    number = next(_ids)
    shared = 100_000 + number % 200 if number % 2 else 7
    tokens = [shared] * num_shared_tokens + [number % 30_000 + i for i in range(PROMPT_TOKENS - num_shared_tokens)]
    return state_of(
        tokens,
        request_id=f"cmpl-{number:032x}",
        arrived_at=number * 1e-3,
        max_tokens=8 if favoured else 2000,
        terms=Terms(
            priority=0 if favoured else 1 + number % 2,
            tenant=f"tenant-{number}" if favoured else f"tenant-{number * 7919 % 100}",
            weight=1.0 + number % 3,
            ttft_slo_s=0.0 if favoured else None,
        ),
        predicted_output_tokens=1.0 if favoured else float(100 + number * 7919 % 1900),
    )


def state_of(tokens: list[int], **fields: Any) -> RequestState:
    return RequestState(
        RequestSpec(
            prompt_token_ids=tokens,
            num_prompt_tokens=len(tokens),
            sampling=SAMPLING,
            eos_token_ids=(2,),
            block_hashes=HASHER.hash_prompt(tokens),
            **fields,
        )
    )


def answer(plan: SchedulerOutput) -> ModelOutput:
    """One draft of each row is right."""
    return ModelOutput(
        tuple(
            SampledRow(
                row.request_id,
                (11, 11) if row.num_drafts else (11,),
                num_accepted=min(1, row.num_drafts),
                num_drafts=row.num_drafts,
            )
            for row in plan.rows
            if row.samples
        )
    )


def fill(
    running: int,
    waiting: int,
    policy: str,
    max_num_batched_tokens: int,
    quantum_tokens: int,
    speculation: Speculation | None = None,
) -> Scheduler:
    """A scheduler with that many requests in decode and in the queue."""
    config = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=max_num_batched_tokens,
        policy=policy,
        quantum_tokens=quantum_tokens,
    )
    kv_cache = KVCacheManager(num_blocks=100_000, block_size=BLOCK_SIZE, hasher=HASHER)
    scheduler = Scheduler(config, kv_cache, speculation=speculation)
    for _ in range(running):
        scheduler.add(new_request(), 0.0)
    num_decoding = 0
    while num_decoding < running:
        plan = scheduler.schedule(0.0)
        num_decoding = len(scheduler.update(plan, answer(plan), 0.0))
    for _ in range(waiting):
        scheduler.add(new_request(), 0.0)
    return scheduler


@dataclass
class Times:
    """Seconds of each call."""

    schedule: list[float] = field(default_factory=list)
    schedule_cpu: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    num_preemptions: int = 0

    def row(self) -> str:
        schedule, cpu, update = (percentiles(s) for s in (self.schedule, self.schedule_cpu, self.update))
        return f"{schedule} {cpu} {update}"


def measure(
    running: int,
    waiting: int,
    churn: bool,
    *,
    steps: int,
    policy: str,
    busy: bool = False,
    speculation: Speculation | None = None,
) -> Times:
    # With churn the budget has room for the prompts that come in.
    num_replaced = max(1, round(CHURN * running)) if churn else 0
    budget = running + PROMPT_TOKENS * max(1, num_replaced)
    budget += running * speculation.most if speculation is not None else 0
    scheduler = fill(running, waiting, policy, budget, 16 if busy else 128, speculation)
    gc.collect()
    gc.freeze()
    times = Times()
    for _ in range(steps):
        for oldest in [r.request_id for r in scheduler.running[:num_replaced]]:
            if not busy:
                scheduler.finish(oldest, FinishReason.STOP, 1.0)
            scheduler.add(new_request(favoured=busy), 1.0)
        now = new_request().arrived_at
        wall, cpu = time.perf_counter(), time.thread_time()
        plan = scheduler.schedule(now)
        times.schedule_cpu.append(time.thread_time() - cpu)
        times.schedule.append(time.perf_counter() - wall)
        output = answer(plan)
        wall = time.perf_counter()
        scheduler.update(plan, output, 2.0)
        times.update.append(time.perf_counter() - wall)
    gc.unfreeze()
    times.num_preemptions = scheduler.stats.num_preemptions
    return times


def percentiles(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return f"|{cuts[49] * 1e3:8.3f} {cuts[98] * 1e3:8.3f}"


def print_steps(steps: int, policy: str) -> None:
    print(f"policy {policy}, {steps} steps each, {PROMPT_TOKENS} prompt tokens; times in ms, p50 and p99")
    print(f"{'running':>8} {'waiting':>8} {'load':>9} |     schedule()    |   schedule() CPU  |      update()")
    for running in (1, 16, 64, 256):
        for waiting in (0, 1000, 10_000):
            for churn in (False, True):
                times = measure(running, waiting, churn, steps=steps, policy=policy)
                print(f"{running:8} {waiting:8} {'churn' if churn else 'steady':>9} {times.row()}")


def print_drafts(steps: int) -> None:
    """Where all draft, and where the rule keeps finding that nobody should."""
    print(f"256 running with drafts, {steps} steps; times in ms, p50 and p99; aim 1.5 at the median")
    print(f"{'drafts':>12} {'load':>7} |     schedule()    |   schedule() CPU  |      update()")
    for name, costs in (("most", MEMORY_BOUND), ("none", COMPUTE_BOUND)):
        for churn in (False, True):
            times = measure(256, 0, churn, steps=steps, policy="fcfs", speculation=Speculation(5, costs))
            print(f"{name:>12} {'churn' if churn else 'steady':>7} {times.row()}", flush=True)


NUM_LANES, NUM_TENSORS, BATCH = 200, 10_000, 16


def new_tensor(lane: LaneKey) -> TensorRequest:
    number = next(_ids)
    return TensorRequest(
        TensorSpec(
            request_id=f"infer-{number:032x}",
            arrived_at=number * 1e-3,
            lane=lane,
            work=float(1 + number % 50),
            terms=Terms(priority=number % 3, tenant=f"tenant-{number % 100}", weight=1.0 + number % 3),
        )
    )


def full_lanes(load: str, policy: str) -> Scheduler:
    """Everybody waits; beside them one chat decodes, where the load is that."""
    scheduler = fill(1, 0, policy, 512, 128)
    if load != "beside":
        scheduler.finish(scheduler.running[0].request_id, FinishReason.STOP, 0.0)
    rules = BatchRules(max_batch_size=BATCH, dynamic=True, machine_share=0.01)
    buckets = load == "buckets"
    lanes = [LaneKey("m", 1, str(number)) if buckets else LaneKey(f"m{number}", 1) for number in range(NUM_LANES)]
    for lane in lanes:
        scheduler.lanes.load(lane.model, lane.version, rules)
    for number in range(NUM_TENSORS):
        scheduler.add_tensor(new_tensor(lanes[number * 7919 % NUM_LANES]), 0.0)
    return scheduler


def measure_lanes(load: str, policy: str, num_calls: int) -> dict[str, list[float]]:
    """Seconds for each request of each call."""
    scheduler, now, calls = full_lanes(load, policy), 1.0, 0
    times: dict[str, list[float]] = {"dispatch": [], "completed": [], "add": []}
    gc.collect()
    gc.freeze()
    while calls < num_calls:
        now += 0.001
        started = time.thread_time()
        batches = scheduler.dispatch(now)
        dispatched = time.thread_time()
        num_requests = sum(len(batch.request_ids) for batch in batches)
        if not batches:
            continue
        calls += 1
        times["dispatch"].append((dispatched - started) / num_requests)
        newcomers = [new_tensor(batch.lane) for batch in batches for _ in batch.request_ids]
        for name, call in (
            ("completed", lambda: [scheduler.completed(one, BatchOutcome(compute_us=900), now) for one in batches]),  # noqa: B023
            ("add", lambda: [scheduler.add_tensor(one, now) for one in newcomers]),  # noqa: B023
        ):
            started = time.thread_time()
            call()
            times[name].append((time.thread_time() - started) / num_requests)
    gc.unfreeze()
    return times


def print_lanes(steps: int, policies: Iterable[str]) -> None:
    print(
        f"{NUM_TENSORS:,} tensor requests wait in {NUM_LANES} lanes; CPU time in us for each request: p50, p99 and mean"
    )
    print(f"{'policy':>12} {'load':>8} |       dispatch()       |      completed()       |         add()")
    for policy in policies:
        for load in ("models", "buckets", "beside"):
            times = measure_lanes(load, policy, max(20, steps // 20) if load == "models" else steps)
            cells = " ".join(
                f"{percentiles([s * 1e3 for s in seconds])} {statistics.fmean(seconds) * 1e6:6.1f}"
                for seconds in times.values()
            )
            print(f"{policy:>12} {load:>8} {cells}", flush=True)


def print_policies(steps: int, policies: Iterable[str]) -> None:
    print(f"256 running, 10,000 waiting, {steps} steps each; times in ms, p50 and p99; aim 1.5 and 4")
    print(f"{'policy':>12} {'load':>7} |     schedule()    |   schedule() CPU  |      update()     | preemptions")
    for policy in policies:
        for load in ("steady", "churn", "busy"):
            times = measure(256, 10_000, load != "steady", steps=steps, policy=policy, busy=load == "busy")
            print(f"{policy:>12} {load:>7} {times.row()} | {times.num_preemptions:6}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--drafts", action="store_true", help="only: 256 running with drafts")
    parser.add_argument("--lanes", action="store_true", help="only: tensor requests and their batches")
    args = parser.parse_args()
    if args.lanes:
        print_lanes(args.steps, POLICIES if args.policy == "all" else args.policy.split(","))
    elif args.drafts:
        print_drafts(args.steps)
    elif args.policy == "all" or "," in args.policy:
        print_policies(args.steps, POLICIES if args.policy == "all" else args.policy.split(","))
    else:
        print_steps(args.steps, args.policy)


if __name__ == "__main__":
    main()
