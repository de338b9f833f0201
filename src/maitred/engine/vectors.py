"""Texts to vectors and scores: what is asked of an engine for them, and what becomes of the numbers that it gives.

A pair of a query and a document is scored as the model was made for: a cross-encoder reads both; a model of vectors
gives the cosine of the two; any other causal model is asked, as Qwen3-Reranker is, whether the document answers the
query, and the share of `yes` beside `no` is the score (arXiv:2506.05176, and the form on the model's card).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import InvalidRequest, PromptTooLong
from maitred.core.request import PoolingFacts, RequestSpec
from maitred.engine.intake import ServedModel
from maitred.text.marks import MarkedText, Marks

T = TypeVar("T")
Text = str | Sequence[int]
Asked = Sequence[tuple[str, tuple[str, str]]]
"""The field of a document, and (query, document)."""
Vector = NDArray[np.float32]
MakeRequest = Callable[..., RequestSpec]
"""`make_pooled` of one model, with what is the same for all requests of a caller."""

LEAST_NORM = 1e-12  # as torch.nn.functional.normalize: a vector of zeros stays one
TASK = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_QUERY_PROMPTS, _DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")


class PooledRequests(NamedTuple, Generic[T]):
    """Requests, and what their answers, in the same order, become."""

    requests: list[RequestSpec]
    finished: Callable[[Sequence[bytes]], T]


def embedding(
    model: ServedModel,
    texts: Sequence[Text],
    make: MakeRequest,
    *,
    prompt_name: str | None = None,
    dimensions: int | None = None,
    **options: Any,
) -> PooledRequests[list[Vector]]:
    """Vectors of texts, behind the model's prompt of that name or its default one; the first `dimensions` of each
    (arXiv:2205.13147). `options` are `make_pooled`'s. Raises RequestError."""
    facts = model.pools
    if not facts.has_vectors:
        told = f"{model.name} scores pairs of texts, and has no vectors; send them to /v1/rerank or /v1/score"
        raise InvalidRequest(told, param="model")
    check_dimensions(dimensions, facts.width)
    name = facts.default_prompt if prompt_name is None else prompt_name
    if name and name not in facts.prompts:
        known = f"it has {', '.join(facts.prompts)}" if facts.prompts else "it has none"
        raise InvalidRequest(f"the model has no prompt {name!r}; {known}", param="prompt_name")
    prompt = facts.prompts.get(name, "")
    requests = [
        make(prompt + text if isinstance(text, str) else text, "embed", at=at, **options)
        for at, text in zip(places("input", len(texts)), texts, strict=True)
    ]
    return PooledRequests(requests, lambda answers: [vector_of(facts, each, dimensions) for each in answers])


def check_dimensions(asked: int | None, width: int | None) -> None:
    """Raises InvalidRequest for none, and for more than there are; a `width` of None is not known yet."""
    if asked is not None and (asked < 1 or (width is not None and asked > width)):
        most = "" if width is None else f", and at most {width}, as many as the model's vectors have"
        raise InvalidRequest(f"dimensions is {asked}; it must be at least 1{most}", param="dimensions")


def places(field: str, count: int) -> list[str]:
    """What errors call each text of a request's field."""
    return [field] if count == 1 else [f"{field}[{index}]" for index in range(count)]


def vector_of(facts: PoolingFacts, numbers: bytes, dimensions: int | None = None) -> Vector:
    """A text's vector, float32 [width], or its first `dimensions`, then of length 1 anew."""
    vector = np.frombuffer(numbers, np.float32)[:dimensions]
    return unit(vector) if facts.normalize else vector


def scoring(
    model: ServedModel,
    pairs: Sequence[tuple[str, str]],
    make: MakeRequest,
    *,
    instruction: str | None = None,
    cut_to: int | None = None,
    at: str = "documents",
) -> PooledRequests[list[float]]:
    """Scores of (query, document) pairs. `instruction` is a causal reranker's; `cut_to` is `make_pooled`'s, and `at`
    the field of the documents.

    Raises RequestError for what the model cannot score.
    """
    facts, asked = model.pools, list(zip(places(at, len(pairs)), pairs, strict=True))
    if not facts.is_encoder and not (facts.is_declared and facts.has_vectors):
        return _answers(model, facts, asked, make, instruction=instruction or TASK, cut_to=cut_to)
    if instruction is not None:
        raise InvalidRequest("this model takes no instruction; leave it out", param="instruction")
    if facts.has_vectors:
        return _cosines(facts, asked, make, cut_to=cut_to)
    if facts.width != 1:
        told = f"{model.name} has {facts.width} labels; a score needs a model with one"
        raise InvalidRequest(told, param="model")
    requests = [make(query, "classify", second=document, cut_to=cut_to, at=at) for at, (query, document) in asked]
    return PooledRequests(requests, lambda answers: [_label_score(facts, each) for each in answers])


def unit(vector: Vector) -> Vector:
    """The vector of length 1 in its direction; zeros stay zeros."""
    return vector / max(float(np.linalg.norm(vector)), LEAST_NORM)


def _label_score(facts: PoolingFacts, numbers: bytes) -> float:
    logit = float(np.frombuffer(numbers, np.float32)[0])
    return logit if facts.activation == "identity" else _sigmoid(logit)


def _cosines(
    facts: PoolingFacts, asked: Asked, make: MakeRequest, *, cut_to: int | None
) -> PooledRequests[list[float]]:
    """Each text once, however many pairs it is in."""
    requests, ends, known = list[RequestSpec](), list[int](), dict[tuple[str, str], int]()
    for at, pair in asked:
        for names, text, field in zip((_QUERY_PROMPTS, _DOCUMENT_PROMPTS), pair, ("query", at), strict=True):
            name = next((each for each in names if each in facts.prompts), facts.default_prompt)
            if (name, text) not in known:
                known[name, text] = len(requests)
                requests.append(make(facts.prompts.get(name, "") + text, "embed", cut_to=cut_to, at=field))
            ends.append(known[name, text])

    def scores(answers: Sequence[bytes]) -> list[float]:
        units = [unit(np.frombuffer(each, np.float32)) for each in answers]
        return [float(units[query] @ units[document]) for query, document in zip(ends[::2], ends[1::2], strict=True)]

    return PooledRequests(requests, scores)


def _answers(
    model: ServedModel,
    facts: PoolingFacts,
    asked: Asked,
    make: MakeRequest,
    *,
    instruction: str,
    cut_to: int | None,
) -> PooledRequests[list[float]]:
    """The model's own logits of no and yes, or the label that its file has of them."""
    tokenizer = model.tokenizer
    words = facts.score_tokens or (tokenizer.token_id("no"), tokenizer.token_id("yes"))
    how: dict[str, Any] = (
        {"task": "classify"} if facts.task == "classify" else {"task": "logits", "score_tokens": words}
    )
    if None in words or tokenizer.token_id("<|im_start|>") is None:
        told = "has no tokens yes, no and <|im_start|>, which a causal reranker is asked by"
        raise InvalidRequest(f"{model.name} {told}; serve a reranker or a model of vectors", param="model")
    before = tokenizer.encode(BEFORE, add_special_tokens=False)
    after = tokenizer.encode(AFTER, add_special_tokens=False)
    most = min(model.max_model_len, cut_to) if cut_to is not None and cut_to > 0 else model.max_model_len
    marks = Marks(tokenizer.added_tokens)  # which a client may not write into the form
    room, requests = max(most - len(before) - len(after), 0), list[RequestSpec]()
    for at, (query, document) in asked:
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        plain = MarkedText(text, [found.span() for found in marks.pattern.finditer(text)], marks)
        body = tokenizer.encode(plain, add_special_tokens=False)
        if len(body) > room and cut_to is None:
            told = f"{at} and the query have {len(body)} tokens, and this model takes {room} of them"
            raise PromptTooLong(f"{told}; send shorter ones, or truncate_prompt_tokens: -1", param=at)
        requests.append(make([*before, *body[:room], *after], **how))

    def scores(answers: Sequence[bytes]) -> list[float]:
        if facts.task == "classify":
            return [_label_score(facts, each) for each in answers]
        logits = [np.frombuffer(each, np.float32).tolist() for each in answers]
        return [_sigmoid(yes - no) for no, yes in logits]

    return PooledRequests(requests, scores)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
