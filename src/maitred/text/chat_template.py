"""Renders messages to a prompt with the model's own Jinja template, as transformers does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.exceptions

from maitred.core.errors import CheckpointError, InvalidRequest
from maitred.text.folder import read_chat_template, read_named_tokens
from maitred.text.marks import HiddenMarks, Marks, is_bracketed
from maitred.text.messages import CallStyle, plain_messages, styled
from maitred.text.sandbox import LimitReached, TemplateSandbox

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
        "<tool_call>{{ c.name }}\n",
        "<arg_key>",
        "</arg_key>\n<arg_value>",
        "</arg_value>\n",
        "</tool_call>" + _LINE,
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
