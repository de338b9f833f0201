"""What each number format costs in quality: the built-in model's perplexity and exact match, and KL on random weights.

    python benchmarks/quality.py [--questions 8] [--checkpoint FOLDER] [--positions 256]

Perplexity is of the replies to held-out questions of the built-in model's world, exact match is greedy and of whole
replies. KL is the mean over positions of KL(float32 || format), in nats, of a random checkpoint (Qwen3's shape in
small, unless a folder is given) reading random tokens, and how often the likeliest token is another one. Trained models
have a few huge channels (LLM.int8(), arXiv:2208.07339), random ones have not: a second table is of the same function
with channels planted in it, four of every norm times 32, and one rotary pair of every key head times 16, with what
reads them divided by as much. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from maitred import LLM, SamplingParams
from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.engine.memory import usable_cores
from maitred.executor.native_plan import plan_native_executor
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.request import RequestSpec
from maitred.step import NewRequest, ScheduledRow, SchedulerOutput

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "kv_dtype": "float32"},
    "float32, KV int8": {"dtype": "float32", "kv_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    "bfloat16, KV int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8": {"dtype": "int8", "kv_dtype": "bfloat16"},
    "int8, KV int8": {"dtype": "int8", "kv_dtype": "int8"},
    "int8, lm_head bfloat16": {"dtype": "int8", "kv_dtype": "bfloat16", "lm_head_dtype": "bfloat16"},
    "int4/32": {"dtype": "int4", "kv_dtype": "bfloat16", "int4_group_size": 32},
    "int4/64": {"dtype": "int4", "kv_dtype": "bfloat16", "int4_group_size": 64},
    "int4/128": {"dtype": "int4", "kv_dtype": "bfloat16", "int4_group_size": 128},
    "int4/32, lm_head int4": {
        "dtype": "int4",
        "kv_dtype": "bfloat16",
        "lm_head_dtype": "int4",
        "int4_group_size": 32,
    },
}

PLANTED = {
    "norms": ("int8", "int4/32", "int4/64", "int4/128"),
    "keys": ("float32, KV int8", "int8, KV int8"),
}


@dataclass(frozen=True)
class Question:
    prompt: str
    reply: str


def questions(num_each: int) -> list[Question]:
    """Held-out questions of every scored category, the same for every format."""
    from training.tokenizer import render
    from training.world import SCORED, held_out_question

    random = Random(1)
    chats = [held_out_question(random, name, 0) for name in SCORED for _ in range(num_each)]
    return [
        Question(render(chat.messages()[:-1], add_generation_prompt=True), chat.turns[-1].assistant) for chat in chats
    ]


def builtin_scores(asked: list[Question], formats: dict[str, Any]) -> tuple[float, float]:
    """Perplexity of the replies, and the share answered exactly."""
    with LLM("maitred-mini", executor="native", max_num_seqs=32, **formats) as llm:
        encode = llm.model.tokenizer.encode
        prompts = [encode(question.prompt, add_special_tokens=False) for question in asked]
        replies = [encode(question.reply, add_special_tokens=False) for question in asked]
        texts = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
        scored = llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
        total, count = 0.0, 0
        for prompt, text, output in zip(prompts, texts, scored, strict=True):
            for position in range(len(prompt), len(text)):
                entry = (output.prompt_logprobs or [])[position]
                assert entry is not None
                total -= entry[text[position]].logprob
                count += 1
        answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=200))
        right = sum(answer.outputs[0].text == q.reply for answer, q in zip(answers, asked, strict=True))
        return math.exp(total / count), right / len(asked)


def logits_of(folder: Path, tokens: list[int], formats: dict[str, Any]) -> Iterator[np.ndarray]:
    """Rows of logits of a text, one after the other."""
    found: list[np.ndarray] = []
    with open_checkpoint(str(folder)) as checkpoint:
        plan = plan_native_executor(
            ModelConfig(**formats),
            checkpoint,
            spec_from_config(checkpoint.config),
            cache=CacheConfig(),
            scheduler=SchedulerConfig(),
            num_threads=usable_cores(),
        )
        executor = plan.build(num_blocks=-(-len(tokens) // 16), max_model_len=len(tokens))
    executor.on_logits = lambda _, start, logits: found.extend(logits)
    spec = RequestSpec(
        request_id="text",
        arrived_at=0.0,
        num_prompt_tokens=len(tokens),
        max_tokens=1,
        prompt_token_ids=tokens,
        sampling=SamplingParams(max_tokens=1),
    )
    new = NewRequest(request_id="text", spec=spec)
    row = ScheduledRow("text", 0, len(tokens), False, tuple(range(-(-len(tokens) // 16))))
    executor.execute(SchedulerOutput(step=0, rows=(row,), new_requests=(new,)))
    executor.close()
    return iter(found)


def divergence(exact: list[np.ndarray], other: Iterator[np.ndarray]) -> tuple[float, float]:
    """Mean KL, and the share of positions whose likeliest token differs."""
    total, moved = 0.0, 0
    for p_V, q_V in zip(exact, other, strict=True):
        log_p, log_q = log_softmax(p_V), log_softmax(q_V)
        total += float((np.exp(log_p) * (log_p - log_q)).sum())
        moved += int(p_V.argmax() != q_V.argmax())
    return total / len(exact), moved / len(exact)


def log_softmax(logits_V: np.ndarray) -> np.ndarray:
    shifted = logits_V.astype(np.float64) - float(logits_V.max())
    return shifted - math.log(np.exp(shifted).sum())


def small_checkpoint(folder: Path) -> Path:
    """Qwen3's shape in small, weights as transformers makes them but large enough that logits differ."""
    from tests.model.checkpoints import make_checkpoint

    return make_checkpoint(
        "qwen3",
        folder,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=8192,
        max_position_embeddings=2048,
    )


def plant(folder: Path, where: str) -> None:
    """Large channels into a `small_checkpoint`, exactly: powers of two that the next matrix divides by."""
    from safetensors.numpy import load_file, save_file

    tensors, random = load_file(folder / "model.safetensors"), Random(0)
    for name, norm in tensors.items():
        if where == "norms" and name.endswith(("layernorm.weight", "model.norm.weight")):
            channels = random.sample(range(len(norm)), 4)
            norm[channels] *= 32
            for reader in readers_of(name):
                tensors[reader][:, channels] /= 32
        if where == "keys" and name.endswith("k_norm.weight"):
            pair = random.randrange(len(norm) // 2) + np.array([0, len(norm) // 2])
            norm[pair] *= 16
            tensors[name.replace("k_norm", "q_norm")][pair] /= 16
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def readers_of(norm: str) -> list[str]:
    """Names of the matrices that read what this norm of a layer, or the last one, has normalised."""
    if norm == "model.norm.weight":
        return ["lm_head.weight"]
    layer, _, kind = norm.removesuffix(".weight").rpartition(".")
    parts = ("q_proj", "k_proj", "v_proj") if kind == "input_layernorm" else ("gate_proj", "up_proj")
    return [f"{layer}.{'self_attn' if len(parts) == 3 else 'mlp'}.{part}.weight" for part in parts]


def print_planted(tokens: list[int], exact: list[np.ndarray]) -> None:
    print("\n| planted in | format | KL (nats) | other likeliest token | KL without |")
    print("|---|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        plain = small_checkpoint(Path(scratch) / "plain")
        for where, names in PLANTED.items():
            planted = small_checkpoint(Path(scratch) / where)
            plant(planted, where)
            same, _ = divergence(exact, logits_of(planted, tokens, FORMATS["float32"]))
            assert abs(same) < 1e-6, f"planting changed the function: KL {same}"
            for name in names:
                kl, moved = divergence(exact, logits_of(planted, tokens, FORMATS[name]))
                without, _ = divergence(exact, logits_of(plain, tokens, FORMATS[name]))
                print(f"| {where} | {name} | {kl:.2e} | {moved:.1%} | {without:.2e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=8, help="held-out questions of each category")
    parser.add_argument("--checkpoint", type=Path, help="folder for the KL; without, a random one is made")
    parser.add_argument("--positions", type=int, default=256, help="length of the random text")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    options = parser.parse_args()
    asked = questions(options.questions)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.checkpoint or small_checkpoint(Path(scratch))
        with open_checkpoint(str(folder)) as checkpoint:
            vocab_size = spec_from_config(checkpoint.config).vocab_size
        random = Random(0)
        tokens = [random.randrange(vocab_size) for _ in range(options.positions)]
        exact = list(logits_of(folder, tokens, FORMATS["float32"]))
        print(f"{len(asked)} questions, {len(tokens)} positions of {folder.name if options.checkpoint else 'qwen3'}")
        print("| format | perplexity | exact match | KL (nats) | other likeliest token |")
        print("|---|---:|---:|---:|---:|")
        for name in options.formats:
            perplexity, match = builtin_scores(asked, FORMATS[name])
            kl, moved = divergence(exact, logits_of(folder, tokens, FORMATS[name]))
            print(f"| {name} | {perplexity:.4f} | {match:.1%} | {kl:.2e} | {moved:.1%} |", flush=True)
    if options.checkpoint is None:
        print_planted(tokens, exact)


if __name__ == "__main__":
    main()
