"""Held-out score of a model directory: greedy, exact match of the whole reply, for each category and after long chats.

python -m training.evaluate --model src/maitred/builtin/maitred-mini
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from training.checkpoint import load
from training.generate import generate
from training.model import Decoder
from training.tokenizer import render
from training.world import SCORED, Chat, held_out_question

LONG_TURNS = 34
"""Turns before the question of a long chat, about 1,600 tokens."""
MAX_REPLY_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Score:
    """`misses` holds (question, reply wanted, reply got)."""

    name: str
    num_asked: int
    misses: tuple[tuple[str, str, str], ...]

    @property
    def num_right(self) -> int:
        return self.num_asked - len(self.misses)

    @property
    def exact_match(self) -> float:
        return self.num_right / self.num_asked


def evaluate(model: Decoder, tokenizer: Tokenizer, num_each: int, seed: int = 1) -> list[Score]:
    """One score per category for questions at the start of a chat, then after a few turns, and after many."""
    rng = Random(seed)
    scores = [score(model, tokenizer, name, _ask(rng, name, 0, num_each)) for name in SCORED]
    fitting = _fitting(tokenizer, 2048 - MAX_REPLY_TOKENS)
    for title, num_before in (("after 4 turns", 4), ("after a long chat", LONG_TURNS)):
        chats: list[Chat] = []
        while len(chats) < 2 * num_each:
            chat = held_out_question(rng, rng.choice(SCORED), num_before)
            chats += [chat] if fitting(chat) else []
        scores.append(score(model, tokenizer, title, chats))
    return scores


def score(model: Decoder, tokenizer: Tokenizer, name: str, chats: list[Chat]) -> Score:
    """Ask the last question of each chat; the turns before it are given."""
    prompts = [render(chat.messages()[:-1], add_generation_prompt=True) for chat in chats]
    replies = generate(model, tokenizer, prompts, MAX_REPLY_TOKENS)
    misses = tuple(
        (chat.turns[-1].user, chat.turns[-1].assistant, reply)
        for chat, reply in zip(chats, replies, strict=True)
        if reply != chat.turns[-1].assistant
    )
    return Score(name, len(chats), misses)


def table(scores: list[Score]) -> str:
    """A Markdown table; `all` counts each question once."""
    lines = ["| category | right | of | exact match |", "|---|---:|---:|---:|"]
    lines += [f"| {s.name} | {s.num_right} | {s.num_asked} | {s.exact_match:.1%} |" for s in scores]
    right, asked = sum(s.num_right for s in scores), sum(s.num_asked for s in scores)
    return "\n".join([*lines, f"| **all** | {right} | {asked} | {right / asked:.1%} |"])


def _ask(rng: Random, category: str, num_before: int, number: int) -> list[Chat]:
    return [held_out_question(rng, category, num_before) for _ in range(number)]


def _fitting(tokenizer: Tokenizer, limit: int) -> Callable[[Chat], bool]:
    return lambda chat: len(tokenizer.encode(render(chat.messages()[:-1])).ids) <= limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--num-each", type=int, default=100, help="questions in each category")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--misses", type=int, default=0, help="wrong replies to print for each category")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load(arguments.model, getattr(torch, arguments.dtype))
    scores = evaluate(model, tokenizer, arguments.num_each, arguments.seed)
    print(table(scores))
    for result in scores:
        for user, wanted, got in result.misses[: arguments.misses]:
            print(json.dumps({"category": result.name, "user": user, "wanted": wanted, "got": got}))


if __name__ == "__main__":
    main()
