"""Chat messages and template variables, checked and made ready for the chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UnsetType

from maitred.api.dialects.openai.refusals import has_value, refuse_raw, unsupported, unsupported_content
from maitred.api.dialects.openai.schemas import ChatMessage
from maitred.api.http.bodies import decode_json
from maitred.api.http.errors import shortened
from maitred.core.errors import InvalidRequest, PromptTooLong
from maitred.engine.intake import ServedModel
from maitred.text.folder import NAMED_TOKENS
from maitred.text.messages import arguments_of
from maitred.text.tool_messages import with_tools

_CALLS = msgspec.json.Decoder(list[Any] | None)
MIN_MAX_MESSAGES = 1024  # else as many as the context has tokens: each is one at least
ROLES = ("system", "developer", "user", "assistant", "tool")
# Names that mean something to the renderer, or would let a request replace what the server decides
# (`tokenize` blocked vLLM's loop, CVE-2025-62426; `chat_template` is CVE-2025-61620).
_RESERVED = frozenset(
    (
        *("self", "messages", "conversation", "conversations", "chat_template", "tokenize", "tools", "documents"),
        *("add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"),
        *("return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("raise_exception", "strftime_now", *NAMED_TOKENS),
    )
)


def render_chat(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The prompt for `messages`, with `tools` as they were sent; call it in a thread."""
    if model.chat_template is None:
        raise InvalidRequest(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template FILE",
            param="messages",
        )
    if not messages:
        raise InvalidRequest("messages is empty; send at least one", param="messages")
    most = max(MIN_MAX_MESSAGES, model.max_model_len)
    if len(messages) > most:
        raise PromptTooLong(
            f"messages has {len(messages)}; this model reads {model.max_model_len} tokens, so send at most {most}",
            param="messages",
        )
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other; send one",
            param="continue_final_message",
        )
    source = model.chat_template.source
    knows_developer = "developer" in source
    plain = [_plain(message, f"messages[{index}]", knows_developer) for index, message in enumerate(messages)]
    variables = _variables(chat_template_kwargs or {}, source)
    if tools or any("tool_calls" in message or message["role"] == "tool" for message in plain):
        plain, more = with_tools(model.answer_format, plain, tools)
        variables |= more
    return model.chat_template.render(
        plain,
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=bool(continue_final_message),
        **variables,
    )


def text_of(message: ChatMessage) -> str:
    """The content as one text; parts are joined by newlines, as vLLM does."""
    if isinstance(message.content, list):
        return "\n".join(part.text or "" for part in message.content)
    return message.content or ""


def _plain(message: ChatMessage, at: str, knows_developer: bool) -> dict[str, Any]:
    if message.role not in ROLES:
        role = shortened(repr(message.role))
        raise InvalidRequest(f"{at}.role is {role}; choose one of {', '.join(ROLES)}", param=f"{at}.role")
    calls = _calls(message, at)
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{at}.tool_call_id is missing: which call was answered?", param=f"{at}.tool_call_id")
    refuse_raw(message.function_call, f"{at}.function_call")
    for name in ("audio", "images"):
        if has_value(getattr(message, name)):
            raise unsupported_content(f"{at}.{name}", name)
    if message.prefix:
        raise unsupported(f"{at}.prefix", "send continue_final_message: true")
    if message.refusal is not None:
        raise unsupported(f"{at}.refusal")
    is_thought = message.role == "assistant" and (message.reasoning or message.reasoning_content)
    if message.content is None and not calls and not is_thought:
        raise InvalidRequest(f"{at}.content is missing; send a string or a list of text parts", param=f"{at}.content")
    if isinstance(message.content, list):
        _check_parts(message, at)
    # Templates that know only the older name take a developer's message as a system message, which it replaced.
    role = "system" if message.role == "developer" and not knows_developer else message.role
    plain: dict[str, Any] = {"role": role, "content": text_of(message)}
    if calls:
        plain["tool_calls"] = calls
    for name in ("name", "reasoning", "reasoning_content", "tool_call_id"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    return plain


def _calls(message: ChatMessage, at: str) -> list[Any]:
    """Calls that the assistant made. Raises InvalidRequest for what is none."""
    if isinstance(message.tool_calls, UnsetType):
        return []
    calls = decode_json(message.tool_calls, _CALLS, at=f"{at}.tool_calls") or []
    if calls and message.role != "assistant":
        raise InvalidRequest(f"{at} has tool_calls; only the assistant calls tools", param=f"{at}.tool_calls")
    for number, call in enumerate(calls):
        where = f"{at}.tool_calls[{number}].function"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}.name is missing", param=f"{where}.name")
    return calls


def emptied_calls(model: ServedModel, messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """Paths of the calls whose arguments are text that this model's template cannot show."""
    template = model.chat_template
    if template is None or not template.takes_objects:
        return ()
    return tuple(
        f"messages.{number}.tool_calls.{place}"
        for number, message in enumerate(messages)
        for place, call in enumerate(_calls(message, f"messages[{number}]"))
        if isinstance(arguments_of(call["function"].get("arguments"), ""), str)
    )


def _check_parts(message: ChatMessage, at: str) -> None:
    assert isinstance(message.content, list)
    for index, part in enumerate(message.content):
        where = f"{at}.content[{index}]"
        if part.type != "text":
            raise unsupported_content(where, f"a part of type {shortened(repr(part.type))}")
        if part.text is None:
            raise InvalidRequest(f"{where}.text is missing", param=f"{where}.text")


def _variables(sent: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The variables this template reads; those it never names have no effect and are left out."""
    for name in sent:
        if name in _RESERVED:
            raise InvalidRequest(
                f"chat_template_kwargs.{name} may not be set by a request", param=f"chat_template_kwargs.{name}"
            )
    words = set(re.findall(r"[A-Za-z_]\w*", source)) if sent else set()
    return {name: value for name, value in sent.items() if name in words}
