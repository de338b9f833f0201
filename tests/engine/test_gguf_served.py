"""A GGUF file's vocabulary and identity where other files' are used: grammars, KV that outlives a request, names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from maitred import LLM, SamplingParams
from maitred.core.structured_outputs import StructuredOutputsParams
from tests.model.gguf_models import random_tensors, write_gguf
from tests.model.test_gguf_config import family, llama
from tests.text.test_gguf_tokenizer import byte_level, sentencepiece

SMALL = {"max_model_len": 256, "kv_cache_memory_bytes": 2**22, "weight_cache": "off", "num_threads": 1}


def test_how_evenly_experts_are_used_is_told_with_the_engines_figures(tmp_path: Path):
    """And a file of experts generates what its checkpoint does in any number of requests."""
    config = family("Qwen3MoeForCausalLM", "qwen3_moe", num_hidden_layers=2, num_experts=5, num_experts_per_tok=2,
                    moe_intermediate_size=96, head_dim=32, norm_topk_prob=True, vocab_size=300)  # fmt: skip
    keys = {key.replace(".", "__"): value for key, value in byte_level().items()}
    path = write_gguf(
        tmp_path / "m.gguf", "qwen3moe", config, random_tensors(config), type_of=lambda name: Type.Q4_0, **keys
    )
    asked = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(str(path), **SMALL) as llm:
        together = llm.generate([[3, 4, 5], [6, 7]], asked)
        alone = llm.generate([[6, 7]], asked)
        assert alone[0].outputs[0].token_ids == together[1].outputs[0].token_ids
        assert llm._parts is not None
        assert 1 < llm._parts.core.figures()["expert_load_ratio"] <= 2.5


def a_model(path: Path, vocabulary: Callable[..., dict[str, Any]], seed: int = 0) -> str:
    config = llama(vocab_size=300, num_hidden_layers=2)
    keys = {key.replace(".", "__"): value for key, value in vocabulary().items()}
    tensors = random_tensors(config, seed)
    return str(write_gguf(path, "llama", config, tensors, type_of=lambda name: Type.Q4_1, **keys))


@pytest.mark.parametrize("vocabulary", [byte_level, sentencepiece])
def test_a_schema_and_a_regular_expression_bind_the_files_tokens(tmp_path: Path, vocabulary: Any):
    """More rows than tokens: none without a text is sampled."""
    with LLM(a_model(tmp_path / "m.gguf", vocabulary), **SMALL) as llm:
        shapes = [
            StructuredOutputsParams(json={"enum": ["heyhey", "abba"]}),
            StructuredOutputsParams(regex="ab(ba){3} hey[é東]"),
        ]
        asked = [SamplingParams(max_tokens=60, temperature=1.5, seed=3, structured_outputs=shape) for shape in shapes]
        schema, regex = (answer.outputs[0] for answer in llm.generate(["ab", "hey"], asked))
    assert schema.text in ('"heyhey"', '"abba"')
    assert regex.text in ("abbababa heyé", "abbababa hey東")
    assert (schema.finish_reason, regex.finish_reason) == ("stop", "stop")


def test_kv_on_disk_is_found_again_by_the_same_file_alone(tmp_path: Path):
    paths = [a_model(tmp_path / f"{name}.gguf", byte_level, seed) for seed, name in enumerate(("a", "b"))]
    text, asked = "hey " * 40, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    found = []
    for path in (paths[0], paths[0], paths[1]):
        with LLM(path, kv_disk=str(tmp_path / "kv"), **SMALL) as llm:
            (answer,) = llm.generate(text, asked)
            found.append((llm.model.names[0], answer.num_cached_tokens > 0, answer.outputs[0].token_ids))
    assert [(name, cached) for name, cached, _ in found] == [("a", False), ("a", True), ("b", False)]
    assert found[0][2] == found[1][2]
