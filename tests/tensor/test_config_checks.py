"""Each rule that a config can break, and what is told of it."""

from __future__ import annotations

import pytest

pytest.importorskip("google.protobuf", reason="the extra tensor brings it")

from maitred.tensor.config import parse_config
from maitred.tensor.config_checks import faults

GOOD = """
name: "m" backend: "onnxruntime" platform: "onnxruntime_onnx" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 3, -1, 4 ] reshape { shape: [ 3, -1, 2, 2 ] } }
output { name: "y" data_type: TYPE_FP32 dims: 10 }
version_policy { latest { num_versions: 1 } }
"""


def faults_of(text: str, good: str = GOOD) -> tuple[str, ...]:
    return faults(parse_config((good + text).encode(), "config.pbtxt"))


def test_a_right_config_has_no_fault():
    assert faults_of("") == ()
    assert faults_of("dynamic_batching { preferred_batch_size: [ 4, 8 ] preserve_ordering: true }") == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("output { data_type: TYPE_FP32 dims: 1 }", "output[1]: name is missing"),
        ('output { name: "z" dims: 1 }', "output 'z': data_type is missing"),
        ('output { name: "z" data_type: 99 dims: 1 }', "output 'z': data_type has no value 99"),
        ('output { name: "z" data_type: TYPE_INT8 }', "output 'z': dims is missing"),
        ('output { name: "z" data_type: TYPE_INT8 dims: [ 2, 0 ] }', "output 'z': dims [2, 0] must be 1 or more"),
        ('output { name: "y" data_type: TYPE_INT8 dims: 1 }', "output 'y' stands 2 times"),
        (
            'input { name: "z" data_type: TYPE_INT8 dims: [ 2, -1 ] reshape { shape: [ -1, 3 ] } }',
            "input 'z': dims [2, -1] and reshape [-1, 3] differ in their number of elements",
        ),
        ('input { name: "z" data_type: TYPE_INT8 dims: [ 2 ] reshape { } }', "dims [2] and reshape [] differ"),
        ('input { name: "z" data_type: TYPE_INT8 dims: 2 format: FORMAT_NHWC }', "an image has 3 dims, and dims has 1"),
        ('input { name: "z" data_type: TYPE_INT8 dims: 2 optional: true }', "max_batch_size 0, and it is 8"),
        ("instance_group { count: -1 }", "instance_group[0].count is -1"),
        ("instance_group { kind: KIND_CPU gpus: 0 }", "instance_group[0].gpus needs kind KIND_GPU"),
        ("instance_group { passive: true }", "instance_group[0].passive is not supported"),
        ('instance_group { rate_limiter { resources { name: "R" } } }', "not 'R' and 0"),
        (
            "dynamic_batching { preferred_batch_size: 16 }",
            "preferred_batch_size 16 is not from 1 to max_batch_size (8)",
        ),
        ("dynamic_batching { priority_levels: 2 }", "default_priority_level 0 is not from 1 to priority_levels (2)"),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 } }",
            "priority_queue_policy has a level 3, and priority_levels is 2",
        ),
        (
            "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
            "preserve_ordering needs priority_levels 1, and it is 2",
        ),
        (
            "dynamic_batching { preserve_ordering: true "
            "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 } }",
            "preserve_ordering does not go with timeout_action DELAY",
        ),
        ("sequence_batching { } response_cache { enable: true }", "response_cache does not go with sequence_batching"),
        ("sequence_batching { direct { minimum_slot_utilization: 2 } }", "minimum_slot_utilization is 2"),
        ("sequence_batching { oldest { preferred_batch_size: 9 } }", "oldest.preferred_batch_size 9"),
        ("sequence_batching { iterative_sequence: true }", "iterative_sequence is not supported"),
        (
            'sequence_batching { control_input { name: "S" control { kind: CONTROL_SEQUENCE_START } } }',
            "CONTROL_SEQUENCE_START needs exactly one of",
        ),
        (
            'sequence_batching { control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID } } }',
            "CONTROL_SEQUENCE_CORRID needs a data_type of TYPE_UINT64",
        ),
        (
            'sequence_batching { control_input { name: "S" control { bool_false_true: [ false, true ] } } '
            'control_input { name: "T" control { int32_false_true: [ 0, 1 ] } } }',
            "CONTROL_SEQUENCE_START is given by two tensors",
        ),
        (
            'model_warmup { batch_size: 9 inputs { key: "x" value { zero_data: true dims: 3 } } }',
            "batch_size 9 is over",
        ),
        ('model_warmup { inputs { key: "x" value { dims: 3 } } }', "input 'x' needs one of zero_data"),
        ('default_model_filename: "../other/model.onnx"', "'../other/model.onnx' leads out of the model's folder"),
        ('output { name: "z" data_type: TYPE_INT8 dims: 1 label_filename: "/etc/passwd" }', "'/etc/passwd' leads out"),
        ('parameters { key: "precision" value { string_value: "int4" } }', "parameters 'precision' is 'int4'"),
        ('parameters { key: "label.new" value { string_value: "latest" } }', "parameters 'label.new' is 'latest'"),
        ('model_operations { op_library_filename: "a.so" }', "model_operations is not supported"),
        ("ensemble_scheduling { }", "an ensemble has no backend, and this one has 'onnxruntime'"),
    ],
)
def test_a_broken_rule_is_told_in_one_line_with_the_numbers(text: str, told: str):
    found = faults_of(text)
    assert any(told in fault for fault in found), found
    assert all("\n" not in fault for fault in found)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "neither platform nor backend is given"),
        ('platform: "tensorrt_plan"', "platform 'tensorrt_plan' is not supported; choose one of onnxruntime, python"),
        ('backend: "pytorch" platform: "pytorch_libtorch"', "backend 'pytorch' is not supported"),
        (
            'backend: "onnxruntime" platform: "tensorrt_plan"',
            "goes with platform 'onnxruntime_onnx', not 'tensorrt_plan'",
        ),
        ('platform: "ensemble"', "platform 'ensemble' needs ensemble_scheduling"),
        ("ensemble_scheduling { step { } }", "ensemble_scheduling needs platform 'ensemble', not ''"),
        ('platform: "ensemble" ensemble_scheduling { step { } }', "ensemble_scheduling.step[0] has no model_name"),
        ('platform: "ensemble" ensemble_scheduling { } instance_group { }', "an ensemble has no instance_group"),
        ("version_policy { latest { } }", "num_versions 0"),
        ("version_policy { specific { } }", "specific names no version"),
        ("max_batch_size: -2", "max_batch_size is -2"),
    ],
)
def test_what_kind_of_model_it_is_must_be_plain(text: str, told: str):
    assert any(told in fault for fault in faults_of(text, good=""))
