"""The GPU path: what is handed to PyTorch's flash kernel, and, on a GPU, what comes out of it.

Without a GPU the kernel's place is taken by `plain_varlen_attn`, which keeps to the documented contract and refuses
what the C++ refuses, so that lengths, tables and windows are proved everywhere and the kernel itself where it runs.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from maitred.config import ModelConfig
from maitred.executor import torch as executor_module
from maitred.executor.torch import plan_torch_executor
from maitred.executor.torch_attention import flash_refusal, reads_block_tables
from maitred.kv.pages import groups_of
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from tests.executor.test_windowed_kv import UNLIKE, outputs_of
from tests.executor.torch_worlds import (
    Hand,
    Seen,
    assert_close,
    dense_logits,
    make_decoder,
    make_executor,
    make_spec,
    random_prompt,
)
from tests.model.checkpoints import load_reference, make_checkpoint

CUDA = torch.device("cuda")


def plain_varlen_attn(
    q_TNH: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor | None,
    num_splits: int,
) -> torch.Tensor:
    """One row after the other. Queries stand at the end of their row's keys; right of the window is always 0."""
    assert enable_gqa
    assert num_splits == 1
    assert window_size[1] == 0
    for lengths in (cu_seq_q, cu_seq_k, seqused_k, *([] if block_table is None else [block_table])):
        assert lengths.dtype == torch.int32
        assert lengths.is_contiguous()
    out = torch.empty_like(q_TNH)
    for row in range(len(seqused_k)):
        queries, used = slice(int(cu_seq_q[row]), int(cu_seq_q[row + 1])), int(seqused_k[row])
        if block_table is None:
            first = int(cu_seq_k[row])
            assert first + used <= int(cu_seq_k[row + 1])
            k_LKH, v_LKH = k[first : first + used], v[first : first + used]
        else:
            assert k.shape[1] % 256 == 0
            k_LKH, v_LKH = (x[block_table[row].long()].flatten(0, 1)[:used] for x in (k, v))
        q = q_TNH[queries]
        assert len(q) <= max_q
        assert used <= max_k
        distance = torch.arange(used - len(q), used)[:, None] - torch.arange(used)
        hidden = distance < 0
        if window_size[0] >= 0:
            hidden |= distance > window_size[0]
        group = q.shape[1] // k.shape[-2]
        scores = torch.einsum("qnh,lnh->nql", q, k_LKH.repeat_interleave(group, 1)) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[queries] = torch.einsum("nql,lnh->qnh", weights, v_LKH.repeat_interleave(group, 1))
    return out


@pytest.mark.parametrize("block_size", [4, 256])
@pytest.mark.parametrize("windows", [(None, None), (1, 6, None, 300)])
def test_lengths_and_tables_say_what_the_batch_is(
    windows: tuple[int | None, ...], block_size: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen_attn)
    monkeypatch.setattr(executor_module, "flash_refusal", lambda *_, **__: None)
    decoder = make_decoder(make_spec(windows=windows))
    seen = Seen()
    executor = make_executor(decoder, num_blocks=128, block_size=block_size, on_logits=seen)
    hand = Hand(executor, num_blocks=128, block_size=block_size)
    lengths = [1, 3, 40, 290]
    for i, length in enumerate(lengths):
        hand.add(f"r{i}", random_prompt(length, seed=i))
    hand.step({"r0": 1, "r1": 3, "r2": 33, "r3": 257})
    hand.step({"r0": 1, "r1": 1, "r2": 7, "r3": 33})
    hand.run(2)
    for i, length in enumerate(lengths):
        logits = seen.of(f"r{i}")
        text = random_prompt(length, seed=i) + hand.outputs[f"r{i}"]
        assert_close(logits, dense_logits(decoder, text[: len(logits)]))


@pytest.mark.parametrize("block_size", [4, 256])
def test_the_kernel_reads_the_pages_of_each_group(block_size: int, monkeypatch: pytest.MonkeyPatch):
    """Prompts in chunks, samples and a second turn say what they say by gathering whole blocks."""
    whole, _ = outputs_of("torch", UNLIKE, None, pages=600 // block_size + 20, block_size=block_size)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen_attn)
    monkeypatch.setattr(executor_module, "flash_refusal", lambda *_, **__: None)
    paged, _ = outputs_of("torch", UNLIKE, groups_of(UNLIKE, 512), pages=1500 // block_size + 60, block_size=block_size)
    assert paged == whole


def test_the_kernel_is_refused_with_a_reason():
    spec = make_spec()
    cpu = flash_refusal(spec, device=torch.device("cpu"), dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    assert cpu == "cpu has no flash kernel for ragged batches"


@pytest.mark.parametrize(
    ("changes", "dtype", "kv_dtype", "reason"),
    [
        ({}, torch.float32, torch.float32, "16 bits"),
        ({}, torch.bfloat16, torch.float32, "16 bits"),
        ({"head_dim": 20}, torch.bfloat16, torch.bfloat16, "head size 20"),
        ({"head_dim": 264}, torch.bfloat16, torch.bfloat16, "head size 264"),
        ({"attention_softcap": 5.0}, torch.bfloat16, torch.bfloat16, "softcap"),
        ({}, torch.bfloat16, torch.bfloat16, None),
    ],
)
def test_what_the_kernel_takes_on_an_ampere_gpu(
    changes: dict[str, Any],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen_attn)
    refusal = flash_refusal(make_spec(**changes), device=CUDA, dtype=dtype, kv_dtype=kv_dtype)
    assert refusal is None if reason is None else reason in (refusal or "")


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    refusal = flash_refusal(make_spec(), device=CUDA, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    assert refusal == "the GPU is older than compute capability 8.0"


def test_a_pytorch_whose_kernel_takes_no_block_tables_is_refused(monkeypatch: pytest.MonkeyPatch):
    """PyTorch 2.11's: every step in 16 bits on a GPU would end in a TypeError."""

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux, scale, window_size): ...

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    refusal = flash_refusal(make_spec(), device=CUDA, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    assert refusal is not None
    assert "no block_table and no enable_gqa and no num_splits and no seqused_k; 2.13 has" in refusal


def test_block_tables_need_blocks_of_256():
    assert [reads_block_tables(size) for size in (16, 128, 256, 512)] == [False, False, True, True]


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "phi3"])
def test_bfloat16_is_at_most_twice_as_far_from_float32_as_transformers(
    family: str, block_size: int, tmp_path: Path, device: torch.device
):
    """Heads of 16, so that a GPU takes the flash kernel; windows of 10 and 12 on mistral and gemma3."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 272}
    make_checkpoint(family, tmp_path, seed=5, **shape, **({} if family == "phi3" else {"head_dim": 16}))
    prompts = {"a": random_prompt(70, seed=1), "b": random_prompt(33, seed=2), "c": random_prompt(5, seed=3)}
    seen = serve_bfloat16(tmp_path, prompts, device=device, block_size=block_size)
    exact = load_reference(tmp_path).to(device)
    with torch.inference_mode():
        wanted = {r: exact(torch.tensor([prompt], device=device)).logits[0].cpu() for r, prompt in prompts.items()}
        exact.to(torch.bfloat16)
        theirs = {
            r: exact(torch.tensor([prompt], device=device)).logits[0].float().cpu() for r, prompt in prompts.items()
        }
    for name in prompts:
        our_error = (seen.of(name) - wanted[name]).abs().max()
        assert our_error <= 2 * (theirs[name] - wanted[name]).abs().max()
        assert our_error > 0


def serve_bfloat16(folder: Path, prompts: dict[str, list[int]], *, device: torch.device, block_size: int) -> Seen:
    with open_checkpoint(str(folder)) as checkpoint:
        spec = spec_from_config(checkpoint.config)
        config = ModelConfig(device=device.type, dtype="bfloat16")
        plan = plan_torch_executor(config, checkpoint, spec, block_size=block_size)
        assert ("flash" in plan.describe()) == (
            device.type == "cuda" and "block_table" in signature(varlen_attn).parameters
        )
        executor = plan.build(num_blocks=64, max_model_len=128)
    executor.on_logits = seen = Seen()
    hand = Hand(executor, block_size=block_size)
    for name, prompt in prompts.items():
        hand.add(name, prompt)
    hand.step({"a": 40, "b": 33, "c": 2})
    hand.step({"a": 29, "c": 3})
    hand.step({"a": 1})
    return seen
