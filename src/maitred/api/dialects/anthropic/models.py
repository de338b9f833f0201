"""GET /v1/models in Anthropic's form, for requests that bring the header `anthropic-version`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from maitred.api.dialects.anthropic.schemas import ANTHROPIC
from maitred.api.dialects.openai import models as openai_models
from maitred.api.http.app import App
from maitred.api.http.exchange import Exchange

VERSION = b"anthropic-version"
MAX_LISTED = 1000  # models in an answer
MODELS_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "string", "description": f"1 to {MAX_LISTED}; in OpenAI's form all are listed, whatever it is"},
    "after_id": {"type": "string"},
    "before_id": {"type": "string"},
}


def is_anthropics(exchange: Exchange) -> bool:
    """Whether a client of Anthropic's asks; then its errors are told in that form too."""
    if VERSION not in exchange.headers:
        return False
    exchange.format = ANTHROPIC
    return True


async def list_models(app: App, exchange: Exchange) -> None:
    """Every name of the model, and the caller's adapters, in the form of whose client asks."""
    if not is_anthropics(exchange):
        await openai_models.list_models(app, exchange)
        return
    await answer_cards(exchange, msgspec.to_builtins(openai_models.model_cards(app, exchange)))


async def get_model(app: App, exchange: Exchange) -> None:
    """One of them; raises ModelNotFound."""
    if not is_anthropics(exchange):
        await openai_models.get_model(app, exchange)
        return
    await exchange.answer_json(model_of(msgspec.to_builtins(openai_models.asked_card(app, exchange))))


async def answer_cards(exchange: Exchange, cards: Sequence[Mapping[str, Any]]) -> None:
    """Answer the part of OpenAI's `cards` that the query asks for. Raises InvalidRequest."""
    models, is_before = [*map(model_of, cards)], "before_id" in exchange.query
    page = exchange.page(
        models[::-1] if is_before else models, "before_id" if is_before else "after_id", most=MAX_LISTED
    )
    if is_before:
        page |= {"data": page["data"][::-1], "first_id": page["last_id"], "last_id": page["first_id"]}
    await exchange.answer_json(page)


def model_of(card: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's card, as far as it tells: a foreign server's may have no date or length."""
    created, length = card.get("created"), card.get("max_model_len")
    at = datetime.fromtimestamp(created if isinstance(created, int) and 0 <= created < 2**33 else 0, UTC)
    most = length if isinstance(length, int) else None
    return {
        "id": card["id"],
        "type": "model",
        "display_name": card["id"],
        "created_at": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": most,
        "max_tokens": most,
        "lifecycle": "active",
        "capabilities": None,
    }
