from __future__ import annotations

from pathlib import Path

import pytest

from maitred.cli.main import main
from maitred.core.errors import KernelError
from maitred.engine import executors
from maitred.executor.native_plan import NativePlan
from maitred.kernels import _native
from tests.model.checkpoints import make_checkpoint


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["explain", *words]) == 0
    return capsys.readouterr().out


def test_fusions_kernels_formats_buffers_and_bytes_are_told(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("MAITRED_ISA", "plain")
    monkeypatch.setattr(executors, "usable_cores", lambda: 2)
    folder = make_checkpoint("gemma2", tmp_path)
    text = explained(capsys, str(folder), "--dtype", "int4", "--num-threads", "2")
    assert "executor  native plain, 2 threads, weights q4_1, embedding and output int8, KV cache bfloat16" in text
    assert "qkv stack                                       4 times,    8 operations fewer" in text
    assert "post-norm into residual add" in text
    assert (
        "layers.*.gate_up                4 x [200 x 72] q4_1      scalar int8, tiles of 4 x 32, gate beside up" in text
    )
    assert "logits [384 x 272]" in text
    assert "bytes of keys and values for each token of context of each request" in text
    assert "fell back nothing\n" in text


def test_techniques_of_model_engine_and_serving_end_it_with_what_each_is_worth(capsys, tmp_path: Path):
    gemma, mini = str(make_checkpoint("gemma2", tmp_path / "gemma")), str(make_checkpoint("llama", tmp_path / "llama"))
    text = explained(capsys, gemma, "--dtype", "int8", "--speculative", "off", "--no-enable-prefix-caching")
    lines = text.split("fell back ")[1].splitlines()[1:]
    levels = [line.split()[0] for line in lines[::2]]
    assert levels == sorted(levels, key=["model", "engine", "serving"].index)
    assert set(levels) == {"model", "engine", "serving"}
    assert "model     weights in int8: on, int8" in lines
    assert "engine    reused prefixes: off, --no-enable-prefix-caching" in lines
    assert "engine    speculation: off, --speculative off" in lines
    assert all(line.startswith(" " * 12) for line in lines[1::2])
    assert "windows: on, 2 of 4 layers" in text
    other = explained(capsys, mini, "--executor", "torch", "--max-num-batched-tokens", "300")
    assert "prompts in chunks: on, steps of at most 300 tokens" in other
    assert "fused operations: off, the PyTorch executor has none" in other
    assert "windows: off, no layer has one" in other


@pytest.mark.skipif("amx" not in _native.available_isas(), reason="needs a processor with AMX")
def test_where_few_rows_are_multiplied_by_another_kernel_both_are_told(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("MAITRED_ISA", "amx")
    folder = make_checkpoint("llama", tmp_path)
    text = explained(capsys, str(folder), "--dtype", "int8")
    assert "int8      vpdpbusd zmm, tiles of 12 x 32; from 9 rows on tdpbsud, tiles of 32 x 32; " in text
    text = explained(capsys, str(folder), "--dtype", "int4")
    assert "q4_1      vpdpbusd zmm, tiles of 8 x 32; from 33 rows on tdpbsud, tiles of 16 x 32; " in text
    text = explained(capsys, str(folder), "--dtype", "bfloat16")
    assert "bfloat16  vfmadd zmm, tiles of 4 x 32; from 5 rows on tdpbf16ps, tiles of 32 x 32; " in text


def test_another_executor_and_why_it_was_taken_is_told(capsys, monkeypatch, tmp_path: Path):
    def refuse(*_: object) -> NativePlan:
        raise KernelError("Tiny needs Gate by itself, which the native executor does not have")

    monkeypatch.setattr(executors, "_plan_native", refuse)
    text = explained(capsys, str(make_checkpoint("llama", tmp_path)), "--device", "cpu")
    assert "executor  torch cpu" in text
    assert "fell back torch takes over: Tiny needs Gate by itself" in text


def test_which_way_a_model_goes_is_told(capsys, tmp_path: Path):
    own = explained(capsys, str(make_checkpoint("llama", tmp_path / "own")))
    assert own.splitlines()[0].endswith("context 128, by a native row")
    other = explained(capsys, str(make_checkpoint("opt", tmp_path / "other")))
    assert other.splitlines()[0].endswith("context 128, through transformers' own module, for there is no native row")
