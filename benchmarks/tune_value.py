"""What `maitred tune` is worth: its choice against the best of 24 settings that are all run live.

    python benchmarks/tune_value.py [--clients 32] [--seconds 2] [--p99 0.1] [--models mlp,convolutions]

A closed loop of so many clients in this process, on an MLP of 70 MB (batching pays: its weights are read once for all
rows) and on convolutions (it does not). The 24 settings are batches of 1, 8 and 32, delays of 0, 2 and 5 ms, one and
two instances of one and two threads; each is run three times, in rotated order, and stands for its median. The choice
of `tune` is run three times as well. Better is more requests a second among those within p99.

Predicted before the first run: the choice is within 10% of the best setting's requests/s, in at most a tenth of the
time of the 24; and on convolutions it is at least 0.98 of the best setting without batches.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tensor_models import MLP_SIZES, write_convolutions, write_mlp

from maitred.tensor.repository_files import read_model
from maitred.tensor.tune import Outcome, Setting, Target, run_live, tune

RUNS = 3
SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2)]  # instances, threads
BATCHES = [(1, 0), (8, 0), (8, 2000), (32, 0), (32, 2000), (32, 5000)]  # rows, delay
SETTINGS = [Setting(batch=b, delay_us=d, instances=i, threads=t) for b, d in BATCHES for i, t in SHAPES]


def medians(folder: Path, settings: list[Setting], target: Target) -> dict[Setting, Outcome]:
    """Of each setting the run of median requests/s."""
    config: Any = read_model(folder).config
    runs: dict[Setting, list[Outcome]] = {setting: [] for setting in settings}
    for number in range(RUNS):
        for setting in settings[number * 8 % len(settings) :] + settings[: number * 8 % len(settings)]:
            runs[setting].append(run_live(folder.parent, config, setting, target, seed=number))
    return {setting: sorted(each, key=lambda run: run.throughput_rps)[RUNS // 2] for setting, each in runs.items()}


def compare(folder: Path, target: Target) -> None:
    began = time.monotonic()
    tuned = tune(folder, target)
    tune_s = time.monotonic() - began
    began = time.monotonic()
    live = medians(folder, SETTINGS, target)
    grid_s = time.monotonic() - began
    chosen = tuned.chosen.setting
    choice = medians(folder, [chosen], target)[chosen]
    best = min(live, key=lambda setting: live[setting].order(target))
    alone = min((each for each in live if each.batch == 1), key=lambda setting: live[setting].order(target))
    print(f"\n{folder.name}: {target.concurrency} clients, p99 <= {target.p99_s * 1e3:g} ms")
    for name, setting, outcome in (
        ("chosen", chosen, choice),
        ("best of 24", best, live[best]),
        ("best without batches", alone, live[alone]),
    ):
        told = f"{outcome.throughput_rps:8,.0f} requests/s, p99 {outcome.p99_s * 1e3:6.1f} ms"
        print(f"{name:22}{told}  ({setting.told})")
    spread = statistics.median(each.throughput_rps for each in live.values()) / live[best].throughput_rps
    print(f"chosen over best {choice.throughput_rps / live[best].throughput_rps:.2f}, "
          f"over the best without batches {choice.throughput_rps / live[alone].throughput_rps:.2f}; "
          f"the median setting has {spread:.2f} of the best")  # fmt: skip
    print(f"tune took {tune_s:.0f} s, the 24 settings {grid_s:.0f} s: {tune_s / grid_s:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each live run")
    parser.add_argument("--p99", type=float, default=0.1, help="s")
    parser.add_argument("--models", default="mlp,convolutions")
    options = parser.parse_args()
    target = Target(p99_s=options.p99, concurrency=options.clients, seconds=options.seconds)
    with tempfile.TemporaryDirectory(prefix="maitred-tune-") as root:
        makers = {
            "mlp": lambda: write_mlp(Path(root), "mlp", MLP_SIZES),
            "convolutions": lambda: write_convolutions(Path(root), "convolutions"),
        }
        for name in options.models.split(","):
            compare(makers[name](), target)


if __name__ == "__main__":
    main()
