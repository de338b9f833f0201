"""`maitred roofline`: the machine's figures, a model's floors, the engine beside them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from maitred.cli.main import main
from maitred.cli.roofline import TimedEngine
from maitred.config import CacheConfig, EngineConfig, SchedulerConfig
from maitred.core.errors import ConfigError
from maitred.engine.build import build_parts
from maitred.model import roofline as machine
from maitred.model.roofline import Machine, MeasuredMachine

PEAKS = {"float32": 0.4e12, "bfloat16": 0.9e12, "int8": 1.8e12}
HOST = MeasuredMachine(Machine(80e9, PEAKS), {name: 1.1 * ops for name, ops in PEAKS.items()}, 2, "avx512")


@pytest.fixture
def known_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure", lambda num_threads, model_bytes: HOST)


@pytest.mark.usefixtures("known_host")
def test_tables_name_machine_model_floors_and_the_engines_share(capsys: pytest.CaptureFixture[str]):
    words = ["roofline", "--batch", "1", "--batch", "2", "--context", "64", "--prompt", "32", "--max-num-seqs", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "reads 80.0 GB/s" in out
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        assert f"\n{dtype} " in out
    for step in ("decode, 1 x context 64", "decode, 2 x context 64", "prefill of 32"):
        (line,) = [line for line in out.splitlines() if line.startswith(step)]
        assert line.rstrip().endswith("%"), "the engine ran"


def test_what_lies_in_the_cache_is_held_against_the_caches_stream_and_a_busy_machine_is_told(capsys, monkeypatch):
    near, asked = replace(HOST, cache_bytes_per_s=800e9, unsteady=("memory", "int8 product")), []
    monkeypatch.setattr(machine, "measure", lambda num_threads, model_bytes: asked.append(model_bytes) or near)
    words = ("--dtype", "int8")
    assert main(["roofline", "--no-engine", *words]) == 0
    out = capsys.readouterr().out
    assert "the last-level cache holds this model's 3.7 MiB, which are read at 800.0 GB/s" in out
    assert "this machine is busy: repeats of memory, int8 product did not agree in 3 s" in out
    assert 3.6 * 2**20 < asked[0] < 3.8 * 2**20
    far = replace(near, cache_bytes_per_s=None)
    floors = []
    for host in (near, far):
        monkeypatch.setattr(machine, "measure", lambda num_threads, model_bytes, host=host: host)
        floors.append(floors_of(capsys, *words)["decode, 1 x context 512"])
    assert floors[0] < 0.5 * floors[1]


@pytest.mark.usefixtures("known_host")
def test_without_the_engine_floors_stand_alone_and_json_has_them_all(capsys: pytest.CaptureFixture[str]):
    assert main(["roofline", "--no-engine", "--json", "--dtype", "int8", "--kv-dtype", "int8"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["dtype"], told["kv_dtype"]) == ("int8", "int8")
    assert [step["name"] for step in told["steps"]] == [
        "decode, 1 x context 512",
        "decode, 8 x context 512",
        "decode, 32 x context 512",
        "prefill of 512",
    ]
    assert all(step["floor_s"] > 0 and step["share"] is None for step in told["steps"])
    assert told["token_budget"]["int8"] % 64 == 0


def floors_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    assert main(["roofline", "--no-engine", "--json", "--batch", "1", *words]) == 0
    return {step["name"]: step["floor_s"] for step in json.loads(capsys.readouterr().out)["steps"]}


@pytest.mark.usefixtures("known_host")
def test_floors_are_of_the_formats_that_the_engine_would_take(capsys: pytest.CaptureFixture[str]):
    """The output matrix has a format of its own."""
    narrow = floors_of(capsys, "--dtype", "int8")["decode, 1 x context 512"]
    wide = floors_of(capsys, "--dtype", "int8", "--lm-head-dtype", "bfloat16")["decode, 1 x context 512"]
    assert (wide - narrow) * HOST.machine.stream_bytes_per_s == pytest.approx(1536 * (256 - 4))  # of the built-in model
    assert floors_of(capsys, "--dtype", "int4")["decode, 1 x context 512"] < narrow
    assert main(["roofline", "--no-engine", "--dtype", "int4", "--kv-dtype", "int4"]) == 0
    assert "weights q4_1, embedding and output int8, KV cache int4" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["0", "-1", "many"])
def test_a_batch_must_be_a_number_of_requests(word: str, capsys: pytest.CaptureFixture[str]):
    assert main(["roofline", "--no-engine", f"--batch={word}"]) == 1
    assert "at least 1" in capsys.readouterr().err


def test_requests_that_cannot_decode_together_are_said_to_be_too_many():
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=2), cache=CacheConfig(enable_prefix_caching=False))
    parts = build_parts(config)
    try:
        with pytest.raises(ConfigError, match="all of 3 requests"):
            TimedEngine(parts, 512).decode_s(3, 32, 4)
    finally:
        parts.close()
