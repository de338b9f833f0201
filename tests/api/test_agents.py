"""A coding agent's loop of reading, editing and running a file, in the form of its requests: it comes to its end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anthropic
import pytest

from tests.conftest import start_server

WRONG, RIGHT = "return a - b", "return a + b"
SOURCE = f"def add(a, b):\n    {WRONG}\n\n\nassert add(2, 3) == 5\nprint('all is well')\n"
STEPS = ("Read", "Edit", "Bash", None)  # the last one says what was done
SUMMARY = {
    "type": "object",
    "properties": {"done": {"const": True}, "summary": {"type": "string", "maxLength": 40}},
    "required": ["done", "summary"],
}
BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27"


def tools(path: str) -> list[dict[str, Any]]:
    """Bound so far that a small model does them right."""
    file = {"type": "string", "enum": [path]}
    inputs: dict[str, dict[str, Any]] = {
        "Read": {"file_path": file},
        "Edit": {"file_path": file, "old_string": {"const": WRONG}, "new_string": {"const": RIGHT}},
        "Bash": {"command": {"enum": [f"python {path}"]}},
    }
    about = {"Read": "Reads a file.", "Edit": "Replaces a text in a file.", "Bash": "Runs a command."}
    return [
        {
            "name": name,
            "description": about[name],
            "input_schema": {
                "type": "object",
                "properties": fields,
                "required": [*fields],
                "additionalProperties": False,
            },
        }
        for name, fields in inputs.items()
    ]


def run_tool(name: str, asked: dict[str, Any]) -> tuple[str, bool]:
    """What it gives, and whether that is an error."""
    if name == "Read":
        lines = Path(asked["file_path"]).read_text().splitlines()
        return "\n".join(f"{number:>6}\t{line}" for number, line in enumerate(lines, 1)), False
    if name == "Edit":
        path = Path(asked["file_path"])
        path.write_text(path.read_text().replace(asked["old_string"], asked["new_string"]))
        return f"The file {path} has been updated.", False
    ran = subprocess.run([sys.executable, *asked["command"].split()[1:]], capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr, ran.returncode != 0


def anthropic_loop(url: str, path: str) -> Iterator[tuple[Any, int, int]]:
    """Of each turn: the call or the words of the answer, prompt tokens, and those of them that were cached.

    Requests as Claude Code sends them: the checksum before the system prompt and the tokens left behind each result
    change from turn to turn, and so does the place of the mark for a cache.
    """
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Make the file pass its check."}]
    mark = {"cache_control": {"type": "ephemeral"}}
    for turn, name in enumerate(STEPS):
        billing = f"x-anthropic-billing-header: cc_version=2.1.232.{turn:03x}; cc_entrypoint=cli; cch={turn * 77:05x};"
        last = messages[-1]["content"]
        marked = [{"type": "text", "text": last}] if isinstance(last, str) else [*last]
        marked[-1] = marked[-1] | mark
        choice = {"type": "none"} if name is None else {"type": "tool", "name": name}
        left = [{"role": "system", "content": f"<total_tokens>{90_000 - turn * 800} tokens left</total_tokens>"}]
        asked: dict[str, Any] = {
            "model": client.models.list().data[0].id,
            "max_tokens": 32_000,
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": "You are an agent that works on files.", **mark},
                {
                    "type": "text",
                    "text": f"The file is {path}. Read it, edit it, run it, then say what was done.",
                    **mark,
                },
            ],
            "messages": [*messages[:-1], {**messages[-1], "content": marked}, *(left if turn else [])],
            "tools": tools(path),
            "tool_choice": choice | ({"disable_parallel_tool_use": True} if name else {}),
            "metadata": {"user_id": "user_1_account__session_2"},
            "extra_headers": {"anthropic-beta": BETAS},
            "extra_query": {"beta": "true"},
            "extra_body": {"temperature": 0, "context_management": {"edits": []}},
        }
        if name is None:
            asked["output_config"] = {"format": {"type": "json_schema", "schema": SUMMARY}}
        with client.messages.stream(**asked) as stream:
            told = stream.get_final_message()
        prompt = told.usage.input_tokens + told.usage.cache_read_input_tokens
        if name is None:
            assert told.stop_reason == "end_turn"
            yield told.content[-1].text, prompt, told.usage.cache_read_input_tokens
            return
        [call] = [block for block in told.content if block.type == "tool_use"]
        assert (call.name, told.stop_reason) == (name, "tool_use")
        result, is_error = run_tool(call.name, call.input)
        yield call.input, prompt, told.usage.cache_read_input_tokens
        answered = {"type": "tool_result", "tool_use_id": call.id, "content": result, "is_error": is_error}
        messages += [
            {"role": "assistant", "content": [block.to_dict() for block in told.content]},
            {"role": "user", "content": [answered]},
        ]


LOOPS = {"anthropic": anthropic_loop}


@pytest.fixture(scope="module", params=["maitred-mini", pytest.param("smollm2", marks=pytest.mark.soak)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    server = start_server(request.param, "--num-threads", "2")
    yield server.url
    server.stop()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The path stands in every prompt, and pytest's own are as long as maitred-mini's context would have them."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("dialect", LOOPS)
def test_it_reads_edits_and_runs_and_each_turn_finds_the_turns_before_it_cached(url, dialect, short_folder):
    path = short_folder / "add.py"
    path.write_text(SOURCE)
    turns = list(LOOPS[dialect](url, str(path)))
    assert path.read_text() == SOURCE.replace(WRONG, RIGHT)
    assert (len(turns), json.loads(turns[-1][0])["done"]) == (len(STEPS), True)
    for (_, before, _), (_, now, cached) in pairwise(turns):
        assert cached > before - 32 > 0, (before, now, cached)  # all but what stood behind the last full block
