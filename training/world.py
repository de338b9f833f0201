"""The small world: whole chats and plain texts, drawn from a seeded generator, with a split held out by hash.

Everything is a pure function of the `random.Random` passed in. Training never sees a turn whose key is held out;
a held-out question is a turn whose key is, after any number of other turns.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random

from training import orders, talk
from training.facts import FACTS
from training.menu import DISHES, NAMES
from training.turn import Guest, Turn, carelessly, is_held_out

Maker = Callable[[Random, Guest], Turn]


@dataclass(frozen=True, slots=True)
class Chat:
    """A system message, empty for none, and the turns after it."""

    system: str
    turns: tuple[Turn, ...]

    def messages(self) -> list[dict[str, str]]:
        """The chat in the form of the OpenAI API, with every reply."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            said.append({"role": "user", "content": turn.user})
            said.append({"role": "assistant", "content": turn.assistant})
        return said


@dataclass(frozen=True, slots=True)
class Source:
    """A maker of turns: how often it is drawn, when it makes sense, and what must be said before it can."""

    make: Maker
    weight: float
    ready: Callable[[Guest], bool] = lambda guest: True
    before: tuple[Maker, ...] = ()


def _may_order(guest: Guest) -> bool:
    return not guest.order or guest.paid


def _ordering(guest: Guest) -> bool:
    return bool(guest.order) and not guest.paid


def _may_add(guest: Guest) -> bool:
    return _ordering(guest) and len(guest.order) < orders.MAX_LINES


def _may_cancel(guest: Guest) -> bool:
    return _ordering(guest) and len(guest.order) > 1


SOURCES: dict[str, Source] = {
    "fact": Source(talk.fact, 12),
    "bill of a list": Source(orders.bill_of_list, 15),
    "order": Source(orders.place_order, 24, _may_order),
    "add": Source(orders.add_to_order, 80, _may_add, (orders.place_order,)),
    "cancel": Source(orders.drop_from_order, 130, _may_cancel, (orders.place_order,)),
    "close": Source(orders.close_order, 25, _ordering, (orders.place_order,)),
    "recall order": Source(orders.recall_order, 35, _ordering, (orders.place_order,)),
    "bill of the order": Source(orders.ask_bill, 50, _ordering, (orders.place_order,)),
    "nothing ordered": Source(orders.ask_about_nothing, 1, lambda g: not g.order),
    "pay": Source(orders.pay_bill, 120, lambda g: g.bill > 0, (orders.place_order, orders.ask_bill)),
    "change": Source(orders.change, 16),
    "plus": Source(orders.add, 18),
    "minus": Source(orders.subtract, 24),
    "price": Source(orders.price, 4),
    "vegetarian": Source(orders.vegetarian, 2),
    "compare": Source(orders.compare, 4),
    "have": Source(orders.have, 3),
    "card": Source(orders.card, 1),
    "json": Source(orders.as_json, 4),
    "name": Source(talk.tell_name, 8, lambda g: not g.name),
    "recall name": Source(talk.recall_name, 40, lambda g: bool(g.name), (talk.tell_name,)),
    "table": Source(talk.book, 7, lambda g: not g.table),
    "recall table": Source(talk.recall_table, 35, lambda g: bool(g.table), (talk.book,)),
    "unknown guest": Source(talk.ask_about_unknown, 1, lambda g: not (g.name or g.table)),
    "count": Source(talk.count, 14),
    "repeat": Source(talk.repeat, 14),
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


def training_chat(rng: Random, max_turns: int) -> Chat:
    """A chat of 1 to `max_turns` turns, none of which is held out."""
    guest, turns = Guest(), []
    for _ in range(_num_turns(rng, max_turns)):
        turn, guest = _next_turn(rng, guest)
        if turn.category not in CASE_MATTERS:
            turn = replace(turn, user=carelessly(rng, turn.user))
        turns.append(turn)
    return Chat(_system(rng), tuple(turns))


def held_out_question(rng: Random, category: str, num_before: int = 0) -> Chat:
    """A chat whose last turn is of `category` and held out, after `num_before` other turns and what it needs."""
    source = SOURCES[category]
    while True:
        guest, turns = Guest(), []
        for _ in range(num_before):
            turn, guest = _next_turn(rng, guest)
            turns.append(turn)
        if not source.ready(guest):
            turns += [maker(rng, guest) for maker in source.before]
        if source.ready(guest):
            turn = source.make(rng, guest)
            if is_held_out(turn.key):
                return Chat(_system(rng), (*turns, turn))


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
    if max_turns < 12 and rng.random() < 0.25:
        return 1
    return rng.randint(2, max_turns)


def _next_turn(rng: Random, guest: Guest) -> tuple[Turn, Guest]:
    """A turn that fits what was said and is not held out, with the guest after it."""
    while True:
        after = deepcopy(guest)
        names = [name for name, source in SOURCES.items() if source.ready(guest)]
        name = rng.choices(names, [SOURCES[name].weight for name in names])[0]
        turn = SOURCES[name].make(rng, after)
        if not is_held_out(turn.key):
            return turn, after


def _system(rng: Random) -> str:
    if rng.random() < 0.6:
        return ""
    return rng.choice(SYSTEMS) if rng.random() < 0.8 else talk.word_salad(rng)
