"""The loop of `maitred chat`: read, ask, show, until the person leaves."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from maitred.cli.chat.answer import Answer
from maitred.cli.chat.conversation import Conversation, Next
from maitred.cli.chat.options import ChatOptions
from maitred.cli.chat.terminal import Terminal, open_terminal
from maitred.cli.command import Options
from maitred.cli.endpoint import Endpoint, HttpEndpoint, first_model
from maitred.cli.flags import UsageError
from maitred.cli.local import engine_config, local_endpoint, refuse_engine_flags, start_engine
from maitred.config import ModelConfig
from maitred.core.errors import ConfigError, MaitredError
from maitred.model.packaged import PACKAGED


def run_chat(options: Options, chat: ChatOptions) -> int:
    conversation = Conversation(system=chat.system, shape=shape_of(chat))
    try:
        conversation.set_all(chat.set)
    except ConfigError as error:
        raise UsageError(f"--set: {error}") from None
    terminal = open_terminal()
    num_failed = asyncio.run(_chat(options, chat, conversation, terminal))
    return 1 if num_failed and not terminal.interactive else 0


def shape_of(chat: ChatOptions) -> dict[str, object]:
    """The fields of a request that say what an answer may be. Raises UsageError for a file that is no such thing."""
    shape: dict[str, object] = {}
    if chat.schema is not None:
        schema = _json_file("--schema", chat.schema, dict, "a JSON schema is an object")
        shape["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if chat.tools is not None:
        shape["tools"] = _json_file("--tools", chat.tools, list, "tools are an array, as the API takes them")
    return shape


def _json_file(flag: str, name: str, kind: type, words: str) -> object:
    try:
        found = json.loads(Path(name).expanduser().read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{flag} {name}: {error.strerror}; name a file that can be read") from None
    except ValueError as error:
        raise UsageError(f"{flag} {name}: it is not valid JSON: {error}") from None
    if not isinstance(found, kind):
        raise UsageError(f"{flag} {name}: {words}, this is {type(found).__name__}")
    return found


async def _chat(options: Options, chat: ChatOptions, conversation: Conversation, terminal: Terminal) -> int:
    async with _open(options, chat, terminal) as (endpoint, model):
        packaged = PACKAGED.get(model)
        first = f'ask "{packaged.question}"; ' if packaged is not None and packaged.question else ""
        terminal.remark(f"{model}; {first}/help lists the commands, Ctrl-D leaves")
        return await talk(endpoint, model, conversation, terminal)


@asynccontextmanager
async def _open(options: Options, chat: ChatOptions, terminal: Terminal) -> AsyncIterator[tuple[Endpoint, str]]:
    """The server at the URL, or the model in this process; and the model's name."""
    if chat.url is not None:
        refuse_engine_flags(options, allowed=("--model",))
        async with HttpEndpoint(chat.url, api_key=chat.api_key) as remote:
            yield remote, options[ModelConfig].model or await first_model(remote)
        return
    engine = start_engine(engine_config(options), on_event=terminal.remark)
    async with local_endpoint(engine, options) as local:
        yield local, engine.model.names[0]


async def talk(endpoint: Endpoint, model: str, conversation: Conversation, terminal: Terminal) -> int:
    """Chat until the person leaves; gives the number of questions that got no whole answer."""
    num_failed = 0
    while (line := await terminal.read()) is not None:
        outcome = conversation.take(line)
        if outcome.text:
            terminal.tell(outcome.text)
        if outcome.next is Next.LEAVE:
            break
        if outcome.next is Next.ASK:
            num_failed += not await _ask(endpoint, model, conversation, terminal)
    return num_failed


async def _ask(endpoint: Endpoint, model: str, conversation: Conversation, terminal: Terminal) -> bool:
    answer, asked = Answer(), ""
    task = asyncio.create_task(_show(answer, endpoint, conversation.request(model), terminal))
    try:
        await _until_done_or_interrupted(task)
    except MaitredError as error:
        terminal.show("\n" if answer.text else "")
        terminal.tell(f"error: {error}")
    finally:
        if message := answer.message():
            asked = conversation.answered(message)
        else:
            conversation.failed()
    if task.cancelled():
        terminal.tell("\n(stopped)")
        return False
    if task.exception() is not None:
        return False
    terminal.show("\n" if answer.text or not asked else "")
    terminal.remark(answer.describe())
    if asked:
        terminal.tell(asked)
    return True


async def _show(answer: Answer, endpoint: Endpoint, request: Mapping[str, object], terminal: Terminal) -> None:
    """Thoughts stand on lines of their own before the text."""
    was_thought = False
    async for text, is_thought in answer.stream(endpoint, request):
        if was_thought and not is_thought:
            terminal.think("\n\n")
        was_thought = is_thought
        if is_thought:
            terminal.think(text)
        else:
            terminal.show(text)
    if was_thought:
        terminal.think("\n")


async def _until_done_or_interrupted(task: asyncio.Task[None]) -> None:
    """Ctrl-C stops the answer, not the chat."""
    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError, ValueError, RuntimeError):  # Windows, or not the main thread
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()
        with suppress(NotImplementedError, ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)
    if not task.cancelled():
        task.result()
