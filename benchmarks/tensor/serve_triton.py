"""Triton with its Python backend, by nvidia-pytriton: `add`, and `mlp` by onnxruntime. HTTP port, gRPC port, file."""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

http_port, grpc_port, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@batch
def add(**inputs: np.ndarray) -> dict[str, np.ndarray]:
    return {"OUTPUT": inputs["INPUT0"] + inputs["INPUT1"]}


@batch
def mlp(**inputs: np.ndarray) -> dict[str, np.ndarray]:
    return {"OUTPUT": session.run(["OUTPUT"], {"INPUT": inputs["INPUT"]})[0]}


def tensor(name: str, width: int) -> Tensor:
    return Tensor(name=name, dtype=np.float32, shape=(width,))


with Triton(config=TritonConfig(http_port=http_port, grpc_port=grpc_port, metrics_port=http_port + 1000)) as triton:
    config = ModelConfig(max_batch_size=32, batcher=DynamicBatcher())
    triton.bind("add", add, [tensor("INPUT0", 16), tensor("INPUT1", 16)], [tensor("OUTPUT", 16)], config=config)
    triton.bind("mlp", mlp, [tensor("INPUT", 512)], [tensor("OUTPUT", 256)], config=config)
    triton.serve()
