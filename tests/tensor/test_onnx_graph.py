"""What an ONNX file tells of itself, and which files it may not have."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf", reason="the extra tensor brings it")

from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import CheckpointError
from maitred.tensor.onnx_graph import GraphTensor, read_graph
from tests.tensor.models import (
    TensorProto,
    add_graph,
    add_model,
    external_weight,
    helper,
    model_of,
    numpy_helper,
    onnx,
    wheel_file,
)


def saved(tmp_path: Path, model) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def test_inputs_and_outputs_have_names_types_and_shapes(tmp_path: Path):
    graph = read_graph(saved(tmp_path, add_model(shape=("batch", 16))))
    assert graph.inputs == tuple(GraphTensor(name, "TYPE_FP32", (-1, 16)) for name in ("INPUT0", "INPUT1"))
    assert graph.outputs == (GraphTensor("OUTPUT", "TYPE_FP32", (-1, 16)),)
    assert graph.opsets == (("", 17),)
    assert graph.operators == {"Add": 1}


def test_an_input_with_a_value_of_its_own_need_not_be_sent(tmp_path: Path):
    graph = add_graph()
    import numpy as np

    graph.initializer.append(numpy_helper.from_array(np.zeros(16, np.float32), "INPUT1"))
    read = read_graph(saved(tmp_path, model_of(graph)))
    assert [each.name for each in read.inputs] == ["INPUT0"]
    assert [each.name for each in read.defaults] == ["INPUT1"]


def test_a_tensor_may_have_no_dimensions_or_none_that_are_known(tmp_path: Path):
    inputs = [helper.make_tensor_value_info("x", TensorProto.INT64, ()), onnx.ValueInfoProto(name="y")]
    inputs[1].type.tensor_type.elem_type = TensorProto.STRING
    graph = helper.make_graph([], "none", inputs, [helper.make_tensor_value_info("x", TensorProto.INT64, ())])
    read = read_graph(saved(tmp_path, model_of(graph)))
    assert [(each.data_type, each.shape) for each in read.inputs] == [("TYPE_INT64", ()), ("TYPE_STRING", None)]


def test_every_type_of_onnx_is_named_or_refused(tmp_path: Path):
    for kind in range(1, TensorProto.DataType.values()[-1] + 1):
        path = saved(tmp_path, add_model(kind=kind))
        if kind in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16):
            assert read_graph(path).inputs[0].data_type.startswith("TYPE_")
        else:
            with pytest.raises(CheckpointError, match=f"input 'INPUT0' has ONNX's type {kind},"):
                read_graph(path)


def test_what_is_no_tensor_is_refused(tmp_path: Path):
    graph = add_graph()
    graph.output[0].CopyFrom(helper.make_tensor_sequence_value_info("OUTPUT", TensorProto.FLOAT, None))
    with pytest.raises(CheckpointError, match="output 'OUTPUT' is a sequence; only tensors are served"):
        read_graph(saved(tmp_path, model_of(graph)))


def test_a_file_cut_off_anywhere_is_refused_in_one_line(tmp_path: Path):
    content = add_model(
        weight=numpy_helper.from_array(__import__("numpy").ones(16, "f4"), "weight")
    ).SerializeToString()
    for size in range(len(content)):
        path = saved(tmp_path, content[:size])
        with pytest.raises(CheckpointError, match=r"model\.onnx is cut off or no ONNX file") as error:
            read_graph(path)
        assert "\n" not in str(error.value)
    assert sum(read_graph(saved(tmp_path, content)).operators.values()) == 2


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_bytes_of_any_kind_are_read_or_refused(tmp_path_factory, noise: bytes, at: int):
    content = bytearray(add_model().SerializeToString())
    content[at : at + len(noise)] = noise
    path = tmp_path_factory.getbasetemp() / "noise.onnx"
    path.write_bytes(content)
    with suppress(CheckpointError):
        read_graph(path)


def test_graphs_in_graphs_end(tmp_path: Path):
    graph = b""
    for _ in range(2000):
        graph = field(1, field(5, field(6, graph)))
    with pytest.raises(CheckpointError, match="more than 32 deep"):
        read_graph(saved(tmp_path, field(7, graph)))


def field(number: int, content: bytes) -> bytes:
    """A message in a message, as it stands on the wire; onnx itself makes none that deep."""
    size, head = len(content), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes([*head, size]) + content


def test_weights_in_a_file_beside_the_model_are_found(tmp_path: Path):
    (tmp_path / "weights.bin").write_bytes(bytes(64))
    assert read_graph(saved(tmp_path, add_model(weight=external_weight("weights.bin")))).operators == {
        "Add": 1,
        "Mul": 1,
    }


def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "model" / "1"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(bytes(64))
    (folder / "linked").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    (folder / "circle").symlink_to("circle")
    (folder / "folder").mkdir()
    (folder / "short").write_bytes(bytes(60))
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("../../secret", "is no name in its folder"),
        ("folder/../../secret", "is no name in its folder"),
        ("/etc/passwd", "is no name in its folder"),
        ("", "is no name in its folder"),
        ("linked", "is a link that leads out of its folder"),
        ("up/secret", "is a link that leads out of its folder"),
        ("circle", "leads nowhere|cannot be read"),
        ("absent", "cannot be read: No such file"),
        ("folder", "which is no file"),
        ("pipe", "which is no file"),
        ("short", "up to byte 64, and that file has 60"),
        ("*/_ORT_MEM_ADDR_/*", "cannot be read"),
    ],
)
def test_weights_anywhere_else_are_refused(tmp_path: Path, location: str, told: str):
    path = saved(outside(tmp_path), add_model(weight=external_weight(location)))
    with pytest.raises(CheckpointError, match=told):
        read_graph(path)


def test_weights_of_an_inner_graph_are_looked_at_too(tmp_path: Path):
    inner = add_graph(weight=external_weight("../secret"))
    node = helper.make_node("If", ["c"], ["o"], then_branch=inner, else_branch=inner)
    with pytest.raises(CheckpointError, match="no name in its folder"):
        read_graph(saved(tmp_path, model_of(helper.make_graph([node], "outer", [], []))))
    constant = helper.make_node("Constant", [], ["o"], value=external_weight("../secret"))
    with pytest.raises(CheckpointError, match="no name in its folder"):
        read_graph(saved(tmp_path, model_of(helper.make_graph([constant], "outer", [], []))))


def test_a_folder_a_pipe_and_nothing_are_told(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for name, told in (("pipe", "is no file"), (".", "cannot read|is no file"), ("absent", "No such file")):
        with pytest.raises(CheckpointError, match=told):
            read_graph(tmp_path / name)


@pytest.mark.parametrize(
    ("package", "path"),
    [
        ("magika", "models/standard_v3_3/model.onnx"),
        ("silero_vad", "data/silero_vad.onnx"),
        ("silero_vad", "data/silero_vad_op18_ifless.onnx"),
        ("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx"),
        ("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"),
        ("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"),
    ],
)
def test_models_from_wheels_are_read_as_the_runtime_reads_them(package: str, path: str):
    runtime = pytest.importorskip("onnxruntime", reason="the extra tensor brings it")
    file = wheel_file(package, path)
    session, graph = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"]), read_graph(file)
    for ours, theirs in ((graph.inputs, session.get_inputs()), (graph.outputs, session.get_outputs())):
        assert [each.name for each in ours] == [each.name for each in theirs]
        for tensor, other in zip(ours, theirs, strict=True):
            shape = tuple(dim if isinstance(dim, int) else -1 for dim in other.shape)
            assert all(own in (-1, dim) for own, dim in zip(tensor.shape, shape, strict=True))
