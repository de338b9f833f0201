"""Device, number formats and sizes, settled before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from maitred.config import ModelConfig
from maitred.core.errors import ConfigError
from maitred.executor import torch as executor_module
from maitred.executor.torch import plan_torch_executor, resolve_device, resolve_dtype, resolve_kv_dtype
from maitred.executor.torch_kv import kv_bytes_per_block, pool_shape
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from tests.executor.torch_worlds import make_spec
from tests.model.checkpoints import make_checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_block_holds_keys_and_values_of_every_layer():
    spec = make_spec(windows=(None, 4, None), num_kv_heads=2, head_dim=8)
    assert kv_bytes_per_block(spec, 16, 2) == 16 * 3 * 2 * 2 * 8 * 2


def test_the_pool_takes_the_bytes_that_were_planned():
    spec = make_spec()
    shape = pool_shape(spec, num_blocks=5, block_size=16)
    assert torch.Size(shape).numel() * 4 == 5 * kv_bytes_per_block(spec, 16, 4)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_a_pool_of_nothing_is_refused(num_blocks: int, block_size: int):
    with pytest.raises(ConfigError, match=f"{num_blocks} blocks of {block_size} tokens"):
        pool_shape(make_spec(), num_blocks=num_blocks, block_size=block_size)


def test_a_plan_says_what_will_be_taken(tmp_path: Path):
    config = ModelConfig(device="cpu", num_threads=1, kv_dtype="bfloat16")
    with open_checkpoint(str(make_checkpoint("llama", tmp_path))) as checkpoint:
        plan = plan_torch_executor(config, checkpoint, spec_from_config(checkpoint.config), block_size=16)
        executor = plan.build(num_blocks=3, max_model_len=64)
    assert plan.weights_bytes == 4 * plan.spec.num_parameters()
    assert plan.bytes_per_block == kv_bytes_per_block(plan.spec, 16, 2)
    assert plan.available_bytes(12345) == 12345
    assert plan.describe() == (
        "torch   cpu, 1 threads, weights float32, KV cache bfloat16, attention by gather and SDPA"
    )
    assert executor.pool.shape == pool_shape(plan.spec, num_blocks=3, block_size=16)
    assert executor.pool.dtype == torch.bfloat16


def test_threads_of_the_config_go_before_those_of_the_machine(tmp_path: Path):
    with open_checkpoint(str(make_checkpoint("llama", tmp_path))) as checkpoint:
        spec = spec_from_config(checkpoint.config)
        for asked, wanted in ((None, 3), (2, 2)):
            config = ModelConfig(device="cpu", num_threads=asked)
            plan = plan_torch_executor(config, checkpoint, spec, block_size=16, num_threads=3)
            assert plan.num_threads == wanted


def test_auto_takes_a_gpu_when_there_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert resolve_device("auto") == torch.device("cuda", 0)
    assert resolve_device("cpu") == CPU


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="PyTorch sees no GPU; choose auto or cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("name", "checkpoint_dtype", "device", "cpu_has_bfloat16", "wanted"),
    [
        ("auto", "bfloat16", CPU, True, torch.bfloat16),
        ("auto", "bfloat16", CPU, False, torch.float32),
        ("auto", "float16", CPU, True, torch.float32),
        ("auto", "float32", CPU, True, torch.float32),
        ("auto", "bfloat16", CUDA, False, torch.bfloat16),
        ("auto", "float16", CUDA, False, torch.float16),
        ("auto", "float32", CUDA, False, torch.float32),
        ("auto", "float64", CUDA, False, torch.float32),
        ("bfloat16", "float32", CPU, False, torch.bfloat16),
        ("float32", "bfloat16", CUDA, True, torch.float32),
    ],
)
def test_dtypes(
    name: str,
    checkpoint_dtype: str,
    device: torch.device,
    cpu_has_bfloat16: bool,
    wanted: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(executor_module, "_cpu_multiplies_bfloat16", lambda: cpu_has_bfloat16)
    assert resolve_dtype(name, checkpoint_dtype, device, num_parameters=10**9) == wanted


def test_a_small_model_computes_in_float32_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executor_module, "_cpu_multiplies_bfloat16", lambda: True)
    sizes = {num: resolve_dtype("auto", "bfloat16", CPU, num_parameters=num) for num in (2**28, 2**28 + 1)}
    assert sizes == {2**28: torch.float32, 2**28 + 1: torch.bfloat16}
    assert resolve_dtype("auto", "bfloat16", CUDA, num_parameters=1) == torch.bfloat16


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integer_weights_are_the_native_executors(name: str):
    with pytest.raises(ConfigError, match=f"dtype is {name}, which only the native executor computes; choose auto"):
        resolve_dtype(name, "bfloat16", CPU, num_parameters=10**9)


def test_kv_dtypes():
    assert resolve_kv_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert resolve_kv_dtype("float32", torch.bfloat16) == torch.float32
    for name in ("int8", "int4"):
        with pytest.raises(ConfigError, match=f"kv_dtype is {name}, which only the native executor has"):
            resolve_kv_dtype(name, torch.float32)
