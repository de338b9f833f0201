"""Bodies of the Responses API, named as in OpenAI's specification; the sampling fields beside them are vLLM's."""

from __future__ import annotations

import time
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from maitred.api.dialects.openai.schemas import EFFORTS, AnyObject, ChatCompletionRequest, ChatMessage, Positive

INPUT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class TextOptions(msgspec.Struct, kw_only=True):
    format: AnyObject = UNSET
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Annotated[str | None, Meta(extra_json_schema={"enum": [*EFFORTS, None]})] = None
    summary: str | None = None  # any of them: thoughts are told as a summary
    generate_summary: str | None = None


class ResponsesRequest(ChatCompletionRequest, kw_only=True):
    """POST /v1/responses: a chat, whose messages, tools and format are made of the items, tools and format here."""

    messages: list[ChatMessage] = msgspec.field(default_factory=list)  # not to be sent
    input: Annotated[Raw | UnsetType, Meta(extra_json_schema=INPUT_SCHEMA)] = UNSET
    instructions: str | None = None
    max_output_tokens: Positive = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    truncation: Annotated[str | None, Meta(extra_json_schema={"enum": ["auto", "disabled", None]})] = None
    # kept by the server that the client talks to, see `stored`
    previous_response_id: str | None = None
    background: bool | None = None
    # accepted, and without effect on the answer
    max_tool_calls: int | None = None  # of the server's own tools, of which there are none


class InputPart(msgspec.Struct, kw_only=True):
    type: str = ""
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """One item of an input, whatever its type; fields of types that nothing reads are skipped."""

    type: str | None = None  # None is a message
    id: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, as far as it is."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: Any = {}
    model: str
    output: list[Any] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: Any = {}
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: Any = {}
    tool_choice: Any = "auto"
    tools: Any = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: dict[str, Any] | None = None
    user: str | None = None


_NULL = Raw(b"null")
_REPEATED = tuple(
    name
    for name in ResponseObject.__struct_fields__
    if name in ResponsesRequest.__struct_fields__ and name not in ("model", "service_tier")
)
_repeated = attrgetter(*_REPEATED)


def response_of(body: ResponsesRequest, id: str, model: str, **more: Any) -> ResponseObject:
    """The response to a body, before it has any output; `more` are fields beside what the body says."""
    fields: dict[str, Any] = {
        "created_at": int(time.time()),
        "status": "in_progress",
        "text": {"format": {"type": "text"}},
    }
    sent = zip(_REPEATED, _repeated(body), strict=True)
    fields |= {name: value for name, value in sent if value is not None and value is not UNSET and value != _NULL}
    return ResponseObject(id=id, model=model, **fields | more)


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of a stream; its type says which other fields it has."""

    type: str
    sequence_number: int
