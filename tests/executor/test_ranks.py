"""Ranks of tensor parallelism: the bits of one process whatever their number, and their life beside rank 0."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.errors import ConfigError, KernelError, OutOfMemory
from maitred.executor import ranks
from maitred.executor.native import NativeExecutor
from maitred.executor.native_plan import plan_native_executor
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.program import Part, Weight
from maitred.model.program import Format
from maitred.model.shares import share_of
from tests.conftest import ROOT
from tests.executor.test_native_identity import Bits, World
from tests.model.checkpoints import make_checkpoint
from tests.waiting import HANGS_S, is_gone, until

BLOCK_SIZE = 16


@contextmanager
def running(folder: Path, num_ranks: int, *, num_blocks: int = 24, **model: Any) -> Iterator[NativeExecutor]:
    """An executor of the folder's model; a thread a rank, unless told otherwise."""
    config = ModelConfig(**{"num_threads": 1, "weight_cache": "off"} | model, tensor_parallel=num_ranks)
    scheduler = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=8)
    with open_checkpoint(str(folder)) as checkpoint:
        spec = spec_from_config(checkpoint.config)
        plan = plan_native_executor(
            config, checkpoint, spec, cache=CacheConfig(block_size=BLOCK_SIZE), scheduler=scheduler, num_threads=1
        )
        executor = plan.build(num_blocks=num_blocks, max_model_len=spec.max_position_embeddings)
    try:
        yield executor
    finally:
        executor.close()


def world() -> World:
    """Chunks, shared beginnings, preemption; of more requests than fit at once."""
    beginning = tuple(range(5, 60))
    return World(
        prompts=(beginning, (*beginning, 7, 8), (9,), tuple(range(100, 140)), (*beginning[:40], 3)),
        output_lengths=(12, 30, 40, 25, 9),
        arrivals=3,
        block_size=BLOCK_SIZE,
        num_blocks=12,
        scheduler={"max_num_batched_tokens": 24, "max_num_seqs": 8},
    )


def outcome(folder: Path, num_ranks: int, **model: Any) -> tuple[dict[str, dict[int, list[bytes]]], list[list[int]]]:
    """Every position's logits, as often as they were computed, and the tokens."""
    bits = Bits()
    with running(folder, num_ranks, num_blocks=12, **model) as executor:
        executor.on_logits = bits
        requests = world().serve(executor)
    return bits.seen, [list(request.output_token_ids) for request in requests]


@pytest.mark.parametrize(
    ("family", "changes", "model"),
    [
        ("llama_bias", {}, {"dtype": "float32", "kv_dtype": "bfloat16"}),
        ("gemma2", {"tie_word_embeddings": True}, {"dtype": "bfloat16"}),
        ("qwen3", {"hidden_size": 40}, {"dtype": "int8", "kv_dtype": "int8"}),
        ("qwen2", {}, {"dtype": "int4", "num_threads": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("dtype"),
)
def test_any_number_of_ranks_gives_the_bits_of_one(
    family: str, changes: dict[str, Any], model: dict[str, Any], tmp_path: Path
):
    """Biases and gates, tied matrices and others, and (hidden size 40: two tiles) ranks that own nothing of some."""
    folder = make_checkpoint(family, tmp_path / "model", **changes)
    one = outcome(folder, 1, **model)
    assert [outcome(folder, num_ranks, **model) == one for num_ranks in (2, 3)] == [True, True]
