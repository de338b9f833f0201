"""A chat as it is read: messages to a prompt, tools and shape to a grammar, an answer's text to thoughts and calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from maitred.api.dialects.openai import refusals
from maitred.api.dialects.openai.schemas import ChatCompletionRequest, ChatMessage, GenerationFields
from maitred.api.generate.dialect import Prompt
from maitred.api.generate.outcome import Sample
from maitred.api.http.bodies import decode_json
from maitred.api.http.errors import shortened
from maitred.core.errors import InvalidRequest, PromptTooLong
from maitred.core.request import ThinkingLimit
from maitred.core.structured_outputs import KINDS, StructuredOutputsParams
from maitred.engine.grammar_check import GrammarChecker
from maitred.engine.intake import ServedModel
from maitred.engine.output import Piece
from maitred.text.answer_format import AnswerFormat, call_id, plain
from maitred.text.answer_parser import AnswerDelta, AnswerParser, CallBegun
from maitred.text.chat_template import arguments_of, with_tools
from maitred.text.folder import NAMED_TOKENS
from maitred.text.schema import Source, json_source, source_of
from maitred.text.shape import NO_CALLS, NO_SHAPE, FunctionTool, Shape, ToolChoice, compose

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
    if message.function_call is not UNSET:
        refusals.refuse_raw(message.function_call, f"{at}.function_call")
    for name in ("audio", "images"):
        if (sent := getattr(message, name)) is not UNSET and refusals.has_value(sent):
            raise refusals.unsupported_content(f"{at}.{name}", name)
    if message.prefix:
        raise refusals.unsupported(f"{at}.prefix", "send continue_final_message: true")
    if message.refusal is not None:
        raise refusals.unsupported(f"{at}.refusal")
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
        if not isinstance(call.get("id"), str | None):
            at_id = f"{at}.tool_calls[{number}].id"
            raise InvalidRequest(f"{at_id} is {shortened(repr(call['id']), 80)}; it must be a text", param=at_id)
    return calls


def emptied_calls(model: ServedModel, messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """Paths of the calls whose arguments are text that this model's template cannot show."""
    template = model.chat_template
    if template is None or not template.takes_objects:
        return ()
    return tuple(
        f"messages[{number}].tool_calls[{place}]"
        for number, message in enumerate(messages)
        for place, call in enumerate(_calls(message, f"messages[{number}]"))
        if isinstance(arguments_of(call["function"].get("arguments"), ""), str)
    )


def _check_parts(message: ChatMessage, at: str) -> None:
    assert isinstance(message.content, list)
    for index, part in enumerate(message.content):
        where = f"{at}.content[{index}]"
        if part.type != "text":
            raise refusals.unsupported_content(where, f"a part of type {shortened(repr(part.type))}")
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


MAX_TOOLS = 128
MAX_SHAPE_BYTES = 4 * 1024 * 1024  # of tools, and of a schema
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# fields of a response_format by its type; `schema` beside the type is llama.cpp's form
KNOWN_OF_FORM: Mapping[Any, tuple[str, ...]] = {
    "text": ("type",),
    "json_object": ("type", "schema"),
    "json_schema": ("type", "json_schema", "schema"),
}
_KNOWN_IN: Mapping[str, tuple[str, ...]] = {
    "response_format.json_schema": ("name", "description", "schema", "strict"),
    "tool_choice": ("type", "function", "allowed_tools"),
    "tool_choice.function": ("name",),
    "tool_choice.allowed_tools": ("mode", "tools"),
}
# keywords that say more of an object's properties than `properties` does
_MORE_PROPERTIES = (
    *("additionalProperties", "unevaluatedProperties", "patternProperties"),
    *("allOf", "anyOf", "oneOf", "$ref", "if"),
)


def tools_of(body: ChatCompletionRequest) -> list[FunctionTool]:
    """Raises InvalidRequest with the path of what is wrong."""
    sent = refusals.any_value(body.tools, "tools", MAX_SHAPE_BYTES) or []
    if not isinstance(sent, list) or len(sent) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS}", param="tools")
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(sent)]
    names = [tool.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InvalidRequest(f"two tools are named {name!r}", param=f"tools[{number}].function.name")
    return tools


def _tool(sent: Any, path: str) -> FunctionTool:
    if not isinstance(sent, Mapping) or sent.get("type") != "function":
        told = sent.get("type") if isinstance(sent, Mapping) else sent
        raise InvalidRequest(f"{path}.type is {_shown(told)}; only function is known", param=f"{path}.type")
    function = sent.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{path}.function is missing", param=f"{path}.function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.function.name is {_shown(name)}; it must be 1 to 64 characters of A-Z a-z 0-9 _ . -",
            param=f"{path}.function.name",
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequest(f"{path}.function.parameters must be an object", param=f"{path}.function.parameters")
    at = f"{path}.function.parameters"
    schema = parameters or {"type": "object", "properties": {}}
    source = json_source(_closed(schema), at, is_strict=function.get("strict") is True)
    return FunctionTool(name=name, parameters=schema, source=source, definition=dict(sent))


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function has the parameters that it lists, and no others, unless its schema says more of them."""
    is_open = "properties" not in schema or any(name in schema for name in _MORE_PROPERTIES)
    return schema if is_open else {**schema, "additionalProperties": False}


def choice_of(body: ChatCompletionRequest, tools: Sequence[FunctionTool]) -> ToolChoice:
    """Which tools may be called, and whether one must be. Raises InvalidRequest."""
    sent = refusals.any_value(body.tool_choice, "tool_choice", MAX_SHAPE_BYTES)
    parallel = body.parallel_tool_calls is not False
    names = tuple(tool.name for tool in tools)
    if sent in (None, "auto", "none"):
        allowed = names if sent != "none" else ()
        return ToolChoice(names=allowed, parallel=parallel)
    if not tools:
        raise InvalidRequest(f"tool_choice is {_shown(sent)}, but there are no tools", param="tool_choice")
    if sent == "required":
        return ToolChoice(names=names, is_required=True, parallel=parallel)
    if isinstance(sent, Mapping) and sent.get("type") == "function":
        return ToolChoice(names=_named([sent], names), is_required=True, parallel=False)
    if isinstance(sent, Mapping) and isinstance(sent.get("allowed_tools"), Mapping):
        allowed_tools = sent["allowed_tools"]
        listed = _named(allowed_tools.get("tools") or [], names)
        return ToolChoice(names=listed, is_required=allowed_tools.get("mode") == "required", parallel=parallel)
    raise InvalidRequest(
        f"tool_choice is {_shown(sent)}; send none, auto, required, or "
        '{"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def _named(listed: Sequence[Any], names: Sequence[str]) -> tuple[str, ...]:
    found: list[Any] = [
        tool["function"].get("name")
        if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)
        else None
        for tool in (listed if isinstance(listed, list) else [listed])
    ]
    for name in found:
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names {_shown(name)}, which is none of the tools: {', '.join(names)}", param="tool_choice"
            )
    return tuple(found)


def content_source(body: GenerationFields) -> tuple[Source | None, bool]:
    """Source of the answer text's grammar, and whether it binds all that the model writes. Raises InvalidRequest."""
    wanted = any_shape(body)
    form = refusals.any_value(body.response_format, "response_format", MAX_SHAPE_BYTES)
    if form is not None and not isinstance(form, Mapping):
        raise InvalidRequest("response_format must be an object", param="response_format")
    if form is not None and form.get("type") is None:
        raise InvalidRequest("response_format.type is missing", param="response_format.type")
    if form is None or form["type"] == "text":
        return (None, False) if wanted is None else (source_of(wanted, "structured_outputs"), not wanted.binds_content)
    if wanted is not None:
        raise InvalidRequest("send either response_format or structured_outputs, not both", param="structured_outputs")
    return _from_format(form, form["type"])


def _from_format(form: Mapping[str, Any], kind: Any) -> tuple[Source, bool]:
    kind = kind if isinstance(kind, str) else repr(kind)
    if "schema" in KNOWN_OF_FORM.get(kind, ()) and form.get("json_schema") is None and form.get("schema") is not None:
        return json_source(form["schema"], "response_format.schema"), False
    if kind == "json_object":
        return source_of(StructuredOutputsParams(json_object=True), "response_format"), False
    if kind == "structural_tag":
        return source_of(StructuredOutputsParams(structural_tag=form), "response_format"), True
    if kind != "json_schema":
        raise InvalidRequest(
            f"response_format.type is {_shown(kind)}; choose one of text, json_object, json_schema, structural_tag",
            param="response_format.type",
        )
    told = form.get("json_schema")
    if not isinstance(told, Mapping) or told.get("schema") is None:
        raise InvalidRequest("response_format.json_schema.schema is missing", param="response_format.json_schema")
    path = "response_format.json_schema.schema"
    return json_source(told["schema"], path, is_strict=told.get("strict") is True), False


def unknown_in_shape(body: GenerationFields) -> tuple[str, ...]:
    """Fields that nothing reads, in objects that `content_source` and `choice_of` have read."""
    choice = body.tool_choice if isinstance(body, ChatCompletionRequest) else UNSET
    sent = {
        "response_format": refusals.any_value(body.response_format, "response_format", MAX_SHAPE_BYTES),
        "tool_choice": refusals.any_value(choice, "tool_choice", MAX_SHAPE_BYTES),
    }
    form = sent["response_format"] or {}
    found = []
    for path, known in {"response_format": KNOWN_OF_FORM.get(form.get("type"), tuple(form)), **_KNOWN_IN}.items():
        at: Any = sent
        for step in path.split("."):
            at = at.get(step) if isinstance(at, Mapping) else None
        if isinstance(at, Mapping):
            found += [f"{path}.{name}" for name, value in at.items() if name not in known and value is not None]
    return tuple(found)


def any_shape(body: GenerationFields) -> StructuredOutputsParams | None:
    """The body's structured_outputs. Raises InvalidRequest for a field that it has not."""
    sent = refusals.any_value(body.structured_outputs, "structured_outputs", MAX_SHAPE_BYTES)
    if sent is None:
        return None
    if not isinstance(sent, Mapping):
        raise InvalidRequest("structured_outputs must be an object", param="structured_outputs")
    given = {name: value for name, value in sent.items() if value not in (None, False) or name == "json"}
    for name in given:
        if name not in (*KINDS, "whitespace_pattern"):
            raise InvalidRequest(
                f"structured_outputs.{name[:64]} is not known; it has {', '.join(KINDS)} and whitespace_pattern",
                param=f"structured_outputs.{name[:64]}",
            )
    return StructuredOutputsParams(**given)


def _shown(value: Any) -> str:
    return shortened(repr(value), 80)


def is_shaped(body: GenerationFields) -> bool:
    """Whether the body may constrain the answer's form."""
    fields = [body.response_format, body.structured_outputs]
    if isinstance(body, ChatCompletionRequest):
        fields += [body.tools, body.tool_choice]
    return any(field is not UNSET and bytes(field) != b"null" for field in fields)


def text_shape(checker: GrammarChecker, body: GenerationFields) -> Shape:
    """Shape of a text answer without reasoning and tool calls. Raises InvalidRequest."""
    content, is_raw = content_source(body)
    if content is None:
        return NO_SHAPE
    grammar, ignored, content = checker.checked(content)
    return Shape(
        grammar if is_raw else compose(AnswerFormat("none"), content=content),
        ignored=ignored,
        unknown=unknown_in_shape(body),
    )


class WantedShape(NamedTuple):
    """The answer shape that a body asks for."""

    tools: Sequence[FunctionTool]
    choice: ToolChoice
    content: Source | None
    is_raw: bool  # `content` binds all that the model writes, thoughts and marks too


NOTHING = WantedShape((), NO_CALLS, None, False)


class ChatReading:
    """One chat request. `prompts`, then `shape` are called in a thread; then each sample has a reader."""

    def __init__(self, model: ServedModel, checker: GrammarChecker, body: ChatCompletionRequest, id: str) -> None:
        self._model, self._checker, self._body, self.id = model, checker, body, id
        self._prompt = ""
        self._may_think = True
        self._emptied: tuple[str, ...] = ()

    @cached_property
    def wanted(self) -> WantedShape:
        """Raises InvalidRequest for what cannot be asked."""
        if not is_shaped(self._body):
            return NOTHING
        tools = tools_of(self._body)
        content, is_raw = content_source(self._body)
        return WantedShape(tools, choice_of(self._body, tools), content, is_raw)

    @property
    def format(self) -> AnswerFormat:
        return self._model.answer_format

    def prompts(self) -> list[Prompt]:
        """The conversation as the model reads it."""
        body, wanted = self._body, self.wanted
        variables = _template_variables(body)
        self._may_think = variables.get("enable_thinking") is not False
        self._prompt = render_chat(
            self._model,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=variables,
            tools=[tool.definition for tool in wanted.tools],
        )
        self._emptied = emptied_calls(self._model, body.messages)
        body.messages.clear()
        return [self._prompt]

    def prediction(self) -> str:
        """The predicted text of the answer. Raises InvalidRequest."""
        return refusals.predicted_text(self._body.prediction)

    def shape(self) -> Shape:
        """Raises InvalidRequest for what cannot be enforced."""
        wanted = self.wanted
        marks = self.format.mark_ids if self.is_read else None
        told = Shape(thinking=self._thinking_limit(), marks=marks, emptied=self._emptied)
        if wanted is NOTHING:
            return told
        if wanted.choice.is_required and self.format.calls is None:
            raise InvalidRequest(
                "tool_choice asks for a call, and how this model writes one is not known; name it with --tool-format",
                param="tool_choice",
            )
        callable_tools = [tool for tool in wanted.tools if tool.name in wanted.choice.names]
        tools = [(tool, self._checker.checked(tool.source)) for tool in callable_tools]
        content = None if wanted.content is None else self._checker.checked(wanted.content)
        found = [*(of_tool for _, of_tool in tools), *([content] if content else [])]
        unknown = unknown_in_shape(self._body)
        ignored = dict.fromkeys(name for checked in found for name in checked.ignored)
        if content is not None and wanted.is_raw:
            return told._replace(grammar=content.grammar, ignored=tuple(ignored), unknown=unknown)
        grammar = compose(
            self.format,
            content=content and content.source,
            tools=[replace(tool, source=checked.source) for tool, checked in tools],
            choice=wanted.choice,
            in_thoughts=self.in_thoughts,
            may_think=self._may_think,
        )
        return told._replace(grammar=grammar, ignored=tuple(ignored), unknown=unknown)

    @cached_property
    def in_thoughts(self) -> bool:
        """Whether the prompt ends within reasoning that it opened."""
        reasoning = self.format.reasoning
        return reasoning is not None and reasoning.opened_by(self._prompt)

    @property
    def is_read(self) -> bool:
        """Whether an answer may hold more than content."""
        return self.format.reasoning is not None or bool(self.wanted.choice.names and self.format.calls)

    def _thinking_limit(self) -> ThinkingLimit | None:
        budget, reasoning = self._body.thinking_token_budget, self.format.reasoning
        if budget is None or reasoning is None:
            return None
        tokens = partial(self._model.tokenizer.encode, add_special_tokens=False)
        begin, end = tuple(tokens(plain(reasoning.begin))), tuple(tokens(reasoning.after + plain(reasoning.end)))
        return ThinkingLimit(budget, begin, end, self.in_thoughts)

    def reader(self, sample: Sample) -> AnswerReader | None:
        """A new one; None where all of the text is content."""
        if not self.is_read:
            return None
        calls = self.format.calls
        length = None if calls is None else calls.id_length
        parser = AnswerParser(
            self.format,
            make_id=lambda index: call_id(f"{self.id}/{sample.index}", index, length),
            tools={tool.name: tool.parameters for tool in self.wanted.tools},
            starts_in_reasoning=self.in_thoughts,
            parse_calls=bool(self.wanted.choice.names),
        )
        return AnswerReader(parser, sample, shows_reasoning=self._body.include_reasoning is not False)


def _template_variables(body: ChatCompletionRequest) -> dict[str, Any]:
    """The client's variables of the chat template, and what the fields about thoughts are called there."""
    given = body.chat_template_kwargs
    sent = {} if given is UNSET else refusals.any_object(given, "chat_template_kwargs") or {}
    effort = body.reasoning_effort
    if effort is None:
        return sent
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks, **sent}


class AnswerReader:
    """Reads one sample, and counts the tokens of its thoughts."""

    def __init__(self, parser: AnswerParser, sample: Sample, *, shows_reasoning: bool) -> None:
        self._parser, self._sample, self._shows_reasoning = parser, sample, shows_reasoning
        self.num_calls = 0

    def push(self, pieces: Sequence[Piece], *, is_last: bool) -> AnswerDelta:
        """Parse `pieces`; returns the text and calls that became certain."""
        parser, whole = self._parser, AnswerDelta()
        for text, mark in pieces:
            was_thought = parser.in_reasoning
            read: list[str | int] = [text] if text else []
            if mark is not None:
                read.append(mark)
            self._add(whole, parser.push(read))
            self._sample.num_reasoning_tokens += was_thought or parser.in_reasoning
        if is_last:
            self._add(whole, parser.flush())
        return whole

    def _add(self, whole: AnswerDelta, more: AnswerDelta) -> None:
        whole.content += more.content
        if self._shows_reasoning:
            whole.reasoning += more.reasoning
        whole.calls += more.calls
        self.num_calls += sum(isinstance(event, CallBegun) for event in more.calls)


def read_answer(reader: AnswerReader | None, text: str, pieces: Sequence[Piece], *, is_last: bool) -> AnswerDelta:
    """Parts of an answer that became certain; without a reader all of it is text."""
    return AnswerDelta(content=text) if reader is None else reader.push(pieces, is_last=is_last)
