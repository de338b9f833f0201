"""Prefill and decode apart, live: the same load before one prefill and one decode worker, and before two mixed ones.

    python benchmarks/handover.py [MODEL] [--requests 24] [--rate 0.6] [--input 512] [--output 48] [--dtype int8]

MODEL is random weights of Qwen3-0.6B's shape unless it is named. Each server has two workers of one thread. In turn:
two mixed workers; a prefill and a decode worker with --handover always; the same with auto. Printed are means, and the
goodput (requests that kept both promises) under three pairs of promises made of the run's own medians: tight in TTFT,
tight in TPOT, balanced; with `auto` over the best of the other two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_start import make_checkpoint
from tests.conftest import start_server
from tests.waiting import until

WAYS = {
    "two mixed": ("--mixed-workers", "2"),
    "always": ("--prefill-workers", "1", "--decode-workers", "1", "--handover", "always"),
    "auto": ("--prefill-workers", "1", "--decode-workers", "1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, default=0.6)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=48)
    parser.add_argument("--dtype", default="int8")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="maitred-bench-") as folder:
        model = args.model or str(make_checkpoint(Path(folder) / "model"))
        report(args, {name: run(args, model, words, Path(folder)) for name, words in WAYS.items()})


def run(args: argparse.Namespace, model: str, words: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """Records of the load test, one for each request."""
    server = start_server(model, *words, "--num-threads", "1", "--dtype", args.dtype, "--max-model-len", "2048")
    try:
        until(lambda: all(w["alive"] for w in httpx.get(f"{server.url}/admin/roles").json()["workers"]))
        records = folder / "records.jsonl"
        command = [sys.executable, "-m", "maitred", "bench", "serve", "--url", server.url, "--seed", 1, "--warmup", 4]
        command += ["--num-requests", args.requests, "--rate", args.rate, "--records", records]
        command += ["--input-len", args.input, "--output-len", args.output, "--prompt-form", "tokens"]
        command += ["--extra-body", "logprobs=1"]  # so that tokens without a text are told one by one
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
        found = [json.loads(line) for line in records.read_text().splitlines()]
        for record in found:
            assert record["error"] is None, record
        return found
    finally:
        server.stop()


def report(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    for name, records in found.items():
        times = [times_of(record) for record in records]
        means = [statistics.fmean(column) for column in zip(*times, strict=True)]
        print(f"{name:10} TTFT {means[0] * 1e3:7.0f} ms   TPOT {means[1] * 1e3:6.1f} ms   E2E {means[2]:6.2f} s")
    mixed = [times_of(record) for record in found["two mixed"]]
    ttft_s, tpot_s = (statistics.median(column) for column in list(zip(*mixed, strict=True))[:2])
    promises = {
        "tight in TTFT": (1.1 * ttft_s, 3 * tpot_s),
        "tight in TPOT": (3 * ttft_s, 1.1 * tpot_s),
        "balanced": (1.7 * ttft_s, 1.5 * tpot_s),
    }
    for name, (most_ttft_s, most_tpot_s) in promises.items():
        kept = {
            way: sum(t[0] <= most_ttft_s and t[1] <= most_tpot_s for t in map(times_of, records))
            for way, records in found.items()
        }
        best = max(kept["two mixed"], kept["always"], 1)
        print(f"goodput, {name:14} " + "   ".join(f"{way} {n}/{args.requests}" for way, n in kept.items()), end="")
        print(f"   auto / best {kept['auto'] / best:.2f} (0.95)")


def times_of(record: dict[str, Any]) -> tuple[float, float, float]:
    """TTFT, TPOT and E2E (s)."""
    return record["ttft_s"], record["tpot_s"], record["e2e_s"]


if __name__ == "__main__":
    main()
