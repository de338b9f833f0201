"""Gaps of a config filled from the graph, and config against graph."""

from __future__ import annotations

import pytest

pytest.importorskip("google.protobuf", reason="the extra tensor brings it")

from maitred.core.errors import CheckpointError
from maitred.tensor.config import parse_config, written
from maitred.tensor.fill import filled_from_files, filled_from_graph, mismatches
from maitred.tensor.onnx_graph import Graph, GraphTensor


def tensor(name: str, *shape: int, kind: str = "TYPE_FP32") -> GraphTensor:
    return GraphTensor(name, kind, shape)


BATCHED = Graph((tensor("x", -1, 3, -1), tensor("n", -1, kind="TYPE_INT64")), (tensor("y", -1, 10),))
FIXED = Graph((tensor("x", 1, 3), tensor("s")), (tensor("y", -1, 10),))


def filled(text: str, graph: Graph, gpus=()) -> dict:
    config = filled_from_files(parse_config(text.encode(), "config.pbtxt"), "m", ["model.onnx"])
    return written(filled_from_graph(config, graph, gpus))


def test_an_empty_config_is_filled_from_a_graph_that_takes_batches():
    found = filled("", BATCHED)
    assert (found["name"], found["platform"], found["backend"]) == ("m", "onnxruntime_onnx", "onnxruntime")
    assert found["default_model_filename"] == "model.onnx"
    assert found["version_policy"] == {"latest": {"num_versions": 1}}
    assert found["max_batch_size"] == 4
    assert found["dynamic_batching"] == {"preferred_batch_size": [4]}
    assert found["input"] == [
        {"name": "x", "data_type": "TYPE_FP32", "dims": [3, -1]},
        {"name": "n", "data_type": "TYPE_INT64", "dims": [1], "reshape": {}},
    ]
    assert found["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [10]}]
    assert found["instance_group"] == [{"name": "m", "count": 2, "kind": "KIND_CPU"}]


def test_an_empty_config_is_filled_from_a_graph_that_takes_none():
    found = filled("", FIXED)
    assert "max_batch_size" not in found
    assert "dynamic_batching" not in found
    assert [each["dims"] for each in found["input"]] == [[1, 3], [1]]
    assert found["output"][0]["dims"] == [-1, 10]


def test_a_batch_asked_of_a_graph_that_takes_none_is_refused_with_both_numbers():
    with pytest.raises(CheckpointError, match=r"max_batch_size is 8, and the first dimension of 'x', \[1, 3\],"):
        filled("max_batch_size: 8", FIXED)


def test_what_the_config_says_stays():
    found = filled("max_batch_size: 1", BATCHED)
    assert found["max_batch_size"] == 1
    assert "dynamic_batching" not in found
    found = filled("max_batch_size: 16 dynamic_batching { max_queue_delay_microseconds: 9 }", BATCHED)
    assert found["dynamic_batching"] == {"max_queue_delay_microseconds": 9, "preferred_batch_size": [16]}
    found = filled("sequence_batching { }", BATCHED)
    assert "dynamic_batching" not in found
    assert found["sequence_batching"] == {"max_sequence_idle_microseconds": 1_000_000}


def test_a_config_with_inputs_and_outputs_is_taken_as_it_stands():
    text = (
        'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 3, -1 ] } output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    )
    found = filled(text, BATCHED)
    assert "max_batch_size" not in found
    assert "dynamic_batching" not in found


def test_controls_and_states_of_sequences_are_not_inputs():
    graph = Graph(
        (tensor("x", -1, 4), tensor("start", -1, 1), tensor("h", -1, 8)), (tensor("y", -1), tensor("hn", -1, 8))
    )
    found = filled(
        'sequence_batching { control_input { name: "start" } state { input_name: "h" output_name: "hn" } }', graph
    )
    assert [each["name"] for each in found["input"]] == ["x"]
    assert [each["name"] for each in found["output"]] == ["y"]


def test_instances_go_where_there_is_a_gpu():
    assert filled("", BATCHED, gpus=[0, 1])["instance_group"] == [
        {"name": "m", "count": 1, "gpus": [0, 1], "kind": "KIND_GPU"}
    ]
    assert filled("instance_group { gpus: 3 }", BATCHED, gpus=[0])["instance_group"][0]["kind"] == "KIND_CPU"
    groups = filled("instance_group [ { kind: KIND_CPU count: 3 }, { kind: KIND_MODEL } ]", BATCHED)["instance_group"]
    assert [(each["name"], each["count"]) for each in groups] == [("m_0", 3), ("m_1", 1)]


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ('platform: "onnxruntime_onnx"', "onnxruntime"),
        ('default_model_filename: "model.py"', "python"),
        ('platform: "tensorrt_plan"', ""),
        ('default_model_filename: "net.onnx"', ""),
    ],
)
def test_the_backend_is_told_by_platform_or_by_file(text: str, backend: str):
    assert filled_from_files(parse_config(text.encode(), "config.pbtxt"), "m", ["model.onnx"]).backend == backend


# ---- config against graph


def differences(text: str, graph: Graph = BATCHED) -> tuple[str, ...]:
    return mismatches(parse_config(text.encode(), "config.pbtxt"), graph)


X = 'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ 3, 7 ] }'
N = 'input { name: "n" data_type: TYPE_INT64 dims: 1 reshape { } }'
Y = 'output { name: "y" data_type: TYPE_FP32 dims: 10 }'


def test_a_config_may_bind_what_the_graph_leaves_open():
    assert differences(X + N + Y) == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (X + Y, "the config declares 1 of the model's 2 inputs; missing 'n'"),
        (
            X + N + 'input { name: "z" data_type: TYPE_FP32 dims: 1 }',
            "input 'z' is no tensor of the model, which has 'x', 'n'",
        ),
        (X.replace("FP32", "FP64") + N, "input 'x' is TYPE_FP64 in the config, TYPE_FP32 in the model"),
        (
            X.replace("3, 7", "5, 7") + N,
            "input 'x' has 5 as dimension 1 in the config ([-1, 5, 7], the batch before dims), 3",
        ),
        (X.replace("3, 7", "-1, 7") + N, "input 'x' has -1 as dimension 1"),
        (
            X.replace("3, 7", "3") + N,
            "input 'x' has 2 dimensions in the config ([-1, 3], the batch before dims), 3 in the",
        ),
        (
            X + N + Y.replace("10", "11"),
            "output 'y' has 11 as dimension 1 in the config ([-1, 11], the batch before dims), 10",
        ),
        (X + N + Y.replace('"y"', '"p"'), "output 'p' is no tensor of the model, which has 'y'"),
        (
            X.replace("size: 4", "size: 0") + N.replace("reshape { }", ""),
            "input 'x' has 2 dimensions in the config ([3, 7]), 3 in the model",
        ),
        (X + N + 'sequence_batching { control_input { name: "c" } }', "control or state 'c' is no tensor of the model"),
    ],
)
def test_a_difference_names_both_sides(text: str, told: str):
    (found,) = differences(text)
    assert found.startswith(told)


def test_a_batch_before_a_fixed_shape_is_told():
    (found,) = differences(
        X.replace("3, 7", "3") + 'input { name: "s" data_type: TYPE_FP32 dims: 1 reshape { } }', FIXED
    )[:1]
    assert found == "input 'x': max_batch_size is over 0, and the model's shape [1, 3] has no batch of any size first"


def test_outputs_that_the_runtime_leaves_open_must_be_open_in_the_config():
    graph = Graph(BATCHED.inputs, (tensor("y", -1, -1),))
    assert differences(X + N + Y, graph) == ()
    exact = Graph(BATCHED.inputs, graph.outputs, exact=True)
    (found,) = differences(X + N + Y, exact)
    assert found.startswith("output 'y' has 10 as dimension 1 in the config ([-1, 10], ")
    assert found.endswith(", -1 in the model ([-1, -1])")
