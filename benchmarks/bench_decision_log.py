"""What the decision log costs a step, and how many bytes a row takes on the disk.

    python benchmarks/bench_decision_log.py [--steps 600]

"record" is the engine thread's share: handing a step over. "encode" and "compress" are the writer thread's, which runs
while the executor computes without the GIL. All stand beside schedule() and update() of the same steps, in the same
run. "churn" replaces 2% of the running requests in each step. Bytes are those on the disk, compressed.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib

from bench_scheduler import BLOCK_SIZE, CHURN, PROMPT_TOKENS, answer, fill, new_request

from maitred.core.request import FinishReason
from maitred.decisions.codec import Header, LogEncoder
from maitred.decisions.files import COMPRESSION_LEVEL
from maitred.decisions.log import Recorder, StepRecord


def measure(running: int, churn: bool, steps: int) -> str:
    num_replaced = max(1, round(CHURN * running)) if churn else 0
    scheduler = fill(running, 0, "fcfs", running + PROMPT_TOKENS * max(1, num_replaced), quantum_tokens=128)
    records: list[StepRecord] = []
    recorder = Recorder(records.append)
    encoder = LogEncoder(Header(scheduler.config, 100_000, BLOCK_SIZE, enable_prefix_caching=True))
    for request in (*scheduler.running, *scheduler.waiting):
        recorder.added(request, 0.0)
    core_s: list[float] = []
    record_s: list[float] = []
    encode_s: list[float] = []
    frames: list[bytes] = []
    now = time.monotonic()
    for _ in range(steps):
        for request in scheduler.running[:num_replaced]:
            scheduler.finish(request.request_id, FinishReason.STOP, now)
            recorder.ended(request.request_id, FinishReason.STOP, now)
            new = new_request()
            scheduler.add(new, now)
            recorder.added(new, now)
        started = time.perf_counter()
        plan = scheduler.schedule(now)
        output = answer(plan)
        between = time.perf_counter()
        answered = time.perf_counter()
        progress = scheduler.update(plan, output, now)
        ended = time.perf_counter()
        core_s.append(ended - answered + between - started)
        now = time.monotonic()
        started = time.perf_counter()
        recorder.stepped(plan, output, progress, now, now + 0.003)
        record_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        frames.append(encoder.encode(records[-1]))
        encode_s.append(time.perf_counter() - started)
    num_bytes, compress = compressed(frames[1:])  # the first names every request
    core, record, encode = (statistics.median(s) * 1e6 for s in (core_s, record_s, encode_s))
    a_step = num_bytes / (steps - 1)
    return (
        f"{running:8} {'churn' if churn else 'steady':>7} | {core:8.1f} | {record:6.1f} {record / core:6.1%} | "
        f"{encode:7.1f} {encode / core:6.1%} | {compress:7.1f} {compress / core:6.1%} | "
        f"{a_step:7.1f} {a_step / running:6.2f}"
    )


def compressed(frames: list[bytes]) -> tuple[int, float]:
    """How many bytes the frames are on the disk, and the microseconds that each took."""
    stream = zlib.compressobj(COMPRESSION_LEVEL, zlib.DEFLATED, 31)
    num_bytes = 0
    started = time.perf_counter()
    for number, frame in enumerate(frames):
        num_bytes += len(stream.compress(bytes(8) + frame))
        num_bytes += len(stream.flush(zlib.Z_SYNC_FLUSH)) if number % 50 == 0 else 0
    num_bytes += len(stream.flush())
    return num_bytes, (time.perf_counter() - started) / len(frames) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps
    print(" running    load | core us  |  record us     |    encode us     |   compress us    | bytes a step, a row")
    for running in (1, 16, 64, 256):
        for churn in (False, True):
            print(measure(running, churn, steps))


if __name__ == "__main__":
    main()
