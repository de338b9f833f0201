"""Prefill and decode apart, live: the same load before one prefill and one decode worker, and before two mixed ones.

    python benchmarks/handover.py [MODEL] [--requests 24] [--rate 0.6] [--input 512] [--output 48] [--dtype int8]
        [--kv-transport shm|tcp|nixl] [--link-mbit 800] [--e2e-only]

MODEL is random weights of Qwen3-0.6B's shape unless it is named. Each server has two workers of one thread. In turn:
two mixed workers; a prefill and a decode worker with --handover always; the same with auto, told no promises. Printed
are means, and the mean E2E of `auto` over the better of the others. Then three pairs of promises, made of the run's own
medians: tight in TTFT, tight in TPOT, balanced. `auto` runs again with each as its --slo; printed is the goodput
(requests that kept both), and that of `auto` over the best of the other two. --link-mbit holds the loopback of a
network namespace of its own to so many megabits a second (Linux, as root or with user namespaces).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_start import make_checkpoint
from tests.conftest import start_server
from tests.waiting import until


class Times(NamedTuple):
    """Of one request."""

    ttft_s: float
    tpot_s: float
    e2e_s: float


MIXED = ("--mixed-workers", "2")
APART = ("--prefill-workers", "1", "--decode-workers", "1")
POOL, WARM_UP = "640MiB", 24  # requests: memory that is touched for the first time takes as long as ten steps
IN_A_NAMESPACE = "MAITRED_BENCH_LINK"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, default=0.6)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=48)
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--kv-transport", default="auto")
    parser.add_argument("--link-mbit", type=int)
    parser.add_argument("--e2e-only", action="store_true")
    args = parser.parse_args()
    if args.link_mbit is not None and IN_A_NAMESPACE not in os.environ:
        sys.exit(in_a_namespace(args.link_mbit))
    with tempfile.TemporaryDirectory(prefix="maitred-bench-") as folder:
        model = args.model or str(make_checkpoint(Path(folder) / "model"))
        compare(partial(run, args, model, folder=Path(folder)), with_promises=not args.e2e_only)


def in_a_namespace(link_mbit: int) -> int:
    """This script again, where the loopback carries no more than so much."""
    link = f"ip link set lo up && tc qdisc add dev lo root tbf rate {link_mbit}mbit burst 1mb latency 50ms"
    command = ["unshare", "-rn", "sh", "-c", f'{link} && exec "$@"', "sh", sys.executable, *sys.argv]
    return subprocess.run(command, env={**os.environ, IN_A_NAMESPACE: "1"}, check=False).returncode


def run(args: argparse.Namespace, model: str, words: tuple[str, ...], folder: Path) -> list[Times]:
    """Of each request of the load."""
    words = (*words, "--num-threads", "1", "--dtype", args.dtype, "--max-model-len", "2048")
    words = (*words, "--kv-cache-memory-bytes", POOL)
    server = start_server(model, *words, "--kv-transport", args.kv_transport)
    try:
        until(lambda: all(w["alive"] for w in httpx.get(f"{server.url}/admin/roles").json()["workers"]))
        records = folder / "records.jsonl"
        command = [
            sys.executable,
            "-m",
            "maitred",
            "bench",
            "serve",
            "--url",
            server.url,
            "--seed",
            1,
            "--warmup",
            WARM_UP,
        ]
        command += ["--num-requests", args.requests, "--rate", args.rate, "--records", records]
        command += ["--input-len", args.input, "--output-len", args.output, "--prompt-form", "tokens"]
        command += ["--extra-body", "logprobs=1"]  # so that tokens without a text are told one by one
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
        tell_waits(server.url)
        found = [json.loads(line) for line in records.read_text().splitlines()]
        tell_second_tokens(found)
        return [times_of(record) for record in found]
    finally:
        server.stop()


def tell_waits(url: str) -> None:
    """Of those that were handed over: what the computing of the prompt did not hide."""
    page = httpx.get(f"{url}/metrics").text
    waited_s, num_waits, num_bytes = (
        sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"maitred_{name}"))
        for name in ("handover_wait_seconds_sum", "handover_wait_seconds_count", "kv_transfer_bytes_total")
    )
    peers = [
        tier for tier in httpx.get(f"{url}/admin/kv").json()["tiers"] if tier["name"] == "peer" and tier["hit_tokens"]
    ]
    if num_waits and num_bytes and peers:
        took_s = sum(num_bytes / len(peers) / tier["bytes_per_s"] for tier in peers)
        told = f"waited {waited_s / num_waits * 1e3:.0f} ms each, their bytes took {took_s / num_waits * 1e3:.0f} ms"
        print(f"{num_waits:.0f} hand-overs: {told}: {waited_s / took_s:.0%} not hidden (20%)", flush=True)


def tell_second_tokens(records: list[dict[str, Any]]) -> None:
    """The time from the first token to the second, which a hand-over adds to, beside that of the later ones."""
    gaps = [
        [after[0] - before[0] for before, after in pairwise(record["chunks"])]
        for record in records
        if len(record["chunks"]) > 2
    ]
    second_s, later_s = statistics.median(g[0] for g in gaps), statistics.median(one for g in gaps for one in g[1:])
    print(f"second token after {second_s * 1e3:.1f} ms, later ones {later_s * 1e3:.1f} ms (+ 10 ms)", flush=True)


def times_of(record: dict[str, Any]) -> Times:
    assert record["error"] is None, record
    return Times(record["ttft_s"], record["tpot_s"], record["e2e_s"])


def compare(run_with: Callable[[tuple[str, ...]], list[Times]], *, with_promises: bool) -> None:
    mixed = told("two mixed", run_with(MIXED))
    always = told("always", run_with((*APART, "--handover", "always")))
    auto = told("auto", run_with(APART))
    means = [statistics.fmean(one.e2e_s for one in found) for found in (auto, mixed, always)]
    print(f"mean E2E of auto / the better {means[0] / min(means[1:]):.2f} (1.05)", flush=True)
    ttft_s, tpot_s = statistics.median(one.ttft_s for one in mixed), statistics.median(one.tpot_s for one in mixed)
    promises = {
        "tight in TTFT": (1.1 * ttft_s, 3 * tpot_s),
        "tight in TPOT": (3 * ttft_s, 1.1 * tpot_s),
        "balanced": (1.7 * ttft_s, 1.5 * tpot_s),
    }
    for name, most in promises.items() if with_promises else ():
        slo = ("--slo", f"ttft:{most[0] * 1e3:.0f}ms", "--slo", f"tpot:{most[1] * 1e3:.0f}ms")
        ways = {"two mixed": mixed, "always": always, "auto": told(f"auto, {name}", run_with((*APART, *slo)))}
        kept = {way: sum(one.ttft_s <= most[0] and one.tpot_s <= most[1] for one in ways[way]) for way in ways}
        print(f"goodput, {name}: " + "   ".join(f"{way} {n}/{len(mixed)}" for way, n in kept.items()), end="")
        print(f"   auto / best {kept['auto'] / max(kept['two mixed'], kept['always'], 1):.2f} (0.95)", flush=True)


def told(name: str, found: list[Times]) -> list[Times]:
    means = [statistics.fmean(column) for column in zip(*found, strict=True)]
    line = f"TTFT {means[0] * 1e3:7.0f} ms   TPOT {means[1] * 1e3:6.1f} ms   E2E {means[2]:6.2f} s"
    print(f"{name:20} {line}", flush=True)
    return found


if __name__ == "__main__":
    main()
