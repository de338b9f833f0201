"""One streamed answer: pieces of text and thoughts as they come, the calls in it, and what it cost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

import msgspec

from maitred.api.dialects.openai.schemas import TimingMs
from maitred.cli.chat import COMMANDS, ChatOptions, Conversation, Next
from maitred.cli.command import Options
from maitred.cli.console import dim, inert
from maitred.cli.endpoint import (
    DONE,
    Endpoint,
    HttpEndpoint,
    ServerRefused,
    SSEParser,
    Unreachable,
    error_text,
    first_model,
)
from maitred.cli.flags import UsageError
from maitred.cli.local import engine_config, local_endpoint, refuse_engine_flags, start_engine
from maitred.config import ModelConfig
from maitred.core.errors import ConfigError, MaitredError, ServerError
from maitred.model.packaged import PACKAGED

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


CHAT_PATH = "/v1/chat/completions"
MIN_RATE_TOKENS = 8  # of fewer, a rate says next to nothing
WHOLE = ("stop", "tool_calls")  # how an answer ends whose calls are complete


class ShownText(NamedTuple):
    text: str
    is_thought: bool = False


@dataclass(slots=True)
class StreamedCall:
    """One call of a tool; `arguments` is JSON text that grows while it streams."""

    index: int
    id: str
    name: str = ""
    arguments: str = ""

    def message(self) -> dict[str, object]:
        """The call as the API wants it back, in the message of the assistant."""
        function = {"name": self.name, "arguments": self.arguments or "{}"}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class StreamedAnswer:
    """Grows while `stream` runs."""

    text: str = ""
    thoughts: str = ""
    calls: list[StreamedCall] = field(default_factory=list)
    num_tokens: int | None = None  # as the server counts them
    timing: TimingMs | None = None  # from the engine's clock; other servers tell none
    finish_reason: str | None = None
    asked_at: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    last_at: float | None = None

    def message(self) -> dict[str, object] | None:
        """The answer as the API wants it back; None where there is nothing to send. Broken-off calls are left out."""
        calls = [call.message() for call in self.calls] if self.finish_reason in WHOLE else []
        if not (self.text or calls):
            return None
        message: dict[str, object] = {"role": "assistant", "content": self.text or None}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        return message | ({"tool_calls": calls} if calls else {})

    def describe(self) -> str:
        """`first token 80 ms, 42 tokens, 35.1 tokens/s, 2 ms in the queue`.

        When chunks arrive says little of when tokens were made, so of a server that tells no times there is no rate:
        `first text 80 ms, 42 tokens in 1.25 s`.
        """
        if self.first_at is None or self.last_at is None:
            return "no tokens"
        count = [] if self.num_tokens is None else [f"{self.num_tokens} tokens"]
        if self.timing is not None:
            parts = [f"first token {self.timing.ttft:.0f} ms", *count, *self._rate(self.timing)]
            parts.append(f"{self.timing.queue:.0f} ms in the queue")
        else:
            took = " ".join([*count, f"in {self.last_at - self.asked_at:.2f} s"])
            parts = [f"first text {1000 * (self.first_at - self.asked_at):.0f} ms", took]
        if self.finish_reason == "length":
            parts.append("cut at the length limit")
        return ", ".join(parts)

    def _rate(self, timing: TimingMs) -> Iterator[str]:
        """Rate of the tokens after the first, where there are enough of them."""
        parts_ms = timing.queue + timing.schedule + timing.prefill + timing.decode + timing.stall
        after_first_ms = parts_ms - timing.ttft
        if self.num_tokens is not None and self.num_tokens >= MIN_RATE_TOKENS and after_first_ms > 0:
            yield f"{1000 * (self.num_tokens - 1) / after_first_ms:,.1f} tokens/s"

    async def stream(self, endpoint: Endpoint, request: Mapping[str, object]) -> AsyncIterator[ShownText]:
        """Thoughts and text, piece by piece. Raises Refused, Unreachable or ServerError."""
        parser = SSEParser()
        async with endpoint.post(CHAT_PATH, msgspec.json.encode(request)) as reply:
            if reply.status != 200:
                raise ServerRefused(reply.status, error_text(reply.status, await reply.read()))
            async for piece in reply.body:
                for data in parser.feed(piece):
                    if data != DONE:
                        for taken in self._take(data):
                            yield taken
        if self.finish_reason is None:
            raise Unreachable("the answer ended too early; see the server's log")

    def _take(self, data: bytes) -> list[ShownText]:
        event = _decoded(data)
        if "error" in event:
            raise ServerError(error_text(500, data))
        pieces: list[ShownText] = []
        for choice in event.get("choices") or ():
            pieces += self._grow(choice.get("delta") or {})
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if usage := event.get("usage"):
            self.num_tokens = usage.get("completion_tokens")
            self.timing = _timing(usage.get("timing_ms"))
        return pieces

    def _grow(self, delta: Mapping[str, Any]) -> Iterator[ShownText]:
        """Thoughts come under two names, of which servers send either or both."""
        thoughts = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        calls = delta.get("tool_calls") or ()
        if thoughts or text or calls:
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at
        self.thoughts += thoughts
        self.text += text
        for piece in calls:
            self._grow_call(piece)
        if thoughts:
            yield ShownText(thoughts, is_thought=True)
        if text:
            yield ShownText(text)

    def _grow_call(self, piece: Mapping[str, Any]) -> None:
        index = piece.get("index", len(self.calls))
        call = next((call for call in self.calls if call.index == index), None)
        if call is None:
            is_taken = any(call.id == piece.get("id") for call in self.calls)
            call = StreamedCall(index, f"call_{index}" if is_taken or not piece.get("id") else piece["id"])
            self.calls.append(call)
        function = piece.get("function") or {}
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""


def _timing(told: object) -> TimingMs | None:
    """None where there is none, or one that another kind of server means otherwise."""
    try:
        return msgspec.convert(told, TimingMs)
    except msgspec.ValidationError:
        return None


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(data)
    except msgspec.DecodeError:
        event = None
    if not isinstance(event, dict):
        raise ServerError("the server's stream is not what OpenAI's API sends; check --url")
    return event


class Terminal(Protocol):
    """The person's side, as a chat needs it."""

    interactive: bool

    async def read(self) -> str | None:
        """Text as typed; None when the person leaves."""

    def show(self, text: str) -> None:
        """A piece of the answer, as it comes."""

    def think(self, text: str) -> None:
        """A piece of the thoughts before the answer, as it comes."""

    def tell(self, text: str) -> None:
        """A line from us, not from the model."""

    def remark(self, text: str) -> None:
        """A line that only someone at a terminal wants."""


def open_terminal() -> Terminal:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a lone surrogate must not end the chat
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return PipeTerminal(sys.stdin, sys.stdout)
    return ScreenTerminal()


class PipeTerminal:
    """One question a line (a backslash at its end continues it), answers without colours."""

    interactive: bool = False

    def __init__(self, source: TextIO, sink: TextIO) -> None:
        self._source, self._sink = source, sink

    async def read(self) -> str | None:
        lines: list[str] = []
        while line := self._read_line():
            line = line.rstrip("\n")
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        return "\n".join(lines) if lines else None

    def _read_line(self) -> str:
        """Blocks, in this thread: nothing else waits on our event loop, and a thread stuck here could not be ended.

        asyncio's own handler of Ctrl-C would only set a flag, so for this long Python's raises at once.
        """
        with suppress(ValueError):  # not the main thread
            previous = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                return self._source.readline()
            finally:
                signal.signal(signal.SIGINT, previous)
        return self._source.readline()

    def show(self, text: str) -> None:
        self._sink.write(inert(text))
        self._sink.flush()

    def think(self, text: str) -> None:
        """Print nothing: a pipe's reader wants the answer alone."""

    def tell(self, text: str) -> None:
        print(inert(text), file=sys.stderr, flush=True)

    def remark(self, text: str) -> None:
        pass


class ScreenTerminal:
    """A person at a keyboard: line editing, history and completion by prompt_toolkit."""

    interactive: bool = True

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.formatted_text import ANSI

        self._session: PromptSession[str] = PromptSession(
            ANSI("\x1b[1;36m>\x1b[0m "),
            history=self._history(),
            multiline=True,
            prompt_continuation=lambda width, line_number, is_soft_wrap: "  ",
            key_bindings=_key_bindings(),
            completer=WordCompleter(list(COMMANDS), sentence=True),
            complete_while_typing=False,
        )

    def _history(self) -> History:
        """History in a file; where that cannot be written, of this chat alone."""
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        try:
            return FileHistory(str(history_file(os.environ)))
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home at all
            self.remark(f"no history is kept ({error}); XDG_STATE_HOME names a folder for it")
            return InMemoryHistory()

    async def read(self) -> str | None:
        try:
            return await self._session.prompt_async()
        except KeyboardInterrupt:
            self.remark("Ctrl-D or /exit leaves")
            return ""
        except EOFError:
            return None

    def show(self, text: str) -> None:
        sys.stdout.write(inert(text))
        sys.stdout.flush()

    def think(self, text: str) -> None:
        sys.stdout.write(dim(inert(text)))
        sys.stdout.flush()

    def tell(self, text: str) -> None:
        print(inert(text), flush=True)

    def remark(self, text: str) -> None:
        print(dim(inert(text)), flush=True)


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def history_file(environ: Mapping[str, str]) -> Path:
    """History file under XDG_STATE_HOME, readable by its owner alone. Raises OSError where it cannot be written."""
    state = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "maitred"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "chat_history"
    path.touch(mode=0o600)
    path.open("a+b").close()
    return path


def run_chat(options: Options) -> int:
    chat = options[ChatOptions]
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
    answer, asked = StreamedAnswer(), ""
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


async def _show(answer: StreamedAnswer, endpoint: Endpoint, request: Mapping[str, object], terminal: Terminal) -> None:
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
