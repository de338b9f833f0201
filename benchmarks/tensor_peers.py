"""Requests a second of maitred and of other servers of tensor models, side by side.

    python benchmarks/tensor_peers.py CACHE [--peers triton] [--rows HTTP] [--rounds 3]

`add` adds two vectors of 16 floats: that measures the server. `mlp` is 512-4096-4096-256 (70 MB): that measures
batching. `encoder` has 6 layers of 384 and gets texts of 4 to 24 tokens: maitred pads those of a length bucket to share
a batch, Triton batches equal shapes alone. Triton is nvidia-pytriton's, with its Python backend; its model.py runs the
same files on the same ONNX Runtime with a thread for each core.

Each server has its own environment in CACHE, made when it is not there, and its own process; all are up at once and
measured in turn by wrk (HTTP) and h2load (gRPC), which Debian has. All speak KServe v2, mlp and encoder in binary data.
Numbers are medians over rounds; the ratio of a row is maitred's number over its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto
from tensor_models import MLP_SIZES, VOCABULARY, add, encoder, mlp, write_mlp, write_model

from maitred.tensor.protocol_fields import MESSAGES

HERE = Path(__file__).parent / "tensor"
ROUNDS, SECONDS, START_S = 3, 4, 180.0
MODELS = {"add": add, "mlp": lambda: mlp(MLP_SIZES), "encoder": encoder}
BUCKETS = "".join(
    f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
    for key, value in {"length_buckets": "9,14,19,24", "pad.attention_mask": "0"}.items()
)
SHORTEST, LONGEST, NUM_TEXTS = 4, 24, 64  # of the encoder's requests: tokens, and how many there are


@dataclass(frozen=True)
class Peer:
    """A server: what it needs installed, and how it is begun (PORT, GRPC and FOLDER are filled in)."""

    name: str
    command: Sequence[str]
    packages: Sequence[str] = ()
    grpc: bool = True
    models: Sequence[str] = tuple(MODELS)


SELF = (sys.executable, "-P", "-m", "maitred", "serve", "none", "--host", "127.0.0.1", "--port", "PORT")
PEERS = (
    Peer("maitred", (*SELF, "--grpc-port", "GRPC", "--model-repository", "FOLDER/batched")),
    Peer("maitred, no batches", (*SELF, "--model-repository", "FOLDER/alone"), grpc=False, models=("mlp",)),
    Peer(
        "triton 2.51",
        ("PYTHON", str(HERE / "serve_triton.py"), "PORT", "GRPC", "FOLDER/triton"),
        ("nvidia-pytriton==0.7.0", "numpy<2", f"onnxruntime=={onnxruntime.__version__}"),
    ),
    Peer(
        "mlserver 1.7.1",
        ("PYTHON", "-c", "from mlserver.cli import main; main()", "start", "FOLDER/mlserver"),
        ("mlserver==1.7.1", "numpy<2", "uvloop<0.22"),
        models=("add",),
    ),
)


@dataclass(frozen=True)
class Row:
    """What is measured of each server that can."""

    title: str
    model: str
    clients: int
    by_grpc: bool = False


ROWS = (
    Row("add, HTTP, 1 client", "add", 1),
    Row("add, HTTP, 16 clients", "add", 16),
    Row("add, gRPC, 1 client", "add", 1, by_grpc=True),
    Row("add, gRPC, 16 clients", "add", 16, by_grpc=True),
    Row("mlp, HTTP, 32 clients", "mlp", 32),
    Row(f"encoder, HTTP, 16 clients, {SHORTEST} to {LONGEST} tokens mixed", "encoder", 16),
)


# ---- what is served


def write_models(folder: Path) -> None:
    for name, make in MODELS.items():
        model = make()
        write_model(folder / "batched", name, model, more=BUCKETS if name == "encoder" else "")
        python = write_model(folder / "triton", name, model, more=f'backend: "python"\n{described(model)}')
        shutil.copy(HERE / "triton_model.py", python / "1" / "model.py")
    write_mlp(folder / "alone", "mlp", MLP_SIZES, max_batch_size=1)


def described(model: onnx.ModelProto) -> str:
    """Inputs and outputs for a config.pbtxt whose backend does not read them from the graph."""
    kinds = {TensorProto.FLOAT: "TYPE_FP32", TensorProto.INT64: "TYPE_INT64"}
    told = []
    for side, tensors in (("input", model.graph.input), ("output", model.graph.output)):
        for tensor in tensors:
            kind = tensor.type.tensor_type
            dims = [each.dim_value or -1 for each in kind.shape.dim[1:]]
            told.append(f'{side} {{ name: "{tensor.name}" data_type: {kinds[kind.elem_type]} dims: {dims} }}')
    return "\n".join(told)


# ---- what is sent

Inputs = Mapping[str, np.ndarray]
KINDS = {"float32": "FP32", "int64": "INT64"}
CYCLE = """
local ready, at = {}, 0
function init() for i, each in ipairs(asked) do ready[i] = wrk.format("POST", nil, each.headers, each.body) end end
function request() at = at % #ready + 1 return ready[at] end
"""


def write_requests(folder: Path) -> None:
    """For wrk a script for each model, for h2load a message; texts come in the same order for all servers."""
    vector, drawn = np.arange(16, dtype="f4")[None], np.random.default_rng(0)
    texts = []
    for length in drawn.integers(SHORTEST, LONGEST, NUM_TEXTS, endpoint=True):
        ids = drawn.integers(0, VOCABULARY, (1, length))
        texts.append({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    pair = {"INPUT0": vector, "INPUT1": vector}
    _write_script(folder / "add.lua", [_json_request(pair)])
    _write_script(folder / "mlp.lua", [_binary_request({"INPUT": np.arange(MLP_SIZES[0], dtype="f4")[None]})])
    _write_script(folder / "encoder.lua", [_binary_request(each) for each in texts])
    message = MESSAGES["ModelInferRequest"](model_name="add")
    for one, array in zip(_described(pair), pair.values(), strict=True):
        message.inputs.add(**one)
        message.raw_input_contents.append(array.tobytes())
    content = message.SerializeToString()
    (folder / "add.grpc").write_bytes(b"\0" + struct.pack(">I", len(content)) + content)


def _described(inputs: Inputs) -> list[dict[str, Any]]:
    return [{"name": n, "datatype": KINDS[str(each.dtype)], "shape": each.shape} for n, each in inputs.items()]


def _json_request(inputs: Inputs) -> tuple[bytes, Mapping[str, str]]:
    each = zip(_described(inputs), inputs.values(), strict=True)
    told = [{**one, "data": data.ravel().tolist()} for one, data in each]
    return json.dumps({"inputs": told}).encode(), {"Content-Type": "application/json"}


def _binary_request(inputs: Inputs) -> tuple[bytes, Mapping[str, str]]:
    each = zip(_described(inputs), inputs.values(), strict=True)
    told = [{**one, "parameters": {"binary_data_size": data.nbytes}} for one, data in each]
    head = json.dumps({"inputs": told, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return head + b"".join(array.tobytes() for array in inputs.values()), headers


def _write_script(path: Path, requests: Sequence[tuple[bytes, Mapping[str, str]]]) -> None:
    """A script that sends them one after another, over and over."""
    asked = []
    for body, headers in requests:
        told = "".join(f"\\{byte:03d}" for byte in body)
        named = ", ".join(f'["{name}"]="{value}"' for name, value in headers.items())
        asked.append(f'{{body="{told}", headers={{{named}}}}},')
    path.write_text("\n".join(["local asked = {", *asked, "}", CYCLE]))


# ---- servers


def installed(peer: Peer, cache: Path) -> str | None:
    """The interpreter of its environment; None where it cannot be made, which is told."""
    if not peer.packages:
        return sys.executable
    home = cache / re.sub(r"\W+", "-", peer.name)
    stamp, wanted = home / ".installed", "\n".join(peer.packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            pip = [str(home / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            subprocess.run([*pip, "setuptools<81", *peer.packages], check=True, env=own)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{peer.name} is left out, it cannot be installed: {error}", flush=True)
            return None
        stamp.write_text(wanted)
    return str(home / "bin/python")


@contextmanager
def running(peer: Peer, python: str, folder: Path) -> Iterator[tuple[int, int]]:
    """Its HTTP and gRPC ports, once it is ready."""
    port, grpc_port, metrics_port = free_ports(3)
    if peer.name.startswith("mlserver"):
        home = folder / "mlserver"
        home.mkdir()
        shutil.copy(HERE / "mlserver_add.py", home)
        ports = {"http_port": port, "grpc_port": grpc_port, "metrics_port": metrics_port, "debug": False}
        (home / "settings.json").write_text(json.dumps(ports))
        model = {"name": "add", "implementation": "mlserver_add.Add", "max_batch_size": 16, "max_batch_time": 0.001}
        (home / "model-settings.json").write_text(json.dumps(model))
    fill = {"PORT": str(port), "GRPC": str(grpc_port), "PYTHON": python}
    command = [fill.get(word, word).replace("FOLDER", str(folder)) for word in peer.command]
    environment = {**os.environ, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
    if peer.packages:
        environment.pop("PYTHONPATH", None)
    log = folder / f"{peer.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        until = time.monotonic() + START_S
        while not _is_ready(f"http://127.0.0.1:{port}/v2/health/ready"):
            if time.monotonic() > until or process.poll() is not None:
                raise SystemExit(f"{peer.name} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.3)
        yield port, grpc_port
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


def free_ports(count: int) -> list[int]:
    """All held at once, so that none comes twice."""
    with ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


def _is_ready(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=2):
        return True
    return False


# ---- measuring


def http_figures(port: int, peer: Peer, row: Row, folder: Path, seconds: int) -> tuple[float, float]:
    """(requests/s, p99 in ms) of wrk."""
    url, script = f"http://127.0.0.1:{port}/v2/models/{row.model}/infer", str(folder / f"{row.model}.lua")
    command = ["wrk", "-t1", f"-c{row.clients}", f"-d{seconds}s", "--latency", "-s", script, url]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode or "Non-2xx" in run.stdout:
        raise SystemExit(f"{peer.name} refuses {row.model}:\n{run.stdout}{run.stderr}")
    return float(_found(r"Requests/sec: +([\d.]+)", run.stdout)), _ms(_found(r"99% +(\S+)", run.stdout))


def grpc_figures(port: int, row: Row, folder: Path, seconds: int) -> tuple[float, float]:
    """(requests/s, mean in ms) of h2load, which tells no p99."""
    url = f"http://127.0.0.1:{port}/inference.GRPCInferenceService/ModelInfer"
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    message = str(folder / f"{row.model}.grpc")
    command = ["h2load", "-t1", f"-D{seconds}", f"-c{row.clients}", "-m1", "-d", message, *headers, url]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(_found(r"([\d.]+) req/s", told)), _ms(_found(r"time for request: +\S+ +\S+ +(\S+)", told))


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"no {pattern!r} in\n{text}")
    return found[1]


def _ms(text: str) -> float:
    unit = re.sub(r"[\d.]", "", text)
    return float(text.removesuffix(unit)) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def print_row(row: Row, up: Sequence[tuple[Peer, tuple[int, int]]], folder: Path, asked: argparse.Namespace) -> None:
    able = [(peer, ports) for peer, ports in up if row.model in peer.models and (peer.grpc or not row.by_grpc)]
    found: dict[str, list[tuple[float, float]]] = {peer.name: [] for peer, _ in able}
    for _ in range(asked.rounds):
        for peer, (port, grpc_port) in able:
            if row.by_grpc:
                found[peer.name].append(grpc_figures(grpc_port, row, folder, asked.seconds))
            else:
                found[peer.name].append(http_figures(port, peer, row, folder, asked.seconds))
    unit = "mean ms" if row.by_grpc else "p99 ms"
    print(f"\n{row.title}\n{'':24}{'requests/s':>12}{unit:>10}{'maitred / it':>14}", flush=True)
    ours = statistics.median(rate for rate, _ in found["maitred"])
    for name, told in found.items():
        rate, ms = (statistics.median(each) for each in zip(*told, strict=True))
        print(f"{name:24}{rate:12.0f}{ms:10.2f}{ours / rate:14.2f}", flush=True)


def print_padding(port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        told = answer.read().decode()
    ratio = float(_found(r'(?m)^maitred_tensor_padding_ratio\{[^}]*model="encoder"[^}]*\} (\S+)', told))
    print(f"{ratio:.1%} of what maitred's encoder computed was padding", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="where the peers' environments are kept")
    parser.add_argument("--peers", default="", help="parts of names, by commas; all without it")
    parser.add_argument("--rows", default="", help="parts of their titles, by commas; all without it")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    asked = parser.parse_args()
    for tool in ("wrk", "h2load"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is not here; on Debian: apt-get install wrk nghttp2-client")

    def wanted(parts: str, name: str) -> bool:
        return not parts or any(part in name for part in parts.split(","))

    peers = [p for p in PEERS if p.name.startswith("maitred") or wanted(asked.peers, p.name)]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_models(folder)
        write_requests(folder)
        pythons = {peer.name: installed(peer, asked.cache) for peer in peers}
        up = [(p, stack.enter_context(running(p, python, folder))) for p in peers if (python := pythons[p.name])]
        for row in ROWS:
            if wanted(asked.rows, row.title):
                print_row(row, up, folder, asked)
        if wanted(asked.rows, ROWS[-1].title):
            print_padding(up[0][1][0])


if __name__ == "__main__":
    main()
