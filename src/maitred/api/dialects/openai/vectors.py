"""POST /v1/embeddings, /v1/rerank and /v1/score by the served model, in the queue of its chats."""

from __future__ import annotations

import secrets
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from maitred.api.dialects.openai.answers import encode
from maitred.api.dialects.openai.refusals import EMBEDDING_REFUSED, MAX_LISTED, SCORE_REFUSED, heed_others, prompts_of
from maitred.api.dialects.openai.sampling import check_priority
from maitred.api.dialects.openai.schemas import PROMPT_SCHEMA, Milliseconds, Positive
from maitred.api.generate.dialect import time_limits
from maitred.api.generate.generation import failure_of
from maitred.api.generate.lease import admitted, cache_salt, enter
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder, Sent, decode_json
from maitred.api.http.exchange import JSON_HEADERS, Exchange
from maitred.api.http.routes import GENERATION_ERRORS, Route
from maitred.core.errors import InvalidRequest, ModelNotFound
from maitred.core.request import Charges, FinishReason, RequestSpec
from maitred.core.step import RequestProgress
from maitred.engine.intake import make_pooled
from maitred.fleet.told import ToldUsage, usage_header
from maitred.gate.gate import Ask, Lease

if TYPE_CHECKING:
    import numpy as np

    from maitred.engine.vectors import MakeRequest, PooledRequests  # which need numpy

T = TypeVar("T")

MAX_TEXTS = 2048  # of one request, as OpenAI takes
NO_ENCODER = (
    "no model of vectors is served here; serve a language model, an encoder, or a "
    '--model-repository that has one: a model with parameters "task" = "embedding" in its config.pbtxt and a '
    "tokenizer.json, or a folder of sentence-transformers with onnx/model.onnx"
)
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


EMBEDDINGS = BodyDecoder(EmbeddingRequest, EMBEDDING_REFUSED)
_RERANK = BodyDecoder(RerankRequest, SCORE_REFUSED)
_SCORE = BodyDecoder(ScoreRequest, SCORE_REFUSED)
_Item = str | RankedText
_ITEMS = msgspec.json.Decoder(_Item | list[_Item])


async def answer_pooled(
    app: App,
    exchange: Exchange,
    body: PoolingBody,
    ask: Callable[[MakeRequest], PooledRequests[T]],
    write: Callable[[T, int], bytes],
    *,
    num_texts: int,
) -> None:
    """Have `ask` make requests, in a thread, and answer with what `write` makes of their numbers and their tokens:
    those of one call share steps with all others.

    Raises RequestError, as `Gate.enter` and `Gate.admit`, and as a generation that fails.
    """
    salt, limits = cache_salt(app, exchange.caller, ""), time_limits(body, exchange.headers)

    def make(*of_request: object, **options: object) -> RequestSpec:
        return make_pooled(
            app.model,
            *of_request,  # type: ignore[arg-type]
            request_id=f"{next(app.request_numbers):x}.pool",
            now=app.clock.now(),
            terms=limits.asked(app.clock.now()),
            cache_salt=salt,
            **options,  # type: ignore[arg-type]
        )

    with app.in_flight.answering():
        lease = enter(app, exchange.caller, Ask(num_samples=num_texts, priority=body.priority, limits=limits))
        charges: list[Charges] = []
        try:
            async with app.in_flight.watch(exchange):
                wanted = await app.text.run(exchange.num_body_bytes, lambda: ask(make))
                answers = await _answered(app, lease, wanted.requests, charges)
        finally:
            num_used = sum(each.num_prompt_tokens for each in charges)
            lease.end(num_used)
            if not exchange.caller.is_anybody:
                app.observer.metrics.tenants.left(exchange.caller.quota, num_used, 0)
    num_tokens = sum(request.num_prompt_tokens for request in wanted.requests)
    exchange.log |= {"model": app.model.name, "prompts": len(answers), "prompt_tokens": num_tokens}
    compute_us, num_cached = (sum(each.compute_us for each in charges), sum(each.num_cached_tokens for each in charges))
    told = usage_header(ToldUsage(num_tokens, num_cached, 0, compute_us))
    whole = await app.text.run(sum(map(len, answers)), lambda: write(wanted.finished(answers), num_tokens))
    await exchange.answer(whole, 200, (*JSON_HEADERS, told) if exchange.from_router else JSON_HEADERS)


async def _answered(app: App, lease: Lease, requests: Sequence[RequestSpec], charges: list[Charges]) -> list[bytes]:
    """Submit all, then wait for one after the other; the first failure gives the others up."""
    specs, answers = admitted(app, lease, requests), []
    async with AsyncExitStack() as running:
        streams = [app.replica.submit(spec)[0] for spec in specs]
        for stream in streams:
            running.push_async_callback(stream.aclose)  # type: ignore[attr-defined]
        for stream in streams:
            last = RequestProgress("")
            async for last in stream:
                if last.charges is not None and last.finish_reason is not None:
                    charges.append(last.charges)
            if last.finish_reason is not FinishReason.STOP:
                raise failure_of(app, last)
            answers.append(last.vector)
    return answers


async def embed(app: App, exchange: Exchange, sent: Sent[EmbeddingRequest] | None = None) -> None:
    """Vectors of texts; `sent` is the body where it was read."""
    sent = sent or await exchange.sent(EMBEDDINGS)
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

    write = partial(written, name, as_base64=body.encoding_format == "base64")
    await answer_pooled(app, exchange, body, ask, write, num_texts=len(texts))


def written(model: str, vectors: Sequence[np.ndarray], num_tokens: int, *, as_base64: bool) -> bytes:
    """The body of an answer with these vectors."""
    told = (
        b64encode(vector.astype("<f4", copy=False).tobytes()).decode() if as_base64 else vector.tolist()
        for vector in vectors
    )
    data = [Embedding(index=index, embedding=embedding) for index, embedding in enumerate(told)]
    return encode(EmbeddingList(data=data, model=model, usage=_usage(num_tokens)))


async def rerank(app: App, exchange: Exchange) -> None:
    """Documents in the order in which they answer a query."""
    sent = await exchange.sent(_RERANK)
    body, name = sent.body, _checked(app, exchange, sent, _RERANK, SCORE_REFUSED)
    documents = _texts(body.documents, "documents")
    most = len(documents) if body.top_n is None or body.top_n == 0 else body.top_n
    if most < 1:
        raise InvalidRequest(f"top_n is {body.top_n}; it must be at least 1, or left out for all", param="top_n")
    shown = [None if body.return_documents is False else RankedText(each) for each in documents]

    def write(scores: list[float], num_tokens: int) -> bytes:
        best = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:most]
        results = [Ranked(index=at, relevance_score=scores[at], document=shown[at]) for at in best]
        return encode(
            RerankAnswer(id=f"rerank-{secrets.token_hex(12)}", model=name, results=results, usage=_usage(num_tokens))
        )

    pairs = [(body.query, each) for each in documents]
    await answer_pooled(app, exchange, body, _scoring(app, body, pairs, "documents"), write, num_texts=len(pairs))


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
    pairs = list(zip(firsts, seconds, strict=True))

    def write(scores: list[float], num_tokens: int) -> bytes:
        data = [Score(index=index, score=each) for index, each in enumerate(scores)]
        usage, created = _usage(num_tokens), int(time.time())
        return encode(
            ScoreList(id=f"score-{secrets.token_hex(12)}", created=created, model=name, data=data, usage=usage)
        )

    await answer_pooled(app, exchange, body, _scoring(app, body, pairs, other), write, num_texts=len(pairs))


def _scoring(app: App, body: RerankRequest | ScoreRequest, pairs: list[tuple[str, str]], at: str) -> Any:
    def ask(make: MakeRequest) -> PooledRequests[list[float]]:
        from maitred.engine.vectors import scoring  # noqa: PLC0415  numpy

        cut_to = body.truncate_prompt_tokens
        return scoring(app.model, pairs, make, instruction=body.instruction, cut_to=cut_to, at=at)

    return ask


def _checked(app: App, exchange: Exchange, sent: Sent[Any], decoder: BodyDecoder[Any], refused: Any) -> str:
    """The model's name. Raises RequestError for fields that cannot be served."""
    name = app.check_model(sent.body.model, exchange.caller)
    if app.adapter(name, exchange.caller) is not None:
        raise InvalidRequest(f"{name} is an adapter, which generates; name the model {app.model.name}", param="model")
    heed_others(app, exchange, sent, decoder, refused)
    check_priority(sent.body.priority, app.policy_without_priorities)
    checked_cut(sent.body)
    return name


def checked_cut(body: PoolingBody) -> int | None:
    """Tokens to which longer texts are cut; -1: as many as the model takes. Raises InvalidRequest."""
    cut = body.truncate_prompt_tokens
    if cut is not None and cut != -1 and cut < 1:
        told = f"truncate_prompt_tokens is {cut}; it must be at least 1, or -1 for as many as the model takes"
        raise InvalidRequest(told, param="truncate_prompt_tokens")
    return cut


def _texts(sent: Raw, at: str) -> list[str]:
    """One text or several, as they are or in objects."""
    found = decode_json(sent, _ITEMS, at=at)
    items = found if isinstance(found, list) else [found]
    if not 1 <= len(items) <= MAX_TEXTS:
        raise InvalidRequest(f"{at} has {len(items)} texts; it must have 1 to {MAX_TEXTS}", param=at)
    return [item if isinstance(item, str) else item.text for item in items]


def _usage(num_tokens: int) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


_route = partial(Route, method="POST", tells_ignored=True, errors=GENERATION_ERRORS)
EMBEDDINGS_ROUTE = _route(
    path="/v1/embeddings", handler=embed, summary="Vectors of texts.", body=EmbeddingRequest, answer=EmbeddingList
)
VECTOR_ROUTES = (
    EMBEDDINGS_ROUTE,
    _route(
        path="/v1/rerank",
        handler=rerank,
        summary="Documents in the order in which they answer a query.",
        body=RerankRequest,
        answer=RerankAnswer,
    ),
    _route(
        path="/v1/score",
        handler=score,
        summary="How well pairs of texts go together.",
        body=ScoreRequest,
        answer=ScoreList,
    ),
)
