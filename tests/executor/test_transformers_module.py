"""Models without a native row run in transformers' own module over the paged pool, or are refused by name."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from maitred.config import EngineConfig, ModelConfig
from maitred.core.errors import CheckpointError, ConfigError
from maitred.engine.executors import plan_executor
from maitred.engine.planning import described_model
from maitred.executor.torch import TorchExecutor, plan_torch_executor
from maitred.kv.pages import KVGroups, groups_of
from maitred.model.checkpoint import open_checkpoint
from maitred.model.spec import DecoderSpec
from tests.executor.test_families_parity import BLOCK_SIZE, NUM_BLOCKS, SHARED, check_against_reference, serve
from tests.model.checkpoints import MODULES, load_reference, make_checkpoint, write_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    return cache(lambda family: make_checkpoint(family, tmp_path_factory.mktemp(family), seed=3))


def described(folder: Path) -> DecoderSpec:
    with open_checkpoint(str(folder)) as checkpoint:
        return described_model(checkpoint)


def load(folder: Path) -> tuple[TorchExecutor, KVGroups | None, int]:
    """The executor, of pages where the model has windows, and how many of them."""
    with open_checkpoint(str(folder)) as checkpoint:
        spec = described_model(checkpoint)
        config = ModelConfig(device="cpu", dtype="float32", num_threads=1)
        plan = plan_torch_executor(config, checkpoint, spec, block_size=BLOCK_SIZE)
        groups = groups_of([layer.window for layer in spec.layers], 128)
        plan = plan.in_groups(groups) if groups is not None else plan
        num_pages = NUM_BLOCKS if groups is None else 60 * groups.counts[0] + 30 * sum(groups.counts[1:])
        return plan.build(num_blocks=num_pages, max_model_len=128), groups, num_pages


@pytest.mark.parametrize("family", MODULES)
def test_a_model_without_a_native_row_equals_transformers(family: str, made: Any):
    """In chunks, from a prefix hit, after preemption, beside others."""
    executor, groups, num_pages = load(made(family))
    served = serve(executor, num_blocks=num_pages, groups=groups)
    check_against_reference(served, load_reference(made(family)))
    by_id = {request.request_id: request for request in served.requests}
    assert served.num_chunks_in_prompt(by_id["long"]) >= 2
    assert by_id["late"].num_cached_tokens == SHARED
    assert sum(request.num_preemptions for request in served.requests) >= 1


def test_the_pool_has_a_place_for_each_layer_that_keeps_keys(made: Any):
    shared, unlike = described(made("gemma3n")), described(made("mimo"))
    assert [layer.window for layer in shared.layers] == [10, None, 10]
    assert shared.module is not None
    assert [(call.place, call.writes) for call in shared.module.calls[2:]] == [(2, True), (2, False), (1, False)]
    assert shared.kv_values_per_token() == 3 * 2 * 2 * 20
    assert (unlike.num_kv_heads, unlike.head_dim) == (1, 4 * 20)  # as wide as the widest: 4 heads of 20


def test_the_text_part_of_a_multimodal_folder_is_served(made: Any, tmp_path: Path):
    text = json.loads((made("gemma3n") / "config.json").read_text())
    del text["architectures"]
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    tensors = load_file(made("gemma3n") / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"model.vision_tower.patch.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.tensor([3, 1, 4, 1, 5])
    logits = [_alone(folder, ids) for folder in (made("gemma3n"), tmp_path)]
    assert torch.equal(*logits)


def _alone(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    executor, _, _ = load(folder)
    decoder = executor._decoder
    hidden = decoder.forward(ids, torch.arange(len(ids)), lambda place, q, k, v, *_, **__: q)
    return decoder.logits(hidden)


CONFIGS = {
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv"], "num_hidden_layers": 1}, "it has layers of type conv"),
    "mamba": ("MambaForCausalLM", {}, "it keeps a recurrent state"),
    "bloom": ("BloomForCausalLM", {}, "its attention cannot be exchanged"),
    "bert": ("BertLMHeadModel", {}, "encoder.layer.0.attention.self sees other tokens than the last ones"),
    "hrm_text": ("HrmTextForCausalLM", {}, "L_module.layers.0.self_attn attends more than once"),
    "arcee": ("ArceeForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "its rope is dynamic"),
    "foreign": ("ForeignForCausalLM", {"auto_map": {"A": "x.Y"}}, r"that name; its own Python code \(auto_map\) is"),
    "mpnet": ("MPNetModel", {}, "no causal model.*of encoders Bert, .* as ONNX graphs"),
    "opt": ("OPTForCausalLM", {"num_hidden_layers": "many"}, "config.json does not describe a OPTForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_cannot_run_so_is_refused_by_name(model_type: str, tmp_path: Path):
    name, fields, why = CONFIGS[model_type]
    config = {"architectures": [name], "model_type": model_type, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=why) as refused:
        described(tmp_path)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "told"), [("drop", "1 tensors .* missing"), ("add", "unexpected"), ("cut", "mismatch")]
)
def test_weights_of_another_model_are_refused(change: str, told: str, made: Any, tmp_path: Path):
    (tmp_path / "config.json").write_text((made("opt") / "config.json").read_text())
    tensors = load_file(made("opt") / "model.safetensors")
    name = next(name for name in tensors if name.endswith("fc1.weight"))
    if change == "drop":
        del tensors[name]
    elif change == "add":
        tensors["model.decoder.layers.9.fc1.weight"] = torch.zeros(2)
    else:
        tensors[name] = tensors[name][1:].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=told):
        load(tmp_path)


@pytest.mark.parametrize("asked", [{"executor": "native"}, {"tensor_parallel": 2}, {"max_model_len": 129}])
def test_what_the_module_does_not_have_is_refused(asked: dict[str, Any], made: Any):
    with (
        open_checkpoint(str(made("opt"))) as checkpoint,
        pytest.raises(ConfigError, match="OPTForCausalLM has no native"),
    ):
        plan_executor(EngineConfig(model=ModelConfig(**asked)), checkpoint, described_model(checkpoint), print)


def test_a_rope_that_depends_on_the_text_is_served_within_its_first_context(tmp_path: Path):
    config = transformers.ArceeConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    fields = config.to_dict() | {"architectures": ["ArceeForCausalLM"], "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert described(tmp_path).max_position_embeddings == 64


# ---- every class of transformers

EXACT = """
    Afmoe Apertus Arcee AriaText Beam BitNet Cohere Cohere2 Cohere2Moe Cwm Dots1 Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe
    FlexOlmo Flint Gemma Gemma4Unified Glm GPTBigCode GPTNeoX GraniteSWA GraniteMoe GraniteMoeSWA
    GraniteMoeShared Helium HunYuanDenseV1 HunYuanMoEV1 HYV3 HyperCLOVAX Jais2 Kolibri1 Laguna Mellum MiniCPM3 MiniMaxM2
    MiniMaxM3VL Ministral Moshi NanoChat Nemotron Olmo Phimoe SeedOss SolarOpen Starcoder2 Youtu
""".split()  # noqa: SIM905
SIZES: dict[str, Any] = {
    **{"vocab_size": 272, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3, "n_inner": 100},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "n_positions": 128},
    **{"head_dim": 18, "v_head_dim": 14, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "sliding_window": 10},
    **{"q_lora_rank": 24, "kv_lora_rank": 20, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 36},
    **{"num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6, "num_experts_per_tok": 2},
    **{"moe_k": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    **{"num_shared_experts": 1, "rotary_pct": 0.25, "pad_token_id": None},
}


@pytest.mark.soak
@pytest.mark.parametrize("prefix", EXACT)
def test_classes_of_transformers_without_a_native_row_are_exact(prefix: str, tmp_path: Path):
    model_class: Any = getattr(transformers, f"{prefix}ForCausalLM")
    config_class = model_class.config_class
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    sizes = {name: size for name, size in SIZES.items() if name in known}
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = 4
    torch.manual_seed(1)
    model = model_class(config_class(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise * (0.1 if "emb" in name or "wte" in name else 1.2 * parameter.shape[-1] ** -0.5))
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    executor, groups, num_pages = load(tmp_path)
    reference = model_class.from_pretrained(tmp_path, dtype=torch.float32).eval()
    check_against_reference(serve(executor, num_blocks=num_pages, groups=groups), reference)
