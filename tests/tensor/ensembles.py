"""Repositories with ensembles for tests."""

from __future__ import annotations

from onnx import TensorProto, helper

from tests.tensor.models import model_of, write_model


def scale_model(factor, *, shape=("batch", 4), kind=TensorProto.FLOAT, names=("x", "y")):
    """y = factor * x."""
    taken, given = names
    value = helper.make_tensor("factor", kind, (), [factor])
    graph = helper.make_graph(
        [helper.make_node("Mul", [taken, "factor"], [given])],
        "scale",
        [helper.make_tensor_value_info(taken, kind, shape)],
        [helper.make_tensor_value_info(given, kind, shape)],
        initializer=[value],
    )
    return model_of(graph)


def sum_model(*, shape=("batch", 4)):
    """z = x + y."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    output = helper.make_tensor_value_info("z", TensorProto.FLOAT, shape)
    return model_of(helper.make_graph([helper.make_node("Add", ["x", "y"], ["z"])], "sum", inputs, [output]))


DIAMOND = """
platform: "ensemble"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 4 }
output { name: "OUT" data_type: TYPE_FP32 dims: 4 }
ensemble_scheduling {
  step { model_name: "zsum" model_version: -1
         input_map { key: "x" value: "left" } input_map { key: "y" value: "right" }
         output_map { key: "z" value: "OUT" } }
  step { model_name: "double" model_version: -1
         input_map { key: "x" value: "IN" } output_map { key: "y" value: "left" } }
  step { model_name: "triple" model_version: -1
         input_map { key: "x" value: "IN" } output_map { key: "y" value: "right" } }
}
"""


def write_diamond(repository, *, config=DIAMOND, cached=False):
    """OUT = 2 IN + 3 IN; the ensemble's name comes before those of its models."""
    extra = "max_batch_size: 4 response_cache { enable: true }" if cached else None
    write_model(repository, "double", model=scale_model(2.0), config=extra)
    write_model(repository, "triple", model=scale_model(3.0))
    write_model(repository, "zsum", model=sum_model())
    write_model(repository, "diamond", config=config, versions=())
