"""maitred and its peers on this CPU, in turn, in one run: prefill, decode, HTTP, start, memory; with the roofline.

    python benchmarks/cpu_peers.py --setup [--model FILE.gguf]   # environments and models into runs/peers, once
    python benchmarks/cpu_peers.py [--model qwen3-0.6b | qwen3-0.6b-q4_k_m | FILE.gguf] [--cells decode-1,prefill-512]
    python benchmarks/cpu_peers.py --tables                      # what the file of results holds, as Markdown

Random weights of the model's real shape, unique prompts, greedy, end-of-sequence ignored, no prefix cache, no drafts.
Cells: prefill-N, tokens/s of one prompt of N tokens; decode-N, tokens/s of the median step in which all N requests
decode, around context 512; http-N, output tokens/s of N clients in a closed loop, 512 in, 128 out, while all are busy
(OpenVINO has no server on the package index: its loop runs in process, which flatters it; `offline` is maitred's
there); start, seconds from launch to first token, of the second of two launches; memory, peak MB after 8 requests of
512 tokens. Of a GGUF file every cell is asked over HTTP, of maitred's server and of llama.cpp's own, prebuilt: decode-N
counts while all N decode, memory is what is resident after a short request (and after 8), the first launch packs the
weights.

Memory's bandwidth is probed next to each repetition, and a share of the floor takes the probes beside it; `*` marks
figures during which it moved by more than a tenth. Results are kept in a file after every round; rounds that are there
are not repeated.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.cells import CELLS, Bench, Probe, measure
from peers.contact import Workers
from peers.entries import Entry, entries, missing
from peers.setup import set_up
from peers.shapes import GGUF_SHAPES, SHAPES, make_checkpoint, make_gguf
from peers.tables import described, ratios, table

from maitred.engine.memory import usable_cores
from maitred.model.roofline import measure as measure_host

RUNS = Path(__file__).resolve().parents[1] / "runs"


class Results:
    """Outcomes by model, cell and contender, in a JSON file that is written after every change."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.models: dict[str, dict[str, dict[str, Any]]] = json.loads(file.read_text()) if file.exists() else {}

    def outcome(self, model: str, cell: str, entry: Entry) -> dict[str, Any]:
        fresh = {"weights": entry.weights, "ours": entry.ours, "rounds": []}
        outcome: dict[str, Any] = self.models.setdefault(model, {}).setdefault(cell, {}).setdefault(entry.name, fresh)
        return outcome

    def save(self) -> None:
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self.models, indent=1))
        partial.replace(self._file)


def run_cell(bench: Bench, cell: str, chosen: Sequence[Entry], rounds: int, results: Results) -> None:
    """The rounds of a cell that are not there yet, contenders in turn; one that fails is left out of the rest."""
    outcomes = {entry.name: results.outcome(bench.model, cell, entry) for entry in chosen}
    for outcome in outcomes.values():
        outcome.pop("failed", None)  # of an earlier run: try again
    for number in range(rounds):
        for entry in chosen if number % 2 == 0 else chosen[::-1]:
            outcome = outcomes[entry.name]
            if len(outcome["rounds"]) > number or "failed" in outcome:
                continue
            try:
                outcome["rounds"].append(measure(bench, entry, cell, seed=number))
            except (RuntimeError, OSError) as error:
                outcome["failed"] = str(error)
            results.save()
    print(cell, flush=True)
    for entry in chosen:
        print(described(cell, entry.name, outcomes[entry.name]), flush=True)
    for ratio in ratios(cell, results.models[bench.model][cell]):
        print(f"  {ratio}", flush=True)


def print_tables(results: Results, models: Sequence[str]) -> None:
    for model in models:
        if cells := results.models.get(model):
            print(f"\n{table(model, cells)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=RUNS / "peers", help="environments and models")
    parser.add_argument("--model", default="qwen3-0.6b", help=f"{', '.join([*SHAPES, *GGUF_SHAPES])}, or a GGUF file")
    parser.add_argument("--setup", action="store_true", help="make what is missing in --work, then leave")
    parser.add_argument("--tables", action="store_true", help="print the results there are, then leave")
    parser.add_argument("--cells", default=",".join(CELLS), help=f"by comma, in this order; default {','.join(CELLS)}")
    parser.add_argument("--only", help="contenders, by comma; all if not given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RUNS / "cpu_peers.json", help="file of results")
    args = parser.parse_args()
    args.work = args.work.resolve()
    return args


def choose(args: argparse.Namespace) -> list[Entry]:
    """Contenders that are asked for and able; others by name and reason on standard error."""
    everyone = {entry.name: entry for entry in entries(args.work, args.model)}
    wanted = args.only.split(",") if args.only else list(everyone)
    if unknown := set(wanted) - set(everyone):
        sys.exit(f"no contender is called {', '.join(unknown)}; there are {', '.join(everyone)}")
    chosen = [entry for name, entry in everyone.items() if name in wanted]
    reasons = {entry.name: missing(entry, args.work) for entry in chosen}
    for name, reason in reasons.items():
        if reason:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    return [entry for entry in chosen if not reasons[entry.name]]


def main() -> None:
    args = arguments()
    results = Results(args.json)
    if args.tables:
        print_tables(results, list(results.models))
        return
    if args.setup:
        set_up(args.work, args.model)
        return
    if args.model in SHAPES:
        make_checkpoint(args.model, args.work)
    elif args.model in GGUF_SHAPES:
        make_gguf(args.model, args.work)
    chosen, cells = choose(args), args.cells.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # contenders end with it
    workers = Workers(args.work / "logs")
    peaks = measure_host(usable_cores()).machine.peak_ops_per_s
    print("peaks in T/s: " + ", ".join(f"{name} {ops / 1e12:.2f}" for name, ops in peaks.items()), flush=True)
    bench = Bench(args.work, args.model, Probe(usable_cores()), dict(peaks), workers)
    for cell in cells:
        run_cell(bench, cell, chosen, args.rounds, results)
    print_tables(results, [args.model])


if __name__ == "__main__":
    main()
