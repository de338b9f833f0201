"""ONNX models for benchmarks, made here: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MLP_SIZES = (512, 4096, 4096, 256)  # 70 MB
ENCODER_LAYERS, HIDDEN, HEADS, FEED_FORWARD, VOCABULARY = 6, 384, 12, 1536, 8000  # all-MiniLM-L6's, but for words


def write_mlp(repository: Path, name: str, sizes: Sequence[int], max_batch_size: int = 32) -> Path:
    """A model's folder: matrices with ReLU between them, weights of a fixed seed."""
    return write_model(repository, name, mlp(sizes), max_batch_size)


def write_model(repository: Path, name: str, model: onnx.ModelProto, max_batch_size: int = 32, more: str = "") -> Path:
    """A model's folder with dynamic batches and one instance; `more` is added to its config.pbtxt."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(
        f"max_batch_size: {max_batch_size}\ndynamic_batching {{}}\ninstance_group {{ kind: KIND_CPU count: 1 }}\n{more}"
    )
    return folder


@dataclass(slots=True)
class _Graph:
    """Nodes and weights in the making; weights are of a fixed seed."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)
    drawn: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """The name of what it makes."""
        name = output or f"{kind}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, [*inputs], [name], **attributes))
        return name

    def weight(self, *shape: int, scale: float | None = None) -> str:
        """Normal, so that what is multiplied by a matrix keeps its size."""
        scale = shape[0] ** -0.5 if scale is None else scale
        return self.constant(self.drawn.standard_normal(shape).astype(np.float32) * np.float32(scale))

    def constant(self, values: Any) -> str:
        name = f"weight{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def made(self, inputs: dict[str, tuple[int, Sequence[str | int]]], outputs: dict[str, Sequence[int]]) -> Any:
        """Inputs by element type and shape, outputs float; the rows come before each shape."""
        given = [helper.make_tensor_value_info(n, kind, ["batch", *dims]) for n, (kind, dims) in inputs.items()]
        results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", *dims]) for n, dims in outputs.items()]
        graph = helper.make_graph(self.nodes, "made", given, results, initializer=self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def add() -> onnx.ModelProto:
    """INPUT0 [batch, 16] + INPUT1 -> OUTPUT: it costs nothing, so that what is measured is the server."""
    graph = _Graph()
    graph.add("Add", "INPUT0", "INPUT1", output="OUTPUT")
    return graph.made({name: (TensorProto.FLOAT, [16]) for name in ("INPUT0", "INPUT1")}, {"OUTPUT": [16]})


def mlp(sizes: Sequence[int]) -> onnx.ModelProto:
    """INPUT [batch, sizes[0]] -> OUTPUT [batch, sizes[-1]]."""
    graph, at = _Graph(), "INPUT"
    for i, (before, after) in enumerate(pairwise(sizes)):
        is_last = i == len(sizes) - 2
        at = graph.add("MatMul", at, graph.weight(before, after), output="OUTPUT" if is_last else "")
        at = at if is_last else graph.add("Relu", at)
    return graph.made({"INPUT": (TensorProto.FLOAT, [sizes[0]])}, {"OUTPUT": [sizes[-1]]})


def encoder(num_layers: int = ENCODER_LAYERS) -> onnx.ModelProto:
    """input_ids and attention_mask [batch, length] -> embedding [batch, HIDDEN], the mean of what the mask has.

    Layers are BERT's (post-norm attention and feed forward with GELU), weights random.
    """
    graph = _Graph()
    seen = graph.add("Unsqueeze", graph.add("Cast", "attention_mask", to=TensorProto.FLOAT), _axes(graph, 2))
    at = graph.add("Gather", graph.weight(VOCABULARY, HIDDEN, scale=1.0), "input_ids")
    unseen = graph.add("Sub", graph.constant(np.float32(1)), graph.add("Cast", "attention_mask", to=TensorProto.FLOAT))
    masked = graph.add("Mul", graph.add("Unsqueeze", unseen, _axes(graph, 1, 2)), graph.constant(np.float32(-1e4)))
    for _ in range(num_layers):
        at = _normalized(graph, graph.add("Add", at, _attention(graph, at, masked)))
        wide = graph.add("MatMul", at, graph.weight(HIDDEN, FEED_FORWARD))
        half = graph.add("Mul", wide, graph.constant(np.float32(0.5)))
        spread = graph.add("Erf", graph.add("Div", wide, graph.constant(np.float32(2**0.5))))
        gelu = graph.add("Mul", half, graph.add("Add", spread, graph.constant(np.float32(1))))
        at = _normalized(graph, graph.add("Add", at, graph.add("MatMul", gelu, graph.weight(FEED_FORWARD, HIDDEN))))
    total = graph.add("ReduceSum", graph.add("Mul", at, seen), _axes(graph, 1), keepdims=0)
    graph.add("Div", total, graph.add("ReduceSum", seen, _axes(graph, 1), keepdims=0), output="embedding")
    text = (TensorProto.INT64, ["length"])
    return graph.made({"input_ids": text, "attention_mask": text}, {"embedding": [HIDDEN]})


def _attention(graph: _Graph, at: str, masked: str) -> str:
    apart = graph.constant(np.array([0, 0, HEADS, HIDDEN // HEADS]))
    heads = [graph.add("Reshape", graph.add("MatMul", at, graph.weight(HIDDEN, HIDDEN)), apart) for _ in range(3)]
    query, value = (graph.add("Transpose", heads[i], perm=[0, 2, 1, 3]) for i in (0, 2))
    key = graph.add("Transpose", heads[1], perm=[0, 2, 3, 1])
    scores = graph.add("Div", graph.add("MatMul", query, key), graph.constant(np.float32((HIDDEN // HEADS) ** 0.5)))
    mixed = graph.add("MatMul", graph.add("Softmax", graph.add("Add", scores, masked), axis=-1), value)
    joined = graph.add("Reshape", graph.add("Transpose", mixed, perm=[0, 2, 1, 3]), graph.constant([0, 0, HIDDEN]))
    return graph.add("MatMul", joined, graph.weight(HIDDEN, HIDDEN))


def _normalized(graph: _Graph, at: str) -> str:
    ones, zeros = (graph.constant(np.full(HIDDEN, value, np.float32)) for value in (1, 0))
    return graph.add("LayerNormalization", at, ones, zeros, axis=-1)


def _axes(graph: _Graph, *axes: int) -> str:
    return graph.constant(np.array(axes))
