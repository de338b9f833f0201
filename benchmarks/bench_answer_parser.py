"""Time to parse a streamed token of an answer: `python benchmarks/bench_answer_parser.py`.

Prints microseconds for a push of 4 characters (best of 5), for content, thoughts, a call with a long text and one with
a long array, in formats of each form.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from maitred.text import ChatTemplate
from maitred.text.answer_format import AnswerFormat, ReasoningFormat
from maitred.text.answer_parser import AnswerParser
from maitred.text.tool_format import read_answer_format
from maitred.text.tool_messages import written_calls

FORMATS = ("hermes", "llama3", "mistral_args", "qwen3_coder", "glm47", "gemma4")
PROSE = "The quick brown fox jumps over the lazy dog, and then some. " * 400
PROPERTIES = {"text": {"type": "string"}, "numbers": {"type": "array"}}
TOOLS = {"look": {"type": "object", "properties": PROPERTIES}}
REPEATS, CHARS_A_TOKEN = 5, 4


def main() -> None:
    print("us a token    content  thoughts  text argument  array argument")
    for name in FORMATS:
        print(f"{name:12}" + "".join(f"{us:10.2f}" for us in costs_us(name)))


def costs_us(name: str) -> Iterator[float]:
    """Of content, thoughts, a text and an array as argument."""
    format = read_answer_format(ChatTemplate("{{ messages[0].content }}"), override=name)
    format = replace(format, reasoning=ReasoningFormat(("<think>",), ("</think>",)))
    yield cost_us(format, PROSE)
    yield cost_us(format, PROSE, starts_in_reasoning=True)
    yield cost_us(format, a_call(format, {"text": PROSE}))
    yield cost_us(format, a_call(format, {"numbers": list(range(5000))}))


def a_call(format: AnswerFormat, arguments: dict[str, Any]) -> str:
    assert format.calls is not None
    return str(written_calls(format.calls, [{"function": {"name": "look", "arguments": arguments}}]))


def cost_us(format: AnswerFormat, text: str, **options: Any) -> float:
    pieces = [[text[at : at + CHARS_A_TOKEN]] for at in range(0, len(text), CHARS_A_TOKEN)]

    def parse() -> None:
        parser = AnswerParser(format, make_id=str, tools=TOOLS, **options)
        for piece in pieces:
            parser.push(piece)
        parser.flush()

    return min(timed(parse) for _ in range(REPEATS)) / len(pieces) * 1e6


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
