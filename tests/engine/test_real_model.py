"""SmolLM2, which the first command serves, where its package is installed: what number formats cost it on real text."""

from __future__ import annotations

import inspect
import json.decoder
import math
from pathlib import Path

import numpy as np
import pytest

from maitred import LLM, SamplingParams
from maitred.core.errors import CheckpointError
from maitred.core.structured_outputs import StructuredOutputsParams
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from tests.model.adapters import random_tensors, write_adapter

TOKENS, WINDOW = 250, 250
EXACT = 9.533  # perplexity in float32; another tokenizer or another order of rope gives hundreds


@pytest.fixture(scope="module")
def smollm2() -> str:
    try:
        open_checkpoint("smollm2").close()
    except CheckpointError as error:
        pytest.skip(str(error))
    return "smollm2"


def perplexity(model: str, dtype: str) -> float:
    """Of the first tokens of Python's JSON decoder, in windows."""
    formats = {"dtype": dtype, "kv_dtype": "float32" if dtype == "float32" else "bfloat16"}
    with LLM(model, max_model_len=WINDOW + 8, kv_cache_memory_bytes=2**26, speculative="off", **formats) as llm:
        ids = llm.get_tokenizer().encode(inspect.getsource(json.decoder))[:TOKENS]
        windows = [ids[at : at + WINDOW] for at in range(0, TOKENS, WINDOW)]
        answers = llm.generate(windows, SamplingParams(max_tokens=1, prompt_logprobs=0))
    chosen = [
        choices[token].logprob
        for answer in answers
        for token, choices in zip(answer.prompt_token_ids[1:], (answer.prompt_logprobs or [])[1:], strict=True)
        if choices is not None
    ]
    return math.exp(-sum(chosen) / len(chosen))


@pytest.mark.parametrize(
    "dtype", ["auto", "int4", *(pytest.param(n, marks=pytest.mark.soak) for n in ("int8", "float32"))]
)
def test_the_files_own_codes_int8_and_int4_cost_next_to_nothing(smollm2: str, dtype: str):
    assert perplexity(smollm2, dtype) == pytest.approx(EXACT, rel=0.02)


def test_a_schema_binds_its_49_152_tokens_with_an_adapter_too(smollm2: str, tmp_path: Path):
    with open_checkpoint(smollm2) as checkpoint:
        tensors = random_tensors(spec_from_config(checkpoint.config), 2)
    tensors = {name: values * np.float32(0.1) for name, values in tensors.items()}
    adapter = write_adapter(tmp_path / "a", tensors, rank=2)
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    shape = StructuredOutputsParams(json=schema | {"additionalProperties": False})
    asked = SamplingParams(max_tokens=40, temperature=0.0, structured_outputs=shape)
    with LLM(smollm2, max_model_len=256, kv_cache_memory_bytes=2**26, lora={"a": str(adapter)}) as llm:
        for lora in (None, "a"):
            (answer,) = llm.generate("The capital of France, as JSON:", asked, lora=lora)
            assert json.loads(answer.outputs[0].text)["city"] in ("Paris", "Rome")
