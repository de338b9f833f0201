"""What a number format costs on real models and real text: perplexity of prompts against float32 of the same weights.

    .venv/bin/python benchmarks/quality.py [--model smollm2 --model gemma3-270m] [--tokens 20000]

Texts are those of this Python and this repository (documentation, code, licences) and a few lines in other scripts, so
nothing is fetched; they are cut into windows of 512 tokens. Models come as packages (`maitred models`). Prints for each
format the perplexity, its ratio to float32, and the share of positions whose likeliest token is another than float32's.
"""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import math
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

from maitred import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 512
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32", "kv_dtype": "float32"},
    "the file's": {"dtype": "auto", "kv_dtype": "bfloat16"},
    "the file's, KV int8": {"dtype": "auto", "kv_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    "int8": {"dtype": "int8", "kv_dtype": "bfloat16"},
    "int4": {"dtype": "int4", "kv_dtype": "bfloat16"},
}
SCRIPTS = """Все люди рождаются свободными и равными в своём достоинстве и правах.
人人生而自由，在尊严和权利上一律平等。
すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。
يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.
Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.
Tous les êtres humains naissent libres et égaux en dignité et en droits.
"""  # article 1 of the Universal Declaration of Human Rights


class Score(NamedTuple):
    """Sum over the tokens of all windows but each one's first."""

    negative_log: float
    likeliest: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(self.negative_log / len(self.likeliest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help="may be given more than once")
    parser.add_argument("--tokens", type=int, default=20_000)
    options = parser.parse_args()
    for model in options.model or ["smollm2", "gemma3-270m"]:
        print(f"\n{model}\n| format | perplexity | to float32 | another likeliest token |\n|---|--:|--:|--:|")
        exact: Score | None = None
        for name, formats in FORMATS.items():
            found = score(model, formats, options.tokens)
            exact = exact or found
            others = sum(a != b for a, b in zip(found.likeliest, exact.likeliest, strict=True)) / len(exact.likeliest)
            ratio = found.perplexity / exact.perplexity
            print(f"| {name} | {found.perplexity:.3f} | {ratio:.4f} | {others:.1%} |", flush=True)


def score(model: str, formats: dict[str, str], num_tokens: int) -> Score:
    with LLM(model, max_model_len=WINDOW + 8, kv_cache_memory_bytes=2**28, speculative="off", **formats) as llm:
        answers = llm.generate(windows(llm, num_tokens), SamplingParams(max_tokens=1, prompt_logprobs=1))
    negative_log, likeliest = 0.0, []
    for answer in answers:
        for token, choices in zip(answer.prompt_token_ids[1:], (answer.prompt_logprobs or [])[1:], strict=True):
            negative_log -= choices[token].logprob
            likeliest.append(max(choices, key=lambda each: choices[each].logprob))
    return Score(negative_log, likeliest)


def windows(llm: LLM, num_tokens: int) -> list[list[int]]:
    """Equal parts of each text, `num_tokens` in all."""
    texts = [
        "\n".join(topics.topics[name] for name in sorted(topics.topics)[:24]),
        inspect.getsource(json.decoder) + inspect.getsource(argparse)[:20_000],
        (ROOT / "LICENSE").read_text(),
        SCRIPTS * 4,
    ]
    found = []
    for text in texts:
        ids = llm.get_tokenizer().encode(text)[: num_tokens // len(texts)]
        found += [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW)]
    return found


if __name__ == "__main__":
    main()
