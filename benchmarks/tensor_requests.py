"""What `tensor_peers.py` has wrk and h2load send."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensor_models import MLP_SIZES, VOCABULARY

from maitred.tensor.protocol_fields import MESSAGES

Inputs = Mapping[str, np.ndarray]
SHORTEST, LONGEST, NUM_TEXTS = 4, 24, 64  # of the encoder's requests: tokens, and how many there are
JSON = {"Content-Type": "application/json"}
KINDS = {"float32": "FP32", "int64": "INT64"}
CYCLE = """
local ready, at = {}, 0
function init() for i, each in ipairs(asked) do ready[i] = wrk.format("POST", nil, each.headers, each.body) end end
function request() at = at % #ready + 1 return ready[at] end
"""


def write_requests(folder: Path) -> None:
    """For wrk a script for each model, for h2load a message."""
    vector = np.arange(16, dtype="f4")[None]
    add = {"INPUT0": vector, "INPUT1": vector}
    _write_script(folder / "add.lua", [_json_request(add)])
    (folder / "add.grpc").write_bytes(_message("add", add))
    row = {"INPUT": np.arange(MLP_SIZES[0], dtype="f4")[None]}
    _write_script(folder / "mlp.lua", [_binary_request(row)])
    _write_script(folder / "encoder.lua", [_binary_request(each) for each in texts()])


def texts() -> list[Inputs]:
    """A request each, of unlike lengths, in an order that is the same for all servers."""
    drawn, found = np.random.default_rng(0), []
    for length in drawn.integers(SHORTEST, LONGEST, NUM_TEXTS, endpoint=True):
        ids = drawn.integers(0, VOCABULARY, (1, length))
        found.append({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    return found


def _described(inputs: Inputs) -> list[dict[str, Any]]:
    return [{"name": n, "datatype": KINDS[str(each.dtype)], "shape": each.shape} for n, each in inputs.items()]


def _json_request(inputs: Inputs) -> tuple[bytes, Mapping[str, str]]:
    described = zip(_described(inputs), inputs.values(), strict=True)
    return json.dumps({"inputs": [{**each, "data": data.ravel().tolist()} for each, data in described]}).encode(), JSON


def _binary_request(inputs: Inputs) -> tuple[bytes, Mapping[str, str]]:
    described = zip(_described(inputs), inputs.values(), strict=True)
    told = [{**each, "parameters": {"binary_data_size": data.nbytes}} for each, data in described]
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


def _message(model: str, inputs: Inputs) -> bytes:
    """A ModelInferRequest in gRPC's frame."""
    told = MESSAGES["ModelInferRequest"](model_name=model)
    for described, array in zip(_described(inputs), inputs.values(), strict=True):
        told.inputs.add(**described)
        told.raw_input_contents.append(array.tobytes())
    content = told.SerializeToString()
    return b"\0" + struct.pack(">I", len(content)) + content
