"""What being watched costs: one snapshot by size, and an engine's speed with the feed on and off in turn.

    python benchmarks/bench_live_view.py [--pairs 20] [--seconds 1.5] [--seqs 32]

First table: the CPU time of one `live_view` in the engine's thread and of encoding its frame, and the frame's size,
against running and waiting requests and blocks. Second: the built-in model decodes for `--seqs` requests without end;
stretches of `--seconds` with a watcher alternate with stretches without (the order turns with each pair), and each pair
gives a ratio of tokens a second and one of the engine thread's CPU time for a step. The aim is under 1% of a step; by
construction the feed asks so seldom that snapshots take at most 0.5% of the engine's time, which is printed too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from itertools import count

import msgspec

from maitred.api.ops.latencies import Latencies
from maitred.api.ops.live_feed import COST_FACTOR, FRAME_S, LiveFeed
from maitred.cli.local import start_engine
from maitred.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from maitred.core.request import RequestSpec, RequestState, SamplingParams
from maitred.core.step import ModelOutput, SampledRow
from maitred.engine.client import EngineClient
from maitred.engine.intake import ServedModel, make_requests
from maitred.engine.live_view import LiveView, live_view
from maitred.kv.manager import KVCacheManager
from maitred.kv.prefix_cache import TokenHasher, hash_blocks, root_hash
from maitred.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
HASHER = TokenHasher(BLOCK_SIZE, "bench")
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, temperature=1.0)
_ids = count()


# ---- one snapshot


def filled(num_running: int, num_waiting: int, num_blocks: int, prompt: int) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=max(2048, num_running * prompt))
    scheduler = Scheduler(config, KVCacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, hasher=HASHER))
    for _ in range(num_running + num_waiting):
        scheduler.add(made(prompt), 0.0)
    for step in range(3):
        plan = scheduler.schedule(float(step))
        rows = tuple(SampledRow(row.request_id, (5,)) for row in plan.rows if row.samples)
        scheduler.update(plan, ModelOutput(rows), float(step))
    return scheduler


def made(prompt: int) -> RequestState:
    number = next(_ids)
    tokens = [number * 31 % 30_000 + i for i in range(prompt)]
    spec = RequestSpec(
        request_id=f"{number:x}.cmpl-{number:032x}",
        prompt_token_ids=tokens,
        sampling=ENDLESS,
        arrived_at=number * 1e-3,
        num_prompt_tokens=prompt,
        max_tokens=2000,
        tenant=f"tenant-{number % 40}",
        block_hashes=hash_blocks(tokens, BLOCK_SIZE, root_hash("bench")),
    )
    return RequestState(spec)


def print_snapshots() -> None:
    print(
        f"{'running':>8}{'waiting':>9}{'blocks':>9}{'snapshot ms':>13}{'encode ms':>11}{'bytes':>8}{'at most /s':>12}"
    )
    for running, waiting, blocks, prompt in (
        (1, 0, 1000, 64),
        (64, 0, 8000, 256),
        (64, 10_000, 8000, 256),
        (256, 10_000, 100_000, 256),
        (256, 100, 400_000, 4096),
    ):
        scheduler = filled(running, waiting, blocks, prompt)
        view = live_view(scheduler, 1.0)
        snapshot_s = cpu_s(lambda scheduler=scheduler: live_view(scheduler, 1.0))
        encode_s = cpu_s(lambda view=view: msgspec.json.encode(view))
        most = 1 / max(FRAME_S, COST_FACTOR * snapshot_s)
        size = len(msgspec.json.encode(view))
        print(f"{running:8,}{waiting:9,}{blocks:9,}{snapshot_s * 1e3:13.3f}{encode_s * 1e3:11.3f}{size:8,}{most:12.1f}")


def cpu_s(work: object, rounds: int = 30) -> float:
    assert callable(work)
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return statistics.median(times)


# ---- on and off in turn


@dataclass(frozen=True, slots=True)
class Stretch:
    tokens_per_s: float
    cpu_s_per_step: float
    looking_s: float  # of the engine's thread
    seconds: float
    num_frames: int


class Counted:
    """The engine with the cost of every look added up."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.looking_s = 0.0
        self.num_frames = 0

    async def live_view(self) -> LiveView:
        view = await self._engine.live_view()
        self.looking_s += view.cost_s
        self.num_frames += 1
        return view


async def stretch(engine: EngineClient, *, watched: bool, seconds: float) -> Stretch:
    counted = Counted(engine)
    watcher = asyncio.create_task(watch(counted)) if watched else None
    before, cpu, began = engine.state(), engine_cpu_s(), time.perf_counter()
    await asyncio.sleep(seconds)
    after, cpu, elapsed = engine.state(), engine_cpu_s() - cpu, time.perf_counter() - began
    if watcher is not None:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
    return Stretch(
        (after.num_generated_tokens - before.num_generated_tokens) / elapsed,
        cpu / max(1, after.num_steps - before.num_steps),
        counted.looking_s,
        elapsed,
        counted.num_frames,
    )


async def watch(replica: Counted) -> None:
    async for _ in LiveFeed(replica, Latencies(), "bench").frames():
        pass


def engine_cpu_s() -> float:
    """CPU time of the engine's thread so far."""
    thread = next(t for t in threading.enumerate() if t.name == "maitred-engine")
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


async def seated(engine: EngineClient, model: ServedModel, stopping: asyncio.Event) -> None:
    """One slot that is never empty."""
    while not stopping.is_set():
        prompt = "What is maitred, and who is served next?"
        (request,) = make_requests(model, prompt, ENDLESS, request_id=f"bench-{next(_ids)}", now=time.monotonic())
        stream = engine.submit(request)
        async for _ in stream:
            if stopping.is_set():
                break
        await stream.aclose()


async def alternate(num_seqs: int, pairs: int, seconds: float) -> list[tuple[Stretch, Stretch]]:
    config = EngineConfig(
        model=ModelConfig(model="maitred-mini", num_threads=1),
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_num_seqs=num_seqs),
    )
    engine = start_engine(config)
    replica, stopping = engine.replica, asyncio.Event()
    guests = [asyncio.create_task(seated(replica, engine.model, stopping)) for _ in range(num_seqs)]
    await asyncio.sleep(2.0)  # until all sit
    found = []
    for number in range(pairs):
        first = await stretch(replica, watched=bool(number % 2), seconds=seconds)
        second = await stretch(replica, watched=not number % 2, seconds=seconds)
        found.append((second, first) if number % 2 == 0 else (first, second))
    stopping.set()
    await asyncio.gather(*guests)
    await replica.close()
    return found


def print_pairs(pairs: list[tuple[Stretch, Stretch]]) -> None:
    """Pairs of (watched, not watched)."""
    speed = [on.tokens_per_s / off.tokens_per_s for on, off in pairs]
    cpu = [on.cpu_s_per_step / off.cpu_s_per_step for on, off in pairs]
    looking = sum(on.looking_s for on, _ in pairs) / sum(on.seconds for on, _ in pairs)
    frames = sum(on.num_frames for on, _ in pairs) / sum(on.seconds for on, _ in pairs)
    step_ms = statistics.median(off.cpu_s_per_step for _, off in pairs) * 1e3
    print(f"{len(pairs)} pairs; a step takes {step_ms:.2f} ms of CPU; {frames:.1f} frames/s while watched")
    for name, ratios in (("tokens/s, watched / not", speed), ("CPU time of a step, watched / not", cpu)):
        low, _, high = statistics.quantiles(ratios, n=4)
        print(f"  {name:36} median {statistics.median(ratios):.4f}   quartiles {low:.4f} to {high:.4f}")
    print(f"  {'time in snapshots, of the engine':36} {looking:.3%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--seqs", type=int, default=32)
    options = parser.parse_args()
    print_snapshots()
    sys.stdout.flush()
    print_pairs(asyncio.run(alternate(options.seqs, options.pairs, options.seconds)))


if __name__ == "__main__":
    main()
