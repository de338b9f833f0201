"""Tensor requests a second of maitred and of Triton, side by side.

    python benchmarks/tensor_peers.py CACHE [--rows HTTP] [--rounds 3] [--seconds 4]

`add` adds two vectors of 16 floats: that measures the server. `mlp` is 512-4096-4096-256 (70 MB): that measures
batching. `encoder` has 6 layers of 384 and gets texts of 6 to 24 tokens: maitred pads those of a length bucket to share
a batch, Triton batches equal shapes alone. Triton is nvidia-pytriton's, with its Python backend, in an environment in
CACHE that is made when it is not there; its model.py runs the same files on the same ONNX Runtime with a thread for
each core. All servers are up at once and get the load of `maitred bench infer`, whose clients use the same cores, in
turn. Numbers are medians over rounds, ratios maitred's over the other's.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import onnx
import onnxruntime
from harness import Figures, begin_load, end_load, in_turn, print_table, served
from onnx import TensorProto
from tensor_models import MLP_SIZES, add, encoder, mlp, write_mlp, write_model

HERE = Path(__file__).parent / "peers"
TRITON = ("nvidia-pytriton==0.7.0", "numpy<2", f"onnxruntime=={onnxruntime.__version__}", "setuptools<81")
START_S = 180.0
MODELS = {"add": add, "mlp": lambda: mlp(MLP_SIZES), "encoder": encoder}
LENGTHS = (6, 9, 20, 24)  # of the encoder's texts, each asked for by a quarter of the clients; two in a bucket
BUCKETS = "".join(
    f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
    for key, value in {"length_buckets": "9,14,19,24", "pad.attention_mask": "0"}.items()
)


class Ports(NamedTuple):
    http: str
    grpc: str


class Row(NamedTuple):
    title: str
    model: str
    clients: int
    protocol: str = "http"


ROWS = (
    *(Row(f"add, HTTP, {n} clients", "add", n) for n in (1, 16)),
    *(Row(f"add, gRPC, {n} clients", "add", n, "grpc") for n in (1, 16)),
    Row("mlp, HTTP, 32 clients", "mlp", 32),
    Row("encoder, HTTP, 16 clients, lengths mixed", "encoder", 16),
)


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


def installed(home: Path) -> Path:
    """The interpreter of Triton's environment."""
    stamp, wanted = home / ".installed", "\n".join(TRITON)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([*pip, *TRITON], check=True, env=own)
        stamp.write_text(wanted)
    return home / "bin/python"


def triton_command(python: Path, ports: Ports, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The server that the wheel holds runs models in this Python, which must have libpython as a shared library."""
    (home,) = python.parents[1].glob("lib/python3.*/site-packages/pytriton/tritonserver")
    stub, version = "triton_python_backend_stub", f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(home / "python_backend_stubs" / version / stub, home / "backends/python" / stub)
    command = [str(home / "bin/tritonserver"), f"--model-repository={folder / 'triton'}"]
    command += [f"--backend-directory={home / 'backends'}", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1"]
    command += [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", "--allow-metrics=false"]
    paths = {"LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")), "PYTHONHOME": sys.base_prefix}
    return command, os.environ | paths | {"PYTHONPATH": str(home.parents[1])}


def free_ports() -> Ports:
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return Ports(*(str(each.getsockname()[1]) for each in (one, other)))


@contextmanager
def triton(python: Path, folder: Path) -> Iterator[Ports]:
    ports, log = free_ports(), folder / "triton.log"
    command, environment = triton_command(python, ports, folder)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        until = time.monotonic() + START_S
        while not _is_ready(f"http://127.0.0.1:{ports.http}/v2/health/ready"):
            if time.monotonic() > until or process.poll() is not None:
                raise SystemExit(f"Triton did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.3)
        yield ports
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
            process.wait(20)


def _is_ready(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=2):
        return True
    return False


@contextmanager
def ours(folder: Path) -> Iterator[Ports]:
    grpc = free_ports().grpc
    with served("none", "--model-repository", str(folder), "--grpc-port", grpc) as server:
        yield Ports(server.url.rpartition(":")[2], grpc)


def figures(ports: Ports, row: Row, seconds: float) -> Figures:
    """One load, or one for each length at once."""
    url = f"http://127.0.0.1:{ports.http}" if row.protocol == "http" else f"127.0.0.1:{ports.grpc}"
    words = ("--model", row.model, "--protocol", row.protocol, "--duration", seconds)
    lengths = LENGTHS if row.model == "encoder" else (0,)
    loads = [
        begin_load("infer", url, *words, "--concurrency", row.clients // len(lengths), "--length", max(1, length))
        for length in lengths
    ]
    told = [end_load(load) for load in loads]
    if failed := sum(each["num_failed"] for each in told):
        raise SystemExit(f"{row.title}: {failed} requests failed: {told}")
    return {"requests/s": sum(each["requests_per_s"] for each in told), "p99 ms": max(each["p99_ms"] for each in told)}


def print_padding(ports: Ports) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{ports.http}/metrics", timeout=10) as answer:
        told = answer.read().decode()
    found = re.search(r'(?m)^maitred_tensor_padding_ratio\{[^}]*model="encoder"[^}]*\} (\S+)', told)
    assert found is not None
    print(f"{float(found[1]):.1%} of what maitred's encoder computed was padding", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cache", type=Path, nargs="?", help="where Triton's environment is kept; without it maitred alone"
    )
    parser.add_argument("--rows", default="", help="part of their titles; all without it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_models(folder)
        up = {"maitred": stack.enter_context(ours(folder / "batched"))}
        if asked.cache is not None:
            up["triton"] = stack.enter_context(triton(installed(asked.cache / "triton"), folder))
        alone = stack.enter_context(ours(folder / "alone"))
        for row in ROWS:
            if asked.rows in row.title:
                ways = up | {"no batches": alone} if row.model == "mlp" else up
                runs = {
                    way: lambda ports=ports, row=row: figures(ports, row, asked.seconds) for way, ports in ways.items()
                }
                found = in_turn(runs, asked.rounds)  # type: ignore[arg-type]
                print_table(row.title, found)
                for way in list(found)[1:]:
                    rates = [statistics.median(run["requests/s"] for run in found[each]) for each in ("maitred", way)]
                    print(f"maitred / {way}: {rates[0] / rates[1]:.2f}", flush=True)
        if asked.rows in ROWS[-1].title:
            print_padding(up["maitred"])


if __name__ == "__main__":
    main()
