"""Documents and tasks of the small world as JSON lines, for the tools around the model.

    python -m training.corpus --documents 20000 --out runs/corpus

Writes data.jsonl, held_out.jsonl (chats whose last turn is held out) and tasks.jsonl (held-out questions by category).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from training.world import SCORED, Chat, held_out_question, training_chat

MOST_TURNS = 5


def documents(rng: Random, count: int) -> Iterable[dict[str, Any]]:
    return ({"messages": training_chat(rng, MOST_TURNS).messages()} for _ in range(count))


def held_out_documents(rng: Random, count: int) -> Iterable[dict[str, Any]]:
    return ({"messages": _question(rng, index, rng.choice((0, 1, 2))).messages()} for index in range(count))


def tasks(rng: Random, count: int) -> Iterable[dict[str, Any]]:
    """Questions at the start of a chat or after a turn, categories in turn."""
    for index in range(count):
        chat = _question(rng, index, rng.choice((0, 0, 1)))
        *asked, reply = chat.messages()
        yield {"messages": asked, "answer": reply["content"], "match": "exact", "category": chat.turns[-1].category}


def _question(rng: Random, index: int, num_before: int) -> Chat:
    return held_out_question(rng, SCORED[index % len(SCORED)], num_before)


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Each line once: equal ones say nothing new."""
    path.write_text("".join(f"{line}\n" for line in dict.fromkeys(json.dumps(line) for line in lines)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=520)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(argv)
    chosen.out.mkdir(parents=True, exist_ok=True)
    _write(chosen.out / "data.jsonl", documents(Random(f"{chosen.seed} data"), chosen.documents))
    _write(chosen.out / "held_out.jsonl", held_out_documents(Random(f"{chosen.seed} held out"), chosen.held_out))
    _write(chosen.out / "tasks.jsonl", tasks(Random(f"{chosen.seed} tasks"), chosen.tasks))


if __name__ == "__main__":
    main()
