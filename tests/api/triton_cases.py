"""Requests whose answers were recorded from a real Triton, in the order in which they are asked.

`python -m tests.api.triton_cases URL` records them anew into triton_answers.json, from a Triton 2.51 in explicit mode
(nvidia-pytriton 0.7.0 holds one, for numpy below 2) that serves `MODELS` with its Python backend: add (versions 1, 3)
adds two FP32 of 16; the others give back their input, and scores has labels.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx

ANSWERS = Path(__file__).with_name("triton_answers.json")
LENGTH = "inference-header-content-length"
HEADERS = ("content-type", "content-encoding", LENGTH)  # of answers, as far as they are compared
MODELS = {
    "add": ("FP32", "16"), "text": ("STRING", "2"), "half": ("FP16", "2"), "any": ("FP32", "-1"),
    "scores": ("FP32", "-1"),
}  # fmt: skip
SIXTEEN = [float(i) for i in range(16)]


class Case(NamedTuple):
    name: str
    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = MappingProxyType({})


def _input(name: str, kind: str, shape: list[int], data: Any = None, **parameters: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"name": name, "datatype": kind, "shape": shape}
    if data is not None:
        told["data"] = data
    return {**told, "parameters": parameters} if parameters else told


def _infer(name: str, model: str, inputs: list[dict[str, Any]], rest: bytes = b"", **fields: Any) -> Case:
    head = json.dumps({"inputs": inputs, **fields}).encode()
    return Case(name, "POST", f"models/{model}/infer", head + rest, {LENGTH: str(len(head))} if rest else {})


def _adds(rows: int = 1) -> list[dict[str, Any]]:
    return [_input(f"INPUT{i}", "FP32", [rows, 16], SIXTEEN * rows) for i in range(2)]


def _binary(rows: int = 1) -> list[dict[str, Any]]:
    return [_input(f"INPUT{i}", "FP32", [rows, 16], binary_data_size=64 * rows) for i in range(2)]


RAW = struct.pack("<16f", *SIXTEEN)
HALF = [_input("IN", "FP16", [1, 2], binary_data_size=4)]
NOT_FINITE = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1,3],"data":[NaN,-Infinity,Infinity]}]}'
FOUR_ROWS = b'{"parameters": {"config": "{\\"max_batch_size\\": 4}"}}'
NO_REGION = b'{"key": "/none", "byte_size": 8}'
IN = [_input("IN", "FP32", [1, 3], [0.5, 2, 1])]

CASES = (
    Case("live", "GET", "health/live"),
    Case("ready", "GET", "health/ready"),
    Case("model ready", "GET", "models/add/ready"),
    Case("version ready", "GET", "models/add/versions/3/ready"),
    Case("version not there", "GET", "models/add/versions/1/ready"),
    Case("model not there", "GET", "models/other/ready"),
    Case("metadata", "GET", "models/add"),
    Case("metadata of a version", "GET", "models/add/versions/3"),
    Case("metadata of none", "GET", "models/other"),
    Case("config", "GET", "models/add/config"),
    Case("index", "POST", "repository/index"),
    Case("index of ready ones", "POST", "repository/index", b'{"ready": true}'),
    _infer("json", "add", _adds()),
    _infer("json with an id, two rows", "add", _adds(2), id="mine"),
    _infer("of a version", "add/versions/3", _adds()),
    _infer("nested data", "add", [_input(f"INPUT{i}", "FP32", [1, 16], [SIXTEEN]) for i in range(2)]),
    _infer("binary in, JSON out", "add", _binary(), RAW * 2),
    _infer("binary both ways", "add", _binary(), RAW * 2, parameters={"binary_data_output": True}),
    _infer("a binary output", "add", _adds(), outputs=[{"name": "OUTPUT", "parameters": {"binary_data": True}}]),
    _infer("a wanted output", "add", _adds(), outputs=[{"name": "OUTPUT"}]),
    _infer("priority and timeout", "add", _adds(), parameters={"priority": 0, "timeout": 5_000_000}),
    _infer("texts", "text", [_input("IN", "BYTES", [1, 2], ["\xe9", ""])]),
    _infer("halves", "half", HALF, b"\0<\0@", parameters={"binary_data_output": True}),
    _infer("fractions", "any", [_input("IN", "FP32", [1, 4], [0.1, 1e20, -0.0, 3])]),
    Case("not finite", "POST", "models/any/infer", NOT_FINITE),
    _infer("classes", "scores", IN, outputs=[{"name": "OUT", "parameters": {"classification": 2}}]),
    _infer("more classes than there are", "scores", IN, outputs=[{"name": "OUT", "parameters": {"classification": 9}}]),
    Case("raw", "POST", "models/any/infer", RAW, {LENGTH: "0"}),
    Case("raw for two inputs", "POST", "models/add/infer", RAW, {LENGTH: "0"}),
    _infer("halves as JSON", "half", [_input("IN", "FP16", [1, 2], [1, 2])]),
    _infer("halves answered as JSON", "half", HALF, b"\0<\0@"),
    _infer("no such model", "other", _adds()),
    _infer("no such version", "add/versions/9", _adds()),
    _infer("an input is missing", "add", _adds()[:1]),
    _infer("an input too many", "add", [*_adds(), _input("MORE", "FP32", [1], [1])]),
    _infer("another shape", "add", [_input(f"INPUT{i}", "FP32", [1, 3], [1, 2, 3]) for i in range(2)]),
    _infer("another type", "add", [_input(f"INPUT{i}", "INT32", [1, 16], [1] * 16) for i in range(2)]),
    _infer("an unknown type", "add", [_input(f"INPUT{i}", "FP9", [1, 16], [1] * 16) for i in range(2)]),
    _infer("too many rows", "add", _adds(9)),
    _infer("too few values", "add", [_input(f"INPUT{i}", "FP32", [1, 16], [1, 2]) for i in range(2)]),
    _infer("values of another kind", "add", [_input(f"INPUT{i}", "FP32", [1, 16], ["a"] * 16) for i in range(2)]),
    _infer("no data", "add", [_input(f"INPUT{i}", "FP32", [1, 16]) for i in range(2)]),
    _infer("data twice", "add", [_input(f"INPUT{i}", "FP32", [1, 16], SIXTEEN, binary_data_size=64) for i in range(2)]),
    _infer("binary too short", "add", _binary(), RAW),
    _infer("binary too long", "add", _binary(), RAW * 3),
    _infer("an unknown output", "add", _adds(), outputs=[{"name": "NONE"}]),
    _infer("a parameter of Triton's own", "add", _adds(), parameters={"triton_x": 1}),
    Case("no JSON", "POST", "models/add/infer", b"{"),
    Case("no body", "POST", "models/add/infer"),
    Case("no inputs", "POST", "models/add/infer", b"{}"),
    Case("a header beyond the body", "POST", "models/add/infer", b"{}", {LENGTH: "99"}),
    Case("infer by GET", "GET", "models/add/infer"),
    Case("another encoding", "POST", "models/add/infer", b"{}", {"content-encoding": "br"}),
    Case("no such path", "GET", "nothing"),
    Case("no such region", "GET", "systemsharedmemory/region/none/status"),
    Case("regions", "GET", "systemsharedmemory/status"),
    Case("a region without a key", "POST", "systemsharedmemory/region/x/register", b'{"byte_size": 8}'),
    Case("a region that is not there", "POST", "systemsharedmemory/region/x/register", NO_REGION),
    Case("unregister all", "POST", "systemsharedmemory/unregister"),
    Case("unregister an unknown one", "POST", "systemsharedmemory/region/x/unregister"),
    Case("CUDA regions", "GET", "cudasharedmemory/status"),
    Case("unregister CUDA regions", "POST", "cudasharedmemory/unregister"),
    Case("logging", "GET", "logging"),
    Case("trace", "GET", "trace/setting"),
    Case("load what is not there", "POST", "repository/models/other/load"),
    Case("load with a config", "POST", "repository/models/any/load", FOUR_ROWS),
    Case("unload", "POST", "repository/models/text/unload"),
    Case("unload what is not there", "POST", "repository/models/other/unload"),
    Case("ready after unload", "GET", "models/text/ready"),
    Case("statistics of a model", "GET", "models/add/stats"),
    Case("statistics of none", "GET", "models/other/stats"),
)  # fmt: skip


def told(answer: httpx.Response) -> dict[str, Any]:
    """What is compared of an answer: JSON, and what follows it."""
    headers = {name: answer.headers[name] for name in HEADERS if name in answer.headers}
    end = int(headers.get(LENGTH, len(answer.content)))
    head, rest = answer.content[:end], answer.content[end:]
    body = json.loads(head) if head.lstrip()[:1] in (b"{", b"[") else head.decode()
    return {"status": answer.status_code, "headers": headers, "body": body, "rest": base64.b64encode(rest).decode()}


def record(url: str) -> None:
    with httpx.Client(base_url=f"{url}/v2/", headers={"accept-encoding": "identity"}) as client:
        answers = {
            case.name: told(client.request(case.method, case.path, content=case.body, headers=case.headers))
            for case in CASES
        }
    ANSWERS.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    record(sys.argv[1])
