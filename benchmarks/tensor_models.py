"""ONNX models for benchmarks, made here: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MLP_SIZES = (512, 4096, 4096, 256)  # 70 MB
LIGHT_SIZES = (512, 2048, 2048, 256)  # 22 MB
CHANNELS, PIXELS = 64, 28


def write_mlp(repository: Path, name: str, sizes: Sequence[int], max_batch_size: int = 32) -> Path:
    """A model's folder: matrices with ReLU between them, weights of a fixed seed."""
    return _write(repository / name, mlp(sizes), [sizes[0]], [sizes[-1]], max_batch_size)


def write_convolutions(repository: Path, name: str, num_layers: int = 4, max_batch_size: int = 32) -> Path:
    """A model's folder whose rows are as dear in a batch as alone."""
    shape = [CHANNELS, PIXELS, PIXELS]
    return _write(repository / name, convolutions(num_layers), shape, shape, max_batch_size)


def _write(folder: Path, model: onnx.ModelProto, given: Sequence[int], made: Sequence[int], most: int) -> Path:
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(
        f"max_batch_size: {most}\ndynamic_batching {{}}\n"
        f'input {{ name: "INPUT" data_type: TYPE_FP32 dims: {list(given)} }}\n'
        f'output {{ name: "OUTPUT" data_type: TYPE_FP32 dims: {list(made)} }}\n'
        "instance_group { kind: KIND_CPU count: 1 }\n"
    )
    return folder


def mlp(sizes: Sequence[int]) -> onnx.ModelProto:
    """INPUT [batch, sizes[0]] -> OUTPUT [batch, sizes[-1]]."""
    rng = np.random.default_rng(0)
    nodes, weights, tensor = [], [], "INPUT"
    for i, (before, after) in enumerate(pairwise(sizes)):
        matrix = rng.standard_normal((before, after)).astype(np.float32) * before**-0.5
        weights.append(numpy_helper.from_array(matrix, f"weight{i}"))
        is_last = i == len(sizes) - 2
        nodes.append(helper.make_node("MatMul", [tensor, f"weight{i}"], ["OUTPUT" if is_last else f"sum{i}"]))
        if not is_last:
            tensor = f"hidden{i}"
            nodes.append(helper.make_node("Relu", [f"sum{i}"], [tensor]))
    return _model(nodes, weights, [sizes[0]], [sizes[-1]])


def convolutions(num_layers: int) -> onnx.ModelProto:
    """INPUT [batch, CHANNELS, PIXELS, PIXELS] -> OUTPUT of the same shape: kernels of 3 x 3."""
    rng = np.random.default_rng(0)
    nodes, weights, tensor = [], [], "INPUT"
    for i in range(num_layers):
        kernel = rng.standard_normal((CHANNELS, CHANNELS, 3, 3)).astype(np.float32) * 0.06
        weights.append(numpy_helper.from_array(kernel, f"kernel{i}"))
        output = "OUTPUT" if i == num_layers - 1 else f"layer{i}"
        nodes.append(helper.make_node("Conv", [tensor, f"kernel{i}"], [output], pads=[1, 1, 1, 1]))
        tensor = output
    shape = [CHANNELS, PIXELS, PIXELS]
    return _model(nodes, weights, shape, shape)


def _model(
    nodes: Sequence[onnx.NodeProto], weights: Sequence[TensorProto], given: Sequence[int], made: Sequence[int]
) -> onnx.ModelProto:
    ends = (("INPUT", given), ("OUTPUT", made))
    first, last = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *size]) for name, size in ends)
    graph = helper.make_graph(nodes, "made", [first], [last], initializer=weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
