"""`maitred profile` and `maitred simulate` of a repository's tensor models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime", reason="the extra tensor brings it")

from maitred.cli.main import main
from maitred.sim.tensor_profile import (
    HostTimes,
    ModelTimes,
    ShapeTimes,
    TensorProfile,
    decode_tensor_profile,
    encode_tensor_profile,
)
from tests.tensor.ensembles import write_diamond
from tests.tensor.models import write_model

CONFIG = "max_batch_size: 4\ndynamic_batching {}\ninstance_group { kind: KIND_CPU count: 1 }\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "repository", "add", config=CONFIG)
    return tmp_path / "repository"


@pytest.fixture
def profile(tmp_path: Path) -> str:
    shape = ShapeTimes(length=0, rows=(1, 2, 4), seconds=(0.010, 0.012, 0.016))
    times = ModelTimes(model="add", version=1, shapes=(shape,))
    path = tmp_path / "profile.json"
    path.write_bytes(encode_tensor_profile(TensorProfile(machine="test", host=HostTimes(), models=(times,))))
    return str(path)


def trace_file(tmp_path: Path, *lines: dict) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def tensor(at_ms, **fields):
    return {"timestamp": at_ms, "model": "add", **fields}


def chat(at_ms):
    return {"timestamp": at_ms, "input_length": 40, "output_length": 4}


def test_a_profile_is_measured_and_read_back(repository, tmp_path, capsys):
    out = tmp_path / "measured.json"
    assert main(["profile", "--model-repository", str(repository), "--model", "add", "-o", str(out)]) == 0
    measured = decode_tensor_profile(out.read_bytes(), "measured.json")
    (times,) = measured.models
    assert times.shapes[0].rows == (1, 2, 4)
    assert min(times.shapes[0].seconds) > 0.0
    assert [number for number, _ in times.beside] == [1, 2]
    assert len(times.spread) == 100
    assert list(times.spread) == sorted(times.spread)
    assert "add" in capsys.readouterr().out


def test_a_trace_of_tensor_models_alone(repository, profile, tmp_path, capsys):
    trace = trace_file(tmp_path, tensor(100.0), tensor(101.0), tensor(102.0, rows=2))
    words = ["simulate", "--trace", trace, "--model-repository", str(repository), "--tensor-profile", profile]
    assert main([*words, "--model", "none", "--policy", "fcfs,srpt", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {"fcfs", "srpt"}
    add = figures["fcfs"]["tensor"]["add"]
    assert (add["num_finished"], add["mean_batch"], add["failed"]) == (3, 2.0, {})
    assert add["latency_s"]["max"] == pytest.approx(0.010 + 0.014 - 0.001)


def test_a_trace_with_chats_among_them(repository, profile, tmp_path, capsys):
    trace = trace_file(tmp_path, chat(0.0), tensor(1.0), tensor(500.0))
    words = ["simulate", "--trace", trace, "--model-repository", str(repository), "--tensor-profile", profile]
    words += ["--model", "llama-3.1-8b", "--device", "h100"]
    assert main(words) == 0
    assert "ttft" in (told := capsys.readouterr().out)
    assert "mean batch" in told
    assert main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["fcfs"]
    assert figures["num_finished"] == 1
    assert figures["tensor"]["add"]["num_finished"] == 2


def test_a_trace_names_an_ensemble_and_its_steps_run_in_their_models_lanes(tmp_path, capsys):
    repository, profile = tmp_path / "repository", tmp_path / "profile.json"
    write_diamond(repository)
    shape = ShapeTimes(length=0, rows=(1, 2, 4), seconds=(0.010, 0.012, 0.016))
    models = [ModelTimes(model=name, version=1, shapes=(shape,)) for name in ("double", "triple", "zsum")]
    profile.write_bytes(encode_tensor_profile(TensorProfile(machine="test", host=HostTimes(), models=tuple(models))))
    trace = trace_file(tmp_path, tensor(0.0, model="diamond"), tensor(0.0, model="diamond"))
    words = ["simulate", "--trace", trace, "--model-repository", str(repository), "--tensor-profile", str(profile)]
    assert main([*words, "--model", "none"]) == 0
    assert "diamond" in capsys.readouterr().out
    assert main([*words, "--model", "none", "--json"]) == 0
    (figures,) = (each["tensor"] for each in json.loads(capsys.readouterr().out).values())
    assert (figures["diamond"]["num_finished"], figures["diamond"]["mean_batch"]) == (2, None)
    assert [figures[name]["num_finished"] for name in ("double", "triple", "zsum")] == [0, 0, 0]
    assert all(figures[name]["mean_batch"] for name in ("double", "triple", "zsum"))


@pytest.mark.parametrize(
    ("lines", "words", "told"),
    [
        ([tensor(0.0, model="resnet")], ["--model", "none"], "'resnet'"),
        ([tensor(0.0), chat(1.0)], ["--model", "none"], "--model is none"),
        ([tensor(0.0)], ["--fleet", "2"], "--fleet"),
        ([tensor(0.0, rows=0)], [], "trace.jsonl:1: rows"),
        ([chat(0.0), {"timestamp": 3.0}], [], "trace.jsonl:2"),
    ],
)
def test_what_cannot_be_simulated_is_told(repository, profile, tmp_path, capsys, lines, words, told):
    trace = trace_file(tmp_path, *lines)
    asked = ["simulate", "--trace", trace, "--model-repository", str(repository), "--tensor-profile", profile]
    assert main([*asked, *words]) != 0
    assert told in capsys.readouterr().err


def test_without_times_simulate_says_how_to_measure_them(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trace = trace_file(tmp_path, tensor(0.0))
    assert main(["simulate", "--trace", trace, "--model-repository", str(repository), "--model", "none"]) != 0
    assert "maitred profile --model-repository" in capsys.readouterr().err
