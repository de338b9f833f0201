"""What batches bring, model by model: the runtime's own gain, and how much of it is left when they are served.

    python benchmarks/batching_gain.py [--models mlp,encoder-8] [--clients 32] [--seconds 3] [--rounds 3]

"Batching makes serving 3 to 10 times as fast" is often read. It depends on the model: a batch reads weights once for
all of its rows and pays each operator's overhead once; arithmetic it does not spare. Six models made here:

    mlp          512-4096-4096-256, 70 MB: weights are read for each run
    encoder-8    6 layers of 384, texts of 8 tokens: weights and overhead
    encoder-128  the same with 128 tokens: arithmetic
    convolutions 4 layers of 64 channels at 28 x 28: arithmetic
    add          two vectors of 16: nothing but overhead
    mean         64 words' vectors of 128, averaged: nothing but overhead

"runtime" is rows a second of ONNX Runtime alone in batches of 32 over batches of one. "engine" is the same ratio of
requests a second, one row each, of so many clients in a closed loop on lanes, runner and runtime in one process: with
`max_batch_size: 32` and dynamic batches over `max_batch_size: 1`. "HTTP" is that ratio of a whole server, binary data,
clients in a process of their own. Each model's ways are measured in turn, ROUNDS times; figures are medians. "kept"
is a ratio over the runtime's.

Predicted before the first run (two cores): the runtime's gain is 8 for mlp, 2.7 for encoder-8, 1.1 for encoder-128,
1.0 for convolutions, 15 for add and mean. The engine keeps 80% where a run of one row takes more than a millisecond
(mlp, both encoders, convolutions); HTTP does so for encoders and convolutions, and half for mlp, whose 2,000
requests/s are more than the edge carries beside a runtime that wants both cores. Of add and mean a request costs the
server 50 times what the runtime does: no gain is left to see (1.0 to 1.3), and none can be promised.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from tensor.serving import served as serving
from tensor_models import MLP_SIZES, add, convolutions, encoder, mean_of_vectors, mlp, write_model

from maitred.tensor.infer_load import run_load
from maitred.tensor.infer_servers import Asked
from maitred.tensor.live_load import Load, made_inputs, served
from maitred.tensor.repository_files import read_model

BATCH = 32
WARM_S = 0.3


@dataclass(frozen=True, slots=True)
class Case:
    make: Callable[[], onnx.ModelProto]
    length: int = 0  # of dimensions of any length


CASES: Mapping[str, Case] = {
    "mlp": Case(lambda: mlp(MLP_SIZES)),
    "encoder-8": Case(encoder, 8),
    "encoder-128": Case(encoder, 128),
    "convolutions": Case(lambda: convolutions(4)),
    "add": Case(add),
    "mean": Case(mean_of_vectors, 64),
}


def of_runtime(folder: Path, rows: int, length: int, seconds: float) -> float:
    """Rows a second of the runtime alone, with as many threads as it has when it serves."""
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = {
        each.name: np.frombuffer(each.data, np.int64 if each.datatype == "INT64" else np.float32).reshape(each.shape)
        for each in made_inputs(read_model(folder).config, rows, length)
    }
    rate = 0.0
    for duration_s in (WARM_S, seconds):
        num_runs, began = 0, time.monotonic()
        while (took_s := time.monotonic() - began) < duration_s:
            session.run(None, inputs)
            num_runs += 1
        rate = num_runs * rows / took_s
    return rate


def of_engine(folder: Path, length: int, clients: int, seconds: float) -> float:
    config: Any = read_model(folder).config

    async def run() -> float:
        async with served(folder.parent, config) as service:
            load = Load(service, config.name, length=length)
            await load.closed_loop(clients, WARM_S)
            return (await load.closed_loop(clients, seconds)).throughput_rps

    return asyncio.run(run())


def of_server(url: str, model: str, length: int, clients: int, seconds: float) -> float:
    asked = Asked(url=url, model=model, protocol="http", length=length)
    for duration_s in (WARM_S, seconds):
        run = run_load(asked, concurrency=clients, rate=None, num_requests=None, duration_s=duration_s, seed=0)
        told = asyncio.run(run).to_json()
        if told["num_failed"]:
            raise SystemExit(f"{model}: {told['failures']}")
    return float(told["requests_per_s"])


def measure(repository: Path, name: str, url: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Rows a second by way and batch, medians over rounds."""
    length, clients, seconds = CASES[name].length, options.clients, options.seconds
    folders = {"alone": repository / f"{name}-1", "batched": repository / f"{name}-{BATCH}"}
    found: dict[str, dict[str, list[float]]] = {way: {"alone": [], "batched": []} for way in WAYS}
    for _ in range(options.rounds):
        for kind, folder in folders.items():
            rows = 1 if kind == "alone" else BATCH
            found["runtime"][kind].append(of_runtime(folders["batched"], rows, length, seconds / 2))
            found["engine"][kind].append(of_engine(folder, length, clients, seconds))
            found["HTTP"][kind].append(of_server(url, folder.name, length, clients, seconds))
    return {way: {kind: statistics.median(rates) for kind, rates in kinds.items()} for way, kinds in found.items()}


WAYS = ("runtime", "engine", "HTTP")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    names = options.models.split(",")
    with tempfile.TemporaryDirectory() as root:
        repository = Path(root)
        for name in names:
            for most in (1, BATCH):
                write_model(repository, f"{name}-{most}", CASES[name].make(), most)
        print("rows a second, in batches of one and of up to 32, and the gain")
        print(f"{'':14}" + "".join(f"{way:>24}{'kept':>6}" for way in WAYS))
        with serving("none", "--model-repository", root) as url:
            for name in names:
                told = measure(repository, name, url, options)
                gains = {way: each["batched"] / each["alone"] for way, each in told.items()}
                cells = (
                    f"{told[way]['alone']:9,.0f} {told[way]['batched']:8,.0f} {gains[way]:5.1f}"
                    f"{gains[way] / gains['runtime']:6.2f}"
                    for way in WAYS
                )
                print(f"{name:14}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
