"""A GGUF file describes the model that its family's config.json does, and gives its tensors by that family's names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from maitred import LLM, SamplingParams
from maitred.cli.main import main
from maitred.core.errors import CheckpointError
from maitred.kernels import _native
from maitred.model.checkpoint import Checkpoint, check_model, folder_beside, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.packed import pack_weights
from maitred.model.rope import inverse_frequencies
from maitred.model.weight_map import weight_map
from tests.executor.native_worlds import native_plan
from tests.model.checkpoints import make_checkpoint
from tests.model.gguf_models import TOKEN_TYPES, TOKENS, random_tensors, write_gguf
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
        ("llama", {"llama__expert_count": 8}, r"mixtures of experts are not supported \(8 experts\)"),
        ("llama", {"llama__attention__causal": False}, r"is an encoder"),
        ("llama", {"llama__attention__value_length": 4}, r"heads of 8 values for keys and 4"),
        ("llama", {"llama__attention__head_count": 0}, r"head_count is 0, and has to be a whole number from 1"),
        ("llama", {"llama__rope__freq_base": "x"}, r"key llama.rope.freq_base is 'x', and has to be one number"),
        ("llama", {"llama__attention__head_count_kv": [2, 4]}, r"head_count_kv is 2 different values"),
        ("llama", {"general__architecture": "qwen35moe"}, r"'qwen35moe' is not supported; supported are gemma2,"),
        ("llama", {"general__type": "adapter"}, r"holds no model \(general.type is 'adapter'\)"),
        ("olmo2", {"olmo2__attention__sliding_window": 4096}, r"OLMo 3, whose layers slide"),
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
