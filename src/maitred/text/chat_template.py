"""Renders messages to a prompt with the model's own Jinja template, as transformers does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.exceptions

from maitred.core.errors import CheckpointError, InvalidRequest, UnsupportedContent
from maitred.text.answer_format import AnswerFormat, CallFormat, Marked, Slot, plain
from maitred.text.folder import read_chat_template, read_named_tokens
from maitred.text.marks import HiddenMarks, MarkedText, Marks, is_bracketed
from maitred.text.sandbox import LimitReached, TemplateSandbox

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class CallStyle(Enum):
    """A template's form of calls: whether arguments are text, and what stands for missing content."""

    OBJECTS_NO_CONTENT = (False, None)
    OBJECTS = (False, "")
    TEXTS_NO_CONTENT = (True, None)
    TEXTS = (True, "")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies in which content is text (or None) and calls hold objects. A tool's message has the name of its
    tool.

    Raises InvalidRequest with the path for calls that are none, UnsupportedContent for parts that are not text.
    """
    chat = [_plain_message(message, index) for index, message in enumerate(messages)]
    names: dict[Any, str] = {}
    for message in chat:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
        if message.get("role") == "tool" and message.get("name") is None and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return chat


def styled(chat: Sequence[Mapping[str, Any]], style: CallStyle) -> list[dict[str, Any]]:
    """Return copies with calls as a template of this style takes them."""
    return [_styled(message, style) if message.get("tool_calls") else dict(message) for message in chat]


def _styled(message: Mapping[str, Any], style: CallStyle) -> dict[str, Any]:
    as_text, no_content = style.value
    calls = [(_with_text if as_text else _with_object)(call) for call in message["tool_calls"]]
    return {**message, "content": message.get("content") or no_content, "tool_calls": calls}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    return {**call, "function": {**call["function"], "arguments": {} if isinstance(arguments, str) else arguments}}


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    plain = dict(message)
    if isinstance(plain.get("content"), Sequence) and not isinstance(plain["content"], str):
        plain["content"] = "\n".join(_part_text(part, index) for part in plain["content"])
    reasoning = next((plain[name] for name in _REASONING_FIELDS if plain.get(name) is not None), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    if plain.get("tool_calls"):
        plain["tool_calls"] = _plain_calls(plain["tool_calls"], f"messages[{index}].tool_calls")
    else:
        plain.pop("tool_calls", None)  # templates ask whether there is the field
    return plain


def _plain_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequest(f"{path} must be a list", param=path)
    return [_plain_call(call, f"{path}[{number}]") for number, call in enumerate(calls)]


def _plain_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{path}.function must be an object with a name and arguments", param=f"{path}.function")
    arguments = arguments_of(function.get("arguments"), f"{path}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_of(arguments: Any, path: str) -> Mapping[str, Any] | str:
    """Arguments as an object; text that is none, as a call that was cut has, stays text. Raises InvalidRequest."""
    try:
        value = json.loads(arguments or "{}", parse_constant=_refused) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return str(arguments)
    if value is None:
        return {}
    if isinstance(arguments, str) and not isinstance(value, Mapping):
        return arguments
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{path} must be a JSON object, it is a {type(value).__name__}", param=path)
    return value


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _part_text(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise UnsupportedContent(
            f"messages[{index}] has a content part of type {kind!r}; this model takes only text", param="messages"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"messages[{index}] has a content part of type 'text' without text", param="messages")
    return text


_NO_MARKS = Marks(())
_Message = Mapping[str, Any]


def with_tools(
    format: AnswerFormat, messages: Sequence[_Message], tools: Sequence[_Message] | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables that `ChatTemplate.render` takes, so that its model hears of the tools, and of calls.

    Raises as `plain_messages` does.
    """
    chat = plain_messages(messages)
    if not format.writes_calls and format.calls is not None:
        chat = [_as_content(message, format, format.calls) for message in chat]
        chat = _alternating(chat) if format.tools_system_text else chat
    if not tools:
        return chat, {}
    if format.tools_system_text is not None:
        return _told_first(chat, format.tools_system_text(tools)), {}
    if format.tools_in_system:
        return _told_in_system(chat, tools), {}
    return chat, {format.tools_variable: list(tools)}


def written_calls(format: CallFormat, calls: Sequence[_Message]) -> MarkedText:
    """Calls, as `tool_calls` has them with arguments as objects, as their model writes them.

    Names, ids and values are a client's: what looks like a mark in them is letters.
    """
    pieces: list[tuple[str, bool]] = [(plain(format.begin), False)]
    for number, call in enumerate(calls):
        pieces += [(plain(format.separator), False)] if number else []
        pieces += [(plain(format.call_begin), False), *_written_call(format, call, number)]
        pieces.append((plain(format.call_end), False))
    return _marked_text([*pieces, (plain(format.end), False)])


def _written_call(format: CallFormat, call: _Message, number: int) -> list[tuple[str, bool]]:
    function = call["function"]
    values = {Slot.NAME: function["name"], Slot.ID: call.get("id", ""), Slot.INDEX: str(number + format.index_from)}
    pieces: list[tuple[str, bool]] = []
    for piece in format.call:
        if piece is Slot.PAIRS:
            pieces += _written_pairs(format, function["arguments"])
        elif piece is Slot.ARGUMENTS:
            told = function["arguments"]
            pieces.append((told if isinstance(told, str) else json.dumps(told, ensure_ascii=False), True))
        else:
            pieces.append((values[piece], True) if isinstance(piece, Slot) else (plain((piece,)), False))
    return pieces


def _written_pairs(format: CallFormat, arguments: _Message) -> list[tuple[str, bool]]:
    pairs = format.pairs
    assert pairs is not None
    pieces: list[tuple[str, bool]] = []
    for number, (key, value) in enumerate(arguments.items() if isinstance(arguments, Mapping) else ()):
        is_text = isinstance(value, str)
        begin: Marked = pairs.value_begin if is_text else pairs.value_begin_of.get("object", pairs.value_begin)
        quote = (plain(pairs.quote), False) if is_text else ("", False)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        pieces += [(plain(pairs.separator) if number else "", False), (plain(pairs.key_begin), False), (key, True)]
        pieces += [(plain(begin), False), quote, (text, True), quote, (plain(pairs.value_end), False)]
    return pieces


def _marked_text(pieces: Sequence[tuple[str, bool]]) -> MarkedText:
    spans: list[tuple[int, int]] = []
    at = 0
    for text, is_clients in pieces:
        if is_clients:
            spans.append((at, at + len(text)))
        at += len(text)
    return MarkedText("".join(text for text, _ in pieces), spans, _NO_MARKS)


def _as_content(message: _Message, format: AnswerFormat, calls: CallFormat) -> dict[str, Any]:
    """Calls become content; so do results, where there is no role for them."""
    if message.get("tool_calls"):
        written = written_calls(calls, message["tool_calls"])
        content = message.get("content")
        before = [(content + "\n", True)] if content else []
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**kept, "content": _marked_text([*before, *written.parts()])}
    if message.get("role") != "tool" or format.tool_role == "tool":
        return dict(message)
    if format.tool_role != "user":
        return {**message, "role": format.tool_role}
    return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}


def _alternating(chat: Sequence[_Message]) -> list[dict[str, Any]]:
    """Neighbours of one role made one message: such templates take turns only."""
    made: list[dict[str, Any]] = []
    for message in chat:
        if made and message.get("role") == made[-1].get("role") == "user":
            made[-1] = {**made[-1], "content": f"{made[-1].get('content') or ''}\n{message.get('content') or ''}"}
        else:
            made.append(dict(message))
    return made


def _told_first(chat: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if not chat or chat[0].get("role") not in ("system", "developer", "user"):
        return [{"role": "user", "content": text}, *chat]
    return [{**chat[0], "content": f"{text}\n\n{chat[0].get('content') or ''}"}, *chat[1:]]


def _told_in_system(chat: list[dict[str, Any]], tools: Sequence[_Message]) -> list[dict[str, Any]]:
    told = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if chat and chat[0].get("role") == "system":
        return [{**chat[0], "tools": told}, *chat[1:]]
    return [{"role": "system", "content": "You are a helpful assistant with some tools.", "tools": told}, *chat]


_JOINED = "{% for c in calls %}BEFORE{{ {'name': c.name, 'arguments': c.arguments} | tojson }}AFTER{% endfor %}"
_LISTED = "BEFORE[{% for c in calls %}{{ {'name': c.name, 'arguments': c.arguments} | tojson }}COMMA{% endfor %}]AFTER"
_COMMA = "{{ ', ' if not loop.last }}"
_LINE = "{{ '\\n' if not loop.last }}"


def _joined(before: str, after: str) -> str:
    return _JOINED.replace("BEFORE", before).replace("AFTER", after)


def _listed(before: str, after: str = "") -> str:
    return _LISTED.replace("BEFORE", before).replace("AFTER", after).replace("COMMA", _COMMA)


def _named(before: str, between: str, after: str) -> str:
    return (
        "{% for c in calls %}"
        + before
        + "{{ c.name }}"
        + between
        + "{{ c.arguments | tojson }}"
        + after
        + "{% endfor %}"
    )


def _paired(before: str, key: str, value: str, end: str, after: str) -> str:
    pairs = (
        "{% for k in c.arguments %}"
        + key
        + "{{ k }}"
        + value
        + "{{ (c.arguments[k] if c.arguments[k] is string else c.arguments[k] | tojson) }}"
        + end
        + "{% endfor %}"
    )
    return "{% for c in calls %}" + before + pairs + after + "{% endfor %}"


TOOL_FORMATS: dict[str, str] = {
    "hermes": _joined("<tool_call>\n", "\n</tool_call>" + _LINE),
    "llama3": "{{ {'name': calls[0].name, 'parameters': calls[0].arguments} | tojson }}",
    "mistral": "[TOOL_CALLS][{% for c in calls %}"
    "{{ {'name': c.name, 'arguments': c.arguments, 'id': c.id} | tojson }}" + _COMMA + "{% endfor %}]",
    "mistral_args": _named("[TOOL_CALLS]", "[ARGS]", ""),
    "mistral_call_id": _named("[TOOL_CALLS]", "[CALL_ID]{{ c.id }}[ARGS]", ""),
    "granite": _listed("<|tool_call|>"),
    "phi4_mini": _listed("<|tool_call|>", "<|/tool_call|>"),
    "functools": _listed("functools"),
    "qwen3_coder": _paired(
        "<tool_call>\n<function={{ c.name }}>\n",
        "<parameter=",
        ">\n",
        "\n</parameter>\n",
        "</function>\n</tool_call>" + _LINE,
    ),
    "glm45": _paired(
        "<tool_call>{{ c.name }}\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>" + _LINE
    ),
    "glm47": _paired("<tool_call>{{ c.name }}", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>"),
    "gemma4": "{% for c in calls %}<|tool_call>call:{{ c.name }}{{ '{' }}"
    "{% for k in c.arguments %}{{ k }}:"
    "{{ '<|\"|>' ~ c.arguments[k] ~ '<|\"|>' if c.arguments[k] is string else c.arguments[k] | tojson }}"
    "{{ ',' if not loop.last }}{% endfor %}}<tool_call|>{% endfor %}",
    "deepseek_v3": "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n"
    "```json\n{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜>" + _LINE + "{% endfor %}<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + _named("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    + "<｜tool▁calls▁end｜>",
}
"""`--tool-format` takes these, and `harmony`."""


THOUGHT_MARKS = ("<think>", "</think>", "[THINK]", "[/THINK]")


class Hint(NamedTuple):
    """Facts that templates which hold `sign` do not show."""

    sign: str
    format: str
    tools_variable: str = "tools"
    tools_in_system: bool = False
    tool_role: str = "tool"


HINTS = (
    Hint("xml_tools", "hermes", tools_variable="xml_tools"),  # SmolLM3
    Hint("<|/tool|>", "phi4_mini", tools_in_system=True, tool_role="tool_response"),  # Phi-4-mini
    Hint("<|tool_call|>", "granite"),  # Granite 3
)

UNTAUGHT_FORMAT = "hermes"
"""Texts for a template without tools, beside `tools_system_text`."""


def tools_system_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tells a model that was taught no calls how to write them."""
    told = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions, one JSON object a line:\n"
        f"<tools>\n{told}\n</tools>\n"
        "To call one, write nothing but its name and its arguments, as a JSON object in these tags:\n"
        '<tool_call>\n{"name": "function_name", "arguments": {"argument": "value"}}\n</tool_call>\n'
        "Write one such block for each call. What the function gives comes as the next message. "
        "When no function is needed, answer as always."
    )


# Appended to the last message to find its end in the rendered text; transformers uses the same words.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_UNSET: Mapping[str, Any] = {"tools": None, "documents": None}
_ANSWER_TEXTS = (*TOOL_FORMATS.values(), *THOUGHT_MARKS)
_PROBE_TOOL = {"name": "probe_tool", "description": "d", "parameters": {"type": "object", "properties": {}}}


class ChatTemplate:
    """A compiled chat template, or several by name; threads may share it.

    Of several, `tool_use` is rendered where there are tools, else `default`, as transformers chooses.
    It comes with the model, so it is not trusted: it runs in Jinja's immutable sandbox, for at most `time_limit_s` of
    its thread's processor time (so a busy machine refuses no chat) and `max_chars` characters; `sandbox` says how.
    Rendering takes milliseconds; call it in a thread, not in an event loop.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        named_tokens: Mapping[str, str] | None = None,
        *,
        added_tokens: Mapping[str, bool] | None = None,
        time_limit_s: float = 2.0,
        max_chars: int = 64 * 1024 * 1024,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`added_tokens` are the tokenizer's, each with whether it is special; those that make a turn are no tokens in
        what is rendered, only letters. Without, a message may hold any."""
        templates = {"default": source} if isinstance(source, str) else dict(source)
        self.source = "\n".join(templates.values())
        self._added_tokens = dict(added_tokens or {})
        self._named_tokens = dict(named_tokens or {})
        self._sandbox = TemplateSandbox(time_limit_s=time_limit_s, max_chars=max_chars, clock=clock)
        self._templates = {name: self._compiled(name, text) for name, text in templates.items()}

    def _compiled(self, name: str, source: str) -> jinja2.Template:
        what = "the chat template" if name == "default" else f"the chat template {name!r}"
        try:
            return self._sandbox.compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{what} has an error in line {error.lineno}: {error.message}; "
                "correct it, or give another with --chat-template FILE"
            ) from None
        except (LimitReached, RecursionError, jinja2.TemplateError, ArithmeticError, MemoryError) as error:
            raise CheckpointError(f"{what} cannot be compiled: {error or type(error).__name__}") from None

    @classmethod
    def from_folder(cls, folder: Path, override: str | None = None) -> ChatTemplate | None:
        """The template of a model folder or a GGUF file, or None. `override` is a text that is used in its place."""
        source = override if override is not None else read_chat_template(folder)
        return None if source is None else cls(source, read_named_tokens(folder))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages` (role, content, ...); `kwargs` are further variables of the template.

        Contents given as parts are joined by newlines; arguments of tool calls reach the template as objects, or as
        text where it takes no objects. With `continue_final_message` the prompt ends where the last message ends, and
        no generation prompt follows. Where a value holds a token's letters, the prompt is a MarkedText, which
        `Tokenizer.encode` reads. Raises InvalidRequest when the template refuses the messages,
        UnsupportedContent for parts that are not text, CheckpointError when the template reaches a limit.
        """
        chat = plain_messages(messages)
        if any(message.get("tool_calls") for message in chat):
            chat = styled(chat, self._call_style)
        hidden = HiddenMarks(*self._marks, self.source, chat, kwargs)
        try:
            chat, kwargs = [hidden.hide_in_message(message) for message in chat], hidden.hide(kwargs)
        except RecursionError:
            raise InvalidRequest("chat_template_kwargs is nested too deeply", param="chat_template_kwargs") from None
        final_text = _tag_final_message(chat) if continue_final_message else ""
        text = self._render(
            {
                **self._named_tokens,
                **_UNSET,
                **kwargs,
                "messages": chat,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
            }
        )
        return hidden.restore(_cut_at_tag(text, final_text) if continue_final_message else text)

    @cached_property
    def _marks(self) -> tuple[Marks, Marks]:
        """Return the texts that neither a client's text nor the model's own may hold: special tokens, and those that
        this template puts around turns. The others mean something to the template or to the parser of answers.
        """
        special = {text for text, special in self._added_tokens.items() if special}
        common = {text for text in self._added_tokens if text not in special and is_bracketed(text)}
        answers = {mark for mark in common if any(mark in text for text in _ANSWER_TEXTS)}
        shown = "".join(map(self._sample, self._templates.values())) if common else ""
        turns = special | {mark for mark in common - answers if mark in shown}
        return Marks(turns | answers | {mark for mark in common if mark in self.source}), Marks(turns)

    def _sample(self, template: jinja2.Template) -> str:
        """A short chat as a prompt; empty where the template takes neither of two."""
        question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        for chat in ([question, answer, question], [question]):
            with suppress(InvalidRequest):
                unset = {**_UNSET, "add_generation_prompt": False}
                return self._render({**self._named_tokens, **unset, "messages": chat}, template)
        return ""

    @cached_property
    def takes_late_system(self) -> bool:
        """Return whether a system message behind a user's is written where it stands, not refused or put first."""
        chat = [{"role": "user", "content": "probe_first"}, {"role": "system", "content": "probe_late"}]
        with suppress(InvalidRequest, CheckpointError):
            shown = self._render({**self._named_tokens, **_UNSET, "messages": chat, "add_generation_prompt": True})
            return 0 <= shown.find("probe_first") < shown.find("probe_late")
        return False

    @property
    def takes_objects(self) -> bool:
        """Return whether arguments of calls must be objects."""
        return not self._call_style.value[0]

    @cached_property
    def _call_style(self) -> CallStyle:
        """Return this template's form of an assistant's calls: the first in which it writes one, and no `None`."""
        call = {"id": "probe0001", "type": "function", "function": {"name": "probe_tool", "arguments": {"a": 1}}}
        variables = {"tools": [{"type": "function", "function": _PROBE_TOOL}], "add_generation_prompt": False}
        variables = {**self._named_tokens, **_UNSET, **variables}
        question = {"role": "user", "content": "a"}
        with suppress(InvalidRequest, CheckpointError):
            told = self._render({**variables, "messages": [question, {"role": "assistant", "content": "b"}]})
            for style in CallStyle:
                with suppress(InvalidRequest, CheckpointError):
                    chat = [question, *styled([{"role": "assistant", "content": None, "tool_calls": [call]}], style)]
                    shown = self._render({**variables, "messages": chat})
                    if shown.count("probe_tool") > told.count("probe_tool") and shown.count("None") == told.count(
                        "None"
                    ):
                        return style
        return CallStyle.OBJECTS

    def _render(self, variables: dict[str, Any], template: jinja2.Template | None = None) -> str:
        """`template` None is the one for such a chat."""
        template = template or self._chosen(has_tools=variables["tools"] is not None)
        try:
            return self._sandbox.render(template, variables)
        except (LimitReached, jinja2.exceptions.SecurityError, OverflowError, MemoryError) as error:
            raise CheckpointError(
                f"the chat template was stopped: {error or 'out of memory'}; give another with --chat-template FILE"
            ) from None
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from None
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages: {type(error).__name__}: {error}", param="messages"
            ) from None

    def _chosen(self, *, has_tools: bool) -> jinja2.Template:
        """Raises InvalidRequest where there is none for such a chat."""
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))
            told = f"this model's chat templates are {names}, and none is `default`; give one with --chat-template FILE"
            raise InvalidRequest(told, param="messages")
        return self._templates[name]


def _tag_final_message(chat: list[dict[str, Any]]) -> str:
    if not chat or not isinstance(chat[-1].get("content"), str):
        raise InvalidRequest("continue_final_message needs a last message with content to continue", param="messages")
    final_text: str = chat[-1]["content"]
    chat[-1]["content"] = final_text + _CONTINUE_TAG
    return final_text


def _cut_at_tag(text: str, final_text: str) -> str:
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final_text.strip() not in text:
        raise InvalidRequest(
            "continue_final_message: the chat template leaves the last message out, so it cannot be continued",
            param="continue_final_message",
        )
    if text.startswith(_CONTINUE_TAG, at):
        return text[:at]
    return text[:at].rstrip()  # the template trimmed the message's end, and must not be given a space it took away
