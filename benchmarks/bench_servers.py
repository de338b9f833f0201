"""`maitred serve` in two or more ways under the same load, in turn: what a way costs, as ratios to the first.

    python benchmarks/bench_servers.py [WORKLOAD ...] [--rounds 5] [--seconds 4] [--json FILE]

    process    the engine in a thread of the server, and in a process of its own (the default)
    log        without and with a decision log
    watched    with nobody at the page's live feed, and with one
    drafts     without drafts, and with those chosen by default
    threads    1 and 2 threads as asked for, and the default, which chooses; of 160 M parameters in int8
    busy       the same while a process takes nine tenths of a core
    ranks      two threads, and two ranks of a thread; Qwen3-0.6B's shape in int8
    returning  prompts of 2,048 tokens that return and whose KV left the pool: computed, and from disk and Redis
    disk       without and with KV on disk that no prompt finds again; the same model
    grammar    answers that are free, and answers bound by a grammar that forces no token
    handover   two mixed workers, and one for prompts and one for answers, by `always` and by `auto`; the same model
    flood      tenant's chats under `vtc`: alone, and while another keeps 64 requests in a tensor model's lane
    queue      eight chats and eight clients of a tensor model: one server for both, and two servers
    overload   1, 2, 5 and 10 times the load that one server can carry: goodput, refusals, accepted first tokens

All servers of a workload are up; a round loads each, and every second round goes backwards. Printed are medians over
rounds and the medians of the ratios of neighbouring runs, which are the figures to look at. Load comes from
`maitred bench`, on the same cores: quote ratios of a quiet machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from harness import (
    QWEN3_06B,
    Figures,
    Found,
    Server,
    begin_load,
    end_load,
    in_turn,
    make_checkpoint,
    print_table,
    served,
)
from tensor_models import MLP_SIZES, write_mlp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.storage.redis_server import running_redis

KEYS = {"chats": "sk-chats-of-the-benchmark", "floods": "sk-floods-of-the-benchmark"}
SMALL = QWEN3_06B | {"num_hidden_layers": 8, "vocab_size": 32_000}  # 160 M parameters
Beside = Callable[[str, Path], AbstractContextManager[object]]
LOAD = ("--concurrency", "16", "--input-len", "64", "--output-len", "64")
FEW = ("--concurrency", "1", "--input-len", "64", "--output-len", "64")
SLOW = ("--rate", "0.7", "--input-len", "512", "--output-len", "32", "--prompt-form", "tokens")
ONE = (
    *["--dtype", "int8", "--speculative", "off", "--max-num-seqs", "1", "--max-model-len", "2112"],
    "--kv-cache-memory-bytes",
    "255MB",
)
RETURNING = ("--shared-prefix-len", "2048", "--num-prefixes", "2", "--input-len", "16")
POOL = ("--dtype", "int8", "--max-model-len", "2048", "--kv-cache-memory-bytes", "640MiB")


@contextmanager
def core_taken(url: str, folder: Path, share: float = 0.9) -> Iterator[None]:
    """A process that uses that share of the last core, by its own processor time, in periods of 20 ms."""
    process = multiprocessing.Process(target=_take, args=(share, max(os.sched_getaffinity(0))), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _take(share: float, core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        until = time.thread_time() + share * 0.02
        while time.thread_time() < until:
            pass
        time.sleep((1 - share) * 0.02)


@contextmanager
def watcher(url: str, folder: Path) -> Iterator[None]:
    """One reader of the live feed."""
    done = threading.Event()

    def read() -> None:
        with httpx.stream("GET", f"{url}/admin/live", timeout=None) as feed:
            for _ in feed.iter_lines():
                if done.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def flood(url: str, folder: Path) -> Iterator[None]:
    load = begin_load(
        "infer", url, "--model", "mlp", "--concurrency", 64, "--duration", 600, "--api-key", KEYS["floods"]
    )
    try:
        yield
    finally:
        load.kill()
        load.communicate()


@dataclass(frozen=True)
class Workload:
    servers: Mapping[str, tuple[str, ...]]  # words after `maitred serve MODEL`; FOLDER is a temporary one
    load: tuple[str, ...] = LOAD
    shape: Mapping[str, object] | None = None  # of random weights; None is the built-in model
    beside: Mapping[str, Beside] = field(default_factory=dict)  # what goes on meanwhile, by server
    more: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # words of the load, by server


BOUND = json.dumps({"regex": "[^\\x00]{4000,8000}"})
THREADS = {"1 thread": ("--num-threads", "1"), "2 threads": ("--num-threads", "2"), "default": ()}
APART = ("--prefill-workers", "1", "--decode-workers", "1", "--num-threads", "1", *POOL)
TENANTS = ("--model-repository", "FOLDER/models", "--policy", "vtc", "--tenants", "FOLDER/tenants.yaml")
WORKLOADS = {
    "process": Workload({"thread": ("--in-process",), "process": ()}),
    "log": Workload({"none": (), "log": ("--decision-log", "FOLDER/log")}),
    "watched": Workload({"not": (), "watched": ()}, beside={"watched": watcher}),
    "drafts": Workload({"off": ("--speculative", "off"), "default": ()}),
    "threads": Workload(THREADS, FEW, SMALL),
    "busy": Workload(THREADS, FEW, SMALL, dict.fromkeys(THREADS, core_taken)),
    "ranks": Workload(
        {"threads": ("--num-threads", "2", *POOL), "ranks": ("--tensor-parallel", "2", "--num-threads", "1", *POOL)},
        ("--concurrency", "8", "--input-len", "128", "--output-len", "64"),
        QWEN3_06B,
    ),
    "disk": Workload({"none": POOL, "disk": ("--kv-disk", "FOLDER/kv", *POOL)}, LOAD, QWEN3_06B),
    "grammar": Workload({"free": (), "bound": ()}, more={"bound": ("--extra-body", f"structured_outputs={BOUND}")}),
    "returning": Workload(
        {"computed": ONE, "disk": ("--kv-disk", "FOLDER/kv", *ONE), "redis": ("--kv-redis", "REDIS", *ONE)},
        (*RETURNING, "--output-len", "1", "--concurrency", "1", "--prompt-form", "tokens"),
        QWEN3_06B,
    ),
    "handover": Workload(
        {
            "two mixed": ("--mixed-workers", "2", "--num-threads", "1", *POOL),
            "always": (*APART, "--handover", "always"),
            "auto": APART,
        },
        SLOW,
        QWEN3_06B,
    ),
    "flood": Workload(
        {"silent": TENANTS, "flooded": TENANTS},
        ("--rate", "10", "--input-len", "128", "--output-len", "64", "--api-key", KEYS["chats"]),
        beside={"flooded": flood},
    ),
}


def figures_of(server: Server, load: tuple[object, ...]) -> Figures:
    before = server.cpu_s()
    told = end_load(begin_load("serve", server.url, *load))
    if told["errors"]:
        raise SystemExit(f"requests failed: {told['errors']}")
    cpu_us = (server.cpu_s() - before) / max(1, told["output_tokens"]) * 1e6
    latencies = {
        f"{name.upper()} {part} ms": told[f"{name}_s"][part] * 1e3
        for name in ("ttft", "itl")
        for part in ("p50", "p99")
        if told[f"{name}_s"]
    }
    means = {"TTFT mean ms": told["ttft_s"]["mean"] * 1e3, "E2E mean ms": told["e2e_s"]["mean"] * 1e3}
    return {"tokens/s": told["output_tokens_per_s"], "processor us/token": cpu_us, **latencies, **means}


def compare(name: str, folder: Path, options: argparse.Namespace) -> Found:
    workload = WORKLOADS[name]
    model = "maitred-mini" if workload.shape is None else str(make_checkpoint(folder / "model", workload.shape))
    with ExitStack() as stack:
        fill = {"FOLDER": str(folder)}
        if any("REDIS" in words for words in workload.servers.values()):
            fill["REDIS"] = stack.enter_context(running_redis(folder)).url

        def filled(word: str) -> str:
            for blank, value in fill.items():
                word = word.replace(blank, value)
            return word

        servers = {
            way: stack.enter_context(served(model, *map(filled, words))) for way, words in workload.servers.items()
        }
        shown = (
            () if workload.shape is None else ("--extra-body", "logprobs=1")
        )  # else a token without text is not told
        load = (*workload.load, *shown, "--duration", options.seconds)

        def run(way: str) -> Figures:
            beside = workload.beside.get(way, lambda url, folder: nullcontext())
            with beside(servers[way].url, folder):
                return figures_of(servers[way], (*load, *workload.more.get(way, ())))

        for server in servers.values():  # warm
            figures_of(server, load)
        return in_turn({way: lambda way=way: run(way) for way in servers}, options.rounds)  # type: ignore[misc]


def queue(folder: Path, options: argparse.Namespace) -> Found:
    """Two loads at once; of one server for both, and of one for each."""
    tensors = ("--model-repository", str(folder / "models"))
    with served("maitred-mini", *tensors) as one, served("maitred-mini") as chats, served("none", *tensors) as other:

        def both(chat_url: str, tensor_url: str) -> Figures:
            common = ("--concurrency", 8, "--duration", options.seconds)
            chat = begin_load("serve", chat_url, *common, "--input-len", 128, "--output-len", 64)
            tensor = begin_load("infer", tensor_url, *common, "--model", "mlp")
            told = end_load(chat), end_load(tensor)
            return {"tokens/s": told[0]["output_tokens_per_s"], "tensor requests/s": told[1]["requests_per_s"]}

        ways = {"two servers": lambda: both(chats.url, other.url), "one server": lambda: both(one.url, one.url)}
        return in_turn(ways, options.rounds)


# ---- more than a server can carry

OBJECTIVE_S, SLOTS = 1.0, 16
FACTORS = (1, 2, 5, 10)


def overload(folder: Path, options: argparse.Namespace) -> Found:
    """Poisson loads at multiples of what as many clients as slots are served; one round."""
    words = ("--max-num-seqs", str(SLOTS), "--ttft-objective-s", str(OBJECTIVE_S))
    length, seconds = ("--input-len", 32, "--output-len", 64, "--endpoint", "chat"), ("--duration", options.seconds)
    with served("maitred-mini", *words) as server:
        end_load(begin_load("serve", server.url, "--concurrency", SLOTS, "--duration", 3, *length))
        full = end_load(begin_load("serve", server.url, "--concurrency", SLOTS + 2, *seconds, *length))
        capacity = full["requests_per_s"]
        print(f"capacity {capacity:.1f} requests/s of 64 tokens; objective {OBJECTIVE_S} s")
        found: Found = {}
        for factor in FACTORS:
            records, slo = folder / f"{factor}.jsonl", ("--slo", f"ttft:{OBJECTIVE_S * 1e3:g}ms")
            rate = ("--rate", factor * capacity, "--records", records)
            told = end_load(begin_load("serve", server.url, *rate, *seconds, *slo, *length))
            if others := set(told["errors"]) - {"HTTP 503"}:
                raise SystemExit(f"at {factor}x: {others}")
            each = [json.loads(line) for line in records.read_text().splitlines()]
            refused_ms = sorted((one["ended_s"] - one["sent_s"]) * 1e3 for one in each if one["error"]) or [0.0]
            found[f"{factor}x"] = [
                {
                    "goodput/s": told["goodput_per_s"],
                    "accepted": told["num_completed"],
                    "TTFT p50 ms": told["ttft_s"]["p50"] * 1e3,
                    "TTFT p99 ms": told["ttft_s"]["p99"] * 1e3,
                    "refused": told["num_failed"],
                    "refusal p50 ms": statistics.median(refused_ms),
                    "refusal p99 ms": refused_ms[math.ceil(0.99 * len(refused_ms)) - 1],
                }
            ]
    (first,), (last,) = found["1x"], found["10x"]
    goodput, ttft_ms, refusal_ms = last["goodput/s"] / first["goodput/s"], last["TTFT p99 ms"], last["refusal p99 ms"]
    print(
        f"at 10x: goodput {goodput:.0%} of that at 1x (aim 90), first tokens' p99 {ttft_ms:.0f} ms (aim 1,000), ",
        end="",
    )
    print(f"refusals' p99 {refusal_ms:.0f} ms (aim 50)")
    return found


def write_inputs(folder: Path) -> None:
    """A tensor model, and two tenants."""
    write_mlp(folder / "models", "mlp", MLP_SIZES)
    keys = {
        name: {"keys": [{"id": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}]} for name, key in KEYS.items()
    }
    (folder / "tenants.yaml").write_text(json.dumps({"tenants": keys}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*WORKLOADS, "queue", "overload"]
    parser.add_argument("workloads", nargs="*", choices=[[], *names], metavar="WORKLOAD")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of load in each run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures of all rounds")
    options = parser.parse_args()
    told: dict[str, Found] = {}
    for name in options.workloads or ["process"]:
        with tempfile.TemporaryDirectory(prefix="maitred-bench-") as root:
            write_inputs(Path(root))
            own = {"queue": queue, "overload": overload}.get(name)
            told[name] = own(Path(root), options) if own else compare(name, Path(root), options)
        print_table(name, told[name])
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
