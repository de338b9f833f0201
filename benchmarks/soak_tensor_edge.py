"""Tensor requests that are left early or are large, beside /health: fails where the server ends or answers late.

    python benchmarks/soak_tensor_edge.py [--leavings 10] [--rounds 3]

Every gRPC call is left in every way, `--leavings` times over: at once, after its message, amid answers, with half the
stream closed, by a closed channel, past its deadline. Server and engine must be the same processes afterwards. Then
bodies as large as a server takes by default are sent, `--rounds` times each, while /health is asked every 20 ms:
numbers flat, deep, not finite and slow to read, too many dimensions, objects, texts, TF Serving's rows and columns, an
answer of a million numbers, and values typed in gRPC. None may hold up /health for over 0.2 s in each of its rounds,
beside what it waits without a body.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import psutil
from onnx import TensorProto, helper

from maitred.api.grpc.inference import InferenceService
from maitred.api.grpc.server import HealthService
from maitred.api.grpc.tfserving import ModelService, PredictionService
from maitred.api.tensor.extensions import Extensions
from maitred.tensor.protocol_fields import MESSAGES

sys.path.insert(0, ".")
from tests.conftest import free_port, start_server
from tests.tensor.models import model_of, write_model

MOST_HEALTH_S, EVERY_S, LATE_S, CALM_S = 0.2, 0.02, 0.05, 2.0
MOST_BYTES = 8 << 20  # ServerConfig.max_body_bytes
WAITS = "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 300000 }"
WAYS = ("at once", "after its message", "amid answers", "half closed", "channel", "late")


def echo(kind: int) -> Any:
    ends = [helper.make_tensor_value_info(name, kind, ("n", "m")) for name in ("IN", "OUT")]
    return model_of(helper.make_graph([helper.make_node("Identity", ["IN"], ["OUT"])], "echo", ends[:1], ends[1:]))


def infer_message(name: str, inputs: tuple[str, ...], shape: list[int], values: list[float]) -> bytes:
    message = MESSAGES["ModelInferRequest"](model_name=name)
    for each in inputs:
        message.inputs.add(name=each, datatype="FP32", shape=shape).contents.fp32_contents.extend(values)
    return message.SerializeToString()


# ---- calls that are left


async def leave(address: str, path: str, content: bytes, way: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(path)(timeout=LATE_S if way == "late" else None)
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError, asyncio.InvalidStateError):
            if way != "at once":
                await call.write(content)
                await call.write(content)
            if way == "amid answers":
                await asyncio.wait_for(call.read(), 1)
            if way == "half closed":
                await call.done_writing()
            if way == "late":
                await call.code()
        if way == "channel":
            await channel.close()
        call.cancel()


async def leave_all(address: str, times: int) -> int:
    app: Any = None  # names of methods need none
    services = (InferenceService(app, Extensions("", None)), PredictionService(app), ModelService(app))
    paths = [f"/{each.name}/{method}" for each in (*services, HealthService(app, ())) for method in each.methods]
    asks = infer_message("add", ("INPUT0", "INPUT1"), [1, 16], [1.0] * 16)
    for _ in range(times):
        for way in WAYS:
            await asyncio.gather(*(leave(address, p, asks if p.endswith("Infer") else b"", way) for p in paths))
    return times * len(WAYS) * len(paths)


# ---- bodies beside /health


def filled(head: bytes, element: bytes, tail: bytes) -> bytes:
    """As many elements as a body may hold."""
    count = (MOST_BYTES - len(head) - len(tail) - 8) // (len(element) + 1)
    return head + b",".join([element] * count) + tail.replace(b"COUNT", str(count).encode())


def bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body of each."""
    infer, predict = "/v2/models/any/infer", "/v1/models/any:predict"
    head, tail = b'{"inputs":[{"name":"IN","datatype":"FP32","data":[', b'],"shape":[1,COUNT]}]}'
    lists = {
        name: (infer, filled(head, element, tail))
        for name, element in {
            "flat": b"0.25",
            "digits": b"0.12345678",
            "powers": b"1e300",
            "not finite": b"NaN",
            "pairs": b"[1,2]",
            "deep": b"[" * 100 + b"1" + b"]" * 100,
            "empty": b"[]",
            "objects": b"{}",
            "texts": b'""',
        }.items()
    }
    texts = filled(head.replace(b"FP32", b"BYTES"), b'"' + b"x" * 90 + b'"', tail)
    dims = filled(b'{"inputs":[{"name":"IN","datatype":"FP32","data":[1],"shape":[', b"4611686018427387904", b"]}]}")
    few = b'{"inputs":[{"name":"IN","datatype":"FP32","data":[1],"shape":[' + b"9," * 400_000 + b"9]}]}"
    rows = {"instances": [{"IN": [0.5] * 1000} for _ in range(1500)]}
    return lists | {
        "many texts": ("/v2/models/text/infer", texts),
        "dimensions": (infer, dims),
        "400,000 dimensions": (infer, few),
        "columns": (predict, filled(b'{"inputs":[[', b"0.25", b"]]}")),
        "instances": (predict, filled(b'{"instances":[', b"[0.25,1.5]", b"]}")),
        "named rows": (predict, json.dumps(rows).encode()),
        "named numbers": (predict, filled(b'{"instances":[', b'{"IN":1.5}', b"]}")),
        "index": ("/v2/repository/index", filled(b'{"x":[', b"[]", b"]}")),
    }


async def slowest_health(session: aiohttp.ClientSession, url: str, work: asyncio.Future[str]) -> float:
    slowest = 0.0
    while not work.done():
        began = time.perf_counter()
        async with session.get(f"{url}/health") as answer:
            await answer.read()
        slowest = max(slowest, time.perf_counter() - began)
        await asyncio.sleep(EVERY_S)
    return slowest


async def post(session: aiohttp.ClientSession, url: str, body: bytes) -> str:
    async with session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
        return f"{answer.status} {(await answer.read())[:70]!r}"


async def typed_call(address: str, content: bytes) -> str:
    async with grpc.aio.insecure_channel(address, options=(("grpc.max_receive_message_length", -1),)) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        try:
            return f"{len(await call(content))} bytes"
        except grpc.aio.AioRpcError as error:
            return str(error.details())


async def beside_health(url: str, address: str, rounds: int) -> float:
    """How much longer than without a body /health waits beside the worst of them, in the best of its rounds."""
    worst = 0.0
    typed = infer_message("any", ("IN",), [1, 2_000_000], [0.5] * 2_000_000)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:
        works = {name: (post, (session, url + path, body)) for name, (path, body) in bodies().items()}
        calm = await slowest_health(session, url, asyncio.ensure_future(asyncio.sleep(CALM_S, "")))
        print(f"/health {calm * 1e3:.0f} ms at most without a body", flush=True)
        for name, (send, given) in {**works, "gRPC, typed": (typed_call, (address, typed))}.items():
            waits = []
            for _ in range(rounds):
                began = time.perf_counter()
                work = asyncio.ensure_future(send(*given))
                waits.append(slowest := await slowest_health(session, url, work))
                took_s, answer = time.perf_counter() - began, work.result()
                print(f"{name:>20}: /health {slowest * 1e3:4.0f} ms at most in {took_s:5.2f} s; {answer}", flush=True)
            worst = max(worst, min(waits) - calm)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leavings", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as root:
        write_model(Path(root), "add", config=WAITS)
        write_model(Path(root), "any", config="max_batch_size: 4194304", model=echo(TensorProto.FLOAT))
        write_model(Path(root), "text", config="max_batch_size: 8", model=echo(TensorProto.STRING))
        server = start_server("none", "--model-repository", root, "--grpc-port", str(port))
        engines = psutil.Process(server.process.pid).children()
        num_left = asyncio.run(leave_all(f"127.0.0.1:{port}", options.leavings))
        lives = server.process.poll() is None and psutil.Process(server.process.pid).children() == engines
        print(f"{num_left} calls left; the server {'lives' if lives else 'has ended'}", flush=True)
        worst = asyncio.run(beside_health(server.url, f"127.0.0.1:{port}", options.rounds)) if lives else 0.0
        ended = server.stop()
    print(f"/health {worst * 1e3:.0f} ms later (at most {MOST_HEALTH_S * 1e3:.0f})")
    sys.exit(not lives or ended != 0 or worst > MOST_HEALTH_S)


if __name__ == "__main__":
    main()
