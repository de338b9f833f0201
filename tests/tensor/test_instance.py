"""One batch through ONNX Runtime, in the shapes that a config tells; settings of sessions; warm-up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="the extra tensor brings it")
pytest.importorskip("onnxruntime", reason="the extra tensor brings it")

from maitred.core.errors import CheckpointError, InvalidRequest
from maitred.tensor.config import parse_config
from maitred.tensor.instance import CPU, CUDA, SessionInstance, SessionSettings, open_session, reshaped, settings_for
from maitred.tensor.repository_files import model_of_file, read_model
from maitred.tensor.served_models import open_onnx
from tests.tensor.models import TensorProto, add_model, helper, model_of, onnx, wheel_file, write_model


def opened(folder: Path):
    model = read_model(folder)
    return open_onnx(model, model.versions[-1])


def instance(folder: Path) -> SessionInstance:
    return opened(folder).instances[0]


def identity(kind: int, shape=("n", "m")):
    tensors = [helper.make_tensor_value_info(name, kind, shape) for name in ("x", "y")]
    return model_of(helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", tensors[:1], tensors[1:]))


def test_a_batch_of_arrays_gives_a_batch_of_arrays(tmp_path: Path):
    rows = np.arange(48, dtype=np.float32).reshape(3, 16)
    answer = instance(write_model(tmp_path, "add")).run({"INPUT0": rows, "INPUT1": rows})
    assert np.array_equal(answer["OUTPUT"], rows * 2)


@pytest.mark.parametrize(
    ("kind", "array"),
    [
        (TensorProto.FLOAT16, np.array([[1.5, -2]], np.float16)),
        (TensorProto.BOOL, np.array([[True], [False]])),
        (TensorProto.UINT64, np.array([[2**64 - 1]], np.uint64)),
        (TensorProto.BFLOAT16, np.array([[0x3F80, 0xC000], [1, 2]], np.uint16)),
        (TensorProto.STRING, np.array([[b"", "\u00fc\u4e2d".encode()]], object)),
    ],
)
def test_every_kind_of_element_comes_back_as_it_went(tmp_path: Path, kind: int, array: np.ndarray):
    answer = instance(write_model(tmp_path, "same", model=identity(kind))).run({"x": array})["y"]
    assert answer.dtype == array.dtype
    assert np.array_equal(answer, array)


def test_reshape_lies_between_client_and_model(tmp_path: Path):
    config = """
    max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: [ 2, -1 ] reshape { shape: [ 1, 2, -1 ] } }
    output { name: "y" data_type: TYPE_FP32 dims: [ 2, -1, 1 ] reshape { shape: [ 1, 2, -1 ] } }
    """
    model = identity(TensorProto.FLOAT, ("n", 1, 2, "m"))
    array = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    answer = instance(write_model(tmp_path, "same", config=config, model=model)).run({"x": array})["y"]
    assert answer.shape == (2, 2, 3, 1)
    assert np.array_equal(answer.reshape(2, 2, 3), array)


def test_a_tensor_without_dimensions_is_one_of_one(tmp_path: Path):
    model = identity(TensorProto.INT64, ())
    answer = instance(write_model(tmp_path, "same", model=model)).run({"x": np.array([7])})
    assert answer["y"].shape == (1,)


def test_dimensions_of_any_length_answer_each_other_in_order():
    assert reshaped((5, 2, 7, 3), (-1, 7, -1), (7, -1, 1, -1), batched=True) == (5, 7, 2, 1, 3)
    with pytest.raises(InvalidRequest, match=r"shape \[5, 2\] does not have dims \[2, 3\]"):
        reshaped((5, 2), (2, 3), (6,), batched=True)


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"INPUT0": np.zeros((1, 16), np.float32)}, "input 'INPUT1' is missing"),
        ({"z": np.zeros(1)}, "'z' is no input of the model, which has INPUT0, INPUT1"),
        ({"INPUT0": np.zeros((1, 16))}, "input 'INPUT0' is an array of float64, and must be of float32"),
    ],
)
def test_inputs_that_are_not_the_models_are_the_clients_fault(tmp_path: Path, inputs: dict, told: str):
    with pytest.raises(InvalidRequest) as error:
        instance(write_model(tmp_path, "add")).run(inputs)
    assert str(error.value) == told


def test_what_the_runtime_finds_is_told_in_one_line(tmp_path: Path):
    rows = np.zeros((1, 15), np.float32)
    with pytest.raises(
        InvalidRequest, match=r"^onnxruntime cannot run the batch: INVALID_ARGUMENT : Got invalid dimensions"
    ):
        instance(write_model(tmp_path, "add")).run({"INPUT0": rows, "INPUT1": rows})
    texts = write_model(tmp_path, "same", model=identity(TensorProto.STRING))
    with pytest.raises(InvalidRequest, match="input 'x' has a text that is no UTF-8: byte 0xff"):
        instance(texts).run({"x": np.array([[b"a\xff"]], object)})


def test_only_what_is_wanted_is_computed_and_given(tmp_path: Path):
    model = add_model()
    model.graph.node.add(op_type="Sub", input=["INPUT0", "INPUT1"], output=["LESS"])
    model.graph.output.append(helper.make_tensor_value_info("LESS", TensorProto.FLOAT, ("batch", 16)))
    loaded = instance(write_model(tmp_path, "m", model=model))
    rows = np.zeros((1, 16), np.float32)
    assert [*loaded.run({"INPUT0": rows, "INPUT1": rows}, ["LESS"])] == ["LESS"]
    assert [*loaded.run({"INPUT0": rows, "INPUT1": rows})] == ["OUTPUT", "LESS"]


def test_each_row_of_a_batch_is_its_run_alone(tmp_path: Path):
    file = wheel_file("magika", "models/standard_v3_3/model.onnx")
    magika = instance(write_model(tmp_path, "magika", model=onnx.load(file)))
    rows = np.random.default_rng(1).integers(0, 256, (4, 2048)).astype(np.int32)
    together = magika.run({"bytes": rows})["target_label"]
    for row, answer in zip(rows, together, strict=True):
        np.testing.assert_allclose(magika.run({"bytes": row[None]})["target_label"][0], answer, atol=1e-5)


# ---- loading


def test_a_lone_file_is_a_model_of_its_name(tmp_path: Path):
    file = tmp_path / "adder.onnx"
    onnx.save(add_model(), file)
    model = model_of_file(file)
    rows = np.ones((2, 16), np.float32)
    loaded = open_onnx(model, model.versions[0])
    assert (loaded.name, loaded.number, loaded.config.name) == ("adder", 1, "adder")
    assert loaded.instances[0].run({"INPUT0": rows, "INPUT1": rows})["OUTPUT"].shape == (2, 16)


def test_a_file_that_the_runtime_refuses_is_told_in_one_line(tmp_path: Path):
    model = add_model()
    model.graph.node[0].op_type = "Unheard"
    with pytest.raises(CheckpointError, match=r"model\.onnx: onnxruntime cannot load it: .*Unheard") as error:
        opened(write_model(tmp_path, "m", model=model))
    assert "\n" not in str(error.value)


def test_shapes_that_only_the_runtime_knows_are_compared_when_it_loads(tmp_path: Path):
    config = 'max_batch_size: 2 output { name: "OUTPUT" data_type: TYPE_FP32 dims: 8 }'
    folder = write_model(tmp_path, "m", config=config, model=add_model(out_shape=("batch", "any")))
    with pytest.raises(CheckpointError, match=r"'OUTPUT' has 8 as dimension 1 .*, 16 in the model \(\[-1, 16\]\)"):
        opened(folder)


SETTINGS = """
backend: "onnxruntime" instance_group { kind: KIND_GPU gpus: 1 }
optimization {
  graph { level: 1 }
  execution_accelerators {
    gpu_execution_accelerator { name: "tensorrt" }
    gpu_execution_accelerator { name: "openvino" parameters { key: "device" value: "GPU" } }
    cpu_execution_accelerator { name: "cuda" }
  }
}
parameters [ { key: "intra_op_thread_count" value { string_value: "3" } },
  { key: "execution_mode" value { string_value: "1" } }, { key: "enable_mem_arena" value { string_value: "false" } },
  { key: "session.intra_op.allow_spinning" value { string_value: "0" } } ]
"""


def test_settings_come_from_the_config_and_providers_in_its_order():
    config = parse_config(SETTINGS.encode(), "config.pbtxt")
    openvino = "OpenVINOExecutionProvider"
    found = settings_for(config, config.instance_group[0], 1, [CPU, CUDA, openvino])
    assert found.providers == ((openvino, {"device": "GPU"}), (CUDA, {"device_id": "1"}), (CPU, {}))
    assert found.fell_back == ("tensorrt",)
    assert (found.graph_level, found.intra_op_threads, found.parallel) == ("ORT_ENABLE_EXTENDED", 3, True)
    assert (found.memory_arena, found.memory_pattern) == (False, True)
    assert found.entries == (("session.intra_op.allow_spinning", "0"),)
    assert settings_for(config, config.instance_group[0], 1, [CPU]).providers == ((CPU, {}),)
    assert settings_for(config, config.instance_group[0], 1, [CPU]).fell_back == ("tensorrt", "openvino", "cuda")


@pytest.mark.parametrize(("written", "spins"), [(None, "0"), ("1", "1")])
def test_threads_sleep_while_they_wait_unless_the_config_says_otherwise(written, spins):
    key = "session.intra_op.allow_spinning"
    parameter = f'parameters {{ key: "{key}" value {{ string_value: "{written}" }} }}' if written else ""
    config = parse_config(f"instance_group {{ kind: KIND_CPU }} {parameter}".encode(), "config.pbtxt")
    assert settings_for(config, config.instance_group[0], None, [CPU]).entries == ((key, spins),)


def test_an_accelerator_that_is_not_here_falls_back_and_is_told(tmp_path: Path):
    config = 'optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }'
    version = opened(write_model(tmp_path, "m", config=config))
    assert version.fell_back in ((), ("openvino",))
    assert version.instances[0].providers[-1] == CPU


def test_a_session_takes_every_setting(tmp_path: Path):
    folder = write_model(tmp_path, "m")
    settings = SessionSettings(graph_level="ORT_DISABLE_ALL", intra_op_threads=1, inter_op_threads=1, parallel=True)
    assert open_session(folder / "1" / "model.onnx", settings).get_providers() == [CPU]


def test_instances_of_a_group_share_the_weights(tmp_path: Path):
    version = opened(write_model(tmp_path, "m", config="instance_group [ { count: 3 kind: KIND_CPU }, { count: 1 } ]"))
    assert len(version.instances) == 4
    assert len({id(each) for each in version.instances}) == 2


# ---- warm-up

WARMUP = """
max_batch_size: 4
model_warmup {{ name: "first" batch_size: 3 count: 2
  inputs {{ key: "INPUT0" value {{ data_type: TYPE_FP32 dims: {dims} random_data: true }} }}
  inputs {{ key: "INPUT1" value {{ data_type: TYPE_FP32 dims: 16 {data} }} }} }}
"""


def test_a_model_is_warmed_before_it_serves(tmp_path: Path):
    folder = write_model(tmp_path, "m", config=WARMUP.format(dims=16, data="zero_data: true"))
    assert len(opened(folder).instances) == 2


def test_data_of_a_warm_up_may_be_a_file_of_the_right_size(tmp_path: Path):
    folder = write_model(tmp_path, "m", config=WARMUP.format(dims=16, data='input_data_file: "ones"'))
    with pytest.raises(CheckpointError, match=r"warmup/ones is not there"):
        opened(folder)
    (folder / "warmup").mkdir()
    (folder / "warmup" / "ones").write_bytes(np.ones(16, np.float32).tobytes())
    assert opened(folder).instances
    (folder / "warmup" / "ones").write_bytes(bytes(60))
    with pytest.raises(CheckpointError, match=r"ones has 60 bytes, and dims \[16\] need 64"):
        opened(folder)


def test_texts_of_a_warm_up_have_their_lengths_before_them(tmp_path: Path):
    config = """
    model_warmup { inputs { key: "x" value { data_type: TYPE_STRING dims: [ 1, 2 ] input_data_file: "texts" } } }
    """
    folder = write_model(tmp_path, "m", config=config, model=identity(TensorProto.STRING, (1, 2)))
    (folder / "warmup").mkdir()
    (folder / "warmup" / "texts").write_bytes(b"\x02\0\0\0ab\0\0\0\0")
    assert opened(folder).instances
    (folder / "warmup" / "texts").write_bytes(b"\x09\0\0\0ab")
    with pytest.raises(CheckpointError, match="6 bytes hold 1 texts"):
        opened(folder)


def test_no_telemetry_is_left_behind(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "ORT_DISABLE_TELEMETRY")}
    command = [sys.executable, "-c", "import maitred.tensor.instance"]
    subprocess.run(command, env={**environment, "TMPDIR": str(tmp_path)}, check=True)
    assert [*tmp_path.iterdir()] == []


def test_a_warm_up_that_fails_refuses_the_load(tmp_path: Path):
    folder = write_model(tmp_path, "m", config=WARMUP.format(dims=15, data="zero_data: true"))
    with pytest.raises(CheckpointError, match=r"^warm-up 'first' failed: onnxruntime cannot run the batch"):
        opened(folder)
    (folder / "config.pbtxt").write_text(
        'model_warmup { inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: 16 zero_data: true } } }'
    )
    with pytest.raises(CheckpointError, match=r"model_warmup\[0\] has no input 'INPUT1'"):
        opened(folder)


def test_a_sequence_is_warmed_with_controls_and_states_of_zero(tmp_path: Path):
    names = ("x", "start", "h")
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", size))
        for name, size in zip(names, (4, 1, 8), strict=True)
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", size)) for name, size in (("y", 4), ("hn", 8))
    ]
    nodes = [helper.make_node("Add", ["x", "start"], ["y"]), helper.make_node("Identity", ["h"], ["hn"])]
    config = """
    sequence_batching {
      control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
      state { input_name: "h" output_name: "hn" data_type: TYPE_FP32 dims: 8 }
    }
    model_warmup { batch_size: 2 inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }
    """
    model = model_of(helper.make_graph(nodes, "sequence", tensors, outputs))
    loaded = instance(write_model(tmp_path, "m", config=config, model=model))
    ones = {name: np.ones((1, size), np.float32) for name, size in zip(names, (4, 1, 8), strict=True)}
    assert {name: each.shape for name, each in loaded.run(ones).items()} == {"y": (1, 4), "hn": (1, 8)}
