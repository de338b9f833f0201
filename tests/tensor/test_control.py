"""Which models come and go, in each control mode."""

from __future__ import annotations

import inspect
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="the extra tensor brings it")
pytest.importorskip("onnxruntime", reason="the extra tensor brings it")

from maitred.core.errors import CheckpointError, InvalidRequest, ModelNotFound, Unavailable
from maitred.tensor.repository import RepositoryChanges
from maitred.tensor.served_models import ControlMode, ModelControl, ServedModels
from tests.tensor.models import write_model

DATA = "zero_data: true"
CHAINED = """
platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
ensemble_scheduling {
  step { model_name: "e%03d" input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }
}
"""
ROWS = np.ones((1, 16), np.float32)


def control(repository: Path, mode: str, load=()) -> ModelControl:
    made = ModelControl(repository, ControlMode(mode), ServedModels())
    made.start(load)
    return made


def index(made: ModelControl) -> list[str]:
    return [f"{e.name} {e.version} {e.state and e.state.value} {e.reason}".strip() for e in made.models.index()]


def test_what_is_there_at_the_start_is_served_and_the_rest_has_its_reason(tmp_path: Path):
    write_model(tmp_path, "good")
    write_model(tmp_path, "bad", config="nonsense: 1")
    made = control(tmp_path, "none")
    assert index(made) == [
        f"bad None UNAVAILABLE {tmp_path}/bad/config.pbtxt:1:1: ModelConfig has no field 'nonsense'",
        "good 1 READY",
    ]
    with pytest.raises(Unavailable, match="models are loaded by mode none; serve with --model-control-mode explicit"):
        made.load("good")


def test_whatever_one_model_holds_the_others_start(tmp_path: Path):
    write_model(tmp_path, "good", versions=(1, 2), config="version_policy { all { } }")
    (tmp_path / "good" / "9").symlink_to(tmp_path / "good" / "9")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    write_model(tmp_path, "circle", versions=())
    (tmp_path / "circle" / "1").mkdir()
    (tmp_path / "circle" / "1" / "model.onnx").symlink_to("model.onnx")
    inputs = "".join(
        f'inputs {{ key: "INPUT{at}" value {{ data_type: TYPE_FP32 dims: 16 {DATA} }} }}' for at in range(2)
    )
    for name, dims in (("large", "1000000000000"), ("wide", "[ " + ", ".join(["1"] * 70) + " ]")):
        warmup = inputs.replace("dims: 16", f"dims: {dims}", 1)
        write_model(tmp_path, name, config=f'model_warmup {{ name: "first" {warmup} }}')
    write_model(tmp_path, "often", config=f"model_warmup {{ count: 4000000000 {inputs} }}")
    lines = index(control(tmp_path, "none"))
    assert [line for line in lines if " READY" in line] == ["good 1 READY", "good 2 READY"]
    told = {line.split()[0] + line.split()[1]: line for line in lines if "UNAVAILABLE" in line}
    assert [*told] == ["circleNone", "good9", "itselfNone", "large1", "oftenNone", "wide1"]
    assert told["large1"].endswith("takes 4000000000000 bytes; make it 1073741824 at most")
    assert "count is 4000000000; it must be at most 100000" in told["oftenNone"]
    assert all("Too many levels of symbolic links" in told[name] for name in ("circleNone", "good9", "itselfNone"))
    assert "maximum supported dimension" in told["wide1"]


def test_a_chain_of_ensembles_however_deep_ends_no_start(tmp_path: Path):
    write_model(tmp_path, "good")
    for at in range(300):
        write_model(tmp_path, f"e{at:03}", config=CHAINED % (at + 1), versions=())
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 250)
    try:
        made = control(tmp_path, "none")
    finally:
        sys.setrecursionlimit(limit)
    assert index(made)[-1] == "good 1 READY"
    assert all(line.split()[2] == "UNAVAILABLE" for line in index(made)[:-1])


def test_a_poll_takes_what_stood_still(tmp_path: Path):
    folder = write_model(tmp_path, "m")
    made = control(tmp_path, "poll")
    assert made.poll() == RepositoryChanges((), ())
    write_model(tmp_path, "m", versions=(2,))
    assert made.poll() == RepositoryChanges((), ())
    assert made.poll() == RepositoryChanges(("m",), ())
    assert index(made) == ["m 1 UNAVAILABLE unloaded", "m 2 READY"]
    (folder / "2" / "model.onnx").write_bytes(b"cut")
    shutil.rmtree(folder / "1")
    made.poll()
    assert made.poll() == RepositoryChanges(("m",), ())
    assert made.models.versions("m") == [2]
    assert any("cut off or no ONNX file" in line for line in index(made))
    assert made.poll() == RepositoryChanges((), ())
    with made.models.lease("m") as served:
        assert served.instances[0].run({"INPUT0": ROWS, "INPUT1": ROWS})
    shutil.rmtree(folder)
    made.poll()
    assert made.poll() == RepositoryChanges((), ("m",))
    assert index(made) == []


def test_a_repository_that_is_away_for_a_while_changes_nothing(tmp_path: Path):
    write_model(tmp_path / "repository", "m")
    made = control(tmp_path / "repository", "poll")
    (tmp_path / "repository").rename(tmp_path / "away")
    assert made.poll() == made.poll() == RepositoryChanges((), ())
    (tmp_path / "away").rename(tmp_path / "repository")
    assert made.poll() == RepositoryChanges((), ())
    assert index(made) == ["m 1 READY"]


def test_explicit_mode_loads_what_is_asked_for(tmp_path: Path):
    for name in "abc":
        write_model(tmp_path, name)
    made = control(tmp_path, "explicit", ["a"])
    assert index(made) == ["a 1 READY", "b None None", "c None None"]
    made.load("b")
    made.unload("a")
    assert index(made) == ["a 1 UNAVAILABLE unloaded", "b 1 READY", "c None None"]
    made.unload("a")
    assert index(made) == ["a 1 UNAVAILABLE unloaded", "b 1 READY", "c None None"]
    with pytest.raises(ModelNotFound):
        made.load("z")
    assert index(control(tmp_path, "explicit", ["*"])) == ["a 1 READY", "b 1 READY", "c 1 READY"]
    with pytest.raises(CheckpointError, match="--load-model z: no such folder"):
        control(tmp_path, "explicit", ["z"])


def test_a_load_may_bring_its_config(tmp_path: Path):
    write_model(tmp_path, "m", config="max_batch_size: 2")
    made = control(tmp_path, "explicit", ["m"])
    made.load("m", '{"max_batch_size": 8, "parameters": {"a": {"string_value": "b"}}}')
    with made.models.lease("m") as served:
        assert served.config.max_batch_size == 8
    for config, told in (('{"max_batch_sizes": 8}', "no ModelConfig: .*max_batch_sizes"), ("[", "no ModelConfig")):
        with pytest.raises(InvalidRequest, match=f"failed to load 'm': the config given for 'm' is {told}"):
            made.load("m", config)
    with made.models.lease("m") as served:
        assert served.config.max_batch_size == 8
