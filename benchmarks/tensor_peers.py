"""Requests a second of maitred and of other servers of tensor models, side by side.

    python benchmarks/tensor_peers.py CACHE

Two models. `add` adds two vectors of 16 floats: that measures the server. `mlp` is 512-4096-4096-256 (70 MB): that
measures batching. Each server has its own environment in CACHE, made when it is not there, and its own
process; all are up at once and measured in turn, ROUNDS times, by wrk (HTTP) and h2load (gRPC), which Debian has. Those
that speak KServe v2 get its JSON (mlp: binary data), LitServe and Ray JSON of their own. Numbers are medians over
rounds; the ratio of a row is maitred's number over its own.

Predicted before the first run (two cores, one of them the client's for a part of the time): add with 16 clients over
HTTP 0.3 to 0.4 of Triton (its server is C++, ours is Python twice: HTTP and engine), 2 of MLServer, 4 of LitServe, 10
of Ray; over gRPC 0.25 of Triton and 2 of MLServer, both sides bounded by grpc.aio. mlp with 32 clients: 5 times what
max_batch_size 1 gives.
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
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).parent / "tensor"
ROUNDS, SECONDS = 3, 4
START_S = 180.0
BATCHED = "max_batch_size: 32 dynamic_batching {}"
ALONE = "max_batch_size: 1"


@dataclass(frozen=True)
class Peer:
    """A server: what it needs installed, and how it is begun (PORT, GRPC and FOLDER are filled in)."""

    name: str
    command: Sequence[str]
    packages: Sequence[str] = ()
    speaks_v2: bool = True
    grpc: bool = False
    models: Sequence[str] = ("add",)
    ready: str = "/v2/health/ready"
    environment: Mapping[str, str] = field(default_factory=dict)


SELF = (
    sys.executable,
    "-P",
    "-m",
    "maitred",
    "serve",
    "none",
    "--host",
    "127.0.0.1",
    "--port",
    "PORT",
    "--grpc-port",
    "GRPC",
)
PEERS = (
    Peer("maitred", (*SELF, "--model-repository", "FOLDER/batched"), grpc=True, models=("add", "mlp")),
    Peer("maitred, no batches", (*SELF, "--model-repository", "FOLDER/alone"), models=("mlp",)),
    Peer(
        "mlserver 1.7.1",
        ("PYTHON", "-c", "from mlserver.cli import main; main()", "start", "FOLDER/mlserver"),
        ("mlserver==1.7.1", "numpy<2", "uvloop<0.22"),
        grpc=True,
    ),
    Peer(
        "litserve 0.2.19",
        ("PYTHON", str(HERE / "serve_litserve.py"), "PORT"),
        ("litserve==0.2.19", "numpy"),
        speaks_v2=False,
        ready="/health",
    ),
    Peer(
        "ray 2.60.0",
        ("PYTHON", str(HERE / "serve_ray.py"), "PORT"),
        ("ray[serve]==2.60.0", "numpy"),
        speaks_v2=False,
        ready="/-/healthz",
    ),
)


# ---- what is served


def write_models(folder: Path) -> None:
    add, mlp = _add(), _mlp()
    onnx.save(mlp, folder / "mlp.onnx")
    for name, config in (("batched", BATCHED), ("alone", ALONE)):
        for model, graph in (("add", add), ("mlp", mlp)):
            version = folder / name / model / "1"
            version.mkdir(parents=True)
            onnx.save(graph, version / "model.onnx")
            (version.parent / "config.pbtxt").write_text(config)


def _add() -> onnx.ModelProto:
    value = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 16]) for name in ("INPUT0", "INPUT1", "OUTPUT")
    ]
    return _model([helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT"])], value[:2], value[2:], [])


def _mlp() -> onnx.ModelProto:
    random, sizes, nodes, weights, at = np.random.default_rng(0), (512, 4096, 4096, 256), [], [], "INPUT"
    for layer, (wide, narrow) in enumerate(pairwise(sizes)):
        scale = 1 / np.sqrt(wide)
        weights.append(
            numpy_helper.from_array((random.standard_normal((wide, narrow)) * scale).astype("f4"), f"w{layer}")
        )
        last = layer == len(sizes) - 2
        nodes.append(helper.make_node("MatMul", [at, f"w{layer}"], ["OUTPUT" if last else f"m{layer}"]))
        if not last:
            nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"]))
            at = f"r{layer}"
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", s]) for n, s in (("INPUT", 512), ("OUTPUT", 256))]
    return _model(nodes, ends[:1], ends[1:], weights)


def _model(nodes: list, inputs: list, outputs: list, weights: list) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "model", inputs, outputs, initializer=weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


# ---- what is asked


INPUTS = {"add": (("INPUT0", 16), ("INPUT1", 16)), "mlp": (("INPUT", 512),)}


def write_requests(folder: Path) -> None:
    """For wrk a script for each model and dialect, for h2load a message."""
    for model, inputs in INPUTS.items():
        data = [np.arange(width, dtype="f4") for _, width in inputs]
        described = [{"name": name, "datatype": "FP32", "shape": [1, width]} for name, width in inputs]
        headers = {"Content-Type": "application/json"}
        if model == "add":  # JSON, which all that speak v2 take
            told = [{**each, "data": array.tolist()} for each, array in zip(described, data, strict=True)]
            body = json.dumps({"inputs": told}).encode()
        else:
            told = [
                {**each, "parameters": {"binary_data_size": array.nbytes}}
                for each, array in zip(described, data, strict=True)
            ]
            head = json.dumps({"inputs": told, "parameters": {"binary_data_output": True}}).encode()
            headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
            body = head + b"".join(array.tobytes() for array in data)
        _write_script(folder / f"{model}.v2.lua", body, headers)
        plain = {name: list(range(width)) for name, width in inputs}
        _write_script(folder / f"{model}.json.lua", json.dumps(plain).encode(), {"Content-Type": "application/json"})
        (folder / f"{model}.grpc").write_bytes(_message(model, inputs))


def _write_script(path: Path, body: bytes, headers: Mapping[str, str]) -> None:
    told = "".join(f"\\{byte:03d}" for byte in body)
    lines = ['wrk.method = "POST"', f'wrk.body = "{told}"']
    path.write_text("\n".join([*lines, *(f'wrk.headers["{k}"] = "{v}"' for k, v in headers.items())]))


def _message(model: str, inputs: Sequence[tuple[str, int]]) -> bytes:
    """A ModelInferRequest in gRPC's frame."""
    from maitred.tensor.protocol_fields import MESSAGES

    told = MESSAGES["ModelInferRequest"](model_name=model)
    for name, width in inputs:
        told.inputs.add(name=name, datatype="FP32", shape=[1, width])
        told.raw_input_contents.append(np.arange(width, dtype="f4").tobytes())
    content = told.SerializeToString()
    return b"\0" + struct.pack(">I", len(content)) + content


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
    port, grpc_port = _free_port(), _free_port()
    if peer.name.startswith("mlserver"):
        _write_mlserver(folder / "mlserver", port, grpc_port)
    fill = {"PORT": str(port), "GRPC": str(grpc_port), "PYTHON": python}
    command = [fill.get(word, word).replace("FOLDER", str(folder)) for word in peer.command]
    environment = {**os.environ, **peer.environment, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
    if peer.packages:
        environment.pop("PYTHONPATH", None)
    log = (folder / f"{peer.name}.log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        _wait(process, f"http://127.0.0.1:{port}{peer.ready}", folder / f"{peer.name}.log")
        yield port, grpc_port
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


def _write_mlserver(folder: Path, port: int, grpc_port: int) -> None:
    folder.mkdir()
    shutil.copy(HERE / "mlserver_add.py", folder / "mlserver_add.py")
    ports = {"http_port": port, "grpc_port": grpc_port, "metrics_port": _free_port(), "debug": False}
    (folder / "settings.json").write_text(json.dumps(ports))
    model = {"name": "add", "implementation": "mlserver_add.Add", "max_batch_size": 16, "max_batch_time": 0.001}
    (folder / "model-settings.json").write_text(json.dumps(model))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise SystemExit(f"it did not start:\n{log.read_text()[-2000:]}")


# ---- measuring


def http_figures(port: int, peer: Peer, model: str, clients: int, folder: Path, seconds: int) -> tuple[float, float]:
    """(requests/s, p99 in ms) of wrk."""
    dialect, path = ("v2", f"v2/models/{model}/infer") if peer.speaks_v2 else ("json", "predict")
    script = str(folder / f"{model}.{dialect}.lua")
    command = [
        "wrk",
        "-t1",
        f"-c{clients}",
        f"-d{seconds}s",
        "--latency",
        "-s",
        script,
        f"http://127.0.0.1:{port}/{path}",
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    told = run.stdout
    if run.returncode or "Non-2xx" in told:
        raise SystemExit(f"{peer.name} refuses {model}:\n{told}{run.stderr}")
    return float(_found(r"Requests/sec: +([\d.]+)", told)), _ms(_found(r"99% +(\S+)", told))


def grpc_figures(port: int, model: str, clients: int, folder: Path, seconds: int) -> tuple[float, float]:
    """(requests/s, mean in ms) of h2load, which tells no p99."""
    url = f"http://127.0.0.1:{port}/inference.GRPCInferenceService/ModelInfer"
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    command = [
        "h2load",
        "-t1",
        f"-D{seconds}",
        f"-c{clients}",
        "-m1",
        "-d",
        str(folder / f"{model}.grpc"),
        *headers,
        url,
    ]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="where the peers' environments are kept")
    parser.add_argument("--peers", default="", help="parts of names, by commas; all without it")
    parser.add_argument(
        "--triton",
        metavar="HTTP:GRPC",
        help="ports of a Triton that serves add here (nvidia-pytriton has one; its Python backend wants numpy below 2)",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    asked = parser.parse_args()
    for tool in ("wrk", "h2load"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is not here; on Debian: apt-get install wrk nghttp2-client")
    wanted = [part for part in asked.peers.split(",") if part]
    peers = [p for p in PEERS if not wanted or p.name.startswith("maitred") or any(part in p.name for part in wanted)]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_models(folder)
        write_requests(folder)
        pythons = {peer.name: installed(peer, asked.cache) for peer in peers}
        up = [(p, stack.enter_context(running(p, python, folder))) for p in peers if (python := pythons[p.name])]
        if asked.triton:
            http_port, grpc_port = map(int, asked.triton.split(":"))
            up.append((Peer("triton", (), grpc=True), (http_port, grpc_port)))
        for title, model, clients, by_grpc in (
            ("add, HTTP, 1 client", "add", 1, False),
            ("add, HTTP, 16 clients", "add", 16, False),
            ("add, gRPC, 1 client", "add", 1, True),
            ("add, gRPC, 16 clients", "add", 16, True),
            ("mlp, HTTP, 32 clients", "mlp", 32, False),
        ):
            print_rows(title, up, model, clients, folder, asked, by_grpc=by_grpc)


def print_rows(
    title: str,
    up: Sequence[tuple[Peer, tuple[int, int]]],
    model: str,
    clients: int,
    folder: Path,
    asked: argparse.Namespace,
    *,
    by_grpc: bool,
) -> None:
    able = [(peer, ports) for peer, ports in up if model in peer.models and (peer.grpc or not by_grpc)]
    found: dict[str, list[tuple[float, float]]] = {peer.name: [] for peer, _ in able}
    for _ in range(asked.rounds):
        for peer, (port, grpc_port) in able:
            if by_grpc:
                found[peer.name].append(grpc_figures(grpc_port, model, clients, folder, asked.seconds))
            else:
                found[peer.name].append(http_figures(port, peer, model, clients, folder, asked.seconds))
    print(
        f"\n{title}\n{'':24}{'requests/s':>12}{'mean ms' if by_grpc else 'p99 ms':>10}{'maitred / it':>14}", flush=True
    )
    ours = statistics.median(rate for rate, _ in found["maitred"])
    for name, figures in found.items():
        rate, ms = (statistics.median(each) for each in zip(*figures, strict=True))
        print(f"{name:24}{rate:12.0f}{ms:10.2f}{ours / rate:14.2f}", flush=True)


if __name__ == "__main__":
    main()
