"""Speculative decoding changes no token: whoever drafts, whatever is asked for, whoever shares the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from maitred import LLM, SamplingParams
from maitred.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from maitred.core.clock import WallClock
from maitred.core.errors import ConfigError
from maitred.core.request import RequestSpec
from maitred.core.step import RequestProgress
from maitred.engine.build import EngineParts, build_parts
from maitred.executor.state import DraftAsk
from tests.model.gguf_models import random_tensors, write_gguf
from tests.model.test_gguf_config import llama

PROMPTS = (
    "<|bos|><|im_start|>user\nWhat do 2 soups and 3 teas cost?<|im_end|>\n<|im_start|>assistant\n",
    "<|bos|><|im_start|>user\nCount from 1 to 30.<|im_end|>\n<|im_start|>assistant\n",
    "<|bos|><|im_start|>user\nRepeat: red apple river red apple river<|im_end|>\n<|im_start|>assistant\n",
)
ASKED = {
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "seeded": SamplingParams(temperature=1.0, seed=3, max_tokens=40),
    "narrow": SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.02, seed=4, max_tokens=40),
    "penalties": SamplingParams(
        temperature=0.7, seed=5, max_tokens=40, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3
    ),
    "bad words": SamplingParams(temperature=0, max_tokens=40, bad_words=("3, 4", "soup")),
    "min tokens": SamplingParams(temperature=0, max_tokens=60, min_tokens=50),
    "bias": SamplingParams(temperature=0.5, seed=6, max_tokens=40, logit_bias={300: 4.0, 20: -8.0}),
    "allowed": SamplingParams(temperature=1.0, seed=6, max_tokens=20, allowed_token_ids=tuple(range(300, 330))),
    "logprobs": SamplingParams(temperature=0, max_tokens=30, logprobs=3, prompt_logprobs=1),
    "stop": SamplingParams(temperature=0, max_tokens=60, stop=("12", "make")),
    "samples": SamplingParams(temperature=1.0, seed=9, n=3, max_tokens=24),
    "one token": SamplingParams(temperature=0, max_tokens=1),
}
KV_DTYPE = "bfloat16"  # so that as many bytes are as many blocks on every processor
SETTINGS = {
    "roomy": {},
    "tight": {
        "kv_cache_memory_bytes": 700_000,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 24,
    },  # chunks, and preemption
    "swap": {"kv_cache_memory_bytes": 700_000, "max_num_seqs": 24, "swap_memory_bytes": 4_000_000},
    "one position at a time": {"block_size": 5, "enable_prefix_caching": False},
}


class Scripted:
    """Drafts what is right up to some position, and something else from there on."""

    name = "scripted"

    def __init__(self, right: dict[str, Sequence[int]], num_right: int) -> None:
        self._right, self._num_right = right, num_right

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        return [self._drafts(ask) for ask in asks]

    def _drafts(self, ask: DraftAsk) -> list[int]:
        known = ask.request.tokens.array
        text = self._right.get(ask.request.request_id, ())[len(known) - ask.request.num_prompt_tokens :]
        right = list(text[: min(self._num_right, ask.num_drafts)])
        return right + [(int(known[-1]) + 7 * i) % 1536 for i in range(ask.num_drafts - len(right))]

    def forget(self, request_id: str) -> None: ...

    def close(self) -> None: ...


class Mad:
    """Says more than it is asked, other than tokens, or nothing."""

    name = "mad"

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        return [((), (5,) * 40, (-1, 10**9, 3))[i % 3] for i, _ in enumerate(asks)]

    def forget(self, request_id: str) -> None: ...

    def close(self) -> None: ...


def outputs(llm: LLM, sampling: Sequence[SamplingParams]) -> list[object]:
    found = llm.generate([prompt for prompt in PROMPTS for _ in sampling], [*sampling] * len(PROMPTS))
    return [
        (one.token_ids, one.finish_reason, one.text, one.logprobs, request.prompt_logprobs)
        for request in found
        for one in request.outputs
    ]


@pytest.fixture(scope="module")
def alone() -> list[object]:
    """Without drafts."""
    with LLM(speculative="off", kv_dtype=KV_DTYPE) as llm:
        return outputs(llm, tuple(ASKED.values()))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("proposer", ["ngram", "draft"])
def test_output_is_that_of_a_run_without_drafts(proposer: str, settings: str, alone: list[object]):
    with LLM(speculative=proposer, num_speculative_tokens=6, kv_dtype=KV_DTYPE, **SETTINGS[settings]) as llm:
        assert outputs(llm, tuple(ASKED.values())) == alone


def served(
    proposer: Callable[[], object] | None, model: Path | None = None
) -> tuple[dict[str, list[int]], EngineParts]:
    """What one request of each kind gives, by its name."""
    config = EngineConfig(
        model=ModelConfig(model=None if model is None else str(model), weight_cache="off", max_model_len=256),
        scheduler=SchedulerConfig(max_num_seqs=16),
        cache=CacheConfig(kv_cache_memory_bytes=2**24),
        speculative=SpeculativeConfig(speculative="off" if proposer is None else "ngram", num_speculative_tokens=4),
    )
    parts = build_parts(config, clock=WallClock())
    if proposer is not None:
        parts.core._executor.proposer = proposer()
        parts.core.scheduler.num_drafts = lambda request, num_rows: 4  # whatever steps take
    found: dict[str, list[int]] = {}
    for name, sampling in ASKED.items():
        if sampling.n == 1:
            prompt = tuple(range(5, 30))
            if model is None:
                prompt = tuple(parts.model.tokenizer.encode(PROMPTS[1], add_special_tokens=False))
            spec = RequestSpec(
                request_id=name,
                arrived_at=0.0,
                num_prompt_tokens=len(prompt),
                prompt_token_ids=prompt,
                max_tokens=sampling.max_tokens or 1,
                sampling=replace(sampling, stop=(), bad_words=()),
                seed=sampling.seed or 0,
            )
            parts.core.add(spec)
            found[name] = []
    while parts.core.has_work:
        progress: list[RequestProgress] = parts.core.step()
        for one in progress:
            assert one.error is None, one
            found[one.request_id] += one.new_token_ids
        parts.core.scheduler.check_invariants()
    return found, parts


def test_adversarial_drafts_cost_time_and_nothing_else():
    right, parts = served(None)
    parts.close()
    for num_right in (0, 1, 2, 4):
        found, parts = served(lambda n=num_right: Scripted(right, n))
        parts.close()
        assert found == right, num_right
    found, parts = served(Mad)
    parts.close()
    assert found == right


def test_a_gguf_files_tokens_do_not_depend_on_drafts(tmp_path: Path):
    config = llama(vocab_size=1536, num_hidden_layers=2)
    types = {"q_proj": "Q4_1", "v_proj": "Q8_0", "down_proj": "Q5_0"}
    path = write_gguf(
        tmp_path / "m.gguf", "llama", config, random_tensors(config),
        type_of=lambda name: Type[types.get(name.split(".")[-2], "Q4_0")],
    )  # fmt: skip
    right, parts = served(None, path)
    parts.close()
    assert len({tuple(tokens) for tokens in right.values()}) > 5
    found, parts = served(lambda: Scripted(right, 2), path)
    parts.close()
    assert found == right


def test_right_drafts_take_a_fifth_of_the_steps():
    right, parts = served(None)
    steps = parts.core.stats.num_steps
    parts.close()
    found, parts = served(lambda: Scripted(right, 4))
    assert found == right
    assert parts.core.stats.num_steps <= steps / 4
    parts.close()


def test_what_cannot_draft_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="a draft model is for speculative=draft, or auto"):
        LLM(speculative="ngram", speculative_model="somewhere")
    with pytest.raises(ConfigError, match="num_speculative_tokens is 17; it must be from 1 to 16"):
        LLM(num_speculative_tokens=17)
    with pytest.raises(ConfigError, match="the torch executor makes no drafts"):
        LLM(speculative="mtp", executor="torch")
