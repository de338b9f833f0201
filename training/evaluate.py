"""Held-out score of a model directory: greedy, exact match, for each category, after long chats, and for each shape.

    python -m training.evaluate --model src/maitred/builtin/maitred-mini --num-each 500

An answer with calls counts where the calls are right to the byte, and with their results what is said then. With
`--draft DIR` it also tells how often the draft's most likely token is the model's; `maitred evaluate --draft` tells
what is accepted of a draft or a head as served.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from training.batches import REPLY_WEIGHT, Batches
from training.checkpoint import load
from training.generate import Constraint, generate
from training.model import Decoder
from training.shapes import opening
from training.tokenizer import END, render
from training.world import SCORED, SHAPES, Chat, held_out_question, held_out_shape

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


class Ask(NamedTuple):
    """One message that the model must write: the prompt, and the rest of the message as it should be."""

    prompt: str
    reply: str
    chat: Chat


MakeConstraint = Callable[[Tokenizer, Ask], Constraint | None]
"""What binds an answer: given the ask, whose chat has the tools and whether the order's schema is given."""


def evaluate(
    model: Decoder, tokenizer: Tokenizer, num_each: int, seed: int = 1, constrain: MakeConstraint | None = None
) -> list[Score]:
    """One score per category at the start of a chat, then after a few turns and after many, and one per shape."""
    rng = Random(seed)
    scores = [score(model, tokenizer, name, _ask(rng, name, 0, num_each), constrain) for name in SCORED]
    fitting = _fitting(tokenizer, 2048 - MAX_REPLY_TOKENS)
    for title, num_before in (("after 4 turns", 4), ("after a long chat", LONG_TURNS)):
        chats: list[Chat] = []
        while len(chats) < 2 * num_each:
            chat = held_out_question(rng, rng.choice(SCORED), num_before)
            chats += [chat] if fitting(chat) else []
        scores.append(score(model, tokenizer, title, chats, constrain))
    for shape in SHAPES:
        chats = [held_out_shape(rng, shape) for _ in range(num_each)]
        scores.append(score(model, tokenizer, shape, chats, constrain))
    return scores


def score(
    model: Decoder, tokenizer: Tokenizer, name: str, chats: list[Chat], constrain: MakeConstraint | None = None
) -> Score:
    """Ask the last question of each chat; the turns before it are given. A miss is the first wrong reply of a chat."""
    asks = [asks_of(chat) for chat in chats]
    flat = [ask for chat_asks in asks for ask in chat_asks]
    constraints = [constrain(tokenizer, ask) for ask in flat] if constrain else []
    replies = iter(generate(model, tokenizer, [ask.prompt for ask in flat], MAX_REPLY_TOKENS, constraints=constraints))
    misses = []
    for chat, chat_asks in zip(chats, asks, strict=True):
        wrong = [(chat.turns[-1].user, ask.reply, got) for ask in chat_asks if (got := next(replies)) != ask.reply]
        misses += wrong[:1]
    return Score(name, len(chats), tuple(misses))


def asks_of(chat: Chat) -> list[Ask]:
    """What the model must write in the last turn: its answer, before it the calls if there are any.

    The results in the second prompt are those of the right calls; they count only where the calls were right. What
    only a schema decides at the begin of a bound answer is given, so that a free model can be asked too.
    """
    messages, last = chat.messages(), chat.turns[-1]
    asks = []
    for index in range(len(messages) - len(last.replies()), len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        prompt = render(messages[:index], add_generation_prompt=True, tools=chat.tools, enable_thinking=last.thinks)
        written = render(messages[: index + 1], tools=chat.tools)
        reply = written.removeprefix(prompt).removesuffix(f"{END}\n")
        given = opening(reply) if chat.is_bound else ""
        asks.append(Ask(prompt + given, reply.removeprefix(given), chat))
    return asks


@torch.inference_mode()
def agreement(model: Decoder, draft: Decoder, tokenizer: Tokenizer, num_chats: int, seed: int = 5) -> float:
    """Share of reply tokens of held-out chats, the right reply given as context, where both find the same likeliest."""
    rng, batches = Random(seed), Batches(tokenizer, Random(seed))
    names = (*SCORED, *SHAPES)
    same = total = 0
    for _ in range(num_chats):
        name = rng.choice(names)
        document = batches.document_of(held_out_shape(rng, name) if name in SHAPES else held_out_question(rng, name))
        tokens_BT = torch.tensor([document.ids])
        is_reply = torch.tensor(document.weights[1:]) == REPLY_WEIGHT
        ours, theirs = (one(tokens_BT)[0, :-1].argmax(-1)[is_reply] for one in (model, draft))
        same, total = same + int((ours == theirs).sum()), total + len(ours)
    return same / total


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


def _named(path: str) -> MakeConstraint:
    module, _, function = path.partition(":")
    return getattr(import_module(module), function)  # type: ignore[no-any-return]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--num-each", type=int, default=100, help="questions in each category")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--misses", type=int, default=0, help="wrong replies to print for each category")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draft", type=Path, help="model directory of a draft, to tell how often it agrees")
    parser.add_argument(
        "--grammar",
        type=_named,
        metavar="MODULE:FUNCTION",
        help="what makes the constraint of an answer of a tokenizer and an Ask; unset, answers are free",
    )
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load(arguments.model, getattr(torch, arguments.dtype))
    scores = evaluate(model, tokenizer, arguments.num_each, arguments.seed, arguments.grammar)
    print(table(scores))
    if arguments.draft is not None:
        draft, _ = load(arguments.draft, getattr(torch, arguments.dtype))
        print(f"the draft agrees on {agreement(model, draft, tokenizer, arguments.num_each):.1%} of reply tokens")
    for result in scores:
        for user, wanted, got in result.misses[: arguments.misses]:
            print(json.dumps({"category": result.name, "user": user, "wanted": wanted, "got": got}))


if __name__ == "__main__":
    main()
