"""Bodies and answers of Anthropic's Messages API as msgspec structs, and the format of its errors and streams.

Source: https://platform.claude.com/docs/en/api/messages and the types of the client `anthropic` 2.14. What blocks hold
stays Raw, because that of unknown types may be anything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from maitred.api.dialects.openai.schemas import AnyObject, Count
from maitred.api.http.errors import HttpError
from maitred.api.http.routes import DialectFormat, StreamFormat
from maitred.tenancy.quota import TenantQuota

AnyJson = Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["string", "array", "object", "null"]})]


class SentBlock(msgspec.Struct, kw_only=True):
    """One block of a content, of any type; only those that hold text, thoughts, calls or results are read."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None  # not checked
    # a call, and its result
    id: str | None = None
    name: str | None = None
    input: AnyObject = UNSET
    tool_use_id: str | None = None
    content: AnyJson = UNSET
    is_error: bool | None = None
    tool_name: str | None = None  # of a tool_reference
    # a document, or a search_result
    source: AnyJson = UNSET
    title: str | None = None


Content = str | list[SentBlock] | None


class SentSource(msgspec.Struct, kw_only=True):
    """Where the content of a document is."""

    type: str | None = None
    data: AnyJson = UNSET
    content: AnyJson = UNSET


class SentTurn(msgspec.Struct, kw_only=True):
    role: str
    content: Content = None


class SentTool(msgspec.Struct, kw_only=True):
    name: str = ""  # a set of tools has none
    type: str | None = None
    description: str | None = None
    input_schema: AnyObject = UNSET
    strict: bool | None = None


class SentToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class SentThinking(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: Count = None
    display: str | None = None  # omitted: no thoughts in the answer


class SentFormat(msgspec.Struct, kw_only=True):
    type: str | None = None
    schema: AnyObject = UNSET


class SentOutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: SentFormat | None = None


class SentMetadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None


class MessagesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages, and /v1/messages/count_tokens."""

    model: str | None = None  # None is the one that is served
    messages: Annotated[list[SentTurn], Meta(extra_json_schema={"minItems": 1})]
    system: Content = None
    max_tokens: Count = None  # 0 computes the prompt alone
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[SentTool] | None = None
    tool_choice: SentToolChoice | None = None
    thinking: SentThinking | None = None
    output_config: SentOutputConfig | None = None
    output_format: SentFormat | None = None  # output_config.format's older name
    metadata: SentMetadata | None = None
    service_tier: str | None = None
    # accepted, and without effect on the answer
    cache_control: AnyObject = UNSET
    inference_geo: str | None = None


class BatchedRequest(msgspec.Struct, kw_only=True):
    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]  # a MessagesRequest, checked when it is asked


class BatchParams(msgspec.Struct, kw_only=True):
    """POST /v1/messages/batches."""

    requests: list[BatchedRequest]


class ThinkingTokens(msgspec.Struct):
    thinking_tokens: int


class AnthropicUsage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: Annotated[int, Meta(description="0: nothing is charged for what the cache keeps")]
    output_tokens_details: ThinkingTokens | UnsetType = UNSET
    service_tier: Literal["standard", "priority", "batch"] | UnsetType = UNSET


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


StopReasonName = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: StopReasonName | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage


class AnthropicEvent(msgspec.Struct, kw_only=True):
    """One event of a stream, by whose type it is named."""

    type: str
    message: AnthropicMessage | UnsetType = UNSET  # of message_start
    index: int | UnsetType = UNSET  # of a block
    content_block: ThinkingBlock | TextBlock | ToolUseBlock | UnsetType = UNSET  # as it begins
    delta: dict[str, Any] | UnsetType = UNSET  # of a block, or the end
    usage: AnthropicUsage | UnsetType = UNSET


class InputTokens(msgspec.Struct):
    input_tokens: int


class AnthropicErrorObject(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True):
    error: AnthropicErrorObject
    request_id: str | None
    type: Literal["error"] = "error"


_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_STATUSES: Mapping[str | None, int] = {"server_overloaded": 529, "queue_timeout": 529}


def _told(error: HttpError) -> AnthropicError:
    status = _STATUSES.get(error.code, error.status)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error.message
    if error.code == "context_length_exceeded":  # the words that coding agents look for
        message = f"prompt is too long: {message}"
    return AnthropicError(AnthropicErrorObject(kind, message), error.request_id or None)


def _limit_headers(quota: TenantQuota, now: float) -> Iterator[tuple[str, str]]:
    """Source: https://platform.claude.com/docs/en/api/rate-limits; tokens are those of prompt and answer together."""
    for name, limit, left, reset_s in quota.left(now):
        reset = datetime.fromtimestamp(math.ceil(time.time() + reset_s), UTC)
        told = {"limit": limit, "remaining": left, "reset": f"{reset:%Y-%m-%dT%H:%M:%SZ}"}
        yield from ((f"anthropic-ratelimit-{name}-{what}", str(value)) for what, value in told.items())


ANTHROPIC = DialectFormat(
    StreamFormat(before_error=b"event: error\ndata: "),
    AnthropicError,
    _told,
    _STATUSES,
    (b"x-request-id", b"request-id"),
    _limit_headers,
)
