"""A body of Anthropic's Messages API read into a chat: blocks to messages, tools, thinking, and what is left out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from maitred.api.dialects.anthropic.schemas import (
    Content,
    MessagesRequest,
    SentBlock,
    SentFormat,
    SentSource,
    SentThinking,
    SentTool,
    SentToolChoice,
)
from maitred.api.dialects.openai.refusals import unsupported, unsupported_content
from maitred.api.dialects.openai.schemas import ChatCompletionRequest, ChatMessage
from maitred.api.http.bodies import decode_json
from maitred.api.http.errors import shortened
from maitred.core.errors import InvalidRequest
from maitred.fleet.prefix_keys import BILLING, BUDGET

_encode = msgspec.json.encode
_CONTENT = msgspec.json.Decoder(str | list[SentBlock] | None)
_SOURCE, _OBJECT = msgspec.json.Decoder(SentSource), msgspec.json.Decoder(dict[str, Raw])
_BILLING = re.compile(rf"\s*{BILLING}\n*")
_BUDGET = re.compile(rf"\n{{0,4}}(?:{BUDGET})")
# what only Anthropic's own servers act on, or can read
_IMAGES = ("image", "audio", "video")
_SYSTEM = ("system", "developer")
_FIELD_NAMES = {  # of a chat's fields
    "prompt": "messages",
    **dict.fromkeys(("response_format", "response_format.json_schema"), "output_config.format"),
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
}
MAX_DEPTH = 8  # blocks in one another: a result, a document, its texts
_EFFORTS = {"max": "xhigh"}  # others are named alike
_TIERS = {"auto": "auto", "standard_only": "default"}


_TEXT = {"type": "string"}
_EDITS = ("view", "create", "str_replace", "insert")
_EDITOR = {
    **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _TEXT),
    "insert_line": {"type": "integer"},
    "view_range": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
}
_MEMORY = {"command": {"enum": (*_EDITS, "delete", "rename")}, **_EDITOR, "old_path": _TEXT, "new_path": _TEXT}
# Tools that the client runs and that Anthropic's models know, by what their types begin with: what the model is told,
# their fields, and those that a call must have. Source: the inputs that `anthropic` 2.14 takes (lib/tools and
# types/beta). `computer_*` answers with images, which are not read here.
CLIENT_TOOLS: Mapping[str, tuple[str, Mapping[str, Any], Sequence[str]]] = {
    "bash_": (
        "Runs a command in a shell that stays open; restart begins a new one.",
        {"command": _TEXT, "restart": {"type": "boolean"}},
        (),
    ),
    "text_editor_": ("Shows and changes files.", {"command": {"enum": _EDITS}, **_EDITOR}, ("command", "path")),
    "memory_": (
        "Keeps files under /memories from one conversation to the next: look there first, and note what will matter.",
        _MEMORY,
        ("command",),
    ),
}


class MessagesReading:
    """One body. `chat` is what it asks for; `left_out`, `ignored` and `ignored_tools` name what is not of it."""

    def __init__(self, body: MessagesRequest, *, takes_late_system: bool) -> None:
        """Raises InvalidRequest and UnsupportedContent, with the path of what is wrong."""
        self.left_out: dict[str, None] = {}
        self.ignored: dict[str, None] = {}
        self.ignored_tools: list[str] = []
        self._tools_at: list[int] = []  # where the tools of the chat stand
        self._late_system = "system" if takes_late_system else "user"
        self._messages: list[ChatMessage] = []
        self._read_system(body.system, "system")
        for number, turn in enumerate(body.messages):
            self._read_turn(turn.role, turn.content, f"messages[{number}]")
        self.chat = self._chat(body)

    def _chat(self, body: MessagesRequest) -> ChatCompletionRequest:
        last = self._messages[-1] if self._messages else None
        is_prefilled = last is not None and last.role == "assistant" and bool(last.content) and not last.tool_calls
        config, choice, thinking = body.output_config, body.tool_choice, body.thinking
        chat = ChatCompletionRequest(
            model=body.model,
            messages=self._messages,
            stream=body.stream,
            max_tokens=body.max_tokens or 1,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=body.stop_sequences,
            tools=self._tools(body.tools or ()),
            continue_final_message=is_prefilled or None,
            user=body.metadata.user_id if body.metadata is not None else None,
        )
        if body.service_tier is not None:
            chat.service_tier = _named("service_tier", body.service_tier, _TIERS)
        if choice is not None:
            chat.tool_choice = _choice(choice)
            chat.parallel_tool_calls = not choice.disable_parallel_tool_use
        if thinking is not None:
            _read_thinking(chat, thinking)
        if form := (config and config.format) or body.output_format:
            chat.response_format = _format(form)
        if config is not None and config.effort is not None:
            chat.reasoning_effort = _EFFORTS.get(config.effort, config.effort)
        return chat

    def field_names(self) -> dict[str, str]:
        """The client's names of a chat's fields."""
        names = dict(_FIELD_NAMES)
        for number, at in enumerate(self._tools_at):
            names[f"tools[{number}].function"] = f"tools[{at}]"
            names[f"tools[{number}].function.parameters"] = f"tools[{at}].input_schema"
        return names

    # -- messages

    def _read_system(self, content: Content, at: str) -> None:
        """A system prompt, and messages with its role: at the beginning one message, later at their place."""
        blocks = self._blocks(content)
        texts = [self._without_books(self._text(block, f"{at}[{number}]")) for number, block in enumerate(blocks)]
        if text := "\n".join(filter(None, texts)):
            is_first = all(message.role == "system" for message in self._messages)
            self._say("system" if is_first else self._late_system, text)

    def _read_turn(self, role: str, content: Content, at: str) -> None:
        if role in _SYSTEM:
            self._read_system(content, f"{at}.content")
        elif role == "assistant":
            self._read_answer(self._blocks(content), f"{at}.content")
        else:
            if role != "user":
                self.ignored[f"messages.role.{role}"] = None
            self._read_user(self._blocks(content), f"{at}.content")

    def _read_user(self, blocks: Sequence[SentBlock], at: str) -> None:
        """Results become messages of their own, texts between them one each."""
        for number, block in enumerate(blocks):
            where = f"{at}[{number}]"
            if block.type == "tool_result":
                if block.tool_use_id is None:
                    raise InvalidRequest(f"{where}.tool_use_id is missing: which call was answered?", param=where)
                result = ChatMessage(role="tool", content=self._result(block, where), tool_call_id=block.tool_use_id)
                self._messages.append(result)
            elif text := self._text(block, where):
                if _BUDGET.sub("", text).strip():  # a user's own words, which may quote one
                    self._say("user", text)
                else:
                    self.left_out["token-budget"] = None
        if not blocks:
            self._say("user", "")

    def _read_answer(self, blocks: Sequence[SentBlock], at: str) -> None:
        thoughts: list[str] = []
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        for number, block in enumerate(blocks):
            if block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type == "tool_use":
                if block.id is None or block.name is None:
                    what = "id" if block.id is None else "name"
                    raise InvalidRequest(f"{at}[{number}].{what} is missing", param=f"{at}[{number}].{what}")
                where = f"{at}[{number}].input"
                arguments = {} if block.input is UNSET else decode_json(block.input, _OBJECT, at=where)
                calls.append(
                    {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
                )
            else:
                texts.append(self._text(block, f"{at}[{number}]"))
        text = "\n".join(filter(None, texts))
        message = ChatMessage(role="assistant", content=text or (None if calls else ""))
        if thoughts:
            message.reasoning_content = "\n".join(thoughts)
        if calls:
            message.tool_calls = Raw(_encode(calls))
        self._messages.append(message)

    def _say(self, role: str, text: str) -> None:
        """Neighbours of one role are one turn, as Anthropic combines them, and templates that take turns want it."""
        last = self._messages[-1] if self._messages else None
        if last is not None and last.role == role:
            last.content = f"{last.content}\n{text}"
        else:
            self._messages.append(ChatMessage(role=role, content=text))

    @staticmethod
    def _blocks(content: Content) -> Sequence[SentBlock]:
        return [SentBlock(type="text", text=content)] if isinstance(content, str) else content or ()

    def _inner(self, block: SentBlock, at: str) -> str:
        """Text of what a block contains."""
        if at.count("[") > MAX_DEPTH:
            raise InvalidRequest(
                f"{at[:80]} is nested too deeply; at most {MAX_DEPTH} blocks in one another", param="messages"
            )
        content = None if isinstance(block.content, UnsetType) else decode_json(block.content, _CONTENT, at=at)
        texts = (self._text(inner, f"{at}[{number}]") for number, inner in enumerate(self._blocks(content)))
        return "\n".join(filter(None, texts))

    def _result(self, block: SentBlock, at: str) -> str:
        text = self._inner(block, f"{at}.content")
        is_told = text.lstrip("<").lower().startswith(("error", "tool_use_error"))
        return f"Error: {text}" if block.is_error and not is_told else text

    def _text(self, block: SentBlock, at: str) -> str:
        """Text of a block of a user or a result; empty for one that is ignored, whose type is noted."""
        match block.type:
            case "text":
                if block.text is None:
                    raise InvalidRequest(f"{at}.text is missing", param=f"{at}.text")
                return block.text
            case "tool_reference":
                return block.tool_name or ""
            case "search_result":
                source = self._inner(SentBlock(type=block.type, content=block.source), f"{at}.source")
                return "\n".join(filter(None, (block.title, source, self._inner(block, f"{at}.content"))))
            case "document":
                return self._document(block, at)
        if block.type in _IMAGES:
            raise unsupported_content(at, f"a block of type {block.type}")
        self.ignored[f"messages.content.{block.type}"] = None
        return ""

    def _document(self, block: SentBlock, at: str) -> str:
        sent = block.source
        source = SentSource() if isinstance(sent, UnsetType) else decode_json(sent, _SOURCE, at=f"{at}.source")
        if source.type not in ("text", "content"):
            raise unsupported_content(at, f"a document of type {shortened(repr(source.type), 40)}")
        content = source.data if source.type == "text" else source.content
        return "\n".join(filter(None, (block.title, self._inner(SentBlock(type="document", content=content), at))))

    def _without_books(self, text: str) -> str:
        """A system text without what the client counts in it: it changes with each turn, so no prefix would be found.

        Sources: see `fleet.prefix_keys`; waybarrios/vllm-mlx#277 measured a turn 13 times as long.
        """
        if billing := _BILLING.match(text):
            self.left_out["billing-header"] = None
            text = text[billing.end() :]
        kept, num_budgets = _BUDGET.subn("", text)
        if not num_budgets:
            return text
        self.left_out["token-budget"] = None
        return kept.rstrip()

    # -- tools

    def _tools(self, sent: Sequence[SentTool]) -> Raw | UnsetType:
        """Tools that a client runs, as functions; those that run on Anthropic's servers are noted."""
        made: list[dict[str, Any]] = []
        for number, tool in enumerate(sent):
            schema, description, kind = tool.input_schema, tool.description or "", tool.type or "custom"
            known = next((of for begin, of in CLIENT_TOOLS.items() if kind.startswith(begin)), None)
            if schema is UNSET and known is not None:
                description, properties, required = known
                schema = Raw(_encode({"type": "object", "properties": properties, "required": required}))
            elif schema is UNSET and kind != "custom":
                self.ignored_tools.append(kind)
                continue
            elif schema is UNSET:
                at = f"tools[{number}].input_schema"
                raise InvalidRequest(f"{at} is missing", param=at)
            function: dict[str, Any] = {"name": tool.name, "description": description, "parameters": schema}
            if tool.strict:
                function["strict"] = True
            self._tools_at.append(number)
            made.append({"type": "function", "function": function})
        return Raw(_encode(made)) if made else UNSET


def _choice(sent: SentToolChoice) -> Raw:
    if sent.type == "tool":
        return Raw(_encode({"type": "function", "function": {"name": sent.name}}))
    known = {"auto": "auto", "any": "required", "none": "none"}
    return Raw(_encode(_named("tool_choice.type", sent.type, known)))


def _named(field: str, sent: str, known: Mapping[str, str]) -> str:
    if sent not in known:
        choices = ", ".join(known)
        raise InvalidRequest(f"{field} is {shortened(repr(sent), 80)}; choose one of {choices}", param=field)
    return known[sent]


def _read_thinking(chat: ChatCompletionRequest, sent: SentThinking) -> None:
    """`adaptive` leaves it to the template; thoughts between tools are what a model that thinks does anyway."""
    known = {"enabled": "true", "disabled": "false", "adaptive": "", "between_tools": ""}
    if told := _named("thinking.type", sent.type, known):
        chat.chat_template_kwargs = Raw(b'{"enable_thinking":%b,"thinking":%b}' % (told.encode(), told.encode()))
    if sent.type == "enabled":
        if sent.budget_tokens is None:
            raise InvalidRequest("thinking.budget_tokens is missing", param="thinking.budget_tokens")
        chat.thinking_token_budget = sent.budget_tokens
    if sent.display == "omitted":
        chat.include_reasoning = False


def _format(sent: SentFormat) -> Raw:
    if sent.type != "json_schema":
        told = f"its type is {shortened(repr(sent.type), 40)}; json_schema is known"
        raise unsupported("output_config.format", told)
    schema = None if sent.schema is UNSET else sent.schema
    return Raw(_encode({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}))
