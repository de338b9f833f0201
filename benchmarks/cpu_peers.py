"""maitred and its peers on this CPU, in turn, in one run: prefill, decode, HTTP, start, memory; with the roofline.

    python benchmarks/cpu_peers.py --setup                       # environments and models into runs/peers, once
    python benchmarks/cpu_peers.py [--model qwen3-0.6b] [--cells decode-1,prefill-512] [--rounds 3] [--json FILE]

Random weights of the model's real shape, unique prompts, greedy, end-of-sequence ignored, no prefix cache, no
speculation. A decode cell is the median step in which all requests decode, around context 512. OpenVINO has no server
on the package index, so its closed loop runs in process, which flatters it. Bandwidth and arithmetic peaks are measured
before and after each cell; a cell between which they moved by more than a tenth is marked `*`.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from peers.http_load import run_http_loop
from peers.setup import set_up
from peers.shapes import SHAPES, make_checkpoint

from maitred.engine.memory import usable_cores
from maitred.model.families import spec_from_config
from maitred.model.machine import measure as measure_host
from maitred.model.roofline import KVFormat, Machine, Row, WeightFormat, floor_s, step_work

HERE = Path(__file__).resolve().parent
DECODE_TOKENS, CONTEXT = 65, 512
LOOP_INPUT, LOOP_OUTPUT = 512, 128
LOOP_REQUESTS = {1: 4, 8: 16, 32: 48}
DTYPES = ("bfloat16", "int8", "int4")
CELLS = (
    *(f"prefill-{n}" for n in (128, 512, 2048)),
    *(f"decode-{n}" for n in (1, 8, 16, 32)),
    *(f"http-{n}" for n in LOOP_REQUESTS),
    "start",
    "memory",
)


@dataclass(frozen=True)
class Entry:
    """A contender: which module of `peers`, in which environment, with what."""

    name: str
    module: str
    python: Path
    options: dict[str, Any]
    dtype: str | None = None  # maitred's, for the floor


def entries(work: Path, model: str, kv_dtype: str) -> list[Entry]:
    openvino, onnxruntime = work / "venv-openvino/bin/python", work / "venv-onnxruntime/bin/python"
    peers = [
        Entry(
            f"openvino-{name}",
            "openvino_pipeline",
            openvino,
            {"model": str(work / f"openvino-{model}-{folder}"), "precision": precision},
        )
        for name, folder, precision in (("bf16", "fp16", "bf16"), ("int8", "int8", None), ("int4", "int4", None))
    ]
    peers.append(
        Entry(
            "onnxruntime-int4", "onnxruntime_generator", onnxruntime, {"model": str(work / f"onnxruntime-{model}-int4")}
        )
    )
    ours = [
        Entry(
            f"maitred-{dtype}",
            "maitred_engine",
            Path(sys.executable),
            {"model": str(work / model), "dtype": dtype, "kv_dtype": kv_dtype},
            dtype,
        )
        for dtype in DTYPES
    ]
    return [*ours, *peers]


class Worker:
    """A contender's process; `first_token_s` is from its launch to its first token."""

    def __init__(self, entry: Entry) -> None:
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [str(entry.python), "-m", "peers.worker", entry.module, json.dumps(entry.options)],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read()
        self.first_token_s = time.perf_counter() - began

    def ask(self, **cell: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(cell) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the contender's process ended with {self._process.wait()}: {self._process.args}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def working(entry: Entry) -> Iterator[Worker]:
    worker = Worker(entry)
    try:
        yield worker
    finally:
        worker.close()


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = Random(f"{length}/{seed}")
    return [rng.choices(range(300, 8000), k=length) for _ in range(count)]


def measure(entry: Entry, cell: str, seed: int) -> dict[str, float]:
    """One round of one cell; the figure that counts is `value`, in the cell's unit."""
    kind, _, number = cell.partition("-")
    count = int(number or 0)
    if kind == "http" and entry.dtype is not None:
        return _http(entry, count, seed)
    with working(entry) as worker:
        if kind == "start":
            return {"value": worker.first_token_s}
        if kind == "memory":
            worker.ask(cell="decode", prompts=prompts(8, CONTEXT, seed), num_tokens=8)
            return {"value": worker.ask(cell="memory")["peak_mb"]}
        if kind == "prefill":
            return {"value": count / worker.ask(cell="prefill", prompts=prompts(1, count, seed))["first_s"]}
        if kind == "decode":
            asked = prompts(count, CONTEXT - DECODE_TOKENS // 2, seed)
            steps = worker.ask(cell="decode", prompts=asked, num_tokens=DECODE_TOKENS)["steps_s"]
            return {"value": count / statistics.median(steps)}
        loop = worker.ask(
            cell="loop", prompts=prompts(LOOP_REQUESTS[count], LOOP_INPUT, seed), clients=count, num_tokens=LOOP_OUTPUT
        )
        return {"value": loop["tokens_per_s"], **loop}


def _http(entry: Entry, clients: int, seed: int) -> dict[str, float]:
    """The same load over HTTP and, in turn, in process: `offline` is the second's rate."""
    asked = prompts(LOOP_REQUESTS[clients], LOOP_INPUT, seed)
    with _server(entry) as (url, model):
        run_http_loop(url, model, prompts(1, 32, seed), 1, 4)
        http = run_http_loop(url, model, asked, clients, LOOP_OUTPUT)
    with working(entry) as worker:
        offline = worker.ask(cell="loop", prompts=asked, clients=clients, num_tokens=LOOP_OUTPUT)
    return {"value": http["tokens_per_s"], "offline": offline["tokens_per_s"], **http}


@contextmanager
def _server(entry: Entry) -> Iterator[tuple[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--dtype", entry.options["dtype"], "--kv-dtype", entry.options["kv_dtype"], "--no-enable-prefix-caching"]
    flags += ["--max-model-len", "4096", "--max-num-seqs", "32", "--port", str(port), "--served-model-name", "bench"]
    command = [sys.executable, "-m", "maitred.cli.main", "serve", entry.options["model"], *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}", "bench"
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], limit_s: float = 120.0) -> None:
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if process.poll() is not None:
            raise RuntimeError(f"maitred serve ended with {process.returncode}")
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"maitred serve did not listen within {limit_s:g} s")


def floor(model: Path, cell: str, dtype: str, kv_dtype: str, machine: Machine) -> float | None:
    """The best value that the roofline allows this cell, in its unit; None where it says nothing."""
    kind, _, number = cell.partition("-")
    spec = spec_from_config(json.loads((model / "config.json").read_text()))
    weights, kv = WeightFormat(dtype), KVFormat(kv_dtype)
    if kind == "prefill":
        return int(number) / floor_s(step_work(spec, [Row(0, int(number))], weights, kv), machine)
    if kind == "decode":
        rows = [Row(CONTEXT - 1, 1)] * int(number)
        return int(number) / floor_s(step_work(spec, rows, weights, kv), machine)
    return None


def best(values: dict[str, float], cell: str) -> tuple[str, float]:
    pick = min if cell in ("start", "memory") else max
    name = pick(values, key=values.__getitem__)
    return name, values[name]


def report(cell: str, rounds: dict[str, list[dict[str, float]]], machine: Machine, args: argparse.Namespace) -> None:
    """A line for each contender, then the ratio of the best of each side."""
    medians = {name: statistics.median(r["value"] for r in runs) for name, runs in rounds.items()}
    for name, value in medians.items():
        dtype = name.removeprefix("maitred-")
        limit = floor(args.work / args.model, cell, dtype, args.kv_dtype, machine) if dtype in DTYPES else None
        of_floor = f"  {value / limit:5.0%} of the floor's {limit:,.0f}" if limit else ""
        more = {
            k: statistics.median(r[k] for r in rounds[name])
            for k in rounds[name][0]
            if k not in ("value", "tokens_per_s")
        }
        extra = "".join(f"  {k} {v:,.3f}" for k, v in more.items())
        print(f"  {name:18} {value:10,.2f}{of_floor}{extra}", flush=True)
    ours = {name: value for name, value in medians.items() if name.startswith("maitred")}
    peers = {name: value for name, value in medians.items() if name not in ours}
    if ours and peers:
        (our_name, our_value), (peer_name, peer_value) = best(ours, cell), best(peers, cell)
        ratio = peer_value / our_value if cell in ("start", "memory") else our_value / peer_value
        print(f"  {our_name} against {peer_name}: {ratio:.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE.parent / "runs/peers", help="environments and models")
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--setup", action="store_true", help="make what is missing in --work, then leave")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--only", help="contenders, by comma; all if not given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-dtype", default="bfloat16", choices=("bfloat16", "int8"), help="maitred's KV cache")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work = args.work.resolve()
    if args.setup:
        set_up(args.work, args.model)
        return
    make_checkpoint(args.model, args.work)
    chosen = [
        e for e in entries(args.work, args.model, args.kv_dtype) if not args.only or e.name in args.only.split(",")
    ]
    chosen = [entry for entry in chosen if _ready(entry)]
    results = {cell: run_cell(cell, chosen, args) for cell in args.cells.split(",")}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def _ready(entry: Entry) -> bool:
    there = entry.python.exists() and Path(entry.options["model"]).exists()
    if not there:
        print(f"{entry.name} is not set up, left out (--setup)", file=sys.stderr)
    return there


def run_cell(cell: str, chosen: Sequence[Entry], args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """All rounds of a cell, contenders in turn."""
    able = [e for e in chosen if not (cell.startswith("http") and e.module == "onnxruntime_generator")]
    rounds: dict[str, list[dict[str, float]]] = {entry.name: [] for entry in able}
    before = measure_host(usable_cores()).machine
    for number in range(args.rounds):
        for entry in able if number % 2 == 0 else able[::-1]:
            rounds[entry.name].append(measure(entry, cell, seed=number))
    after = measure_host(usable_cores()).machine
    moved = abs(after.stream_bytes_per_s / before.stream_bytes_per_s - 1) > 0.1
    machine = max(before, after, key=lambda m: m.stream_bytes_per_s)
    streams = f"{before.stream_bytes_per_s / 1e9:.0f} and {after.stream_bytes_per_s / 1e9:.0f} GB/s"
    peaks = ", ".join(f"{name} {ops / 1e12:.2f}" for name, ops in machine.peak_ops_per_s.items())
    print(f"{cell}{'*' if moved else ''}  (stream {streams}; peaks in T/s: {peaks})", flush=True)
    report(cell, rounds, machine, args)
    return rounds


if __name__ == "__main__":
    main()
