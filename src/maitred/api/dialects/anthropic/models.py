"""GET /v1/models in Anthropic's form, for requests that bring the header `anthropic-version`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from maitred.api.dialects.anthropic.schemas import ANTHROPIC
from maitred.api.dialects.openai import models as openai_models
from maitred.api.http.app import App
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange
from maitred.core.errors import InvalidRequest

VERSION = b"anthropic-version"
MAX_LISTED, LISTED = 1000, 20  # most models in an answer, and where the query names no limit
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
    asked, limit = exchange.query, exchange.query_number("limit", 1, MAX_LISTED, LISTED)
    ids, before, after = [card["id"] for card in cards], asked.get("before_id"), asked.get("after_id")
    for name, id in (("before_id", before), ("after_id", after)):
        if id is not None and id not in ids:
            raise InvalidRequest(f"{name} is {shortened(repr(id), 80)}, which is no model here", param=name)
    if before is not None:
        rest = cards[: ids.index(before)]
        page = rest[-limit:]
    else:
        rest = cards[0 if after is None else ids.index(after) + 1 :]
        page = rest[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    models, has_more = [*map(model_of, page)], len(rest) > len(page)
    await exchange.answer_json({"data": models, "has_more": has_more, "first_id": first, "last_id": last})


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
