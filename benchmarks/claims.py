"""Claims of the field, each run here: the rows of docs/claims.md, one after the other.

    python benchmarks/claims.py [ROW ...] [--write]      # all simulated rows; others only by name

A simulated row takes a second and has the same figures on every machine: the real scheduler, caches and policies around
a datasheet's times, without jitter. A measured row times two ways in turn, in processor time, or runs the benchmark
that has the claim already, which prints its own ratios. Figures and words stand in src/maitred/cli/claims.toml, which
`maitred explain` reads too; --write makes the page's table of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import process_time
from timeit import timeit
from typing import Any

from harness import write_section

from maitred.config import SchedulerConfig
from maitred.sim.baselines import Baseline
from maitred.sim.devices import DEVICES, MODELS, ModelShape, num_kv_blocks, roofline
from maitred.sim.engine import EngineSetup, Simulation
from maitred.sim.results import Objectives, SimulatedResults
from maitred.sim.synthetic import SyntheticWorkload, parse_spec

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE = ROOT / "src" / "maitred" / "cli" / "claims.toml", ROOT / "docs" / "claims.md"
Figures = dict[str, float]
LLAMA, AT_ONCE = MODELS["llama-3.1-8b"], 1e6
CHATS: dict[str, Any] = {"input": "lognormal:120,0.8", "output": "lognormal:80,0.9", "max_tokens": 512}
DOCUMENTS: dict[str, Any] = {"input": "lognormal:4000,0.3", "output": 40, "share": 0.2}


def simulated(
    *,
    model: ModelShape = LLAMA,
    device: str = "a100",
    rate: float = AT_ONCE,
    requests: int = 96,
    slots: int = 16,
    kv_gb: float | None = None,
    budget: int = 512,
    policy: str = "fcfs",
    objectives: Objectives | None = None,
    classes: Mapping[str, Any] | None = None,
    batching: str = "continuous",
    kv_layout: str = "paged",
    **more: Any,
) -> dict[str, Any]:
    """Figures of `maitred simulate --json` and `rps`, of a workload that is the same unless a row says otherwise."""
    spec = {"rate": rate, "num_requests": requests, "seed": 1, "classes": classes or {"chat": CHATS}}
    blocks = num_kv_blocks(DEVICES[device], model, 16)
    setup = EngineSetup(
        scheduler=SchedulerConfig(policy=policy, max_num_seqs=slots, max_num_batched_tokens=budget),
        num_blocks=blocks if kv_gb is None else int(kv_gb * 1e9 / model.kv_bytes_per_token / 16),
        baseline=Baseline(batching=batching, kv_layout=kv_layout),
        **more,
    )
    simulation = Simulation(setup, roofline(DEVICES[device], model), SimulatedResults(objectives))
    results = simulation.run(SyntheticWorkload(parse_spec(spec, "claims")).arrivals())
    assert simulation.kv_waste is not None
    more = {"waste": 100 * simulation.kv_waste.share, "rps": results.total.num_finished / results.duration_s}
    return results.to_json() | more | {"busy_s": results.busy_s}


def rps(**asked: Any) -> float:
    return float(simulated(**asked)["rps"])


def continuous() -> Figures:
    """All at once; and one request a second, for which a dynamic batch waits no longer than it may."""
    slow, quick = (simulated(batching=way, rate=1.0)["e2e_s"]["mean"] for way in ("dynamic", "continuous"))
    return {"static": rps() / rps(batching="static"), "latency": slow / quick}


def dynamic() -> Figures:
    """Batches of chats, and of requests that are all alike."""
    alike, alone = {"classes": {"alike": {"input": 120, "output": 80}}}, {"slots": 1}
    unlike = {f"of_{size}": rps(slots=size, batching="dynamic") / rps(**alone) for size in (4, 16)}
    return unlike | {"alike": rps(batching="dynamic", **alike) / rps(**alone, **alike)}


def lengths() -> Figures:
    mixed, alike = (rps(batching="static", policy=policy, requests=64) for policy in ("fcfs", "sjf"))
    return {"static": alike / mixed, "of_continuous": 100 * alike / rps(requests=64)}


def paged() -> Figures:
    """Clients allow 512 tokens, then 2,048, where the median is 80; KV has 2 GB."""
    figures = Figures()
    for allowed in (512, 2048):
        few = {"classes": {"chat": CHATS | {"max_tokens": allowed}}, "slots": 128, "kv_gb": 2.0, "requests": 300}
        contiguous, pages = (simulated(kv_layout=way, **few) for way in ("contiguous", "paged"))
        figures |= {f"waste_{allowed}": contiguous["waste"], f"rps_{allowed}": pages["rps"] / contiguous["rps"]}
    return figures | {"waste": pages["waste"]}


def no_cache() -> Figures:
    return {"rps": rps(requests=64) / rps(kv_layout="none", requests=64)}


def chunked() -> Figures:
    """Chats beside documents of 4,000 tokens; steps of 16,384 tokens, so that prompts are whole, and of 512."""
    asked = {"classes": {"chat": CHATS, "document": DOCUMENTS}, "slots": 64, "rate": 2.0, "requests": 64}
    slo = Objectives(itl_s=0.1, ttft_s=5.0)
    whole, chunks = (simulated(budget=budget, objectives=slo, **asked) for budget in (16_384, 512))
    gaps = {name: whole["itl_s"][name] / chunks["itl_s"][name] for name in ("max", "p99")}
    return gaps | {"good": 100 * chunks["slo_attainment"], "good_whole": 100 * whole["slo_attainment"]}


def gqa() -> Figures:
    every = replace(LLAMA, kv_width=LLAMA.q_width, kv_heads=32)
    asked = {"classes": {"long": DOCUMENTS | {"output": 200}}, "slots": 64, "kv_gb": 16.0, "requests": 64}
    return {
        "bytes": every.kv_bytes_per_token / LLAMA.kv_bytes_per_token,
        "rps": rps(**asked) / rps(model=every, **asked),
    }


def windows() -> Figures:
    """KV of one request of 32,768 tokens in Gemma 3 27B, of all that it would be, and of the weights' bytes."""
    model = MODELS["gemma-3-27b"]
    assert model.groups is not None
    all_bytes, page_bytes = 32_768 * model.kv_bytes_per_token, 16 * model.kv_bytes_per_token / model.num_layers
    kept_bytes = model.groups.pages_for(32_768, 16, 1) * page_bytes * model.groups.size
    to_weights = {"own": 100 * kept_bytes / model.weight_bytes, "all": 100 * all_bytes / model.weight_bytes}
    return {"share": 100 * kept_bytes / all_bytes} | to_weights


def kv_int8() -> Figures:
    asked = {"slots": 128, "kv_gb": 0.5, "requests": 150}
    return {"rps": rps(model=replace(LLAMA, bytes_per_kv=1.0), **asked) / rps(**asked)}


def critical_batch() -> Figures:
    """Operations that a device has for each byte of bfloat16 weights: two a weight and token, two bytes a weight."""
    return {name.replace("-", "_"): each.peak_flops / each.bandwidth for name, each in DEVICES.items() if name != "cpu"}


def prefix() -> Figures:
    talk = {"prefix_tokens": 512, "input": "lognormal:60,0.5", "output": 60, "turns": "uniform:1,8", "think_s": 5}
    asked = {"classes": {"talk": talk}, "requests": 150, "slots": 64, "rate": 3.0}
    own, cold = (simulated(enable_prefix_caching=on, **asked) for on in (True, False))
    return {"ttft": cold["ttft_s"]["mean"] / own["ttft_s"]["mean"], "busy": cold["busy_s"] / own["busy_s"]}


def speculation() -> Figures:
    """At most 5 drafts, which take no time here, accepted with a chance of 0.8: the most that they can be worth."""

    def gain(slots: int, acceptance: float) -> float:
        asked = {"slots": slots, "requests": max(8, 2 * slots), "device": "h100"}
        return rps(acceptance=acceptance, **asked) / rps(**asked)

    return {f"at_{slots}": gain(slots, 0.8) for slots in (1, 16, 256)} | {"sure": gain(1, 1.0)}


def attention() -> Figures:
    """Plain attention, its scores in memory, against the native library's tiles: a prompt, one thread, in turn."""
    sys.path.insert(0, str(ROOT))
    import numpy as np
    import torch

    from maitred.kernels import _native
    from maitred.kernels.kv_pool import make_kv_pool
    from tests.kernels.attention_layer import AttentionLayer, AttentionShape, StepRow

    torch.set_num_threads(1)
    found, heads, size = Figures(), 8, 64
    sizes = {"dtype": "float32", "num_layers": 1, "block_size": 16, "num_kv_heads": heads, "head_dim": size}
    shape = AttentionShape(num_heads=heads, num_kv_heads=heads, head_dim=size, scale=size**-0.5)
    for tokens in (512, 2048, 4096):
        pool, isa = make_kv_pool(num_blocks=tokens // 16, **sizes), _native.available_isas()[-1]
        layer = AttentionLayer(shape, pool, _native.ThreadPool(1), max_tokens=tokens, isa=isa)
        qkv = np.random.default_rng(0).standard_normal((tokens, 3 * heads * size), dtype=np.float32)
        q, k, v = torch.from_numpy(qkv).view(tokens, 3, heads, size).permute(1, 2, 0, 3)
        unseen, row = torch.ones(tokens, tokens, dtype=torch.bool).triu(1), StepRow(0, tokens, range(tokens // 16))

        def plain() -> Any:
            return (q @ k.transpose(1, 2) * size**-0.5).masked_fill(unseen, -torch.inf).softmax(-1) @ v  # noqa: B023

        def tiled() -> Any:
            return layer.run([row], qkv)  # noqa: B023

        assert np.allclose(plain().transpose(0, 1).reshape(tokens, -1).numpy(), tiled(), atol=1e-3)
        ratios = (
            timeit(plain, timer=process_time, number=1) / timeit(tiled, timer=process_time, number=1) for _ in range(7)
        )
        found[f"of_{tokens}"] = statistics.median(ratios)
    return found


def results(trace: Path) -> Figures:
    """A trace's requests whose whole prompt came before, and its blocks that did."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    prompts = [(line["input_length"], *line["hash_ids"]) for line in lines]
    blocks = [block for line in lines for block in line["hash_ids"]]
    return {name: 100 * (1 - len(set(all_)) / len(all_)) for name, all_ in (("prompts", prompts), ("blocks", blocks))}


SIMULATED = (
    continuous, dynamic, lengths, paged, no_cache, chunked, gqa, windows, kv_int8, critical_batch, prefix, speculation
)  # fmt: skip
RUNS: dict[str, Callable[[], Figures]] = {run.__name__.replace("_", "-"): run for run in (*SIMULATED, attention)}
BENCHMARKS = {  # that have a claim already
    "int8": "techniques.py --only bf16 int8-rtn", "int4": "techniques.py --only int4-gptq",
    "fusion": "techniques.py --only fusion", "mtp": "bench_speculation.py builtin", "host": "bench_host_overhead.py",
    "hashing": "bench_fleet.py alike", "ttft-cpu": "cpu_peers.py --cells prefill-512",
    "loading": "cpu_peers.py --cells start",
}  # fmt: skip


def table() -> str:
    lines = ["| row | claim | source | command | here | verdict |", "|---|---|---|---|---|---|"]
    for name, row in tomllib.loads(DATA.read_text(encoding="utf-8")).items():
        cells = (name, row["claim"], row["source"], f"`{row['command']}`", row["here"].format(**row["figures"]))
        lines.append(f"| {' | '.join((*cells, row['verdict']))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = (*RUNS, *BENCHMARKS, "results")
    parser.add_argument("rows", nargs="*", choices=[*rows, []], metavar="ROW", help=", ".join(rows))
    parser.add_argument("--trace", type=Path, default="conversation_trace.jsonl", help="of `results`, as Mooncake's")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    options = parser.parse_args()
    if options.write:
        write_section(PAGE, "claims", table())
    for name in options.rows or ([] if options.write else [*RUNS][: len(SIMULATED)]):
        if name in BENCHMARKS:
            script, *words = BENCHMARKS[name].split()
            subprocess.run([sys.executable, str(ROOT / "benchmarks" / script), *words], check=True)
            continue
        figures = results(options.trace) if name == "results" else RUNS[name]()
        print(f"{name:15} {', '.join(f'{key} = {value:.3g}' for key, value in figures.items())}", flush=True)


if __name__ == "__main__":
    main()
