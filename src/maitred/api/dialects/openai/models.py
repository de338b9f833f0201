"""GET /v1/models, and the text routes /tokenize and /detokenize, which touch no engine."""

from __future__ import annotations

from functools import partial

import msgspec
from msgspec import UNSET, UnsetType

from maitred.api.dialects.openai import schemas
from maitred.api.dialects.openai.reading import render_chat
from maitred.api.dialects.openai.refusals import MAX_LISTED, TOKENIZE_REFUSED, any_object, heed_others
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder
from maitred.api.http.exchange import Exchange
from maitred.core.errors import InvalidRequest, PromptTooLong
from maitred.engine.intake import ServedModel
from maitred.engine.model_facts import AdapterFacts

_TOKENIZE = BodyDecoder(schemas.TokenizeRequest, TOKENIZE_REFUSED)
_DETOKENIZE = BodyDecoder(schemas.DetokenizeRequest)
# /tokenize takes texts of so many tokens, or so many contexts where that is more
MOST_TOKENS = 32 * 1024
MOST_CONTEXTS = 2


async def list_models(app: App, exchange: Exchange) -> None:
    await exchange.answer_json(schemas.ModelList(model_cards(app, exchange)))


def model_cards(app: App, exchange: Exchange) -> list[schemas.ModelCard]:
    """Every name under which the model answers, and the adapters that the caller may ask for."""
    cards = [_card(app, name) for name in app.model.names]
    if app.adapters is not None and exchange.from_router:
        return [*cards, *(_adapter_card(app, facts) for facts in app.adapters.named.values())]
    return [*cards, *(_adapter_card(app, facts) for facts in app.adapters_of(exchange.caller))]


async def get_model(app: App, exchange: Exchange) -> None:
    """One of them; raises ModelNotFound."""
    await exchange.answer_json(asked_card(app, exchange))


def asked_card(app: App, exchange: Exchange) -> schemas.ModelCard:
    """The card of the model that the path names; raises ModelNotFound."""
    name = app.check_model(exchange.parameter, exchange.caller)
    adapter = app.adapter(name, exchange.caller)
    return _card(app, name) if adapter is None else _adapter_card(app, adapter)


def _adapter_card(app: App, adapter: AdapterFacts) -> schemas.ModelCard:
    """An adapter's card like vLLM's: `root` is its path, `parent` its base model."""
    card = _card(app, adapter.name)
    if card.meta is not UNSET:
        card.meta = msgspec.structs.replace(card.meta, size=adapter.num_bytes, kv_size=0, digest=adapter.digest)
    return msgspec.structs.replace(card, root=adapter.path, parent=app.model.names[0])


def _card(app: App, name: str) -> schemas.ModelCard:
    canonical = app.model.names[0]
    return schemas.ModelCard(
        id=name,
        created=app.model.created,
        root=app.model.root or canonical,
        max_model_len=app.model.max_model_len,
        meta=_meta(app.model),
    )


def _meta(model: ServedModel) -> schemas.ModelMeta | UnsetType:
    held = model.footprint
    if held is None:
        return UNSET
    family = held.architecture.removesuffix("ForCausalLM").lower()
    sizes = held.num_parameters, held.weights_bytes, held.kv_bytes
    return schemas.ModelMeta(*sizes, family, held.dtype, held.device, model.revision)


async def tokenize(app: App, exchange: Exchange) -> None:
    """Tokens of a prompt, or of messages as the chat route would render them."""
    sent = await exchange.sent(_TOKENIZE)
    body = sent.body
    app.check_model(body.model, exchange.caller)
    heed_others(app, exchange, sent, _TOKENIZE, TOKENIZE_REFUSED)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    async with app.in_flight.watch(exchange):
        answer = await app.text.run(
            exchange.num_body_bytes, partial(_tokenize, app, body), may_take_long=body.chat_template_kwargs is not UNSET
        )
    await exchange.answer_json(answer)


def _tokenize(app: App, body: schemas.TokenizeRequest) -> schemas.TokenizeResponse:
    model = app.model
    if body.messages is not None:
        text = render_chat(
            model,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=any_object(body.chat_template_kwargs, "chat_template_kwargs"),
        )
    else:
        text = body.prompt or ""
    least, most = model.tokenizer.min_tokens(text), max(MOST_TOKENS, MOST_CONTEXTS * model.max_model_len)
    if least > most:
        raise PromptTooLong(f"the text has at least {least} tokens; /tokenize takes at most {most}", param="prompt")
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    tokens = model.tokenizer.encode(text, add_special_tokens=special, most=most)
    return schemas.TokenizeResponse(
        count=len(tokens),
        max_model_len=model.max_model_len,
        tokens=tokens,
        token_strs=[model.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None,
    )


async def detokenize(app: App, exchange: Exchange) -> None:
    """Text of tokens, special ones included."""
    sent = await exchange.sent(_DETOKENIZE)
    body = sent.body
    app.check_model(body.model, exchange.caller)
    heed_others(app, exchange, sent, _DETOKENIZE, {})
    await exchange.answer_json(await app.text.run(exchange.num_body_bytes, partial(_detokenize, app, body)))


def _detokenize(app: App, body: schemas.DetokenizeRequest) -> schemas.DetokenizeResponse:
    most = max(MAX_LISTED, MOST_CONTEXTS * app.model.max_model_len)
    if len(body.tokens) > most:
        text = f"tokens has {len(body.tokens)} items; at most {most}"
        raise InvalidRequest(text, param="tokens", code="too_many_items")
    for position, token in enumerate(body.tokens):
        if not 0 <= token < app.model.vocab_size:
            raise InvalidRequest(
                f"tokens[{position}] is {token}; the vocabulary has ids 0 to {app.model.vocab_size - 1}",
                param=f"tokens[{position}]",
            )
    return schemas.DetokenizeResponse(prompt=app.model.tokenizer.decode(body.tokens, skip_special_tokens=False))
