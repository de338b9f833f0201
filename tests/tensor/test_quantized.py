"""Int8 copies: made at load, kept on disk, and refused where they answer otherwise."""

from __future__ import annotations

import asyncio

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from maitred.core.tensor_request import InferRequest
from maitred.tensor.arrays import array_of, tensor_of
from tests.tensor.models import model_of, write_model
from tests.tensor.test_local import served


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "maitred" / "quantized"


def mlp():
    """64 - 256 - 32 with a ReLU between."""
    numbers = np.random.default_rng(5)
    weights = [numbers.normal(size=shape).astype(np.float32) / 16 for shape in ((64, 256), (256, 32))]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w1"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", 64))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", 32))]
    tensors = [numpy_helper.from_array(weight, f"w{at}") for at, weight in enumerate(weights)]
    return model_of(helper.make_graph(nodes, "mlp", inputs, outputs, initializer=tensors))


def config(precision, min_cosine=None):
    text = f'max_batch_size: 8 parameters {{ key: "precision" value {{ string_value: "{precision}" }} }}'
    if min_cosine is not None:
        text += f' parameters {{ key: "min_cosine" value {{ string_value: "{min_cosine}" }} }}'
    return text


INPUT = np.random.default_rng(6).normal(size=(4, 64)).astype(np.float32)


def outcome(repository):
    """What it answers, and the reason in the index."""

    async def story():
        async with served(repository) as service:
            (entry,) = service.index()
            if not service.versions("mlp"):
                return None, entry.reason
            inputs = (tensor_of("x", INPUT, "TYPE_FP32"),)
            answer = await service.infer(InferRequest(request_id="r", model="mlp", inputs=inputs))
            return array_of(answer.outputs[0]), entry.reason

    return asyncio.run(story())


@pytest.mark.parametrize(("precision", "operator"), [("int8-dynamic", "MatMulInteger"), ("int8-static", "QLinear")])
def test_an_int8_copy_is_made_once_and_answers_alike(tmp_path, cache, precision, operator):
    write_model(tmp_path, "mlp", model=mlp())
    exact, _ = outcome(tmp_path)
    (tmp_path / "mlp" / "config.pbtxt").write_text(config(precision))
    (tmp_path / "mlp" / "calibration").mkdir()
    np.savez(tmp_path / "mlp" / "calibration" / "0.npz", x=INPUT)
    rounded, reason = outcome(tmp_path)
    assert reason == ""
    assert not np.array_equal(rounded, exact)
    assert np.vdot(rounded, exact) / np.linalg.norm(rounded) / np.linalg.norm(exact) > 0.98
    (copy,) = cache.glob("*.onnx")
    assert any(operator in node.op_type or "Quantize" in node.op_type for node in onnx.load(copy).graph.node)
    before = copy.stat().st_mtime_ns
    assert np.array_equal(outcome(tmp_path)[0], rounded)
    assert copy.stat().st_mtime_ns == before


def test_a_copy_that_misses_the_gate_is_not_loaded_and_its_figure_is_told(tmp_path):
    write_model(tmp_path, "mlp", model=mlp(), config=config("int8-dynamic", "1.0"))
    found, reason = outcome(tmp_path)
    assert found is None
    assert "precision int8-dynamic: output 'y' has cosine 0.99" in reason
    assert "min_cosine is 1" in reason


def test_what_calibration_lacks_is_told(tmp_path):
    write_model(tmp_path, "mlp", model=mlp(), config=config("int8-static"))
    assert "needs batches to measure with" in outcome(tmp_path)[1]
    (tmp_path / "mlp" / "calibration").mkdir()
    np.savez(tmp_path / "mlp" / "calibration" / "0.npz", other=INPUT)
    found, reason = outcome(tmp_path)
    assert found is None
    assert "precision int8-static" in reason
