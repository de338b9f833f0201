"""POST /v1/embeddings, /v1/rerank and /v1/score by the served model, in the queue of its chats."""

from __future__ import annotations

import secrets
import time
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw

from maitred.api.dialects.openai import embedding_schemas as s
from maitred.api.dialects.openai.answers import encode
from maitred.api.dialects.openai.refusals import (
    EMBEDDING_REFUSED,
    MAX_LISTED,
    SCORE_REFUSED,
    heed_others,
    prompts_of,
)
from maitred.api.dialects.openai.sampling import check_priority
from maitred.api.generate.dialect import time_limits
from maitred.api.generate.pooled import Pooled, pooled
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder, Sent, decode_json
from maitred.api.http.exchange import JSON_HEADERS, Exchange
from maitred.api.http.routes import GENERATION_ERRORS, Route
from maitred.core.errors import InvalidRequest, ModelNotFound

if TYPE_CHECKING:
    import numpy as np

    from maitred.engine.vectors import MakeRequest, PooledRequests

MAX_TEXTS = 2048  # of one request, as OpenAI takes
NO_ENCODER = (
    "no model of vectors is served here; serve a language model or an encoder by --executor native, or a "
    '--model-repository that has one: a model with parameters "task" = "embedding" in its config.pbtxt and a '
    "tokenizer.json, or a folder of sentence-transformers with onnx/model.onnx"
)
EMBEDDINGS = BodyDecoder(s.EmbeddingRequest, EMBEDDING_REFUSED)
_RERANK = BodyDecoder(s.RerankRequest, SCORE_REFUSED)
_SCORE = BodyDecoder(s.ScoreRequest, SCORE_REFUSED)
_Item = str | s.RankedText
_ITEMS = msgspec.json.Decoder(_Item | list[_Item])


async def embed(app: App, exchange: Exchange) -> None:
    """Vectors of texts."""
    await embed_texts(app, exchange, await exchange.sent(EMBEDDINGS))


async def embed_texts(app: App, exchange: Exchange, sent: Sent[s.EmbeddingRequest]) -> None:
    """Answer a body that was read with vectors of its texts."""
    body = sent.body
    if not app.model.names or app.model.pooling is None:
        raise ModelNotFound(NO_ENCODER, param="model")
    name = _checked(app, exchange, sent, EMBEDDINGS, EMBEDDING_REFUSED)
    texts = prompts_of(body.input, at="input", max_listed=MAX_LISTED, max_prompts=MAX_TEXTS)
    body.input = Raw()  # which was the whole body

    def ask(make: MakeRequest) -> PooledRequests[list[np.ndarray]]:
        from maitred.engine.vectors import embedding  # noqa: PLC0415  numpy

        special, cut_to, size = body.add_special_tokens is not False, body.truncate_prompt_tokens, body.dimensions
        how = {"add_special_tokens": special, "cut_to": cut_to}
        return embedding(app.model, texts, make, prompt_name=body.prompt_name, dimensions=size, **how)

    found = await _pooled(app, exchange, body, ask, num_texts=len(texts), name="input")

    def write() -> bytes:
        return written(name, found.made(), found.num_tokens, as_base64=body.encoding_format == "base64")

    whole = await app.text.run(found.num_bytes, write)
    await exchange.answer(whole, 200, (*JSON_HEADERS, *found.headers))


def written(model: str, vectors: Sequence[np.ndarray], num_tokens: int, *, as_base64: bool) -> bytes:
    """The body of an answer with these vectors."""
    told = (
        b64encode(vector.astype("<f4", copy=False).tobytes()).decode() if as_base64 else vector.tolist()
        for vector in vectors
    )
    data = [s.Embedding(index=index, embedding=embedding) for index, embedding in enumerate(told)]
    return encode(s.EmbeddingList(data=data, model=model, usage=_usage(num_tokens)))


async def rerank(app: App, exchange: Exchange) -> None:
    """Documents in the order in which they answer a query."""
    sent = await exchange.sent(_RERANK)
    body, name = sent.body, _checked(app, exchange, sent, _RERANK, SCORE_REFUSED)
    documents = _texts(body.documents, "documents")
    most = len(documents) if body.top_n is None or body.top_n == 0 else body.top_n
    if most < 1:
        raise InvalidRequest(f"top_n is {body.top_n}; it must be at least 1, or left out for all", param="top_n")
    scores, num_tokens, headers = await _scores(app, exchange, body, [(body.query, each) for each in documents])
    shows = body.return_documents is not False
    best = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:most]
    results = [
        s.Ranked(index=at, relevance_score=scores[at], document=s.RankedText(documents[at]) if shows else None)
        for at in best
    ]
    answer = s.RerankAnswer(id=_new_id("rerank"), model=name, results=results, usage=_usage(num_tokens))
    await exchange.answer(encode(answer), 200, (*JSON_HEADERS, *headers))


async def score(app: App, exchange: Exchange) -> None:
    """How well each of the second texts goes with the first, or with its own."""
    sent = await exchange.sent(_SCORE)
    body, name = sent.body, _checked(app, exchange, sent, _SCORE, SCORE_REFUSED)
    fields = ("text_1", "text_2", "queries", "documents")
    given = {field: value for field in fields if (value := getattr(body, field)) is not UNSET}
    if tuple(given) not in (("text_1", "text_2"), ("queries", "documents")):
        raise InvalidRequest("send text_1 and text_2, or queries and documents", param=next(iter(given), "text_1"))
    (one, firsts), (other, seconds) = ((field, _texts(value, field)) for field, value in given.items())
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        told = f"{one} has {len(firsts)} texts and {other} {len(seconds)}; the first must have one, or as many"
        raise InvalidRequest(told, param=one)
    scores, num_tokens, headers = await _scores(app, exchange, body, list(zip(firsts, seconds, strict=True)))
    data = [s.Score(index=index, score=each) for index, each in enumerate(scores)]
    usage, created = _usage(num_tokens), int(time.time())
    answer = s.ScoreList(id=_new_id("score"), created=created, model=name, data=data, usage=usage)
    await exchange.answer(encode(answer), 200, (*JSON_HEADERS, *headers))


async def _scores(
    app: App, exchange: Exchange, body: s.RerankRequest | s.ScoreRequest, pairs: list[tuple[str, str]]
) -> tuple[list[float], int, tuple[Any, ...]]:
    def ask(make: MakeRequest) -> PooledRequests[list[float]]:
        from maitred.engine.vectors import scoring  # noqa: PLC0415  numpy

        return scoring(app.model, pairs, make, instruction=body.instruction, cut_to=body.truncate_prompt_tokens)

    found = await _pooled(app, exchange, body, ask, num_texts=len(pairs), name="documents")
    return found.made(), found.num_tokens, found.headers


async def _pooled(
    app: App, exchange: Exchange, body: s.PoolingBody, ask: Any, *, num_texts: int, name: str
) -> Pooled[Any]:
    limits = time_limits(body, exchange.headers)
    return await pooled(app, exchange, ask, num_texts=num_texts, priority=body.priority, limits=limits, name=name)


def _checked(app: App, exchange: Exchange, sent: Sent[Any], decoder: BodyDecoder[Any], refused: Any) -> str:
    """The model's name. Raises RequestError for fields that cannot be served."""
    name = app.check_model(sent.body.model, exchange.caller)
    if app.adapter(name, exchange.caller) is not None:
        raise InvalidRequest(f"{name} is an adapter, which generates; name the model {app.model.name}", param="model")
    heed_others(app, exchange, sent, decoder, refused)
    check_priority(sent.body.priority, app.policy_without_priorities)
    if (cut := sent.body.truncate_prompt_tokens) is not None and cut != -1 and cut < 1:
        told = f"truncate_prompt_tokens is {cut}; it must be at least 1, or -1 for as many as the model takes"
        raise InvalidRequest(told, param="truncate_prompt_tokens")
    return name


def _texts(sent: Raw, at: str) -> list[str]:
    """One text or several, as they are or in objects."""
    found = decode_json(sent, _ITEMS, at=at)
    items = found if isinstance(found, list) else [found]
    if not 1 <= len(items) <= MAX_TEXTS:
        raise InvalidRequest(f"{at} has {len(items)} texts; it must have 1 to {MAX_TEXTS}", param=at)
    return [item if isinstance(item, str) else item.text for item in items]


def _usage(num_tokens: int) -> s.EmbeddingUsage:
    return s.EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


_route = partial(Route, method="POST", tells_ignored=True, errors=GENERATION_ERRORS)
EMBEDDINGS_ROUTE = _route(
    path="/v1/embeddings",
    handler=embed,
    summary="Vectors of texts.",
    body=s.EmbeddingRequest,
    answer=s.EmbeddingList,
)
VECTOR_ROUTES = (
    EMBEDDINGS_ROUTE,
    _route(
        path="/v1/rerank",
        handler=rerank,
        summary="Documents in the order in which they answer a query.",
        body=s.RerankRequest,
        answer=s.RerankAnswer,
    ),
    _route(
        path="/v1/score",
        handler=score,
        summary="How well pairs of texts go together.",
        body=s.ScoreRequest,
        answer=s.ScoreList,
    ),
)
