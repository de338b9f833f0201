"""The state of a chat and its slash commands: no terminal, no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from maitred.errors import ConfigError, did_you_mean

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
Alt+Enter or a backslash at the end of the line starts a new line; Ctrl-C stops an answer."""


class Next(Enum):
    READ = "read"  # the next line
    ASK = "ask"  # send the messages
    LEAVE = "leave"


@dataclass(slots=True)
class Outcome:
    """Outcome of a typed line."""

    next: Next
    text: str = ""  # for the person


@dataclass(slots=True)
class Conversation:
    """Messages so far and the settings of the next answer."""

    system: str | None = None
    settings: dict[str, object] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def take(self, line: str) -> Outcome:
        """One line (or several, if typed so) from the person."""
        if not line.strip():
            return Outcome(Next.READ)
        if not line.startswith("/") or line.startswith("//"):
            self.messages.append({"role": "user", "content": line.removeprefix("/") if line[0] == "/" else line})
            return Outcome(Next.ASK)
        name, _, rest = line.strip().partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            return Outcome(Next.READ, f"no command {name}{did_you_mean(name, list(COMMANDS))}; /help lists them")
        try:
            return command(self, rest.strip())
        except ConfigError as error:
            return Outcome(Next.READ, str(error))

    def request(self, model: str) -> dict[str, object]:
        """The body for /v1/chat/completions."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": model,
            "messages": [*system, *self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.settings,
        }

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def failed(self) -> None:
        """No answer came: the question is taken back, so that the next one stands alone."""
        if self.messages and self.messages[-1]["role"] == "user":
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


# ---- the commands


def _help(conversation: Conversation, rest: str) -> Outcome:
    return Outcome(Next.READ, HELP)


def _set(conversation: Conversation, rest: str) -> Outcome:
    name, _, word = rest.replace("=", " ", 1).partition(" ")
    if not name:
        lines = [f"{name:20}{doc}" for name, (_, doc) in SETTINGS.items()]
        return Outcome(Next.READ, "\n".join([*lines, f"{'system':20}what the model is told before everything else"]))
    if not word.strip():
        raise ConfigError(f"/set {name} needs a value, for example /set temperature 0.2")
    conversation.set(name, word.strip())
    return Outcome(Next.READ, f"{name} is {word.strip()}")


def _unset(conversation: Conversation, rest: str) -> Outcome:
    if rest == "system":
        conversation.system = None
    elif conversation.settings.pop(rest, None) is None:
        raise ConfigError(f"{rest or 'nothing'} is not set; /show lists what is")
    return Outcome(Next.READ, f"{rest} is the default again")


def _show(conversation: Conversation, rest: str) -> Outcome:
    lines = [f"{name} = {value}" for name, value in conversation.settings.items()] or ["all settings are the defaults"]
    if conversation.system:
        lines.append(f"system = {conversation.system}")
    return Outcome(Next.READ, "\n".join([*lines, f"{len(conversation.messages)} messages"]))


def _reset(conversation: Conversation, rest: str) -> Outcome:
    conversation.messages.clear()
    return Outcome(Next.READ, "the conversation is forgotten")


def _retry(conversation: Conversation, rest: str) -> Outcome:
    if conversation.messages and conversation.messages[-1]["role"] == "assistant":
        conversation.messages.pop()
    if not conversation.messages:
        raise ConfigError("there is no question to answer anew")
    return Outcome(Next.ASK)


def _save(conversation: Conversation, rest: str) -> Outcome:
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
    return Outcome(Next.READ, f"saved in {path}")


def _as_json(conversation: Conversation) -> str:
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    return json.dumps([*system, *conversation.messages], ensure_ascii=False, indent=2) + "\n"


def _as_transcript(conversation: Conversation) -> str:
    return "".join(f"{message['role']}:\n{message['content']}\n\n" for message in conversation.messages)


def _exit(conversation: Conversation, rest: str) -> Outcome:
    return Outcome(Next.LEAVE)


COMMANDS: dict[str, Callable[[Conversation, str], Outcome]] = {
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
