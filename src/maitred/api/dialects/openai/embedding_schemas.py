"""POST /v1/embeddings: its bodies, and the route as it is where no encoder is served (`embeddings` has the other)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from maitred.api.dialects.openai.schemas import PROMPT_SCHEMA, Milliseconds, Positive
from maitred.api.http.app import App
from maitred.api.http.exchange import Exchange
from maitred.api.http.routes import Route
from maitred.core.errors import ModelNotFound

NO_ENCODER = (
    'no encoder of texts is served here; serve a --model-repository that has one: a model with parameters "task" = '
    '"embedding" in its config.pbtxt and a tokenizer.json, or a folder of sentence-transformers with onnx/model.onnx'
)


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings; `add_special_tokens` is of texts, and lists of token ids are taken as they are."""

    input: Annotated[Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive = None
    add_special_tokens: bool | None = None
    priority: Annotated[int | None, Meta(extra_json_schema={"minimum": 0, "maximum": 1000})] = None
    ttft_slo_ms: Milliseconds = None
    queue_timeout_ms: Milliseconds = None
    timeout_ms: Milliseconds = None
    user: str | None = None


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


async def no_encoder(app: App, exchange: Exchange) -> None:
    raise ModelNotFound(NO_ENCODER, param="model")


EMBEDDINGS = Route(
    method="POST",
    path="/v1/embeddings",
    handler=no_encoder,
    summary="Vectors of texts, by an encoder of the model repository.",
    body=EmbeddingRequest,
    tells_ignored=True,
    answer=EmbeddingList,
    errors=(400, 401, 403, 404, 413, 415, 429, 500, 503, 504),
)
