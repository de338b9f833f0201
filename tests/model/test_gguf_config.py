"""A GGUF file describes the model that its family's config.json does, and gives its tensors by that family's names."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

from maitred import LLM, SamplingParams
from maitred.cli.main import main
from maitred.core.errors import CheckpointError
from maitred.kernels import _native
from maitred.kernels.linear import PackedWeights, unpack_rows
from maitred.model.checkpoint import Checkpoint, check_model, folder_beside, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.gguf_file import GGML_TYPES, HELD_AS, GgufFile, gguf_in
from maitred.model.packed import pack_weights
from maitred.model.rope import inverse_frequencies
from maitred.model.weight_map import weight_map
from tests.executor.native_worlds import load_native, native_plan
from tests.executor.test_families_parity import (
    NUM_BLOCKS,
    NUM_STATE_SLOTS,
    check_against_reference,
    load_executor,
    serve,
)
from tests.model.checkpoints import load_reference, make_checkpoint
from tests.model.gguf_models import TOKEN_TYPES, TOKENS, random_tensors, stacked, write_gguf
from tests.model.test_families import Config
from tests.model.test_families import family as family_of


def family(architecture: str, model_type: str, **extra: Any) -> Config:
    return family_of(architecture, model_type, intermediate_size=192, **extra)  # rows of whole blocks


def llama(**extra: Any) -> Config:
    return family("LlamaForCausalLM", "llama", **extra)


_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_LOCAL = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
_DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}

FORMS: dict[str, tuple[str, Config]] = {
    "llama": ("llama", llama(rope_parameters=_DEFAULT)),
    "llama, tied": ("llama", llama(rope_parameters=_DEFAULT, tie_word_embeddings=True, head_dim=16)),
    "llama, biases": ("llama", llama(rope_parameters=_DEFAULT, attention_bias=True, mlp_bias=True)),
    "llama 3.1": ("llama", llama(rope_parameters=_LLAMA3, max_position_embeddings=131_072, head_dim=64)),
    "llama linear": ("llama", llama(rope_parameters={**_DEFAULT, "rope_type": "linear", "factor": 4.0})),
    "llama yarn": (
        "llama",
        llama(rope_parameters={**_DEFAULT, "rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0,
                               "original_max_position_embeddings": 1024}),
    ),
    "qwen2": ("qwen2", family("Qwen2ForCausalLM", "qwen2", rope_parameters={**_DEFAULT, "rope_theta": 1e6})),
    "qwen3": ("qwen3", family("Qwen3ForCausalLM", "qwen3", head_dim=16, rope_parameters=_DEFAULT)),
    "gemma2": (
        "gemma2",
        family("Gemma2ForCausalLM", "gemma2", head_dim=16, query_pre_attn_scalar=16, sliding_window=64,
               attn_logit_softcapping=50.0, final_logit_softcapping=30.0, tie_word_embeddings=True),
    ),
    "gemma3": (
        "gemma3",
        family("Gemma3ForCausalLM", "gemma3_text", head_dim=16, query_pre_attn_scalar=16, sliding_window=64,
               tie_word_embeddings=True, sliding_window_pattern=6, num_hidden_layers=7,
               rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, **_LOCAL}),
    ),
    "phi3": ("phi3", family("Phi3ForCausalLM", "phi3", sliding_window=2047, rope_parameters=_DEFAULT)),
    "phi3 longrope": (
        "phi3",
        family("Phi3ForCausalLM", "phi3", max_position_embeddings=131_072, original_max_position_embeddings=4096,
               rope_parameters={**_DEFAULT, "rope_type": "longrope", "original_max_position_embeddings": 4096,
                                "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.5, 8.0, 30.0]}),
    ),
    "phi4-mini": (
        "phi3",
        family("Phi3ForCausalLM", "phi3", tie_word_embeddings=True,
               rope_parameters={**_DEFAULT, "partial_rotary_factor": 0.75}),
    ),
    "smollm3": ("smollm3", family("SmolLM3ForCausalLM", "smollm3", rope_parameters={**_DEFAULT, "rope_theta": 5e6})),
    "olmo2": ("olmo2", family("Olmo2ForCausalLM", "olmo2", rope_parameters=_DEFAULT)),
    "granite": (
        "granite",
        family("GraniteForCausalLM", "granite", rope_parameters=_DEFAULT, embedding_multiplier=12.0,
               logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.015625, tie_word_embeddings=True),
    ),
}  # fmt: skip


UNROUTED = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # no file says that there are dense layers between
_TWICE = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "mscale": 0.7,
                              "mscale_all_dim": 0.7, "original_max_position_embeddings": 16}}  # fmt: skip
_ONE_GROUP = {"n_group": 1, "topk_group": 1}  # no file says that groups are there and all are chosen from
FAMILIES: dict[str, tuple[str, Config]] = {
    "deepseek_v2": ("deepseek2", _TWICE | _ONE_GROUP),
    "deepseek_v2, one kv_b_proj": ("deepseek2", _TWICE | _ONE_GROUP),
    "deepseek_v2_groups": ("deepseek2", {}),
    "deepseek_v3": ("deepseek2", _TWICE | {"num_nextn_predict_layers": 0}),
    "glm4_moe_lite": ("deepseek2", {"num_nextn_predict_layers": 0}),
    "mixtral": ("llama", {}),
    "qwen2_moe": ("qwen2moe", UNROUTED),
    "qwen3_moe": ("qwen3moe", UNROUTED),
    "olmoe": ("olmoe", {"norm_topk_prob": False, "moe_intermediate_size": None}),
    "olmo3": ("olmo2", {}),
    "ministral3": ("mistral3", {}),
    "gemma4": ("gemma4", {}),
    "gemma4_shared": ("gemma4", {}),
    "gemma4_moe": ("gemma4", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4moe", {"num_nextn_predict_layers": 0}),
    "gpt_oss": ("gpt-oss", {"swiglu_limit": 7.0}),
    "qwen3_next": ("qwen3next", UNROUTED),
    "qwen3_next, one in_proj_qkvz": ("qwen3next", UNROUTED),
    "qwen3_5": ("qwen35", {}),
    "qwen3_5_moe": ("qwen35moe", {"linear_num_key_heads": 6}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_a_checkpoint_becomes_the_same_decoder_and_the_same_bytes(tmp_path: Path, family: str) -> None:
    """Odd shapes in float32, from transformers' own class: equal programs of equal weights."""
    architecture, changes = FAMILIES[family]
    folder = make_checkpoint(family.split(",", maxsplit=1)[0], tmp_path / "folder", **changes)
    config = json.loads((folder / "config.json").read_text())
    tensors = stacked(load_file(folder / "model.safetensors"))
    keys: dict[str, Any] = {}
    if family.endswith("one in_proj_qkvz"):  # a list of layers wins over their interval
        told = [each == "linear_attention" for each in config["layer_types"]]
        keys = {"qwen3next__full_attention_interval": 3, "qwen3next__attention__recurrent_layers": told}
    path = write_gguf(tmp_path / "model.gguf", architecture, config, tensors, whole=", one" in family, **keys)
    packed = []
    for model in (folder, path):
        with open_checkpoint(str(model)) as checkpoint:
            plan = native_plan(checkpoint, spec_from_config(checkpoint.config))
            assert plan.num_pool_layers == len(plan.spec.kv_layers)
            packed.append((plan.program, pack_weights(plan.program, checkpoint, _native.ThreadPool(1)).tensors))
    (program, weights), (of_file, found) = packed
    named = of_file.spec.architecture if family == "glm4_moe_lite" else program.spec.architecture  # by no file
    wanted = replace(program.spec, norm_offset=of_file.spec.norm_offset, architecture=named)
    assert _rounded(of_file.spec) == _rounded(wanted)
    assert list(found) == list(weights)
    for name, weight in weights.items():
        np.testing.assert_array_equal(found[name].buffer, weight.buffer, err_msg=name)


def test_glm_4_7_flash_scores_by_sigmoid_where_its_file_does_not_say(tmp_path: Path) -> None:
    """A file knows that model by its number of layers and its vocabulary, others of its kind are DeepSeek-V2."""
    latent = {"kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 2, "q_lora_rank": None}
    config = family("DeepseekV3ForCausalLM", "deepseek_v3", **latent, num_hidden_layers=47, vocab_size=154_880,
                    hidden_size=4, num_attention_heads=1, first_k_dense_replace=46, n_group=1, topk_group=1,
                    n_routed_experts=3, num_experts_per_tok=1, moe_intermediate_size=4, n_shared_experts=1,
                    norm_topk_prob=True, routed_scaling_factor=1.8, rope_parameters=_DEFAULT)  # fmt: skip
    keys = {"deepseek2__expert_gating_func": 0}
    with open_checkpoint(
        str(write_gguf(tmp_path / "a.gguf", "deepseek2", config, random_tensors(config), **keys))
    ) as it:
        assert spec_from_config(it.config) == spec_from_config(config)


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_value_heads_that_take_key_heads_in_turn_are_served_as_their_folder_is(tmp_path: Path, executor: str) -> None:
    """Three value heads a key head, which llama.cpp's converter has in another order."""
    folder = make_checkpoint("qwen3_5_moe", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    path = write_gguf(tmp_path / "m.gguf", "qwen35moe", config, stacked(load_file(folder / "model.safetensors")))
    sizes = {"num_blocks": NUM_BLOCKS, "num_state_slots": NUM_STATE_SLOTS}
    model: Any = load_native(path, **sizes) if executor == "native" else load_executor(path, device="cpu")
    check_against_reference(serve(model, num_state_slots=NUM_STATE_SLOTS), load_reference(folder))


def _rounded(spec: Any) -> str:
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.6g}", repr(spec))


@pytest.mark.parametrize("dtype", [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q6_K, Type.MXFP4], ids=str)
def test_experts_keep_the_codes_of_their_file(tmp_path: Path, dtype: Type) -> None:
    config = family("Qwen3MoeForCausalLM", "qwen3_moe", num_hidden_layers=1, num_experts=5, num_experts_per_tok=2,
                    hidden_size=256, moe_intermediate_size=256, head_dim=32, norm_topk_prob=True)  # fmt: skip
    path = write_gguf(tmp_path / "model.gguf", "qwen3moe", config, random_tensors(config), type_of=lambda name: dtype)
    with open_checkpoint(str(path)) as checkpoint:
        plan = native_plan(checkpoint, spec_from_config(checkpoint.config), dtype="auto")
        weights = pack_weights(plan.program, checkpoint, _native.ThreadPool(1)).tensors
        of_all = next(each for name, each in weights.items() if name.endswith("experts.down"))
        assert of_all.weight.format.dtype == HELD_AS[dtype.name]
        raw = checkpoint.tensor("model.layers.0.mlp.experts.down_proj.weight")
        values = np.empty((5 * 256, 256), np.float32)
        _native.expand_rows(raw.dtype, np.frombuffer(raw.data, np.uint8), values)
    one = int(of_all.shape.packed_bytes)
    for expert in range(5):
        packed = PackedWeights(of_all.shape, of_all.buffer[expert * one : (expert + 1) * one])
        np.testing.assert_array_equal(unpack_rows(packed, range(256)), values[expert * 256 :][:256])


def opened(folder: Path, name: str, **keys: Any) -> Checkpoint:
    architecture, config = FORMS[name]
    return open_checkpoint(str(write_gguf(folder / "model.gguf", architecture, config, random_tensors(config), **keys)))


@pytest.mark.parametrize("name", FORMS)
def test_a_file_describes_what_its_familys_config_does_and_holds_the_same_tensors(tmp_path: Path, name: str) -> None:
    architecture, config = FORMS[name]
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "model.gguf", architecture, config, tensors, type_of=lambda name: Type.Q8_0)
    with open_checkpoint(str(path)) as checkpoint:
        spec, expected = spec_from_config(checkpoint.config), spec_from_config(config)
        is_gemma = architecture.startswith("gemma")
        assert (checkpoint.config.get("norm_offset") == 0.0) is is_gemma
        assert spec == (replace(expected, norm_offset=0.0) if is_gemma else expected)
        for source in weight_map(spec, checkpoint.tensor_names()):
            values = tensors[source.tensor]
            if is_gemma and source.tensor.endswith("norm.weight"):
                values = values + np.float32(1)
            raw = checkpoint.tensor(source.tensor)
            assert (raw.dtype, raw.shape) == ("Q8_0" if values.ndim == 2 else "F32", source.shape)
            if values.ndim == 1:
                found = np.frombuffer(raw.data, np.float32)
            else:
                values = gguf.quants.dequantize(gguf.quants.quantize(values, Type.Q8_0), Type.Q8_0)
                found = np.empty(values.shape, np.float32)
                _native.expand_rows(raw.dtype, np.frombuffer(raw.data, np.uint8), found)
            np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("dtype", [Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1], ids=str)
def test_rows_of_every_type_are_put_back_whole(tmp_path: Path, dtype: Type) -> None:
    config = llama(num_hidden_layers=1)
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "model.gguf", "llama", config, tensors, type_of=lambda name: dtype)
    name = "model.layers.0.self_attn.k_proj.weight"
    with open_checkpoint(str(path)) as checkpoint:
        raw = checkpoint.tensor(name)
        assert bytes(raw.data) == gguf.quants.quantize(tensors[name], dtype).tobytes()
        assert raw.dtype == checkpoint.dtype_of(name) == dtype.name


def test_other_numbers_of_llama_3s_rule_are_the_divisors_as_they_stand(tmp_path: Path) -> None:
    rope = {**_LLAMA3, "low_freq_factor": 2.0, "original_max_position_embeddings": 1024}
    config = llama(rope_parameters=rope, head_dim=64)
    path = write_gguf(tmp_path / "model.gguf", "llama", config, random_tensors(config))
    with open_checkpoint(str(path)) as checkpoint:
        found, expected = (spec_from_config(each).layers[0].rope for each in (checkpoint.config, config))
        assert found is not None
        assert expected is not None
        np.testing.assert_allclose(inverse_frequencies(found, 4096), inverse_frequencies(expected, 4096), rtol=1e-6)
        assert found.attention_factor == 1.0


def test_a_window_makes_a_llama_a_mistral_and_a_list_of_layers_wins_over_gemmas_rule(tmp_path: Path) -> None:
    with opened(tmp_path, "llama", llama__attention__sliding_window=128) as checkpoint:
        spec = spec_from_config(checkpoint.config)
        assert (spec.architecture, spec.layers[0].window) == ("MistralForCausalLM", 128)
    slides = [True, False, True, True, False, True, True]
    with opened(tmp_path, "gemma3", gemma3__attention__sliding_window_pattern=slides) as checkpoint:
        spec = spec_from_config(checkpoint.config)
        assert [layer.window is not None for layer in spec.layers] == slides


def test_sampling_and_every_end_token_come_from_the_file(tmp_path: Path) -> None:
    keys = {"general__sampling__temp": 0.7, "general__sampling__top_k": 20, "tokenizer__ggml__eom_token_id": 4}
    with opened(tmp_path, "llama", **keys) as checkpoint:
        # <|eot_id|> by its text; <|im_end|>, an ordinary token here, is text that the model may write
        ids = [1, 4, TOKENS.index("<|eot_id|>")]
        assert checkpoint.generation_config == {"temperature": 0.7, "top_k": 20, "eos_token_id": ids}
        assert (checkpoint.config["bos_token_id"], checkpoint.config["eos_token_id"]) == (0, 1)


@pytest.mark.parametrize(
    ("name", "keys", "told"),
    [
        ("llama", {"llama__vocab_size": 501}, r"llama.vocab_size is 501, and the embedding has 500 rows"),
        ("llama", {"llama__block_count": 2**32 - 1}, r"block_count is 4,294,967,295, and there are tensors of 6"),
        ("llama", {"llama__expert_count": 8}, r"key llama.expert_used_count is None, and has to be"),
        ("llama", {"llama__attention__causal": False}, r"is an encoder"),
        ("llama", {"llama__attention__value_length": 4}, r"heads of 8 values for keys and 4"),
        ("llama", {"llama__attention__head_count": 0}, r"head_count is 0, and has to be a whole number from 1"),
        ("llama", {"llama__rope__freq_base": "x"}, r"key llama.rope.freq_base is 'x', and has to be one number"),
        ("llama", {"llama__attention__head_count_kv": [2, 4]}, r"head_count_kv is 2 different values"),
        ("llama", {"general__architecture": "dots1"}, r"'dots1' is not supported; supported are bert, deepseek2,"),
        ("llama", {"general__type": "adapter"}, r"holds no model \(general.type is 'adapter'\)"),
        ("llama", {"llama__nextn_predict_layers": 6}, r"nextn_predict_layers is 6 of 6 layers"),
        ("llama 3.1", {"llama__rope__dimension_count": 2**32 - 1}, r"is 4,294,967,295, and heads have 64 values"),
        ("llama", {"llama__nextn_predict_layers": 1.5}, r"nextn_predict_layers is 1.5, and has to be a whole number"),
        ("granite", {"granite__rope__scaling__finetuned": False}, r"granite model without rope"),
        ("llama", {"tokenizer__ggml__tokens": ["t"] * 501}, r"tokenizer has 501 tokens, and the embedding 500 rows"),
        ("llama", {"llama__feed_forward_length": 96}, r"ffn_gate.weight has shape \[192, 64\], .* asks for \[96"),
        ("gemma3", {"gemma3__attention__sliding_window_pattern": [True]}, r"metadata has 1 layer_types for 7 layers"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_key(tmp_path: Path, name: str, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told) as refused:
        opened(tmp_path, name, **keys)
    assert "\n" not in str(refused.value)
    assert str(tmp_path / "model.gguf") in str(refused.value)


def test_a_tensor_that_is_missing_is_told_before_a_weight_is_read_and_by_file(tmp_path: Path) -> None:
    architecture, config = FORMS["llama"]
    tensors = random_tensors(config)
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    path = write_gguf(tmp_path / "model.gguf", architecture, config, tensors)
    told = r"model.gguf: 1 tensors .* are missing from the weights: .*1.self_attn.v_proj.weight; the metadata and"
    with pytest.raises(CheckpointError, match=told):
        check_model(str(path))


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_types_that_no_executor_holds_are_widened_and_told(tmp_path: Path, executor: str, capsys: Any) -> None:
    config = llama(num_hidden_layers=1) | {"hidden_size": 256, "intermediate_size": 256}
    types = {"q_proj": Type.Q2_K, "up_proj": Type.Q3_K}
    path = write_gguf(
        tmp_path / "model.gguf", "llama", config, random_tensors(config),
        type_of=lambda name: types.get(name.split(".")[-2], Type.Q4_K),
        tokenizer__ggml__tokens=[*TOKENS, "ab"], tokenizer__ggml__token_type=[*TOKEN_TYPES, 1],
        tokenizer__ggml__merges=["a b"],
    )  # fmt: skip
    assert main(["explain", str(path), "--executor", "native"]) == 0
    assert "as the file has them (Q3_K the same values in q6_k, Q2_K rounded to q8_0)" in capsys.readouterr().out
    asked = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with LLM(str(path), executor=executor, kv_cache_memory_bytes=2**22, weight_cache="off", max_model_len=64) as llm:
        assert len(llm.generate([[3, 4, 3]], asked)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_file_that_changes_while_its_weights_are_read_is_told(tmp_path: Path, kind: str) -> None:
    if kind == "gguf":
        path = file = write_gguf(tmp_path / "model.gguf", *FORMS["llama"], random_tensors(FORMS["llama"][1]))
    else:
        path = make_checkpoint("llama", tmp_path / "model")
        file = path / "model.safetensors"

    def change(num_bytes: int, total: int) -> None:
        with file.open("ab") as opened:
            opened.write(b"more")

    with open_checkpoint(str(path)) as checkpoint:
        plan = native_plan(checkpoint, spec_from_config(checkpoint.config))
        with pytest.raises(CheckpointError, match=rf"{file} changed while it was read \([\d,]+ bytes then, [\d,]+"):
            pack_weights(plan.program, checkpoint, _native.ThreadPool(1), on_packed=change)


def test_a_type_that_is_not_computed_is_refused_by_tensor(tmp_path: Path) -> None:
    config = llama(num_hidden_layers=1)
    path = write_gguf(tmp_path / "model.gguf", "llama", config, random_tensors(config))
    name = b"blk.0.attn_v.weight"
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the name: dimensions, type
    data[at] = 26  # I32, of as many bytes
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor blk.0.attn_v.weight is of type I32, which is not computed here"):
        open_checkpoint(str(path))


def test_a_draft_lies_beside_a_file_as_a_file(tmp_path: Path) -> None:
    with opened(tmp_path, "llama") as checkpoint:
        assert folder_beside(checkpoint, "draft") is None
        (tmp_path / "model-draft.gguf").write_bytes(b"GGUF")
        assert folder_beside(checkpoint, "draft") == tmp_path / "model-draft.gguf"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    config = llama(num_hidden_layers=1, vocab_size=8)
    return write_gguf(tmp_path / "small.gguf", "llama", config, random_tensors(config), general__note="größer")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor(name: bytes, shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        GgufFile(path)
    told = str(refused.value)
    assert told.startswith(f"{path}: ")
    assert "\n" not in told
    return told


def test_types_are_ggmls() -> None:
    sizes = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert sizes == GGML_TYPES


def test_keys_and_tensors_are_what_ggufs_reader_reads(path: Path) -> None:
    oracle = gguf.GGUFReader(path)
    file = GgufFile(path)
    assert {name: file.metadata[name] for name in file.metadata} == {
        name: field.contents() for name, field in oracle.fields.items() if not name.startswith("GGUF.")
    }
    assert sorted(file.tensor_names()) == sorted(each.name for each in oracle.tensors)
    for each in oracle.tensors:
        raw = file.tensor(each.name)
        assert (raw.dtype, raw.shape) == (each.tensor_type.name, tuple(int(n) for n in reversed(each.shape)))
        assert bytes(raw.data) == each.data.tobytes()
    file.close()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "no GGUF file, or cut short (0 bytes)"),
        (b"PK" + bytes(40), "its first bytes are b'PK"),
        (header(version=1) + bytes(9), "GGUF version 1 is not read"),
        (header(version=4) + bytes(9), "GGUF version 4 is not read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(tensors=2**63) + bytes(99), "claims 9,223,372,036,854,775,808 tensors, and the file has 123 bytes"),
        (header(keys=2**63) + bytes(99), "claims 9,223,372,036,854,775,808 keys"),
        (header(keys=1) + struct.pack("<Q", 2**62) + bytes(99), "key 0 takes 4,611,686,018,427,387,904 bytes, and 99"),
        (header(keys=1) + key(b"a", 8, struct.pack("<Q", 100)), "key a takes 108 bytes, and 8 are left"),
        (header(keys=1) + key(b"a", 9, struct.pack("<IQ", 6, 2**61)), "key a takes 9,223,372,036,854,775,808 bytes"),
        (header(keys=1) + key(b"a", 9, struct.pack("<IQ", 8, 2**61)), "key a claims 2,305,843,009,213,693,952 texts"),
        (header(keys=1) + key(b"a", 9, struct.pack("<IQQ", 8, 1, 2**64 - 8)), "key a takes 18,446,744,073,709,551,616"),
        (header(keys=1) + key(b"a", 9, struct.pack("<IQ", 9, 1)), "arrays of arrays are not read"),
        (header(keys=1) + key(b"a", 77, bytes(8)), "key a is of kind 77, which the format has not"),
        (header(keys=1) + key(b"\xff", 4, bytes(4)), "key 0 is no printable UTF-8"),
        (header(keys=1) + key(b"a\nb", 4, bytes(4)), "key 0 is no printable UTF-8"),
        (header(keys=1) + key(b"a" * 10_000, 4, bytes(4)), "of at most 255 characters"),
        (header(keys=2) + 2 * key(b"a", 4, bytes(4)), "key a stands there twice"),
        (header(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 24)), "alignment is '24', no power of 2"),
        (header(tensors=2) + 2 * tensor(b"t") + bytes(400), "tensor t stands there twice"),
        (header(tensors=1) + tensor(b"t", (4,) * 5) + bytes(400), "tensor t has 5 dimensions"),
        (header(tensors=1) + tensor(b"t", (0,)) + bytes(400), "tensor t (F32) has shape [0]"),
        (header(tensors=1) + tensor(b"t", (33,), 3) + bytes(400), "tensor t (Q4_1) has shape [33]"),
        (header(tensors=1) + tensor(b"t", kind=99) + bytes(400), "tensor t is of GGML's type 99"),
        (header(tensors=1) + tensor(b"t", offset=8) + bytes(400), "tensor t lies at offset 8, no multiple of 32"),
        (header(tensors=1) + tensor(b"t", (2**63, 2**63)) + bytes(400), "was cut short"),
        (header(tensors=1) + tensor(b"t", offset=2**63) + bytes(400), "was cut short"),
        (header(tensors=2) + tensor(b"a") + tensor(b"b", offset=64) + bytes(400), "tensors a and b overlap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_fault_in_a_header_is_told_by_key_or_tensor(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    assert told in refusal(path)


def test_a_file_that_is_cut_short_anywhere_is_refused(path: Path) -> None:
    data = path.read_bytes()
    with_header = GgufFile(path)
    size = len(with_header.header_bytes)
    with_header.close()
    for length in (*range(0, size, 23), size, (size + len(data)) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        assert "cut short" in refusal(path)


def test_damaged_headers_are_refused_or_read_and_nothing_else(path: Path) -> None:
    """Random bytes, and large numbers over random places: a model, or one line; never another error."""
    data = path.read_bytes()
    file = GgufFile(path)
    size = len(file.header_bytes)
    file.close()
    draw = random.Random(13)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(size)
            new = draw.choice((bytes([draw.randrange(256)]), b"\xff" * 8, bytes(8), struct.pack("<Q", 2**63)))
            damaged[at : at + len(new)] = new
        path.write_bytes(damaged)
        assert "\n" not in outcome(path)


def outcome(path: Path) -> str:
    """Of opening the file and all that a start reads of it."""
    try:
        with open_checkpoint(str(path)) as checkpoint:
            spec_from_config(checkpoint.config)
            for name in checkpoint.tensor_names():
                checkpoint.tensor(name)
            return f"ends with {checkpoint.generation_config.get('eos_token_id')}"
    except CheckpointError as error:
        return str(error)


def test_a_folder_with_one_model_is_that_model_and_a_file_is_known_by_its_first_bytes(path: Path, tmp_path: Path):
    (path.parent / "mmproj-small.gguf").write_bytes(b"GGUF")
    with open_checkpoint(str(path.parent)) as checkpoint:
        assert (checkpoint.name, checkpoint.path, checkpoint.folder) == ("small", path, path.parent)
    (path.parent / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models \(other.gguf, small.gguf\); name the file"):
        open_checkpoint(str(path.parent))

    with open_checkpoint(str(path.rename(path.with_name("sha256-0f")))) as checkpoint:
        assert checkpoint.gguf is not None

    (tmp_path / "empty").mkdir()
    assert gguf_in(tmp_path / "empty") is None


def split(path: Path) -> list[Path]:
    """The same model in two parts, as llama.cpp's gguf-split writes them: all keys in the first."""
    oracle = gguf.GGUFReader(path)
    parts = []
    for number, tensors in enumerate((oracle.tensors[:5], oracle.tensors[5:])):
        part = path.with_name(f"small-{number + 1:05d}-of-00002.gguf")
        writer = gguf.GGUFWriter(part, "llama")
        if number:
            writer.kv_data[0].clear()
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        own = (
            ()
            if number
            else (n for n in oracle.fields if n.partition(".")[0] != "GGUF" and n != "general.architecture")
        )
        for name in own:
            field = oracle.fields[name]
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
        for each in tensors:
            writer.add_tensor(each.name, np.array(each.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return parts


def test_parts_of_a_model_open_together_whichever_is_named(path: Path) -> None:
    with open_checkpoint(str(path)) as whole:
        tensors = {name: bytes(whole.tensor(name).data) for name in whole.tensor_names()}
        config, identity = whole.config, whole.identity
    first, second = split(path)
    path.unlink()
    for named in (first, second, path.parent):
        with open_checkpoint(str(named)) as checkpoint:
            assert {name: bytes(checkpoint.tensor(name).data) for name in checkpoint.tensor_names()} == tensors
            assert (checkpoint.config, checkpoint.name) == (config, "small")
            assert checkpoint.identity != identity
            assert [stamp.name for stamp in checkpoint.stamps] == [first.name, second.name]
    second.unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 parts are missing \(small-00002-of-00002.gguf\)"):
        open_checkpoint(str(first))
    with pytest.raises(CheckpointError, match=r"by its metadata part 0 \(from 0\) of 2"):
        open_checkpoint(str(first.rename(path)))


def test_identity_changes_with_the_metadata(path: Path) -> None:
    with open_checkpoint(str(path)) as checkpoint:
        before = checkpoint.identity
    data = path.read_bytes()
    status = path.stat()
    path.write_bytes(data.replace("größer".encode(), "grösser".encode()))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with open_checkpoint(str(path)) as checkpoint:
        assert checkpoint.identity != before


def test_a_file_is_opened_and_refused_before_anything_heavy_is_imported(path: Path) -> None:
    bad = path.with_name("bad.gguf")
    bad.write_bytes(path.read_bytes()[:-1])
    code = (
        "import sys; from maitred.cli.main import main; from maitred.model.checkpoint import open_checkpoint;"
        f"open_checkpoint({str(path)!r}).identity; assert main(['serve', '--port', '0', {str(bad)!r}]) != 0;"
        "assert not {'numpy', 'jinja2', 'maitred.engine.build'} & set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert f"{bad}: the file was cut short" in ended.stderr
