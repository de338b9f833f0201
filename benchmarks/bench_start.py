"""How long `maitred serve` takes to its first token: `python benchmarks/bench_start.py [--model PATH] [--repeats 5]`.

Measured from the start of the process, medians of --repeats on a warm disk: until the server is ready, and until the
first token of a request that is sent then. Three kinds of start: the built-in model; a 1.2 GB checkpoint (random
weights of Qwen3-0.6B's shape, unless --model names one) whose weights are packed and kept; and the same again, mapped.
Beside a GGUF file, a checkpoint in safetensors of its size and width (random weights, fewer layers) is started too.
The phases are those of the server's own timeline, in its last start, and add up to "ready". Modules are compiled, as
an installed package's are: the first start, which is not counted, sees to that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from harness import make_checkpoint, tensor_shapes

from maitred.model.checkpoint import open_checkpoint


class Start(NamedTuple):
    ready_s: float
    first_token_s: float
    cpu_s: float  # of the server and its engine, until they ended
    phases: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint, or a GGUF file")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="maitred-bench-") as name:
        folder = Path(name)
        model = args.model or make_checkpoint(folder / "model")
        cache = folder / "cache"
        models = [model, make_checkpoint(folder / "safetensors", config_of_size(model))] if model.is_file() else [model]
        measured(["maitred-mini"])
        report("built-in model", [measured(["maitred-mini"]) for _ in range(args.repeats)])
        for each in models:
            cold, warm = [], []
            flags = [str(each), "--dtype", args.dtype, "--weight-cache", str(cache), "--max-model-len", "4096"]
            for _ in range(args.repeats):
                shutil.rmtree(cache, ignore_errors=True)
                cold.append(measured(flags))
                warm.append(measured(flags))
            num_bytes = sum(file.stat().st_size for file in cache.iterdir())
            report(f"{each.name}, packed and kept", cold)
            rate = num_bytes / statistics.median(start.phases["weights"] for start in cold) / 1e9
            print(f"    {num_bytes / 1e6:,.0f} MB packed and kept at {rate:.2f} GB/s")
            report(f"{each.name}, mapped", warm)


def measured(flags: list[str]) -> Start:
    """One start of a server, one token, and its end."""
    spent_before = children_cpu_s()
    began = time.perf_counter()
    command = [sys.executable, "-m", "maitred", "serve", *flags, "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if line.startswith("maitred serves "):
                break
        else:
            raise SystemExit("the server did not start:\n" + "".join(lines))
        ready_s = time.perf_counter() - began
        served, url = lines[-1].split("serves ")[1].split(" on ")
        url = url.split()[0]
        body = json.dumps({"model": served, "prompt": "Hello", "max_tokens": 1, "ignore_eos": True}).encode()
        request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
        urllib.request.urlopen(request).read()
        first_token_s = time.perf_counter() - began
        page = urllib.request.urlopen(url + "/metrics").read().decode()
        server.terminate()
        server.communicate()
    phases = {
        line.split('"')[1]: float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith("maitred_start_seconds{")
    }
    return Start(ready_s, first_token_s, children_cpu_s() - spent_before, phases)


def report(what: str, starts: list[Start]) -> None:
    ready, token, cpu = (statistics.median(values) for values in list(zip(*starts, strict=True))[:3])
    print(f"{what:34} ready {ready:6.2f} s   first token {token:6.2f} s   processor time {cpu:6.2f} s")
    print("    " + ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in starts[-1].phases.items()), flush=True)


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def config_of_size(gguf: Path) -> dict[str, Any]:
    """The file's config with as many layers in bfloat16 as it has bytes, and at least one."""
    with open_checkpoint(str(gguf)) as checkpoint:
        config, num_bytes = dict(checkpoint.config), checkpoint.weight_bytes
    sizes = [_num_bytes(config | {"num_hidden_layers": layers}) for layers in (1, 2)]
    layers = max(1, 1 + round((num_bytes - sizes[0]) / (sizes[1] - sizes[0])))
    return config | {"num_hidden_layers": layers, "layer_types": None, "torch_dtype": "bfloat16"}


def _num_bytes(config: dict[str, Any]) -> int:
    return sum(2 * math.prod(shape) for shape in tensor_shapes(config | {"layer_types": None}).values())


if __name__ == "__main__":
    main()
