"""Tool calls of the restaurant and their results, as the page runs them: what the model learns is what it will meet."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from training.menu import DISHES, HOUSE, Dish

TOOLS: list[dict[str, Any]] = HOUSE["tools"]
"""In the form of the OpenAI API."""


MAX_COUNT = 99
"""Of one dish in an order."""


def result_of(name: str, arguments: Mapping[str, Any]) -> str:
    """The result of a call as JSON text. KeyError for a tool that there is not; a wrong argument is told in the result.

    `api/ops/static/restaurant.js` gives the same to the byte, and a test holds the two together.
    """
    return json.dumps(_RUNS[name](arguments), ensure_ascii=False)


def _get_price(arguments: Mapping[str, Any]) -> dict[str, Any]:
    dish = _dish_named(arguments.get("dish"))
    return {"dish": dish.name, "price": dish.price} if dish else _absent(arguments.get("dish"))


def _place_order(arguments: Mapping[str, Any]) -> dict[str, Any]:
    items = arguments.get("items")
    if not items or not isinstance(items, list):
        return {"error": "the order is empty"}
    total = 0
    for item in items:
        name, count = (item.get("dish"), item.get("count")) if isinstance(item, dict) else (None, None)
        if (dish := _dish_named(name)) is None:
            return _absent(name)
        if not _is_within(count, 1, MAX_COUNT):
            return {"error": f"how many {dish.plural}?"}
        total += dish.price * count
    return {"total": total}


def _book_table(arguments: Mapping[str, Any]) -> dict[str, Any]:
    seats, first, last = HOUSE["seats"], HOUSE["first_hour"], HOUSE["last_hour"]
    if not _is_within(arguments.get("people"), 1, seats):
        return {"error": f"a table seats 1 to {seats}"}
    if not _is_within(arguments.get("time"), first, last):
        return {"error": f"tables are booked for {first} to {last}"}
    return {"booked": True}


_RUNS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "get_price": _get_price,
    "place_order": _place_order,
    "book_table": _book_table,
}


def _dish_named(name: object) -> Dish | None:
    said = str(name).lower()
    return next((dish for dish in DISHES if said in (dish.name, dish.plural)), None)


def _absent(name: object) -> dict[str, str]:
    return {"error": f"there is no {name if isinstance(name, str) else 'such dish'} on the card"}


def _is_within(number: object, least: int, most: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and least <= number <= most
