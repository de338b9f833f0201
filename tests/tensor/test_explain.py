"""How a model is run is told: its nodes before and after, what is fused, quantised, and how long batches take."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from maitred.cli.main import main
from maitred.core.errors import CheckpointError
from maitred.tensor.explain import explained
from tests.tensor.models import model_of, write_model

INT8 = 'max_batch_size: 2 parameters { key: "precision" value { string_value: "int8-dynamic" } }'


def dense():
    """Y = Relu(X W + b): two nodes that the runtime fuses, and one that it can quantise."""
    weights = [
        numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32), "W"),
        numpy_helper.from_array(np.zeros(32, np.float32), "b"),
    ]
    nodes = [helper.make_node("Gemm", ["X", "W", "b"], ["h"]), helper.make_node("Relu", ["h"], ["Y"])]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", s]) for n, s in (("X", 64), ("Y", 32))]
    return model_of(helper.make_graph(nodes, "dense", ends[:1], ends[1:], initializer=weights))


def lines_of(path):
    return {line.split()[0]: line for line in explained(path) if line.split()}


def test_nodes_fusions_providers_and_times_are_told(tmp_path, capsys):
    folder = write_model(tmp_path, "dense", config="max_batch_size: 4", model=dense())
    told = lines_of(folder)
    assert told["nodes"].startswith("nodes     2 in the file, 1 once optimised")
    assert told["fused"] == "fused     FusedGemm 1"
    assert told["replaced"] == "replaced  Gemm 1, Relu 1"
    assert told["providers"] == "providers CPUExecutionProvider 1"
    assert [part.split(":")[0] for part in told["batches"].partition("rows: ")[2].split(", ")] == ["1", "2", "4"]
    assert main(["explain", str(folder / "1" / "model.onnx")]) == 0
    assert "FusedGemm 1" in capsys.readouterr().out


def test_quantised_nodes_have_their_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told = lines_of(write_model(tmp_path, "dense", config=INT8, model=dense()))
    assert told["quantised"] == "quantised DynamicQuantizeMatMul 1"
    assert float(told["output"].split("cosine ")[1].split()[0]) > 0.98


def test_what_is_no_onnx_model_is_told(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text("")
    tensors = 'input { name: "I" data_type: TYPE_FP32 dims: [1] } output { name: "O" data_type: TYPE_FP32 dims: [1] }'
    (tmp_path / "m" / "config.pbtxt").write_text(f'backend: "python" {tensors}')
    with pytest.raises(CheckpointError, match="only ONNX is explained"):
        list(explained(tmp_path / "m"))
