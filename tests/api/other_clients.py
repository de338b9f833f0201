"""Asks a server for an answer that fits a schema, and for a call of a tool, whole and streamed, as one client does it;
or for a stream of every client at once.

    python tests/api/other_clients.py CLIENT URL
    python tests/api/other_clients.py streams URL MODEL

Run in the environment of benchmarks/fetch_inputs.py, which has nothing of ours; what fails raises. `streams` says
`begun` once there is something of each, and at the end prints of each its text and its counters.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

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


STORY, MOST = "Tell a long story of the sea.", 320
Pieces = AsyncIterator[Any]  # texts, then the counters of prompt and answer


async def pieces_of_openai(client: openai.AsyncOpenAI, name: str) -> Pieces:
    asked: Any = {"model": name, "messages": [{"role": "user", "content": STORY}], "temperature": 0, "max_tokens": MOST}
    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        for choice in chunk.choices:
            yield choice.delta.content or ""
    yield chunk.usage.prompt_tokens, chunk.usage.completion_tokens


async def pieces_of_anthropic(host: str, name: str) -> Pieces:
    import anthropic

    client = anthropic.AsyncAnthropic(base_url=host, api_key="none", max_retries=0)
    asked: Any = {"model": name, "max_tokens": MOST, "messages": [{"role": "user", "content": STORY}]}
    async with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
        async for text in stream.text_stream:
            yield text
        usage = (await stream.get_final_message()).usage
    yield usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens


async def pieces_of_ollama(host: str, name: str) -> Pieces:
    import ollama

    asked: Any = {"options": {"temperature": 0, "num_predict": MOST}, "stream": True}
    async for part in await ollama.AsyncClient(host).chat(name, [{"role": "user", "content": STORY}], **asked):
        yield part.message.content
    yield part.prompt_eval_count, part.eval_count


async def pieces_of_langchain(model: Any) -> Pieces:
    first, texts = None, 0
    async for chunk in model.astream(STORY):
        first = chunk if first is None else first + chunk
        texts += bool(chunk.text)
        yield chunk.text
    yield first.usage_metadata["input_tokens"], first.usage_metadata["output_tokens"]


class Story(pydantic.BaseModel):
    """What is told where a stream must come to its own end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sentences: list[Annotated[str, pydantic.Field(max_length=60)]] = pydantic.Field(min_length=16, max_length=16)


async def pieces_of_agents(kind: Any, client: openai.AsyncOpenAI, name: str) -> Pieces:
    import agents

    agents.set_tracing_disabled(True)
    settings, model = agents.ModelSettings(temperature=0, include_usage=True), kind(model=name, openai_client=client)
    agent: Any = agents.Agent(name="teller", model=model, output_type=Story, model_settings=settings)
    result, told = agents.Runner.run_streamed(agent, STORY), ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            told += event.data.delta
            yield event.data.delta
    assert result.final_output == Story.model_validate_json(told)
    usage = result.context_wrapper.usage
    yield usage.input_tokens, usage.output_tokens


async def pieces_of_pydantic_ai(model: Any) -> Pieces:
    from pydantic_ai import Agent

    asking: Any = Agent(model, model_settings={"temperature": 0, "max_tokens": MOST})
    async with asking.run_stream(STORY) as result:
        async for text in result.stream_text(delta=True, debounce_by=None):
            yield text
        usage = result.usage() if callable(result.usage) else result.usage
        yield usage.input_tokens, usage.output_tokens


async def pieces_of_instructor(client: Any, name: str) -> Pieces:
    ask: Any = {"model": name, "messages": [{"role": "user", "content": STORY}], "temperature": 0, "max_retries": 0}
    told = Story.model_construct(sentences=[])
    async for state in client.chat.completions.create_partial(response_model=Story, **ask):
        told = state
        yield "." if told.sentences else ""
    yield Story.model_validate(told.model_dump()).sentences  # counters are not told


def streams_of(url: str, name: str) -> dict[str, Pieces]:
    import agents
    import instructor
    from langchain_anthropic import ChatAnthropic
    from langchain_ollama import ChatOllama
    from langchain_openai import ChatOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    host, plain = url.removesuffix("/v1"), openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    provider, common = OpenAIProvider(openai_client=plain), {"temperature": 0, "max_retries": 0}
    of_openai: Any = {
        "model": name,
        "base_url": url,
        "api_key": "none",
        "max_tokens": MOST,
        "stream_usage": True,
    } | common
    return {
        "openai": pieces_of_openai(plain, name),
        "anthropic": pieces_of_anthropic(host, name),
        "ollama": pieces_of_ollama(host, name),
        "openai-agents, chats": pieces_of_agents(agents.OpenAIChatCompletionsModel, plain, name),
        "openai-agents, responses": pieces_of_agents(agents.OpenAIResponsesModel, plain, name),
        "langchain-openai, chats": pieces_of_langchain(ChatOpenAI(**of_openai)),
        "langchain-openai, responses": pieces_of_langchain(ChatOpenAI(**of_openai, use_responses_api=True)),
        "langchain-anthropic": pieces_of_langchain(
            ChatAnthropic(model=name, base_url=host, api_key="none", max_tokens=MOST, **common)
        ),
        "langchain-ollama": pieces_of_langchain(ChatOllama(model=name, base_url=host, num_predict=MOST, temperature=0)),
        "pydantic-ai, chats": pieces_of_pydantic_ai(OpenAIChatModel(name, provider=provider)),
        "pydantic-ai, responses": pieces_of_pydantic_ai(OpenAIResponsesModel(name, provider=provider)),
        "instructor": pieces_of_instructor(instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA), name),
    }


async def have_streams(url: str, name: str) -> dict[str, Any]:
    """Text and counters of each stream."""
    streams = streams_of(url, name)
    to_begin = set(streams)

    async def have(client: str) -> tuple[str, Any]:
        had: list[Any] = []
        async for piece in streams[client]:
            had.append(piece)
            if piece and client in to_begin:
                to_begin.remove(client)
                if not to_begin:
                    print("begun", flush=True)  # noqa: T201
        return "".join(had[:-1]).strip("."), had[-1]

    return dict(zip(streams, await asyncio.gather(*map(have, streams)), strict=True))


if __name__ == "__main__":
    if sys.argv[1] == "streams":
        print(json.dumps(asyncio.run(have_streams(*sys.argv[2:]))))  # noqa: T201
    else:
        CLIENTS[sys.argv[1]](sys.argv[2])
