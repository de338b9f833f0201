"""The small world: whole chats and plain texts, drawn from a seeded generator, with a split held out by hash.

Everything is a pure function of the `random.Random` passed in. Training never sees a turn whose key is held out;
a held-out question is a turn whose key is, after any number of other turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from training import orders, shapes, talk
from training.facts import FACTS
from training.menu import DISHES, NAMES
from training.tools import TOOLS
from training.turn import Guest, Turn, carelessly, is_held_out

Maker = Callable[[Random, Guest], Turn]


@dataclass(frozen=True, slots=True)
class Chat:
    """A system message, empty for none, and the turns after it, with the tools there are."""

    system: str
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """In the form of the OpenAI API."""
    is_bound: bool = False
    """Whether a JSON schema binds the last reply."""

    def messages(self) -> list[dict[str, Any]]:
        """The chat in the form of the OpenAI API, with every reply."""
        said: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            said += [{"role": "user", "content": turn.user}, *turn.replies()]
        return said


@dataclass(frozen=True, slots=True)
class Source:
    """A maker of turns: how often it is drawn, when it makes sense, and the turns (by name) that it needs before it."""

    make: Maker
    weight: float
    ready: Callable[[Guest], bool] = lambda guest: True
    before: tuple[str, ...] = ()


def _may_order(guest: Guest) -> bool:
    return not guest.order or guest.paid


def _ordering(guest: Guest) -> bool:
    return bool(guest.order) and not guest.paid


def _may_add(guest: Guest) -> bool:
    return _ordering(guest) and len(guest.order) < orders.MAX_LINES


def _may_cancel(guest: Guest) -> bool:
    return _ordering(guest) and len(guest.order) > 1


SOURCES: dict[str, Source] = {
    "fact": Source(talk.fact, 16),
    "bill of a list": Source(orders.bill_of_list, 15),
    "order": Source(orders.place_order, 24, _may_order),
    "add": Source(orders.add_to_order, 80, _may_add, ("order",)),
    "cancel": Source(orders.drop_from_order, 130, _may_cancel, ("order",)),
    "close": Source(orders.close_order, 25, _ordering, ("order",)),
    "recall order": Source(orders.recall_order, 35, _ordering, ("order",)),
    "bill of the order": Source(orders.ask_bill, 50, _ordering, ("order",)),
    "nothing ordered": Source(orders.ask_about_nothing, 1, lambda g: not g.order),
    "pay": Source(orders.pay_bill, 120, lambda g: g.bill > 0, ("order", "bill of the order")),
    "change": Source(orders.change, 20),
    "plus": Source(orders.add, 18),
    "minus": Source(orders.subtract, 28),
    "price": Source(orders.price, 4),
    "vegetarian": Source(orders.vegetarian, 2),
    "compare": Source(orders.compare, 4),
    "have": Source(orders.have, 3),
    "hours": Source(orders.ask_hours, 3),
    "card": Source(orders.card, 1),
    "json": Source(orders.as_json, 4),
    "name": Source(talk.tell_name, 8, lambda g: not g.name),
    "recall name": Source(talk.recall_name, 40, lambda g: bool(g.name), ("name",)),
    "table": Source(talk.book, 7, lambda g: not g.table),
    "recall table": Source(talk.recall_table, 35, lambda g: bool(g.table), ("table",)),
    "unknown guest": Source(talk.ask_about_unknown, 1, lambda g: not (g.name or g.table)),
    "count": Source(talk.count, 30),
    "repeat": Source(talk.repeat, 12),
    "greet": Source(talk.greet, 3),
    "scope": Source(talk.out_of_scope, 5),
}
UNSCORED = ("greet", "nothing ordered", "unknown guest")
"""Small talk with a fixed handful of wordings, all of them in training."""
SCORED = tuple(name for name in SOURCES if name not in UNSCORED)

CASE_MATTERS = ("name", "table", "repeat")

SYSTEMS = (
    "You are the maitre d' of a small restaurant.",
    "You are a helpful assistant.",
    "You are a waiter. Be polite and brief.",
    "Answer in one sentence.",
    "You are the built-in model of maitred.",
    "You are a helpful and honest assistant. Answer questions as well as you can.",
    "Be concise.",
    "You serve guests. Add up bills step by step.",
)


TOOL_SOURCES: dict[str, tuple[str, Source]] = {
    "price": ("get_price", Source(shapes.price_by_tool, 50)),
    "order": ("place_order", Source(shapes.order_by_tool, 60, _may_order)),
    "add": ("place_order", Source(shapes.add_by_tool, 80, _may_add, ("order",))),
    "cancel": ("place_order", Source(shapes.cancel_by_tool, 60, _may_cancel, ("order",))),
    "table": ("book_table", Source(shapes.table_by_tool, 40, lambda g: not g.table)),
}
"""Name of a source -> the tool that does its work where it is offered, and the source in its place."""

FOCUS = {"cancel": 14, "add": 4, "bill of the order": 2, "pay": 3, "recall order": 1, "close": 1}
"""Turns that need others before them, so that short chats have too few of them, with how often a chat begins there."""
FOCUS_SHARE = 0.28
TOOL_FOCUS = {"price": 3, "order": 3, "add": 6, "cancel": 7, "table": 3}
TOOL_FOCUS_SHARE = 0.5
SHAPED_SHARE = 0.42
"""Of all chats, those with tools, thoughts or a schema."""

Sources = Mapping[str, Source]


def any_chat(rng: Random, max_turns: int) -> Chat:
    """A training chat of talk alone, or with tools, thoughts or a schema."""
    return shaped_chat(rng, max_turns) if rng.random() < SHAPED_SHARE else training_chat(rng, max_turns)


def training_chat(rng: Random, max_turns: int) -> Chat:
    """A chat of talk of 1 to `max_turns` turns (or as many as it begins with), none of which is held out."""
    turns = _turns(rng, SOURCES, max_turns, FOCUS if rng.random() < FOCUS_SHARE else {})
    return Chat(_system(rng), tuple(turns))


def shaped_chat(rng: Random, max_turns: int) -> Chat:
    """A training chat with tools, with thoughts in all turns or the last, or with a schema at its end."""
    has_tools, is_bound, thinks = rng.choices(
        ((True, False, False), (True, False, True), (False, False, True), (False, True, False), (False, True, True)),
        (54, 10, 20, 13, 3),
    )[0]
    tools = _offer(rng) if has_tools else ()
    focus = TOOL_FOCUS if has_tools and rng.random() < TOOL_FOCUS_SHARE else FOCUS if rng.random() < 0.15 else {}
    # A turn with a call is about twice as long as one without.
    most = max(1, max_turns // 2) if has_tools else max_turns
    turns = [] if is_bound and rng.random() < 0.7 else _turns(rng, sources_with(tools), most, focus)
    if is_bound:
        turns.append(_not_held_out(lambda: shapes.order_under_schema(rng, Guest())))
    if thinks:
        first = 0 if rng.random() < 0.7 else len(turns) - 1
        turns = [shapes.with_thoughts(turn) if index >= first else turn for index, turn in enumerate(turns)]
    return Chat(_system(rng), tuple(turns), tools, is_bound)


def sources_with(tools: tuple[dict[str, Any], ...]) -> Sources:
    """All sources, with those in place that use these tools."""
    offered = {tool["function"]["name"] for tool in tools}
    replaced = {name: source for name, (tool, source) in TOOL_SOURCES.items() if tool in offered}
    return {**SOURCES, **replaced}


def held_out_question(rng: Random, category: str, num_before: int = 0) -> Chat:
    """A chat whose last turn is of `category` and held out, after `num_before` other turns and what it needs."""
    return _ask(rng, SOURCES, category, num_before)


def held_out_shape(rng: Random, shape: str) -> Chat:
    """A chat whose last turn is held out and takes one of SHAPES."""
    if shape == "schema":
        return _bound_question(rng)
    tools = () if shape == "thoughts" else _offer(rng)
    sources = sources_with(tools)
    calling = [name for name in sources if sources[name] is not SOURCES[name]]
    if shape in ("thoughts", "no call"):
        category = rng.choice([name for name in SCORED if name not in calling])
    else:
        category = rng.choice(calling) if shape == "thoughts and call" else shape.removeprefix("call: ")
        if category not in calling:
            return held_out_shape(rng, shape)
    chat = _ask(rng, sources, category, rng.choice((0, 0, 1)))
    *before, last = chat.turns
    return replace(chat, tools=tools, turns=(*before, shapes.with_thoughts(last) if "thoughts" in shape else last))


def _bound_question(rng: Random) -> Chat:
    while True:
        turn = shapes.order_under_schema(rng, Guest(), as_usual=True)
        if is_held_out(turn.key):
            return Chat(_system(rng), (turn,), is_bound=True)


CALLS = tuple(f"call: {name}" for name in TOOL_SOURCES)
SHAPES = (*CALLS, "no call", "thoughts", "thoughts and call", "schema")
"""`no call` has tools and needs none; `schema` is an order's JSON that nothing but a schema asks for."""


def _ask(rng: Random, sources: Sources, category: str, num_before: int) -> Chat:
    source = sources[category]
    while True:
        guest, turns = Guest(), []
        for _ in range(num_before):
            turn, guest = _next_turn(rng, guest, sources)
            turns.append(turn)
        if not source.ready(guest):
            turns += [sources[name].make(rng, guest) for name in source.before]
        if source.ready(guest):
            turn = source.make(rng, guest)
            if is_held_out(turn.key):
                return Chat(_system(rng), (*turns, turn))


def _turns(rng: Random, sources: Sources, max_turns: int, focus: Mapping[str, float]) -> list[Turn]:
    guest, turns = Guest(), []
    if focus:
        guest, turns = _begin_with(rng, sources, rng.choices(list(focus), list(focus.values()))[0])
    for _ in range(_num_turns(rng, max_turns) - len(turns)):
        turn, guest = _next_turn(rng, guest, sources)
        turns.append(turn)
    return [turn if turn.category in CASE_MATTERS else replace(turn, user=carelessly(rng, turn.user)) for turn in turns]


def _begin_with(rng: Random, sources: Sources, name: str) -> tuple[Guest, list[Turn]]:
    """The turns that a source needs, and its own."""
    while True:
        guest, turns = Guest(), []
        for step in (*sources[name].before, name):
            if sources[step].ready(guest):
                turns.append(sources[step].make(rng, guest))
        if len(turns) == len(sources[name].before) + 1 and not any(is_held_out(turn.key) for turn in turns):
            return guest, turns


def _not_held_out(make: Callable[[], Turn]) -> Turn:
    while is_held_out((turn := make()).key):
        pass
    return turn


def _offer(rng: Random) -> tuple[dict[str, Any], ...]:
    """All tools mostly, else some of them in any order."""
    if rng.random() < 0.75:
        return tuple(TOOLS)
    return tuple(rng.sample(TOOLS, rng.randint(1, len(TOOLS))))


def plain_text(rng: Random) -> str:
    """A short text that is not a chat: a visit to the restaurant, or some facts in a row."""
    if rng.random() < 0.4:
        return " ".join(fact.answer for fact in rng.sample(FACTS, rng.randint(2, 5)))
    name = rng.choice(NAMES)
    order = orders.random_order(rng)
    while is_held_out(orders.order_key(order)):
        order = orders.random_order(rng)
    total = orders.order_total(order)
    start = rng.choice(("{} comes into the restaurant.", "Once upon a time {} was hungry.", "Hello, my name is {}."))
    dish = rng.choice(DISHES)
    praise = rng.choice(("good", "very good", "hot", "fresh"))
    return (
        f"{start.format(name)} {name} orders {orders.list_order(order)}. {orders.bill_text(order)}"
        f" {name} pays {total} euros and says that the {dish.name} is {praise}."
    )


def _num_turns(rng: Random, max_turns: int) -> int:
    """Many short chats have one turn; the others, and long ones, any number up to the most."""
    if max_turns == 1 or (max_turns < 12 and rng.random() < 0.25):
        return 1
    return rng.randint(2, max_turns)


def _next_turn(rng: Random, guest: Guest, sources: Sources) -> tuple[Turn, Guest]:
    """A turn that fits what was said and is not held out, with the guest after it."""
    while True:
        after = deepcopy(guest)
        names = [name for name, source in sources.items() if source.ready(guest)]
        name = rng.choices(names, [sources[name].weight for name in names])[0]
        turn = sources[name].make(rng, after)
        if not is_held_out(turn.key):
            return turn, after


def _system(rng: Random) -> str:
    if rng.random() < 0.6:
        return ""
    return rng.choice(SYSTEMS) if rng.random() < 0.8 else talk.word_salad(rng)
