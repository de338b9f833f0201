"""Ranks of tensor parallelism: the bits of one process whatever their number, and their life beside rank 0."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from gguf import GGMLQuantizationType

from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.core.errors import ConfigError, KernelError
from maitred.core.request import SamplingParams
from maitred.engine.llm import LLM
from maitred.executor import ranks
from maitred.executor.native import NativeExecutor
from maitred.executor.native_lora import PAGE, NativeAdapters
from maitred.executor.native_plan import plan_native_executor
from maitred.model.adapters import Adapter, read_adapter
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from tests.conftest import ROOT
from tests.executor.native_worlds import Narrow
from tests.executor.test_native_identity import Bits, World, tries_everything
from tests.model.adapters import random_tensors, write_adapter
from tests.model.checkpoints import make_checkpoint
from tests.model.gguf_models import random_tensors as tensors_of
from tests.model.gguf_models import write_gguf
from tests.model.test_gguf_config import llama
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
        slots = NUM_STATE_SLOTS if spec.has_state else 0
        executor = plan.build(num_blocks=num_blocks, max_model_len=spec.max_position_embeddings, num_state_slots=slots)
    try:
        yield executor
    finally:
        executor.close()


NUM_BLOCKS, NUM_STATE_SLOTS = 20, 10


def world(adapters: tuple[str, ...] = ("",)) -> World:
    """Chunks, shared beginnings, a prompt longer than attention sums at once; of more requests than fit at once."""
    beginning = tuple(range(5, 60))
    return World(
        prompts=(beginning, (*beginning, 7, 8), (9,), tuple(i % 250 for i in range(270)), (*beginning[:40], 3)),
        output_lengths=(6, 12, 16, 9, 5),
        arrivals=3,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        scheduler={"max_num_batched_tokens": 24, "max_num_seqs": 8},
        adapters=adapters,
    )


def outcome(
    folder: Path, num_ranks: int, num_state_slots: int, **model: Any
) -> tuple[dict[str, dict[int, list[bytes]]], list[list[int]]]:
    """Every position's logits, as often as they were computed, and the tokens."""
    bits = Bits()
    with running(folder, num_ranks, num_blocks=NUM_BLOCKS, **model) as executor:
        executor.on_logits = bits
        served = world()
        served.scheduler["num_state_slots"] = num_state_slots
        requests = served.serve(executor)
    assert num_state_slots or tries_everything(requests)  # a state is kept where a prompt ends, and few begin there
    return bits.seen, [list(request.output_token_ids) for request in requests]


def a_gguf_file(path: Path) -> Path:
    """Of several block formats; one of v and down alone."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 512}
    config = llama() | sizes
    kinds = {"v_proj": "Q6_K", "down_proj": "Q5_0", "embed_tokens": "Q8_0", "lm_head": "Q4_0"}

    def type_of(name: str) -> GGMLQuantizationType:
        return GGMLQuantizationType[next((kind for part, kind in kinds.items() if part in name), "Q4_K")]

    return write_gguf(path, "llama", config, tensors_of(config), type_of=type_of)


@pytest.mark.parametrize(
    ("family", "num_ranks", "changes", "model"),
    [
        ("llama_bias", 3, {}, {"dtype": "float32", "kv_dtype": "bfloat16"}),
        ("gemma4_shared", 2, {}, {"dtype": "bfloat16"}),  # tied
        pytest.param("gemma4_moe", 2, {}, {"dtype": "int8"}, marks=pytest.mark.soak),
        pytest.param("qwen3", 3, {"hidden_size": 40}, {"dtype": "int8", "kv_dtype": "int4"}, marks=pytest.mark.soak),
        ("gguf", 2, {}, {"dtype": "auto", "num_threads": 2}),
        ("gpt_oss", 2, {}, {"dtype": "int8", "num_threads": 2}),
        ("qwen3_next", 2, {"mlp_only_layers": [0, 1, 2, 3]}, {"dtype": "float32"}),
        ("deepseek_v3", 2, {"num_attention_heads": 3}, {"dtype": "bfloat16"}),
    ],
    ids=["llama_bias", "gemma4_shared", "gemma4_moe", "qwen3", "gguf", "gpt_oss", "qwen3_next", "deepseek_v3"],
)
def test_any_number_of_ranks_gives_the_bits_of_one(
    family: str, num_ranks: int, changes: dict[str, Any], model: dict[str, Any], tmp_path: Path
):
    """Biases and gates, tied matrices and others, and (hidden size 40: two tiles) ranks that own nothing of some."""
    if family == "gguf":
        folder = a_gguf_file(tmp_path / "model.gguf")
    else:
        folder = make_checkpoint(family, tmp_path / "model", max_position_embeddings=512, **changes)
    slots = NUM_STATE_SLOTS if family == "qwen3_next" else 0
    assert outcome(folder, num_ranks, slots, **model) == outcome(folder, 1, slots, **{**model, "num_threads": 1})


def adapters_of(folder: Path, model_folder: Path) -> dict[str, Adapter]:
    """Of unlike ranks, one for some linears only."""
    with open_checkpoint(str(model_folder)) as checkpoint:
        spec = spec_from_config(checkpoint.config)
    found = {}
    for seed, (name, rank, only) in enumerate([("a", 4, "proj"), ("b", 9, "v_proj"), ("c", 16, "proj")]):
        tensors = {key: value for key, value in random_tensors(spec, rank, seed=seed).items() if only in key}
        found[name] = read_adapter(write_adapter(folder / name, tensors, rank=rank), spec, max_rank=16)
    return found


@pytest.mark.parametrize(
    ("family", "changes", "model"),
    [
        pytest.param("llama_bias", {}, {"dtype": "float32"}, marks=pytest.mark.soak),
        ("phi3", {"hidden_size": 40}, {"dtype": "int8", "kv_dtype": "int8"}),
    ],
    ids=["llama_bias", "phi3"],
)
def test_any_number_of_ranks_gives_adapters_the_bits_of_one(
    family: str, changes: dict[str, Any], model: dict[str, Any], tmp_path: Path
):
    """Adapters come and go while ranks run: there is room for c when a has gone and b has moved."""
    folder = make_checkpoint(family, tmp_path / "model", max_position_embeddings=512, **changes)
    adapters, outcomes = adapters_of(tmp_path, folder), []
    for num_ranks in (1, 3):
        bits = Bits()
        with running(folder, num_ranks, num_blocks=NUM_BLOCKS, **model) as executor:
            executor.on_logits = bits
            executor.adapters = narrowed(executor, adapters["b"], adapters["c"])
            for name in ("a", "b"):
                executor.adapters.load(name, adapters[name])
            first = world(("a", "a", "b", "")).serve(executor)
            executor.adapters.unload("a")
            executor.adapters.load("c", adapters["c"])
            second = world(("c", "c", "", "b")).serve(executor)
        outcomes.append((bits.seen, [list(request.output_token_ids) for request in (*first, *second)]))
    assert outcomes[1] == outcomes[0]


def narrowed(executor: NativeExecutor, *adapters: Adapter) -> NativeAdapters:
    """The executor's, with room for these and no more."""
    runner = executor.runner
    if runner.adapter_memory is None:
        return executor.adapters
    pages = sum(-(-executor.adapters.num_bytes(adapter) // PAGE) for adapter in adapters)
    return NativeAdapters(Narrow(runner, PAGE * pages))


# ---- beginning and end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("ranks") / "model")


def processes() -> list[psutil.Process]:
    """Ranks that this process has started."""
    return [child for child in psutil.Process().children() if "maitred.executor.rank_process" in child.cmdline()]


def output_of(script: str, *arguments: str) -> str:
    """Of Python in a process of its own."""
    command = [sys.executable, "-c", BEGUN + script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANGS_S, check=True).stdout


def test_close_leaves_no_process_and_no_descriptor(model: Path):
    before = psutil.Process().num_fds()
    with running(model, 3):
        ours = processes()
        assert len(ours) == 2
    assert all(is_gone(process) for process in ours)
    assert psutil.Process().num_fds() == before


def test_an_executor_that_is_dropped_leaves_no_process(model: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError("no room for a log")

    monkeypatch.setattr("maitred.engine.build._decision_log", refuse)
    with pytest.raises(OSError, match="no room for a log"):
        LLM(str(model), tensor_parallel=2, num_threads=1, executor="native", decision_log="anywhere")
    gc.collect()
    assert processes() == []


BEGUN = """
import os, resource, sys, time
import psutil
from maitred.config import EngineConfig, ModelConfig
from maitred.core.clock import WallClock
from maitred.core.errors import OutOfMemory
from maitred.engine.build import build_parts

def begin(num_ranks, **settings):
    model = ModelConfig(model=sys.argv[1], tensor_parallel=num_ranks, num_threads=1, weight_cache="off", **settings)
    return build_parts(EngineConfig(model=model), clock=WallClock())
"""
PARENT = """
parts = begin(3)
print(*(process.pid for process in psutil.Process().children()), flush=True)
time.sleep(600)
"""


def test_ranks_end_with_rank_0_however_that_ends(model: Path):
    """Even those that are stopped."""
    with subprocess.Popen(
        [sys.executable, "-c", BEGUN + PARENT, str(model)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as rank_0:
        assert rank_0.stdout is not None
        others = [psutil.Process(int(pid)) for pid in rank_0.stdout.readline().split()]
        assert len(others) == 2
        others[0].suspend()
        rank_0.kill()
    until(lambda: all(is_gone(process) for process in others))


def test_a_rank_that_dies_fails_steps_and_not_the_process_that_made_the_llm(model: Path):
    with LLM(str(model), tensor_parallel=2, num_threads=1, executor="native", weight_cache="off") as llm:
        asked = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        assert len(llm.generate("hello", asked)[0].outputs[0].token_ids) == 4
        (rank,) = processes()
        rank.kill()
        until(lambda: is_gone(rank))
        with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
            llm.generate("hello", asked)  # it waits for the rank until its keeper knows


def test_a_rank_that_cannot_load_is_told_by_its_number(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "RANK", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(KernelError, match="rank 1 was killed by SIGKILL before it had loaded"), running(model, 2):
        pass
    monkeypatch.setattr(ranks, "RANK", ("/there/is/no/such/program",))
    with pytest.raises(KernelError, match=r"rank 1 could not be started: .*No such file"), running(model, 2):
        pass


# ---- shared memory


def test_memory_that_is_not_allowed_is_told_before_anything_is_loaded(model: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(ConfigError, match=r"this system refuses it \(memfd_create: .*not permitted"), running(model, 2):
        pass
    assert processes() == []


LIMITED = """
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
try:
    begin(2)
except OutOfMemory as error:
    print(error)
"""


def test_memory_of_which_there_is_too_little_is_told_before_anything_is_loaded(model: Path):
    assert "memory that ranks share could not be had" in output_of(LIMITED, str(model))


# ---- processors


def test_ranks_get_a_processor_a_thread_or_a_node():
    near, far = [0, 1, 2, 3], [4, 5, 6, 7]
    assert ranks.dealt_processors([near, far], 2, 4) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert ranks.dealt_processors([near, far], 4, 2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert ranks.dealt_processors([near, far], 2, 3) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert ranks.dealt_processors([near], 2, 1) == ()
    assert ranks.dealt_processors([near], 2, 2) == ((0, 1), (2, 3))


def test_nodes_are_those_of_the_processors_that_may_be_used(tmp_path: Path):
    for node, cpus in {0: "0-2,8", 1: "3-5", 10: "6-7"}.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    assert ranks.processors_by_node({1, 8, 3, 4}, tmp_path) == [[1, 8], [3, 4]]
    assert ranks.processors_by_node({2, 5}, tmp_path / "none") == [[2, 5]]


BOUND = """
parts = begin(2, bind_threads="on")
print(sorted(os.sched_getaffinity(0)), *(process.cpu_affinity() for process in psutil.Process().children()))
parts.close()
"""


def test_ranks_that_are_as_many_as_processors_keep_to_one_each(model: Path):
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) != 2:
        pytest.skip("for two processors")
    assert output_of(BOUND, str(model)).split() == [f"[{cpu}]" for cpu in cpus]
