"""ONNX files and repositories for tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx", reason="the extra dev brings it")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def add_graph(*, shape=("batch", 16), out_shape=None, kind=TensorProto.FLOAT, weight=None):
    """OUTPUT = INPUT0 + INPUT1, both of `shape`; a name in it is a dimension of any length."""
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name in ("INPUT0", "INPUT1")]
    output = helper.make_tensor_value_info("OUTPUT", kind, out_shape or shape)
    nodes = [helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT"])]
    weights = [] if weight is None else [weight]
    if weight is not None:
        nodes = [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["sum"]),
            helper.make_node("Mul", ["sum", weight.name], ["OUTPUT"]),
        ]
    return helper.make_graph(nodes, "add", inputs, [output], initializer=weights)


def model_of(graph, *, opset=17):
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def add_model(**kwargs):
    return model_of(add_graph(**kwargs))


def write_model(repository: Path, name: str, *, config: str | None = None, versions=(1,), model=None) -> Path:
    """A model's folder; without `model` each version is `add_model`."""
    folder = repository / name
    for version in versions:
        (folder / str(version)).mkdir(parents=True)
        onnx.save(model or add_model(), folder / str(version) / "model.onnx")
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


def external_weight(location: str, *, length: int = 64):
    """16 floats that stand in another file."""
    import numpy as np

    weight = numpy_helper.from_array(np.ones(16, np.float32), "weight")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(length))):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    return weight


def wheel_file(package: str, path: str) -> Path:
    """A model that a wheel brings; skips where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed (make dev has it)")
    return Path(spec.submodule_search_locations[0], path)
