"""Which executor is taken, and what is said when it is not the first choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maitred.config import EngineConfig, MachineShare, ModelConfig
from maitred.core.errors import ConfigError, KernelError
from maitred.engine import executors
from maitred.engine.executors import plan_executor
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config

ALONE = MachineShare()


def planned(share: MachineShare = ALONE, /, **model: Any) -> tuple[Any, list[str]]:
    """The plan for the built-in model, and what was told."""
    told: list[str] = []
    checkpoint = open_checkpoint(None)
    config = EngineConfig(model=ModelConfig(**model), share=share)
    return plan_executor(config, checkpoint, spec_from_config(checkpoint.config), told.append), told


def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise KernelError("the native library was not built")

    monkeypatch.setattr(executors, "_plan_native", refuse)


@pytest.mark.parametrize("executor", ["auto", "native"])
def test_a_cpu_gets_the_native_executor(executor: str):
    plan, told = planned(executor=executor, device="cpu", dtype="int8")
    assert (plan.name, plan.device_name, plan.on_gpu) == ("native", "cpu", False)
    assert (plan.dtype_name, plan.kv_dtype_name) == ("int8", "bfloat16")
    assert told == []


def test_pytorch_is_taken_when_asked_for():
    plan, _ = planned(executor="torch", device="cpu", dtype="float32")
    assert (plan.name, plan.dtype_name, plan.on_gpu) == ("torch", "float32", False)


def test_pytorch_takes_over_what_the_library_cannot_and_says_why(monkeypatch: pytest.MonkeyPatch):
    without_native(monkeypatch)
    plan, told = planned(device="cpu")
    assert plan.name == "torch"
    assert told == ["torch   takes over: the native library was not built"]


@pytest.mark.parametrize("settings", [{"executor": "native"}, {"dtype": "int4"}, {"kv_dtype": "int4"}])
def test_what_only_the_library_has_is_refused_without_it(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    without_native(monkeypatch)
    with pytest.raises(ConfigError, match="the native library was not built"):
        planned(device="cpu", **settings)


def test_without_pytorch_the_library_must_do(monkeypatch: pytest.MonkeyPatch):
    without_native(monkeypatch)
    monkeypatch.setattr(executors, "_has_torch", lambda: False)
    with pytest.raises(ConfigError, match="the native library was not built"):
        planned(device="cpu")
    with pytest.raises(ConfigError, match=r"needs PyTorch; install it with: pip install 'maitred\[torch\]'"):
        planned(executor="torch", device="cpu")


def test_nobody_waits_for_pytorch_where_there_is_no_gpu_driver(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executors, "GPU_DRIVERS", ("/there/is/no/such/driver",))
    assert planned(device="auto")[0].name == "native"


def test_a_small_model_gets_one_thread_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executors, "usable_cores", lambda: 2)
    assert planned(device="cpu")[0].num_threads == 1
    assert planned(device="cpu", num_threads=2)[0].num_threads == 2


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_more_threads_than_cores_are_refused_with_both_numbers(executor: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executors, "usable_cores", lambda: 2)
    with pytest.raises(ConfigError, match="is 1000, and this process may use 2 physical cores; ask for 2 or"):
        planned(executor=executor, device="cpu", num_threads=1000)


def test_threads_that_nobody_counted_out_follow_measured_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executors, "usable_cores", lambda: 2)
    monkeypatch.setattr(executors, "SMALL_MODEL_PARAMETERS", 0)
    plan, kept = planned(device="cpu")[0], planned(device="cpu", num_threads=2)[0]
    assert ", up to 2 threads, " in plan.describe()
    assert ", 2 threads, " in kept.describe()
    choices = []
    for each in (plan, kept):
        executor = each.build(num_blocks=2, max_model_len=16)
        choices.append(executor.choice)
        executor.close()
    assert choices[0].num_threads == 2
    assert choices[1] is None


def test_ranks_share_the_cores_and_more_threads_than_these_are_told_not_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executors, "usable_cores", lambda: 4)
    monkeypatch.setattr(executors, "SMALL_MODEL_PARAMETERS", 0)
    plan, told = planned(device="cpu", tensor_parallel=2)
    assert (plan.num_threads, plan.choose_threads, told) == (2, False, [])
    assert ", 2 ranks of 2 threads, " in plan.describe()
    assert planned(device="cpu", tensor_parallel=9)[0].num_threads == 1
    _, told = planned(device="cpu", tensor_parallel=2, num_threads=4)
    assert told == ["ranks   8 threads in all on 4 cores: each step waits for time slices"]
    with pytest.raises(ConfigError, match="num_threads is 5"):
        planned(device="cpu", tensor_parallel=2, num_threads=5)


def test_ranks_are_refused_where_pytorch_computes(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="tensor_parallel is the native executor's"):
        planned(executor="torch", tensor_parallel=2)
    without_native(monkeypatch)
    with pytest.raises(ConfigError, match="the native library was not built"):
        planned(device="cpu", tensor_parallel=2)


def test_engines_of_one_machine_share_its_cores_and_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executors, "usable_cores", lambda: 4)
    monkeypatch.setattr(executors, "SMALL_MODEL_PARAMETERS", 0)
    assert planned(MachineShare(num_engines=2), device="cpu")[0].num_threads == 2
    assert planned(MachineShare(num_engines=2), device="cpu", tensor_parallel=2)[0].num_threads == 1
    assert planned(MachineShare(num_engines=9), device="cpu", executor="torch")[0].num_threads == 1
    assert planned(MachineShare(num_engines=2), device="cpu", num_threads=3)[0].num_threads == 3
    monkeypatch.setattr(executors, "_wants_gpu", lambda device: device != "cpu")
    with pytest.raises(ConfigError, match="several workers share processors, not a GPU"):
        planned(MachineShare(num_engines=2))


def test_mapped_weights_are_those_that_the_cache_keeps(tmp_path: Path):
    plan, _ = planned(device="cpu", weight_cache=str(tmp_path))
    assert plan.mapped_bytes == 0, "too small to be kept"
    assert replace(plan, weight_cache=replace(plan.weight_cache, min_bytes=1)).mapped_bytes >= plan.weights_bytes
    assert replace(plan, weight_cache=None).mapped_bytes == 0
