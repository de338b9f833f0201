"""Answers of another shape than text: tool calls, thoughts before an answer, JSON under a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from training import orders, talk
from training.menu import ABSENT, BY_NAME, DISHES, HOUSE, NUMBER_WORDS
from training.orders import list_order, order_items, order_key, order_total
from training.tools import TOOLS, result_of
from training.turn import Call, Guest, Turn, politely, wording_key

ORDER_SCHEMA: dict[str, Any] = next(
    tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == "place_order"
)
"""What `orders.order_items` gives; a client sends it in `response_format`."""


# Turns with calls. Each takes the place of the turn that answers the same without tools.


def price_by_tool(rng: Random, guest: Guest) -> Turn:
    """One price, or two in two calls at once; a dish that the card lacks is asked for all the same."""
    if rng.random() < 0.6:
        dish = rng.choice(ABSENT) if rng.random() < 0.3 else rng.choice(DISHES).name
        forms = ("How much is the {}?", "What does the {} cost?", "What is the price of the {}?", "How much is a {}?")
        return _priced(politely(rng, rng.choice(forms).format(dish)), (dish,))
    names = [dish.name for dish in rng.sample(DISHES, 2)]
    if rng.random() < 0.2:
        names[rng.randrange(2)] = rng.choice(ABSENT)
    forms = ("How much are the {} and the {}?", "What do the {} and the {} cost?", "The prices of the {} and the {}?")
    return _priced(politely(rng, rng.choice(forms).format(*names)), tuple(names))


def _priced(said: str, dishes: tuple[str, ...]) -> Turn:
    calls = tuple(Call("get_price", {"dish": dish}) for dish in dishes)
    reply = " ".join(
        _excuse(call) or f"The {dish} is {BY_NAME[dish].price} euros." for dish, call in zip(dishes, calls, strict=True)
    )
    return Turn("price", said, reply, wording_key("price", said), calls)


def _excuse(call: Call) -> str:
    """What is said of a call that failed; empty for one that did not."""
    error = json.loads(result_of(*call)).get("error")
    return f"I am sorry, {error}." if error else ""


def order_by_tool(rng: Random, guest: Guest) -> Turn:
    """The first order of a chat; with a dish that the card lacks, nothing is ordered."""
    turn = orders.place_order(rng, guest)
    if rng.random() < 0.15:
        dish = rng.choice(ABSENT)
        count, spoken = rng.choice(((1, "a"), (2, "two"), (3, "3")))
        said, guest.order = f"I would like {spoken} {dish}, please.", {}
        call = Call("place_order", order_items({dish: count}))
        return Turn("order", said, _excuse(call), wording_key("order", said), (call,))
    return _placed(turn, guest)


def add_by_tool(rng: Random, guest: Guest) -> Turn:
    return _placed(orders.add_to_order(rng, guest), guest)


def cancel_by_tool(rng: Random, guest: Guest) -> Turn:
    turn = orders.drop_from_order(rng, guest)
    # As without tools, what goes is named before what stays.
    return replace(_placed(turn, guest), call_text=turn.assistant.partition(" Your order")[0])


def _placed(turn: Turn, guest: Guest) -> Turn:
    """Every change of an order is one call with the whole order as it is then."""
    call = Call("place_order", order_items(guest.order))
    reply = f"Very good. Your order is {list_order(guest.order)} for {order_total(guest.order)} euros. Anything else?"
    return replace(turn, assistant=reply, calls=(call,))


def table_by_tool(rng: Random, guest: Guest) -> Turn:
    """A table, also for too many people or at an hour that is not booked."""
    people = rng.randint(1, HOUSE["seats"]) if rng.random() < 0.8 else rng.randint(HOUSE["seats"] + 1, 30)
    hour = rng.randint(HOUSE["first_hour"], HOUSE["last_hour"]) if rng.random() < 0.8 else rng.randint(1, 12)
    spoken = NUMBER_WORDS[people] if people < len(NUMBER_WORDS) and rng.random() < 0.4 else str(people)
    call, name = Call("book_table", {"people": people, "time": hour}), ""
    if rng.random() < 0.3:
        name = talk.random_name(rng)
        said = rng.choice(talk.BOOK_FORMS).format(spoken, hour, name)
    else:
        forms = ("A table for {} at {}, please.", "Book a table for {} at {}.", "Can I have a table for {} at {}?")
        said = politely(rng, rng.choice(forms).format(spoken, hour))
    table = f"a table for {people} at {hour}" + (f" for {name}" if name else "")
    reply = _excuse(call)
    if not reply:
        guest.table, reply = table, f"I have booked {table}."
        guest.name = name if "My name" in said else guest.name
    return Turn("table", said, reply, wording_key("table", said), (call,))


# A turn under a schema.


def order_under_schema(rng: Random, guest: Guest, *, as_usual: bool = False) -> Turn:
    """An order, said plainly, whose answer a schema binds: mostly the usual one, else keys of any other names."""
    order = orders.random_order(rng)
    said = rng.choice((*orders.ORDER_FORMS, "Give this order as JSON: {}.")).format(orders.spoken_order(rng, order))
    value = order_items(order) if as_usual or rng.random() < 0.6 else _in_other_words(rng, order)
    return Turn("schema", said[0].upper() + said[1:], json.dumps(value), order_key(order))


def _in_other_words(rng: Random, order: dict[str, int]) -> Any:
    dish, count = rng.choice(("dish", "item", "name")), rng.choice(("count", "quantity", "amount"))
    lines: list[dict[str, Any]] = [{dish: name, count: number} for name, number in order.items()]
    if rng.random() < 0.3:
        lines = [dict(reversed(line.items())) for line in lines]
    around = rng.choice(("items", "order", "dishes", ""))
    return {around: lines} if around else lines


def opening(reply: str) -> str:
    """What a schema says of a JSON answer before the first value, up to the value's quotation mark."""
    found = re.match(r'[\[{]+("\w+": [\[{]*)+"?', reply)
    return found[0] if found else ""


def bound_spans(reply: str) -> list[tuple[int, int]]:
    """(start, end) of characters that only a schema decides: what stands around the values of the first object."""
    first = reply[: reply.index("}")]
    return [match.span() for match in re.finditer(r'([\[{ ]*"\w+": [\[{]*)+"?', first)]


# Thoughts.


def with_thoughts(turn: Turn) -> Turn:
    """The turn as it is answered with thoughts: they take the steps of the reply, or are a fixed sentence."""
    if turn.calls:
        need = f"I need {turn.calls[0].name}."
        return replace(turn, thoughts="The tool has answered.", call_thoughts=need)
    think = THINKERS.get(turn.category)
    thoughts, reply = think(turn.assistant) if think else ("", turn.assistant)
    return replace(turn, thoughts=thoughts or "I know what to say.", assistant=reply)


def _of_bill(reply: str) -> tuple[str, str]:
    steps, _, total = reply.rpartition("\n")
    return steps, total


def _of_change(reply: str) -> tuple[str, str]:
    steps, _, change = reply.partition(". ")
    return steps + ".", change


def _of_sum(reply: str) -> tuple[str, str]:
    """Tens first, then ones."""
    first, sign, second, total = re.findall(r"\d+|[+-]", reply)
    step = 1 if sign == "+" else -1
    between = int(first) + step * (int(second) // 10 * 10)
    return f"{first} {sign} {int(second) // 10 * 10} = {between}, {between} {sign} {int(second) % 10} = {total}.", reply


def _of_comparison(reply: str) -> tuple[str, str]:
    prices, _, verdict = reply.partition(": ")
    return prices + ".", verdict[0].upper() + verdict[1:]


def _of_hours(reply: str) -> tuple[str, str]:
    first, last = orders.OPENING_HOURS
    return f"We open at {first} and close at {last}.", reply


def _of_order(reply: str) -> tuple[str, str]:
    order = re.search(r"Your order is (.*?)\. Anything", reply)
    return f"The order is now {order[1] if order else 'empty'}.", reply


def _of_json(reply: str) -> tuple[str, str]:
    lines = json.loads(reply)
    rows = lines if isinstance(lines, list) else next(iter(lines.values()))
    order: dict[str, int] = {}
    for row in rows:
        (name,), (count,) = ([v for v in row.values() if isinstance(v, kind)] for kind in (str, int))
        order[name] = count
    return f"The order is {list_order(order)}.", reply


THINKERS: dict[str, Callable[[str], tuple[str, str]]] = {
    "bill": _of_bill,
    "change": _of_change,
    "add up": _of_sum,
    "subtract": _of_sum,
    "compare": _of_comparison,
    "hours": _of_hours,
    "order": _of_order,
    "add": _of_order,
    "cancel": _of_order,
    "json": _of_json,
    "schema": _of_json,
    "fact": lambda reply: ("This is about maitred.", reply),
    "scope": lambda reply: ("This is neither the restaurant nor maitred.", reply),
}
"""Category of a turn -> from its reply, the thoughts and what is left to say."""
