"""LoRA in the native executor: PEFT's tokens in float32, the same bits in any batch, and nobody else's."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from maitred.errors import KernelError
from maitred.executor.native import NativeExecutor
from maitred.kernels import _native
from maitred.model.adapters import Adapter, read_adapter
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.spec import DecoderSpec
from maitred.request import RequestState, SamplingParams
from tests.executor.native_worlds import load_native, make_native
from tests.executor.test_native_identity import Bits, EachInTurn
from tests.executor.torch_worlds import VOCAB, make_decoder, make_spec
from tests.fakes import make_request, make_scheduler
from tests.model.adapters import make_peft, random_tensors, write_adapter
from tests.model.checkpoints import VOCAB_SIZE, load_reference, make_checkpoint

NUM_GREEDY = 12
NEAR_TIE = 1e-4
FORMATS = [
    {"dtype": "float32", "kv_dtype": "float32"},
    {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    {"dtype": "int8", "kv_dtype": "int8"},
    {"dtype": "int8", "kv_dtype": "bfloat16"},
    {"dtype": "int4", "kv_dtype": "bfloat16", "int4_group_size": 32},
]


def greedy(request_id: str, prompt: list[int], adapter: str, *, length: int = NUM_GREEDY) -> RequestState:
    sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return make_request(
        request_id, prompt=prompt, max_tokens=length, sampling=sampling, adapter=adapter, cache_salt=adapter
    )


def serve(executor: NativeExecutor, requests: list[RequestState], *, num_blocks: int = 200, **limits: int) -> None:
    """All to the end, arriving at once."""
    scheduler = make_scheduler(num_blocks=num_blocks, **limits)
    for request in requests:
        scheduler.add(request, 0.0)
    for step in range(1000):
        if not scheduler.has_work:
            return
        plan = scheduler.schedule(float(step))
        scheduler.update(plan, executor.execute(plan), float(step))
    raise AssertionError("requests that never end")


def read(folder: Path, model_folder: Path) -> Adapter:
    with open_checkpoint(str(model_folder)) as checkpoint:
        return read_adapter(folder, spec_from_config(checkpoint.config), max_rank=64)


def assert_greedy(model: Any, request: RequestState) -> None:
    """Each token is the model's likeliest, or as good as that."""
    tokens = [*request.spec.prompt_token_ids, *request.output_token_ids]
    with torch.inference_mode():
        logits_TV = model(torch.tensor([tokens])).logits[0].double()
    assert request.error is None
    for position in range(request.num_prompt_tokens - 1, len(tokens) - 1):
        best = logits_TV[position].max()
        assert logits_TV[position][tokens[position + 1]] >= best - NEAR_TIE, position


PEFT_CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16},
    "odd_rank": {"r": 5, "lora_alpha": 7},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "layer": {"r": 4, "lora_alpha": 8, "layers_to_transform": [1]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {r"layers\.[02]\..*proj": 12, "model.layers.1.self_attn.o_proj": 64},
        "alpha_pattern": {"o_proj": 32, "^model.layers.2.mlp.down_proj": 1},
    },
}


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("family", ["llama", "llama_bias", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "olmo2"])
def test_greedy_tokens_are_pefts_in_float32(family: str, isa: str, tmp_path: Path) -> None:
    check_family(family, PEFT_CONFIGS["all"], isa, tmp_path)


@pytest.mark.parametrize("config", [name for name in PEFT_CONFIGS if name != "all"])
def test_ranks_scales_and_layers_are_pefts(config: str, tmp_path: Path) -> None:
    targets = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "up_proj"]}
    check_family("llama", targets | PEFT_CONFIGS[config], None, tmp_path)


def test_queries_and_values_alone_are_pefts(tmp_path: Path) -> None:
    check_family("qwen2", {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}, None, tmp_path)


def check_family(family: str, config: dict[str, Any], isa: str | None, folder: Path) -> None:
    make_checkpoint(family, folder / "model")
    adapted = make_peft(load_reference(folder / "model"), folder / "adapter", **config)
    executor = load_native(folder / "model", num_blocks=200, isa=isa)
    executor.adapters.load("a", read(folder / "adapter", folder / "model"))
    chooser = Random(family)
    prompts = [[chooser.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 7, 23)]
    served = [greedy(f"a{i}", prompt, "a") for i, prompt in enumerate(prompts)]
    plain = [greedy(f"p{i}", prompt, "") for i, prompt in enumerate(prompts)]
    serve(executor, [*served, *plain], max_num_batched_tokens=24)
    for request in served:
        assert_greedy(adapted, request)
    assert any(a.output_token_ids != p.output_token_ids for a, p in zip(served, plain, strict=True))
    with adapted.disable_adapter():
        for request in plain:
            assert_greedy(adapted, request)
    executor.close()
