"""4 MiB into a model: what it takes over the runtime's own time, by frame, by arena and by a client's region.

The model sums 2**20 floats, so that it reads its input and answers four bytes. One client, one connection, KServe v2's
HTTP: `frame` and `arena` send the input as binary data, to a server with `--tensor-arena-bytes 0` and to one with the
default; `region` names registered shared memory. The three take turns, and `alone` is onnxruntime in this process.

Predicted before the first run (two cores): alone 0.3 ms. Over it: frame 7 ms (the kernel's two copies, the body's two,
the frame's three and the socket's two, at 2 to 5 GB/s each), arena 4 ms (of the last five one is left), region 0.8 ms,
which is what a small tensor takes. Aim: region <= 1/3 of binary HTTP, which is `arena`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from tensor.serving import served

COUNT = 2**20
BYTES = 4 * COUNT
WARM, TIMED = 5, 20  # requests of one way before it is another's turn
CONFIG = "max_batch_size: 0 instance_group { kind: KIND_CPU count: 1 }"
THREADS = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }'


def model_bytes() -> bytes:
    value = helper.make_tensor_value_info
    axes = onnx.numpy_helper.from_array(np.array([0], np.int64), "axes")
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["X", "axes"], ["Y"], keepdims=1)],
        "sum",
        [value("X", TensorProto.FLOAT, [COUNT])],
        [value("Y", TensorProto.FLOAT, [1])],
        initializer=[axes],
    )
    whole: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10
    ).SerializeToString()
    return whole


def runs_alone(model: bytes) -> Callable[[], object]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    numbers = np.ones(COUNT, np.float32)
    return lambda: session.run(["Y"], {"X": numbers})


@contextmanager
def connected(folder: Path, *flags: str) -> Iterator[http.client.HTTPConnection]:
    """To a server of its own."""
    with served("none", "--model-repository", str(folder), *flags) as url:
        yield http.client.HTTPConnection("127.0.0.1", int(url.rpartition(":")[2]))


def ask(connection: http.client.HTTPConnection, path: str, header: bytes, data: bytes = b"") -> bytes:
    connection.putrequest("POST", f"/v2/{path}")
    connection.putheader("Content-Length", str(len(header) + len(data)))
    connection.putheader("Inference-Header-Content-Length", str(len(header)))
    connection.endheaders()
    connection.send(header)
    if data:
        connection.send(data)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body
    return body


def header_of(**parameters: object) -> bytes:
    inputs = [{"name": "X", "datatype": "FP32", "shape": [COUNT], "parameters": parameters}]
    return json.dumps({"inputs": inputs}).encode()


def taken_ms(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Several requests of one way, then of the next, so that none pays for what another left in caches."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            for number in range(WARM + TIMED):
                began_at = time.perf_counter()
                way()
                if number >= WARM:
                    found[name].append(1000 * (time.perf_counter() - began_at))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "sum/1").mkdir(parents=True)
        (folder / "sum/1/model.onnx").write_bytes(model_bytes())
        (folder / "sum/config.pbtxt").write_text(f"{CONFIG} {THREADS}")
        by_frame = stack.enter_context(connected(folder, "--tensor-arena-bytes", "0"))
        by_arena = stack.enter_context(connected(folder))
        region = SharedMemory(create=True, size=BYTES)
        stack.callback(region.unlink)
        stack.callback(region.close)
        region.buf[:] = np.ones(COUNT, np.float32).tobytes()
        register = {"key": region.name, "offset": 0, "byte_size": BYTES}
        ask(by_arena, "systemsharedmemory/region/input/register", json.dumps(register).encode())
        data, binary = bytes(region.buf), header_of(binary_data_size=BYTES)
        shared = header_of(shared_memory_region="input", shared_memory_byte_size=BYTES)
        path = "models/sum/infer"
        ways = {
            "alone": runs_alone(model_bytes()),
            "frame": lambda: ask(by_frame, path, binary, data),
            "arena": lambda: ask(by_arena, path, binary, data),
            "region": lambda: ask(by_arena, path, shared),
        }
        found = taken_ms(ways, rounds)
    alone = statistics.median(found["alone"])
    print(f"{'':8}{'p50 ms':>9}{'p90 ms':>9}{'p50 over alone':>16}")
    for name, times in found.items():
        p50, p90 = statistics.median(times), statistics.quantiles(times, n=10)[-1]
        print(f"{name:8}{p50:9.3f}{p90:9.3f}{p50 - alone:16.3f}")


if __name__ == "__main__":
    main()
