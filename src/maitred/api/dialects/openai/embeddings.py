"""POST /v1/embeddings by ONNX encoders of the model repository, and GET /v1/models with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from maitred.api.dialects.anthropic.models import answer_cards, is_anthropics
from maitred.api.dialects.openai.models import model_cards
from maitred.api.dialects.openai.refusals import EMBEDDING_REFUSED, MAX_LISTED, heed_others, prompts_of, unsupported
from maitred.api.dialects.openai.sampling import check_priority
from maitred.api.dialects.openai.schemas import ModelCard, ModelList
from maitred.api.dialects.openai.vectors import EMBEDDINGS, EMBEDDINGS_ROUTE, MAX_TEXTS, checked_cut, embed, written
from maitred.api.generate.dialect import time_limits
from maitred.api.http.app import App
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import JSON_HEADERS, Exchange
from maitred.api.http.routes import Route
from maitred.api.tensor.lease import TensorLease, leased, new_id, tensors_of
from maitred.core.errors import InvalidRequest, ModelNotFound
from maitred.core.tensor_request import InferRequest
from maitred.engine.intake import tokens_to_pool
from maitred.engine.tensors import TensorModels
from maitred.engine.vectors import check_dimensions, places
from maitred.fleet.told import ToldUsage, usage_header
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.encoder import inputs_for, vector_of
from maitred.tensor.encoder_config import Encoder, encoder_of, is_encoder
from maitred.text.tokenizer import Tokenizer


class Embeddings:
    """The route, with the tokenizers that it has read. A file that changes is read again when models change."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[ANY_MESSAGE, Tokenizer]] = {}  # with the config of the load that it is of

    async def __call__(self, app: App, exchange: Exchange) -> None:
        sent = await exchange.sent(EMBEDDINGS)
        body, tensors = sent.body, tensors_of(app)
        is_served = body.model is not None and bool(app.model.names) and app.is_model(body.model)
        model = None if is_served else encoder_named(tensors, body.model)
        if model is None:
            await embed(app, exchange, sent)
            return
        heed_others(app, exchange, sent, EMBEDDINGS, EMBEDDING_REFUSED)
        if body.prompt_name is not None:
            raise unsupported("prompt_name", "this model's texts are taken as they are")
        check_priority(body.priority, app.policy_without_priorities)
        cut_to = checked_cut(body)
        config = tensors.config(model)
        encoder = encoder_of(config)
        check_dimensions(body.dimensions, encoder.width)
        asked = prompts_of(body.input, at="input", max_listed=MAX_LISTED, max_prompts=MAX_TEXTS)
        body.input = Raw()  # which was the whole body
        exchange.log |= {"model": model, "prompts": len(asked)}
        most = encoder.max_length if cut_to in (None, -1) else min(encoder.max_length, cut_to)

        def read() -> list[Sequence[int]]:
            tokenizer, special = self._tokenizer(model, config, encoder), body.add_special_tokens is not False
            how: dict[str, Any] = {"most": most, "vocab_size": tokenizer.vocab_size, "cuts": cut_to is not None}
            named = zip(asked, places("input", len(asked)), strict=True)
            return [tokens_to_pool(tokenizer, text, at=at, add_special_tokens=special, **how)[0] for text, at in named]

        limits, first = time_limits(body, exchange.headers), self._read.get(model, (None,))[0] is not config
        with leased(app, exchange.caller, num_requests=len(asked), priority=body.priority, limits=limits) as lease:
            async with app.in_flight.watch(exchange):
                tokens = await app.text.run(exchange.num_body_bytes, read, may_take_long=first)
                lease.reserve(sum(map(len, tokens)))
                vectors = await _vectors(lease, model, encoder, tokens, body.dimensions)
        exchange.log["prompt_tokens"] = lease.num_tokens
        write = partial(written, model, vectors, lease.num_tokens, as_base64=body.encoding_format == "base64")
        whole = await app.text.run(sum(vector.nbytes for vector in vectors), write)
        told = ToldUsage(lease.num_tokens, 0, 0, lease.compute_us)
        usage = (usage_header(told),) if exchange.from_router else ()
        await exchange.answer(whole, 200, (*JSON_HEADERS, *usage))

    def _tokenizer(self, name: str, config: ANY_MESSAGE, encoder: Encoder) -> Tokenizer:
        """An encoder's tokenizer. From any thread. Raises CheckpointError for a file gone or broken since the load."""
        if self._read.get(name, (None,))[0] is not config:
            tokenizer = Tokenizer.from_folder(encoder.tokenizer)
            if encoder.vocab_size is not None:
                tokenizer.limit_to(encoder.vocab_size)
            self._read[name] = (config, tokenizer)
        return self._read[name][1]


async def _vectors(
    lease: TensorLease, model: str, encoder: Encoder, token_lists: Sequence[Sequence[int]], num_dimensions: int | None
) -> list[np.ndarray]:
    """Vectors of each text, float32. Each text is a request of its own, so that several clients' texts share batches;
    the first failure gives the others up.
    """

    async def vector(ids: Sequence[int]) -> np.ndarray:
        inputs, outputs = inputs_for(encoder, ids), (encoder.output,)
        of_text = InferRequest(request_id=new_id(), model=model, inputs=inputs, outputs=outputs, num_tokens=len(ids))
        (output,) = (await lease.infer(of_text)).outputs
        return vector_of(encoder, output, len(ids), num_dimensions)

    tasks = [asyncio.create_task(vector(ids)) for ids in token_lists]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # their places are free when we return


def encoders_of(tensors: TensorModels) -> dict[str, Encoder]:
    """Encoders that answer now, by name."""
    names = dict.fromkeys(entry.name for entry in tensors.index(ready_only=True))
    configs = {name: tensors.config(name) for name in names}
    return {name: encoder_of(config) for name, config in configs.items() if is_encoder(config)}


def encoder_named(tensors: TensorModels, name: str | None) -> str | None:
    """`name`, or the only one there is; None where no encoder is served at all. Raises ModelNotFound for another
    name, InvalidRequest where none of several is named.
    """
    if name is not None and tensors.versions(name) and is_encoder(tensors.config(name)):
        return name
    found = list(encoders_of(tensors))
    if found and name is not None:
        told = f"{shortened(repr(name))} is no encoder of texts that is served here; choose one of {', '.join(found)}"
        raise ModelNotFound(told, param="model")
    if len(found) > 1:
        raise InvalidRequest(f"name the model: one of {', '.join(found)}", param="model")
    return found[0] if found else None


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
