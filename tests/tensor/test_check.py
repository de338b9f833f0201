"""Repositories, folders, configs and ONNX files, judged without loading."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf", reason="the extra tensor brings it")

import maitred.tensor.check
from maitred.core.errors import CheckpointError
from maitred.tensor.check import check
from maitred.tensor.repository_files import read_model, scan
from tests.tensor.ensembles import scale_model
from tests.tensor.models import add_model, external_weight, onnx, wheel_file, write_model

MISMATCH = """
max_batch_size: 4
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }, { name: "INPUT1" data_type: TYPE_FP32 dims: 17 } ]
output { name: "OUTPUT" data_type: TYPE_FP32 dims: 16 }
"""


def verdicts(path: Path, **kwargs) -> dict[str, tuple[bool, bool, str]]:
    return {Path(each.path).name: (each.parsed, each.served, each.reason) for each in check(path, **kwargs)}


def test_each_model_of_a_repository_has_a_verdict(tmp_path: Path):
    write_model(tmp_path, "plain")
    write_model(tmp_path, "hinted", config="optimization { cuda { graphs: true } }")
    write_model(tmp_path, "mismatch", config=MISMATCH)
    write_model(tmp_path, "misspelt", config="max_batch_sizes: 4")
    write_model(tmp_path, "empty", versions=())
    write_model(tmp_path, "other", config='name: "another"')
    write_model(tmp_path, "ensemble", versions=(), config=ENSEMBLE)
    (tmp_path / ".git").mkdir()
    (tmp_path / "README").touch()
    found = verdicts(tmp_path)
    assert found["plain"] == (True, True, "")
    assert found["ensemble"] == (True, True, "")
    assert found["hinted"] == (True, True, "ignored: optimization.cuda: CUDA graphs are not captured")
    assert found["mismatch"][:2] == (True, False)
    assert (
        "has 17 as dimension 1 in the config ([-1, 17], the batch before dims), 16 in the model" in found["mismatch"][2]
    )
    assert found["misspelt"][:2] == (False, False)
    assert "config.pbtxt:1:1: ModelConfig has no field 'max_batch_sizes'" in found["misspelt"][2]
    assert found["empty"][2].startswith("it has no version")
    assert found["other"][2] == "name is 'another' in config.pbtxt, and the folder's is 'other'; make them equal"
    assert len(found) == 7


ENSEMBLE = """
platform: "ensemble"
input { name: "a" data_type: TYPE_FP32 dims: 16 }
output { name: "b" data_type: TYPE_FP32 dims: 16 }
ensemble_scheduling {
  step { model_name: "plain" input_map { key: "INPUT0" value: "a" } input_map { key: "INPUT1" value: "a" }
         output_map { key: "OUTPUT" value: "b" } }
}
"""


def test_the_config_is_told_as_it_is_written(tmp_path: Path):
    (checked,) = check(
        write_model(tmp_path, "m", config='max_batch_size: 2 parameters { key: "a" value { string_value: "b" } }')
    )
    assert checked.config == {"max_batch_size": 2, "parameters": {"a": {"string_value": "b"}}}
    (checked,) = check(write_model(tmp_path, "n"))
    assert checked.config is None


def test_files_are_judged_by_what_they_tell(tmp_path: Path):
    folder = write_model(tmp_path, "m", config="max_batch_size: 2")
    assert verdicts(folder / "config.pbtxt") == {"m": (True, True, "")}
    assert verdicts(folder / "1" / "model.onnx") == {"model.onnx": (True, True, "")}
    (tmp_path / "lone.pbtxt").write_text('backend: "onnxruntime" response_cache { enable: true }')
    assert verdicts(tmp_path / "lone.pbtxt") == {"lone.pbtxt": (True, True, "")}
    (tmp_path / "lone.pbtxt").write_text("model_transaction_policy { decoupled: true } platform: 'onnxruntime_onnx'")
    (verdict,) = verdicts(tmp_path / "lone.pbtxt").values()
    assert verdict == (True, False, "model_transaction_policy.decoupled is not supported: one request, one answer")
    assert verdicts(tmp_path / "absent")["absent"][2].endswith("No such file or directory")
    assert verdicts(tmp_path / "absent" / "config.pbtxt")["config.pbtxt"][:2] == (False, False)
    os.mkfifo(tmp_path / "pipe.pbtxt")
    assert verdicts(tmp_path / "pipe.pbtxt")["pipe.pbtxt"][2].endswith("is no file")
    (tmp_path / "nothing").mkdir()
    assert verdicts(tmp_path / "nothing")["nothing"][2].startswith("it holds no model")


def test_a_model_whose_code_would_run_is_served_only_when_that_is_allowed(tmp_path: Path):
    folder = write_model(tmp_path, "m", versions=())
    (folder / "1").mkdir()
    (folder / "1" / "model.py").touch()
    assert verdicts(folder)["m"][1:] == (
        False,
        "backend 'python' runs code of the repository; allow that with --allow-repository-code",
    )
    assert verdicts(folder, allow_code=True) == {"m": (True, True, "")}


def test_of_several_versions_those_that_can_be_served_are(tmp_path: Path):
    folder = write_model(tmp_path, "m", config="version_policy { all { } }", versions=(1, 2))
    path = folder / "2" / "model.onnx"
    path.write_bytes(path.read_bytes()[:-10])
    (checked,) = check(folder)
    assert checked.served
    assert checked.reason.startswith("version 2: ")
    assert "cut off" in checked.reason
    model = read_model(folder)
    assert [bool(version.fault) for version in model.versions] == [False, True]
    (folder / "config.pbtxt").write_text("version_policy { specific { versions: [ 1, 9 ] } }")
    assert "9/model.onnx: No such file" in verdicts(folder)["m"][2]
    (folder / "config.pbtxt").unlink()
    assert verdicts(folder)["m"][1] is False


def test_files_that_a_config_names_must_be_there(tmp_path: Path):
    config = 'output { name: "OUTPUT" data_type: TYPE_FP32 dims: 16 label_filename: "labels.txt" }'
    folder = write_model(tmp_path, "m", config=config)
    assert verdicts(folder)["m"] == (True, False, f"{folder}/labels.txt is not there")
    (folder / "labels.txt").touch()
    assert verdicts(folder)["m"] == (True, True, "")


def test_a_version_may_be_a_folder_with_the_model_and_its_weights(tmp_path: Path):
    folder = write_model(tmp_path, "m", versions=())
    inner = folder / "1" / "model.onnx"
    inner.mkdir(parents=True)
    (inner / "weights").write_bytes(bytes(64))
    onnx.save(add_model(weight=external_weight("weights")), inner / "model.onnx")
    assert read_model(folder).versions[0].path == inner / "model.onnx"
    assert verdicts(folder)["m"] == (True, True, "")


def test_labels_and_hints_come_with_the_model(tmp_path: Path):
    config = 'version_policy { all { } } parameters { key: "label.stable" value { string_value: "2" } }'
    model = read_model(write_model(tmp_path, "m", config=config, versions=(1, 2, 3)))
    assert (model.labels, [version.number for version in model.versions]) == ({"stable": 2}, [1, 2, 3])
    (model.folder / "config.pbtxt").write_text(config.replace('"2"', '"4"'))
    with pytest.raises(CheckpointError, match="names version 4, and served are: 1, 2, 3"):
        read_model(model.folder)


def test_models_from_wheels_are_served_without_a_config(tmp_path: Path):
    folder = write_model(tmp_path, "magika", model=onnx.load(wheel_file("magika", "models/standard_v3_3/model.onnx")))
    config = read_model(folder).config
    assert (config.max_batch_size, list(config.input[0].dims), list(config.output[0].dims)) == (4, [2048], [214])
    folder = write_model(tmp_path, "vad", model=onnx.load(wheel_file("silero_vad", "data/silero_vad.onnx")))
    config = read_model(folder).config
    assert (config.max_batch_size, [each.name for each in config.input]) == (0, ["input", "state", "sr"])


def test_an_ensemble_reads_each_model_once_however_many_steps_name_it(tmp_path: Path, monkeypatch):
    write_model(tmp_path, "scale", model=scale_model(2))
    step = 'step {{ model_name: "scale" input_map {{ key: "x" value: "t{}" }} output_map {{ key: "y" value: "t{}" }} }}'
    steps = "".join(step.format(at, at + 1) for at in range(200))
    ends = 'input { name: "t0" data_type: TYPE_FP32 dims: 4 } output { name: "t200" data_type: TYPE_FP32 dims: 4 }'
    write_model(tmp_path, "many", config=f'platform: "ensemble" {ends} ensemble_scheduling {{ {steps} }}', versions=())
    read, reads = maitred.tensor.check.read_model, []
    monkeypatch.setattr(maitred.tensor.check, "read_model", lambda *args: reads.append(args[0].name) or read(*args))
    assert verdicts(tmp_path)["many"] == (True, True, "")
    assert reads == ["many", "scale", "scale"]  # the last is its own verdict


# ---- scans


def test_a_scan_sees_every_change_of_a_folder(tmp_path: Path):
    folder = write_model(tmp_path, "m")
    first = scan(tmp_path)
    assert scan(tmp_path) == first
    (folder / "config.pbtxt").touch()
    second = scan(tmp_path)
    assert second != first
    path = folder / "1" / "model.onnx"
    path.rename(folder / "copy")
    path.write_bytes((folder / "copy").read_bytes())
    (folder / "copy").unlink()
    assert scan(tmp_path)["m"] != second["m"]
    with pytest.raises(CheckpointError, match=r"cannot read the model repository .*: No such file"):
        scan(tmp_path / "absent")


def test_a_scan_follows_links_and_ends_in_a_circle(tmp_path: Path):
    write_model(tmp_path / "mounted", "m")
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "m").symlink_to(tmp_path / "mounted" / "m")
    (tmp_path / "mounted" / "m" / "again").symlink_to(tmp_path / "mounted" / "m")
    assert "1/model.onnx" in [path for path, *_ in scan(repository)["m"]]
