"""The flags of `maitred chat`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import Any

from maitred.cli.command import Command, deferred
from maitred.cli.flags import option
from maitred.cli.local import ENGINE_PARTS
from maitred.core.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The conversation"""

    url: str | None = option(None, metavar="URL")
    """Talk to the server at this URL; None loads the model in this process."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """Key for the server at --url."""
    system: str | None = None
    """System prompt."""
    schema: str | None = option(None, metavar="FILE")
    """File with a JSON schema that every answer follows."""
    tools: str | None = option(None, metavar="FILE")
    """File with a JSON array of tools, as the API takes them; calls are shown, and what is typed next is the result."""
    set: Mapping[str, object] = field(default_factory=dict)
    """Settings to begin with, as /set takes them: temperature, top_p, max_tokens, seed, ..."""


COMMAND = Command(
    path="chat",
    summary="Talk to a model in the terminal. Alt+Enter or a backslash at the end starts a new line; /help lists more.",
    run=deferred("maitred.cli.chat_session:run_chat"),
    parts=(ChatOptions, *ENGINE_PARTS),
    positional="model",
    first=("url", "api_key", "system", "schema", "tools", "set", "model", "dtype", "max_model_len", "num_threads"),
    examples=(
        "maitred chat",
        "maitred chat ./Llama-3.2-1B --system 'Answer in one sentence.' --set temperature=0.2",
        "maitred chat --url http://127.0.0.1:8000",
        "maitred chat --schema order.json",
        "echo 'What is a maitre d?' | maitred chat",
    ),
)


# setting -> (how its word is read, what it does); ranges are the server's business
SETTINGS: dict[str, tuple[Callable[[str], object], str]] = {
    "temperature": (float, "0 is greedy, larger is more random"),
    "top_p": (float, "smallest set of tokens whose probability reaches this"),
    "top_k": (int, "keep this many most likely tokens"),
    "min_p": (float, "drop tokens less likely than this share of the likeliest"),
    "max_tokens": (int, "longest answer in tokens"),
    "seed": (int, "same seed, same answer"),
    "stop": (str, "text that ends the answer"),
    "presence_penalty": (float, "discourages tokens already used"),
    "frequency_penalty": (float, "discourages tokens by how often they were used"),
    "repetition_penalty": (float, "over 1 discourages repetition"),
}
HELP = """\
/help             this list
/set NAME VALUE   change a setting, or `system`; /set alone lists them
/unset NAME       back to the model's default
/show             settings and length of the conversation
/reset, /clear    forget the conversation, keep the settings
/retry            answer the last question anew
/save FILE        write the conversation; .json holds the messages, other names a transcript
/exit, /bye       leave, as Ctrl-D does
Alt+Enter or a backslash at the end of the line starts a new line; Ctrl-C stops an answer.
After a call of a tool, the next line is its result; /retry drops the call."""


class Next(Enum):
    READ = "read"  # the next line
    ASK = "ask"  # send the messages
    LEAVE = "leave"


@dataclass(slots=True)
class TypedOutcome:
    """Outcome of a typed line."""

    next: Next
    text: str = ""  # for the person


@dataclass(slots=True)
class Conversation:
    """Messages so far and the settings of the next answer."""

    system: str | None = None
    settings: dict[str, object] = field(default_factory=dict)
    shape: Mapping[str, object] = field(default_factory=dict)  # of answers: fields of each request
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def pending(self) -> list[dict[str, Any]]:
        """The calls of the last answer that have no result yet, in their order."""
        results = [message["tool_call_id"] for message in takewhile(_is_result, reversed(self.messages))]
        if len(results) == len(self.messages):
            return []
        calls = self.messages[-1 - len(results)].get("tool_calls", [])
        return [call for call in calls if call["id"] not in results]

    def take(self, line: str) -> TypedOutcome:
        """One line (or several, if typed so) from the person: a question, a command, or the result of a call."""
        if not line.strip():
            return TypedOutcome(Next.READ)
        if not line.startswith("/") or line.startswith("//"):
            return self._heard(line.removeprefix("/") if line[0] == "/" else line)
        name, _, rest = line.strip().partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            return TypedOutcome(Next.READ, f"no command {name}{did_you_mean(name, list(COMMANDS))}; /help lists them")
        try:
            return command(self, rest.strip())
        except ConfigError as error:
            return TypedOutcome(Next.READ, str(error))

    def _heard(self, text: str) -> TypedOutcome:
        if not (pending := self.pending):
            self.messages.append({"role": "user", "content": text})
            return TypedOutcome(Next.ASK)
        self.messages.append({"role": "tool", "tool_call_id": pending[0]["id"], "content": text})
        return TypedOutcome(Next.READ, _asked(pending[1])) if pending[1:] else TypedOutcome(Next.ASK)

    def request(self, model: str) -> dict[str, object]:
        """The body for /v1/chat/completions."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": model,
            "messages": [*system, *self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.shape,
            **self.settings,
        }

    def answered(self, message: dict[str, Any]) -> str:
        """Append an answer; return what the person is asked now: the first call's result, or nothing."""
        self.messages.append(message)
        return _asked(pending[0]) if (pending := self.pending) else ""

    def failed(self) -> None:
        """No answer came: the question, or the last result, is taken back, so that the next one stands alone."""
        if self.messages and self.messages[-1]["role"] in ("user", "tool"):
            self.messages.pop()

    def set(self, name: str, word: str) -> None:
        """Raises ConfigError for an unknown name or a value of the wrong type."""
        if name == "system":
            self.system = word
            return
        if name not in SETTINGS:
            raise ConfigError(f"no setting {name!r}{did_you_mean(name, [*SETTINGS, 'system'])}; /set lists them")
        try:
            self.settings[name] = SETTINGS[name][0](word)
        except ValueError:
            kind = "a whole number" if SETTINGS[name][0] is int else "a number"
            raise ConfigError(f"{name} is {word!r}; it must be {kind}") from None

    def set_all(self, values: Mapping[str, object]) -> None:
        for name, value in values.items():
            self.set(name, str(value))


def _is_result(message: Mapping[str, object]) -> bool:
    return message["role"] == "tool"


def _asked(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return f"calls {function['name']}({function['arguments']}); what does it give?"


# ---- the commands


def _help(conversation: Conversation, rest: str) -> TypedOutcome:
    return TypedOutcome(Next.READ, HELP)


def _set(conversation: Conversation, rest: str) -> TypedOutcome:
    name, _, word = rest.replace("=", " ", 1).partition(" ")
    if not name:
        lines = [f"{name:20}{doc}" for name, (_, doc) in SETTINGS.items()]
        return TypedOutcome(
            Next.READ, "\n".join([*lines, f"{'system':20}what the model is told before everything else"])
        )
    if not word.strip():
        raise ConfigError(f"/set {name} needs a value, for example /set temperature 0.2")
    conversation.set(name, word.strip())
    return TypedOutcome(Next.READ, f"{name} is {word.strip()}")


def _unset(conversation: Conversation, rest: str) -> TypedOutcome:
    if rest == "system":
        conversation.system = None
    elif conversation.settings.pop(rest, None) is None:
        raise ConfigError(f"{rest or 'nothing'} is not set; /show lists what is")
    return TypedOutcome(Next.READ, f"{rest} is the default again")


def _show(conversation: Conversation, rest: str) -> TypedOutcome:
    lines = [f"{name} = {value}" for name, value in conversation.settings.items()] or ["all settings are the defaults"]
    if conversation.system:
        lines.append(f"system = {conversation.system}")
    return TypedOutcome(Next.READ, "\n".join([*lines, f"{len(conversation.messages)} messages"]))


def _reset(conversation: Conversation, rest: str) -> TypedOutcome:
    conversation.messages.clear()
    return TypedOutcome(Next.READ, "the conversation is forgotten")


def _retry(conversation: Conversation, rest: str) -> TypedOutcome:
    while conversation.pending and _is_result(conversation.messages[-1]):
        conversation.messages.pop()  # not all the results are there: the calls go as well
    if conversation.messages and conversation.messages[-1]["role"] == "assistant":
        conversation.messages.pop()
    if not conversation.messages:
        raise ConfigError("there is no question to answer anew")
    return TypedOutcome(Next.ASK)


def _save(conversation: Conversation, rest: str) -> TypedOutcome:
    if not rest:
        raise ConfigError("/save needs a file name, for example /save talk.json")
    path = Path(rest).expanduser()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_as_json(conversation) if path.suffix == ".json" else _as_transcript(conversation))
    except FileExistsError:
        raise ConfigError(f"{path} exists; choose another name") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; choose another name") from None
    return TypedOutcome(Next.READ, f"saved in {path}")


def _as_json(conversation: Conversation) -> str:
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    return json.dumps([*system, *conversation.messages], ensure_ascii=False, indent=2) + "\n"


def _as_transcript(conversation: Conversation) -> str:
    return "".join(f"{message['role']}:\n{_spoken(message)}\n\n" for message in conversation.messages)


def _spoken(message: Mapping[str, Any]) -> str:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [f"{function['name']}({function['arguments']})" for function in functions]
    return "\n".join([message["content"], *calls] if message["content"] else calls)


def _exit(conversation: Conversation, rest: str) -> TypedOutcome:
    return TypedOutcome(Next.LEAVE)


COMMANDS: dict[str, Callable[[Conversation, str], TypedOutcome]] = {
    "/help": _help,
    "/set": _set,
    "/unset": _unset,
    "/show": _show,
    "/reset": _reset,
    "/clear": _reset,
    "/retry": _retry,
    "/save": _save,
    "/exit": _exit,
    "/quit": _exit,
    "/bye": _exit,
}
