"""POST /v1/embeddings by ONNX encoders of the model repository, and GET /v1/models with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
from msgspec import Raw

from maitred.api.dialects.anthropic.models import answer_cards, is_anthropics
from maitred.api.dialects.openai.models import model_cards
from maitred.api.dialects.openai.refusals import EMBEDDING_REFUSED, MAX_LISTED, heed_others, prompts_of, unsupported
from maitred.api.dialects.openai.sampling import check_priority
from maitred.api.dialects.openai.schemas import ModelCard, ModelList
from maitred.api.dialects.openai.vectors import (
    EMBEDDINGS,
    EMBEDDINGS_ROUTE,
    MAX_TEXTS,
    embed_texts,
    written,
)
from maitred.api.generate.dialect import time_limits
from maitred.api.http.app import App
from maitred.api.http.exchange import JSON_HEADERS, Exchange
from maitred.api.http.routes import Route
from maitred.api.tensor.lease import leased, tensors_of
from maitred.api.tensor.texts import Tokenizers, encoder_named, encoders_of, tokens_of, vectors_of
from maitred.fleet.told import ToldUsage, usage_header
from maitred.tensor.encoder import check_dimensions
from maitred.tensor.encoder_config import encoder_of


class Embeddings:
    """The route, with the tokenizers that it has read."""

    def __init__(self) -> None:
        self._tokenizers = Tokenizers()

    async def __call__(self, app: App, exchange: Exchange) -> None:
        sent = await exchange.sent(EMBEDDINGS)
        body, tensors = sent.body, tensors_of(app)
        is_served = body.model is not None and bool(app.model.names) and app.is_model(body.model)
        model = None if is_served else encoder_named(tensors, body.model)
        if model is None:
            await embed_texts(app, exchange, sent)
            return
        heed_others(app, exchange, sent, EMBEDDINGS, EMBEDDING_REFUSED)
        for name in ("prompt_name", "truncate_prompt_tokens"):
            if getattr(body, name) is not None:
                raise unsupported(name, "this model's texts are taken as they are")
        check_priority(body.priority, app.policy_without_priorities)
        config = tensors.config(model)
        encoder = encoder_of(config)
        check_dimensions(body.dimensions, encoder.width)
        asked = prompts_of(body.input, at="input", max_listed=MAX_LISTED, max_prompts=MAX_TEXTS)
        body.input = Raw()  # which was the whole body
        exchange.log |= {"model": model, "prompts": len(asked)}

        def read() -> list[Sequence[int]]:
            tokenizer, special = self._tokenizers.of(model, config), body.add_special_tokens is not False
            return tokens_of(tokenizer, encoder, asked, add_special_tokens=special)

        limits, first = time_limits(body, exchange.headers), not self._tokenizers.has(model, config)
        with leased(app, exchange.caller, num_requests=len(asked), priority=body.priority, limits=limits) as lease:
            async with app.in_flight.watch(exchange):
                tokens = await app.text.run(exchange.num_body_bytes, read, may_take_long=first)
                lease.reserve(sum(map(len, tokens)))
                vectors = await vectors_of(lease, model, encoder, tokens, body.dimensions)
        exchange.log["prompt_tokens"] = lease.num_tokens
        write = partial(written, model, vectors, lease.num_tokens, as_base64=body.encoding_format == "base64")
        whole = await app.text.run(sum(vector.nbytes for vector in vectors), write)
        told = ToldUsage(lease.num_tokens, 0, 0, lease.compute_us)
        usage = (usage_header(told),) if exchange.from_router else ()
        await exchange.answer(whole, 200, (*JSON_HEADERS, *usage))


async def list_models(app: App, exchange: Exchange) -> None:
    """The language model's names and adapters, then encoders of texts, in the form of whose client asks."""
    cards = model_cards(app, exchange)
    for name, encoder in encoders_of(tensors_of(app)).items():
        cards.append(ModelCard(id=name, created=app.model.created, root=name, max_model_len=encoder.max_length))
    if is_anthropics(exchange):
        await answer_cards(exchange, msgspec.to_builtins(cards))
    else:
        await exchange.answer_json(ModelList(cards))


def embedding_routes() -> tuple[Route, ...]:
    """Routes of a server that has a model repository."""
    models = Route(
        path="/v1/models",
        handler=list_models,
        summary="List the names of the model, and encoders of texts.",
        answer=ModelList,
    )
    return replace(EMBEDDINGS_ROUTE, handler=Embeddings()), models
