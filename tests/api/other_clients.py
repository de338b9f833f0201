"""Asks a server for an answer that fits a schema, and for a call of a tool, whole and streamed, as one client does it.

    python tests/api/other_clients.py CLIENT URL

Run in the environment of benchmarks/fetch_inputs.py, which has nothing of ours; what fails raises.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import openai
import pydantic

QUESTION = "One soup, please."
MODEL = "maitred-mini"
TRIES = 20  # of an answer that may be a call


class Dish(pydantic.BaseModel):
    """What was ordered."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=12)
    euros: int = pydantic.Field(ge=1, le=99)


class Kitchen:
    """A tool that counts."""

    def __init__(self) -> None:
        self.cooked: list[Dish] = []

    def cook(self, dish: Dish) -> str:
        """Cook it."""
        self.cooked.append(dish)
        return "done"


def use_instructor(url: str) -> None:
    import instructor

    plain = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        asking = instructor.from_openai(plain, mode=mode).chat.completions
        ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_retries": 1}
        assert isinstance(asking.create(response_model=Dish, **ask), Dish)
        *_, last = asking.create_partial(response_model=Dish, **ask)
        Dish.model_validate(last.model_dump())


def use_langchain(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_retries=0)
    for method in ("json_schema", "function_calling"):
        shaped = model.with_structured_output(Dish, method=method)
        assert isinstance(shaped.invoke(QUESTION), Dish)
        *_, last = shaped.stream(QUESTION)
        assert isinstance(last, Dish)
    calling = model.bind_tools([Dish], tool_choice="any")
    asked: list[Any] = [HumanMessage(QUESTION)]
    called = calling.invoke(asked)
    first, *chunks = calling.stream(asked)
    for chunk in chunks:
        first += chunk
    for message in (called, first):
        assert message.tool_calls
        for call in message.tool_calls:
            Dish.model_validate(call["args"])
    results = [ToolMessage("done", tool_call_id=call["id"]) for call in called.tool_calls]
    assert model.invoke([*asked, called, *results], max_tokens=16).usage_metadata["output_tokens"] <= 16


def use_pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput, Tool, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    for kind in (NativeOutput, ToolOutput):
        agent: Any = Agent(model, output_type=kind(Dish))
        assert isinstance(agent.run_sync(QUESTION).output, Dish)
        assert isinstance(asyncio.run(_streamed_output(agent)), Dish)
    kitchen = Kitchen()

    async def until_cooked(_: Any, definition: Any) -> Any:
        return None if kitchen.cooked else definition

    cooking: Any = Agent(model, output_type=ToolOutput(Dish), tools=[Tool(kitchen.cook, prepare=until_cooked)])
    for seed in range(TRIES):  # either tool may be called
        assert isinstance(cooking.run_sync(QUESTION, model_settings={"seed": seed}).output, Dish)
        if kitchen.cooked:
            return
    raise AssertionError("no tool was called")


async def _streamed_output(agent: Any) -> Any:
    async with agent.run_stream(QUESTION) as result:
        return await result.get_output()


def use_agents(url: str) -> None:
    import agents

    agents.set_tracing_disabled(True)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        asyncio.run(_use_agents(kind, openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)))


async def _use_agents(kind: Any, client: openai.AsyncOpenAI) -> None:
    import agents

    model = kind(model=MODEL, openai_client=client)
    settings = agents.ModelSettings(tool_choice="required")
    for calls in (False, True):
        for streamed in (False, True):
            kitchen = Kitchen()
            once = agents.function_tool(kitchen.cook, is_enabled=lambda *_: not kitchen.cooked)  # noqa: B023 - at once
            agent: Any = agents.Agent(
                name="waiter", model=model, output_type=Dish, tools=[once] if calls else [],
                model_settings=settings if calls else agents.ModelSettings(),
            )  # fmt: skip
            if streamed:
                result: Any = agents.Runner.run_streamed(agent, QUESTION)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, QUESTION)
            assert isinstance(result.final_output, Dish)
            assert len(kitchen.cooked) == calls


def use_langchain_ollama(url: str) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_ollama import ChatOllama, OllamaEmbeddings

    host = url.removesuffix("/v1")
    model: Any = ChatOllama(model=MODEL, base_url=host, validate_model_on_init=True, num_predict=60, temperature=0)
    whole = model.invoke(QUESTION)
    first, *chunks = model.stream(QUESTION)
    for chunk in chunks:
        first += chunk
    assert (first.content, first.response_metadata["done_reason"]) == (whole.content, "stop")
    assert whole.usage_metadata["output_tokens"] > 0
    assert isinstance(model.with_structured_output(Dish, method="json_schema").invoke(QUESTION), Dish)
    thinking: Any = ChatOllama(model=MODEL, base_url=host, reasoning=True, num_predict=60)
    assert thinking.invoke("Hi").additional_kwargs["reasoning_content"]
    call = {"name": "Dish", "args": {"name": "soup", "euros": 4}, "id": "one"}  # which nothing makes this model write
    said = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), ToolMessage("done", tool_call_id="one")]
    assert model.bind_tools([Dish]).invoke(said).content
    vectors = OllamaEmbeddings(model=MODEL, base_url=host).embed_documents(["soup", "bread"])
    assert len(vectors) == 2
    assert len(vectors[0]) == len(vectors[1]) > 0


def use_langchain_anthropic(url: str) -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, ToolMessage

    host = url.removesuffix("/v1")
    model: Any = ChatAnthropic(model=MODEL, base_url=host, api_key="none", max_tokens=60, max_retries=0)
    whole = model.invoke(QUESTION)
    assert whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    assert any(part.text for part in model.stream(QUESTION))
    calling = model.bind_tools([Dish], tool_choice="any")
    called = calling.invoke(QUESTION)
    assert called.tool_calls
    for call in called.tool_calls:
        Dish.model_validate(call["args"])
    results = [ToolMessage("done", tool_call_id=call["id"]) for call in called.tool_calls]
    assert model.invoke([HumanMessage(QUESTION), called, *results]).text


CLIENTS: dict[str, Callable[[str], None]] = {
    "openai-agents": use_agents, "instructor": use_instructor, "langchain-openai": use_langchain,
    "langchain-ollama": use_langchain_ollama, "langchain-anthropic": use_langchain_anthropic,
    "pydantic-ai": use_pydantic_ai,
}  # fmt: skip

if __name__ == "__main__":
    CLIENTS[sys.argv[1]](sys.argv[2])
