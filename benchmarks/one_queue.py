"""A language model and tensor models in one server, against two servers side by side on the same cores.

    python benchmarks/one_queue.py [--model FOLDER] [--seconds 15] [--rounds 3] [--parts beside,flood]

"beside": eight chats (128 tokens in, 64 out) and eight clients of an MLP of 70 MB (one row each), each asking again
when it was answered, at the same time: once of one server, once of two. Compared are output tokens a second and tensor
requests a second, one server's over two servers', medians over rounds in turn. In one server batches may take half of
the machine while the language model has rows (`--tensor-share 0.5`); between two the kernel decides.

"flood": policy `vtc`, two tenants. One chats now and then (`--chat-rate` a second); its TTFT's p99 is measured while
the other is silent, and while it keeps 64 requests in the MLP's lane. Compared is the latter over the former.

Predicted before the first run (built-in model, two cores): tokens/s 1.0 and tensor requests/s 1.0 of two servers,
within 10% either way, because the halves of the machine are what the kernel would give two busy processes of two
threads each; one server saves a process' HTTP edge and pays with its one edge for both. The flood: 1.5 times the TTFT's
p99, of which most is cores that are shared: a step that runs beside a batch takes up to twice as long.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tensor.serving import served
from tensor_models import MLP_SIZES, write_mlp

CHATS, CLIENTS, FLOOD = 8, 8, 64
KEYS = {"chats": "sk-chats-of-the-benchmark", "floods": "sk-floods-of-the-benchmark"}
SMALL_PROMPTS = ("--input-len", "128", "--output-len", "64")


def bench(kind: str, url: str, *words: str) -> subprocess.Popen[str]:
    """A load generator under way, which ends by printing JSON."""
    command = (sys.executable, "-P", "-m", "maitred", "bench", kind, "--url", url, *words)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def told(load: subprocess.Popen[str]) -> Any:
    out, _ = load.communicate()
    if load.returncode:
        raise SystemExit(f"the load ended with {load.returncode}: {load.args}")
    return json.loads(out)


def chats(url: str, seconds: float, *words: str) -> subprocess.Popen[str]:
    return bench("serve", url, "--duration", str(seconds), "--json", "-", *SMALL_PROMPTS, *words)


def tensors(url: str, seconds: float, clients: int, *words: str) -> subprocess.Popen[str]:
    asked = ("--model", "mlp", "--concurrency", str(clients), "--duration", str(seconds), "--json")
    return bench("infer", url, *asked, *words)


def both(chat_url: str, tensor_url: str, seconds: float) -> dict[str, float]:
    loads = chats(chat_url, seconds, "--concurrency", str(CHATS)), tensors(tensor_url, seconds, CLIENTS)
    chat, tensor = told(loads[0])["result"], told(loads[1])
    return {"tokens/s": chat["output_tokens_per_s"], "tensor requests/s": tensor["requests_per_s"]}


def beside(model: Sequence[str], repository: Path, options: argparse.Namespace) -> None:
    words = ("--model-repository", str(repository))
    with served(*model, *words) as one, served(*model) as chat_url, served("none", *words) as tensor_url:
        ways: dict[str, Callable[[], dict[str, float]]] = {
            "one server": lambda: both(one, one, options.seconds),
            "two servers": lambda: both(chat_url, tensor_url, options.seconds),
        }
        found = in_turn(ways, options.rounds)
    print(f"\n{'':20}{'one server':>14}{'two servers':>14}{'one / two':>12}")
    for figure, both_ways in found.items():
        one_has, two_have = both_ways.values()
        print(f"{figure:20}{one_has:14,.1f}{two_have:14,.1f}{one_has / two_have:12.2f}", flush=True)


def flood(model: Sequence[str], repository: Path, options: argparse.Namespace) -> None:
    words = ("--model-repository", str(repository), "--policy", "vtc", "--tenants", str(write_tenants(repository)))
    with served(*model, *words) as url:

        def ttft(flooded: bool) -> dict[str, float]:
            with ExitStack() as stack:
                if flooded:
                    lane = tensors(url, options.seconds + 60, FLOOD, "--api-key", KEYS["floods"])
                    stack.callback(lane.wait)
                    stack.callback(lane.terminate)
                key = ("--api-key", KEYS["chats"], "--rate", str(options.chat_rate))
                chat = told(chats(url, options.seconds, *key, "--warmup", "8"))["result"]
            return {f"TTFT {p} ms": chat["ttft_s"][p] * 1e3 for p in ("p50", "p99")}

        found = in_turn({"silent": lambda: ttft(False), "flooded": lambda: ttft(True)}, options.rounds)
    print(f"\n{'':20}{'silent':>14}{'flooded':>14}{'flooded / silent':>18}")
    for figure, ways in found.items():
        before, after = ways.values()
        print(f"{figure:20}{before:14.1f}{after:14.1f}{after / before:18.2f}", flush=True)


def in_turn(ways: dict[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, dict[str, float]]:
    """By figure and way, medians over rounds."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            runs[name].append(way())
            print(name, {figure: round(value, 1) for figure, value in runs[name][-1].items()}, flush=True)
    figures = next(iter(runs.values()))[0]
    return {f: {name: statistics.median(run[f] for run in each) for name, each in runs.items()} for f in figures}


def write_tenants(folder: Path) -> Path:
    path = folder.parent / "tenants.yaml"
    keys = {name: hashlib.sha256(secret.encode()).hexdigest() for name, secret in KEYS.items()}
    path.write_text(
        json.dumps({"tenants": {name: {"keys": [{"id": name, "sha256": sha}]} for name, sha in keys.items()}})
    )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="maitred-mini", help="the language model's folder")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chat-rate", type=float, default=10.0)
    parser.add_argument("--parts", default="beside,flood")
    options = parser.parse_args()
    model = [options.model]
    with tempfile.TemporaryDirectory() as root:
        repository = Path(root) / "models"
        write_mlp(repository, "mlp", MLP_SIZES)
        for part in options.parts.split(","):
            {"beside": beside, "flood": flood}[part](model, repository, options)


if __name__ == "__main__":
    main()
