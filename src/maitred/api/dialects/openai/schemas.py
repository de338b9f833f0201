"""The bodies of requests and answers as msgspec structs; decoding checks their types, openapi.py documents them.

Field names follow OpenAI's specification and, for extensions, vLLM's. Ranges that a message should explain with both
numbers are checked in sampling.py; here they only appear in the OpenAPI document (`extra_json_schema`). Objects and
nested lists of any size stay Raw until bounded.py has measured them: 2.8 million empty lists are 8 MiB of body and half
a second of decoding.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from maitred.tenancy.tenant import TIERS


def _between(low: float, high: float) -> dict[str, Any]:
    return {"minimum": low, "maximum": high}


def _map_of(kind: str) -> dict[str, Any]:
    return {"type": ["object", "null"], "additionalProperties": {"type": kind}}


PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1024},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1, "maxItems": 1024},
    ]
}
AnyObject = Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["object", "null"]})]
AnyList = Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["array", "null"], "items": {"type": "object"}})]
Count = Annotated[int | None, Meta(extra_json_schema={"minimum": 0})]
Positive = Annotated[int | None, Meta(extra_json_schema={"minimum": 1})]
Penalty = Annotated[float | None, Meta(extra_json_schema=_between(-2, 2))]
Salt = Annotated[str | None, Meta(extra_json_schema={"minLength": 1, "maxLength": 1024})]
Milliseconds = Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 86_400_000})]
TokenIds = list[int]
# numbers of more digits would be read at length, and no vocabulary has them
SentTokenIds = list[Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]]
SERVICE_TIERS = ("auto", *TIERS)  # where there are no tenants, auto and default
ServiceTierName = Annotated[str, Meta(extra_json_schema={"enum": [*TIERS]})]


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None  # None is the one that is served
    n: Positive = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # OpenAI's sampling
    temperature: Annotated[float | None, Meta(extra_json_schema=_between(0, 2))] = None
    top_p: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: Annotated[Raw | UnsetType, Meta(extra_json_schema=_map_of("number"))] = UNSET
    seed: Annotated[int | None, Meta(extra_json_schema=_between(-(2**63), 2**63 - 1))] = None
    stop: str | list[str] | None = None
    max_tokens: Count = None
    # vLLM's sampling
    top_k: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    min_p: Annotated[float | None, Meta(extra_json_schema=_between(0, 1))] = None
    repetition_penalty: Annotated[float | None, Meta(extra_json_schema=_between(0.01, 100))] = None
    stop_token_ids: SentTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: SentTokenIds | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Annotated[int | None, Meta(extra_json_schema=_between(0, 20))] = None
    # the answer's shape; decoded where a thread has the time
    response_format: AnyObject = UNSET
    structured_outputs: AnyObject = UNSET
    # what the answer shows, and how the request is treated
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int | None, Meta(extra_json_schema=_between(0, 1000))] = None
    request_id: Annotated[str | None, Meta(extra_json_schema={"pattern": "^[A-Za-z0-9._-]{1,128}$"})] = None
    cache_salt: Salt = None
    ttft_slo_ms: Milliseconds = None
    queue_timeout_ms: Milliseconds = None
    timeout_ms: Milliseconds = None
    service_tier: Annotated[str | None, Meta(extra_json_schema={"enum": [*SERVICE_TIERS, None]})] = None
    store: bool | None = None  # whether a server that captures may keep the answer's tokens
    # accepted, and without effect on the answer
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Annotated[Raw | UnsetType, Meta(extra_json_schema=_map_of("string"))] = UNSET
    session_id: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """Part of a message; only text is understood so far."""

    type: str
    text: str | None = None


class Prediction(msgspec.Struct, kw_only=True):
    """What the answer may be like (OpenAI's predicted outputs)."""

    type: str
    content: str | list[ContentPart]


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: AnyList = UNSET
    tool_call_id: str | None = None
    function_call: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET
    images: Raw | UnsetType = UNSET
    prefix: bool | None = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(extra_json_schema={"minItems": 1})]
    max_completion_tokens: Positive = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Meta(extra_json_schema=_between(0, 20))] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: AnyObject = UNSET
    # calls of tools, and thoughts
    tools: AnyList = UNSET
    tool_choice: Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["string", "object", "null"]})] = UNSET
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str | None, Meta(extra_json_schema={"enum": [*EFFORTS, None]})] = None
    include_reasoning: bool | None = None
    thinking_token_budget: Count = None
    prediction: AnyObject = UNSET
    # accepted, and without effect on the answer
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: AnyObject = UNSET


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
    logprobs: Annotated[int | None, Meta(extra_json_schema=_between(0, 20))] = None
    best_of: Positive = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize, with either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: AnyObject = UNSET


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: SentTokenIds
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    # of a prediction: tokens that were checked and became output, and tokens checked in vain, which are not billed
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class TimingMs(msgspec.Struct, kw_only=True):
    """Where the time in the engine went (ms), of the choice that took longest; all but `ttft` add up to all of it."""

    queue: float
    schedule: float
    prefill: float
    decode: float
    stall: float
    ttft: float


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    handover: str | UnsetType = UNSET
    timing_ms: TimingMs | UnsetType = UNSET
    engine_ms: float | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class NamedLogprob(msgspec.Struct):
    """One entry of vLLM's prompt_logprobs, whose keys are token ids."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, NamedLogprob] | None]
FinishReasonName = Literal["stop", "length", "tool_calls"]


class CalledFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`arguments` is JSON as text; in a stream a piece of it."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The first of a call has id, type and name, those after it pieces of the arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class AssistantMessage(msgspec.Struct):
    """Thoughts stand under both names that clients know."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReasonName
    stop_reason: int | str | None = None
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    service_tier: ServiceTierName | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: ServiceTierName | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A text completion, whole or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelMeta(msgspec.Struct, frozen=True):
    """What a model is and takes, beside its card; the first two as llama.cpp's server names them."""

    n_params: int
    size: int  # bytes of the weights
    kv_size: int  # bytes of the KV cache
    family: str
    dtype: str
    device: str
    digest: str


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "maitred"
    root: str
    parent: str | None = None
    max_model_len: int
    meta: ModelMeta | UnsetType = UNSET


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"
