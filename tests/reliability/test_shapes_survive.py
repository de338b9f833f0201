"""Answers with a shape, streamed by `maitred serve`: what is asked fits, and a killed engine changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.conftest import ServerProcess, start_server
from tests.reliability.test_served_engine import engine_of
from tests.waiting import HANGS_S

SCHEMA = {
    "type": "object",
    "properties": {
        "dish": {"enum": ["soup", "salad", "fish"]},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 3},
        "euros": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["dish", "notes", "euros"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "order", "parameters": SCHEMA}}
MESSAGES = [{"role": "user", "content": "One soup, please."}]
ASKS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"structured_outputs": {"regex": "(soup|salad) (please|now){3,9}"}},
    {"structured_outputs": {"grammar": 'root ::= "[" item ("," item){5,20} "]"\nitem ::= [a-f]{4}'}},
]


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    server = start_server()
    yield server
    server.stop()


def body_of(number: int) -> dict[str, Any]:
    asked = ASKS[number % len(ASKS)]
    return {
        "messages": MESSAGES,
        "seed": number,
        "temperature": 1.3,
        "n": 1 + 2 * (number % 2),
        **asked,
        "stream": True,
    }


async def streamed(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event | None = None) -> list[Any]:
    """What each sample said: its content and the arguments of its calls, and how it ended."""
    samples: list[list[Any]] = [["", "", None] for _ in range(body["n"])]
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                sample, delta = samples[choice["index"]], choice["delta"]
                sample[0] += delta.get("content") or ""
                sample[1] += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
                sample[2] = choice["finish_reason"] or sample[2]
            if begun is not None:
                begun.set()
    return samples


def check(number: int, samples: Sequence[list[Any]]) -> None:
    for content, arguments, finish in samples:
        kind = number % len(ASKS)
        assert finish == ("tool_calls" if kind == 1 else "stop"), (content, arguments)
        if kind < 2:
            jsonschema.validate(json.loads(arguments if kind == 1 else content), SCHEMA)


async def together(url: str, count: int, pid_to_kill: int | None = None) -> list[Any]:
    begun = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=HANGS_S, limits=httpx.Limits(max_connections=None)) as client:
        tasks = [asyncio.create_task(streamed(client, body_of(number), begun)) for number in range(count)]
        if pid_to_kill is not None:
            await begun.wait()
            os.kill(pid_to_kill, signal.SIGKILL)
        return await asyncio.gather(*tasks)


async def test_streams_with_a_shape_outlive_their_engine_token_for_token(served: ServerProcess):
    undisturbed = await together(served.url, 20)
    for number, samples in enumerate(undisturbed):
        check(number, samples)
    assert await together(served.url, 20, engine_of(served).pid) == undisturbed


@pytest.mark.parametrize("named", ["<|nobody|>", "<[9999]>"])
async def test_a_grammar_that_names_a_token_there_is_not_is_a_400(served: ServerProcess, named: str):
    """What only the model's own tokenizer can tell."""
    async with httpx.AsyncClient(base_url=served.url, timeout=HANGS_S) as client:
        for streamed in (False, True):
            body = {"messages": MESSAGES, "stream": streamed, "structured_outputs": {"grammar": f'start: "a" {named}'}}
            answer = await client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            assert "the grammar cannot be used: " in answer.text


async def test_an_answer_is_the_same_alone_and_among_others(served: ServerProcess):
    among = await together(served.url, 8)
    async with httpx.AsyncClient(base_url=served.url, timeout=HANGS_S) as client:
        for number in range(4):
            assert await streamed(client, body_of(number)) == among[number]


class Dish(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=16)
    euros: int = pydantic.Field(ge=1, le=99)


def test_openais_client_parses_what_it_asked_for(served: ServerProcess):
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    messages: Any = MESSAGES
    parsed = client.beta.chat.completions.parse(model="maitred-mini", messages=messages, response_format=Dish)
    assert isinstance(parsed.choices[0].message.parsed, Dish)
    called = client.beta.chat.completions.parse(
        model="maitred-mini", messages=messages, tools=[openai.pydantic_function_tool(Dish)], tool_choice="required"
    )
    [call, *_] = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Dish)
    with client.beta.chat.completions.stream(
        model="maitred-mini", messages=messages, response_format=Dish, seed=1
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Dish)
    tool = openai.pydantic_function_tool(Dish)
    with client.beta.chat.completions.stream(
        model="maitred-mini", messages=messages, tools=[tool], tool_choice="required", seed=1
    ) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        calls = stream.get_final_completion().choices[0].message.tool_calls or []
    assert all(isinstance(call.function.parsed_arguments, Dish) for call in calls)
    assert "".join(pieces) == "".join(call.function.arguments for call in calls) != ""


def test_forced_tokens_change_nothing_but_the_time(served: ServerProcess):
    """Their number of steps is another, their tokens are not."""
    plain = start_server("--no-forced-tokens")
    try:
        without = asyncio.run(together(plain.url, 8))
    finally:
        plain.stop()
    assert asyncio.run(together(served.url, 8)) == without
