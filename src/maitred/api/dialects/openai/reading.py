"""A chat's prompt, the shape that binds its answers, and a parser for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from msgspec import UNSET

from maitred.api.dialects.openai.bounded import any_object, predicted_text
from maitred.api.dialects.openai.messages import emptied_calls, render_chat
from maitred.api.dialects.openai.schemas import ChatCompletionRequest, GenerationFields
from maitred.api.dialects.openai.tools import choice_of, content_source, tools_of, unknown_in_shape
from maitred.api.generate.dialect import Prompt
from maitred.api.generate.outcome import Sample
from maitred.core.errors import InvalidRequest
from maitred.core.request import ThinkingLimit
from maitred.engine.grammar_check import GrammarChecker
from maitred.engine.intake import ServedModel
from maitred.engine.output import Piece
from maitred.text.answer_format import AnswerFormat, call_id, plain
from maitred.text.answer_parser import AnswerDelta, AnswerParser, CallBegun
from maitred.text.schema import Source
from maitred.text.shape import NO_CALLS, NO_SHAPE, Shape, Tool, ToolChoice, compose


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


class Wanted(NamedTuple):
    """The answer shape that a body asks for."""

    tools: Sequence[Tool]
    choice: ToolChoice
    content: Source | None
    is_raw: bool  # `content` binds all that the model writes, thoughts and marks too


NOTHING = Wanted((), NO_CALLS, None, False)


class ChatReading:
    """One chat request. `prompts`, then `shape` are called in a thread; then each sample has a reader."""

    def __init__(self, model: ServedModel, checker: GrammarChecker, body: ChatCompletionRequest, id: str) -> None:
        self._model, self._checker, self._body, self.id = model, checker, body, id
        self._prompt = ""
        self._may_think = True
        self._emptied: tuple[str, ...] = ()

    @cached_property
    def wanted(self) -> Wanted:
        """Raises InvalidRequest for what cannot be asked."""
        if not is_shaped(self._body):
            return NOTHING
        tools = tools_of(self._body)
        content, is_raw = content_source(self._body)
        return Wanted(tools, choice_of(self._body, tools), content, is_raw)

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
        return predicted_text(self._body.prediction)

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
    sent = any_object(body.chat_template_kwargs, "chat_template_kwargs") or {}
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
