"""POST /v1/embeddings, /v1/rerank and /v1/score: their bodies and answers. Reranking is as Jina and vLLM have it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from maitred.api.dialects.openai.schemas import PROMPT_SCHEMA, Milliseconds, Positive

Priority = Annotated[int | None, Meta(extra_json_schema={"minimum": 0, "maximum": 1000})]
Cut = Annotated[int | None, Meta(description="Cuts longer texts to so many tokens; -1: as many as the model takes.")]
_TEXTS_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
Texts = Annotated[Raw, Meta(extra_json_schema=_TEXTS_SCHEMA)]
"""One text or a list; an item may be an object with a `text`."""


class PoolingBody(msgspec.Struct, kw_only=True):
    """Fields of all three bodies."""

    model: str | None = None
    truncate_prompt_tokens: Cut = None
    priority: Priority = None
    ttft_slo_ms: Milliseconds = None
    queue_timeout_ms: Milliseconds = None
    timeout_ms: Milliseconds = None
    user: str | None = None


class EmbeddingRequest(PoolingBody, kw_only=True):
    """POST /v1/embeddings; `add_special_tokens` is of texts, and lists of token ids are taken as they are.
    `prompt_name` is one of the model's own prompts, which is put before each text."""

    input: Annotated[Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None


class Embedding(msgspec.Struct, kw_only=True):
    index: int
    embedding: list[float] | str  # base64 of float32, little-endian
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class RerankRequest(PoolingBody, kw_only=True):
    """POST /v1/rerank. `instruction` is for a causal reranker: what makes a document a good one."""

    query: str
    documents: Texts
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class RankedText(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankAnswer(msgspec.Struct, kw_only=True):
    id: str
    model: str
    results: list[Ranked]  # the best first
    usage: EmbeddingUsage


class ScoreRequest(PoolingBody, kw_only=True):
    """POST /v1/score: text_1 with text_2, or queries with documents; one of the first is that of all of the second."""

    text_1: Texts | UnsetType = UNSET
    text_2: Texts | UnsetType = UNSET
    queries: Texts | UnsetType = UNSET
    documents: Texts | UnsetType = UNSET
    instruction: str | None = None


class Score(msgspec.Struct, kw_only=True):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
