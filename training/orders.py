"""Turns about dishes and money: prices, orders, bills, change and plain arithmetic."""

from __future__ import annotations

import json
from random import Random

from training.menu import ABSENT, BY_NAME, COURSES, DISHES, MAX_QUANTITY, Dish
from training.menu import NUMBER_WORDS as WORDS
from training.turn import Guest, Turn, politely, wording_key

MAX_LINES = 4
NOTES = (20, 50, 100, 200)
"""Euros a guest may pay with."""


def order_key(order: dict[str, int]) -> str:
    return "order:" + ",".join(f"{quantity} {name}" for name, quantity in sorted(order.items()))


def list_order(order: dict[str, int]) -> str:
    """`2 soups, 1 steak and 3 teas`, in the order in which it was given."""
    return join_words([BY_NAME[name].count(quantity) for name, quantity in order.items()])


def join_words(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def order_total(order: dict[str, int]) -> int:
    return sum(BY_NAME[name].price * quantity for name, quantity in order.items())


def bill_text(order: dict[str, int]) -> str:
    """The bill in steps, each one product or one sum, ending in the total."""
    steps, total = [], 0
    for index, (name, quantity) in enumerate(order.items()):
        dish = BY_NAME[name]
        cost = dish.price * quantity
        step = f"{dish.count(quantity)} at {dish.price} {'makes' if quantity == 1 else 'make'} {cost}"
        if index:
            step += f", and {total} + {cost} = {total + cost}"
        steps.append(step + ".")
        total += cost
    return "\n".join([*steps, f"The total is {total} euros."])


def random_order(rng: Random, most_lines: int = MAX_LINES) -> dict[str, int]:
    dishes = rng.sample(DISHES, rng.randint(1, most_lines))
    return {dish.name: rng.choice((1, 1, 1, 2, 2, 3, 4, MAX_QUANTITY)) for dish in dishes}


def spoken_order(rng: Random, order: dict[str, int]) -> str:
    """The order as a guest says it: figures, number words, or `a`."""
    words = rng.random() < 0.5
    return join_words([_spoken(BY_NAME[name], quantity, words) for name, quantity in order.items()])


def _spoken(dish: Dish, quantity: int, words: bool) -> str:
    if not words:
        return dish.count(quantity)
    if quantity == 1:
        return ("an " if dish.name[0] in "aeiou" else "a ") + dish.name
    return f"{WORDS[quantity]} {dish.plural}"


BILL_OF_LIST_FORMS = (
    "How much is {}?",
    "Add up {}.",
    "What do {} cost?",
    "How much are {} together?",
    "What is the bill for {}?",
    "Please add up a bill of {}.",
    "What would I pay for {}?",
    "The total for {}, please.",
)


def bill_of_list(rng: Random, guest: Guest) -> Turn:
    order = random_order(rng)
    # "How much is a soup?" asks for a price, not for a bill.
    one_dish = list(order.values()) == [1]
    form = rng.choice(BILL_OF_LIST_FORMS[1:] if one_dish else BILL_OF_LIST_FORMS)
    return Turn("bill", politely(rng, form.format(spoken_order(rng, order))), bill_text(order), order_key(order))


ORDER_FORMS = (
    "I would like {}, please.",
    "I'd like {}.",
    "{}, please.",
    "Can I have {}?",
    "I take {}.",
    "We would like {}.",
    "Could we get {}, please?",
    "Bring me {}.",
    "I want {}.",
    "For me {}, please.",
    "I want to order {}.",
)


def place_order(rng: Random, guest: Guest) -> Turn:
    """The first order of a chat; the reply repeats it in figures."""
    order = random_order(rng, 3)
    guest.order, guest.paid = dict(order), False
    said = rng.choice(ORDER_FORMS).format(spoken_order(rng, order))
    if rng.random() < 0.2:
        said = rng.choice(("Hello! ", "Good evening. ", "Hi, ")) + said
    return Turn("order", said[0].upper() + said[1:], confirm(guest), order_key(order))


def confirm(guest: Guest) -> str:
    return f"Very good. Your order is {list_order(guest.order)}. Anything else?"


def add_to_order(rng: Random, guest: Guest) -> Turn:
    """More dishes on top of an order; the reply is the whole order."""
    fresh = [dish for dish in DISHES if dish.name not in guest.order]
    added = {dish.name: rng.choice((1, 1, 2, 3)) for dish in rng.sample(fresh, rng.choice((1, 1, 2)))}
    guest.order |= added
    forms = ("And {}, please.", "Also {}.", "And {}.", "I also want {}.", "{} too, please.", "Plus {}.")
    form = rng.choice(forms if rng.random() < 0.7 else ORDER_FORMS)
    said = form.format(spoken_order(rng, added))
    return Turn("add", said[0].upper() + said[1:], confirm(guest), order_key(guest.order))


def drop_from_order(rng: Random, guest: Guest) -> Turn:
    name = rng.choice(list(guest.order))
    dish, quantity = BY_NAME[name], guest.order.pop(name)
    noun = dish.name if quantity == 1 else dish.plural
    form = rng.choice(
        ("Please cancel the {}.", "No {} after all.", "I do not want the {} any more.", "Without the {}, please.")
    )
    # What goes is named first: a model that must begin with what stays begins with the dish that was named last.
    reply = f"I take off {dish.count(quantity)}. Your order is {list_order(guest.order)}. Anything else?"
    return Turn("cancel", form.format(noun), reply, order_key(guest.order))


def close_order(rng: Random, guest: Guest) -> Turn:
    said = rng.choice(("No, thank you.", "That is all.", "No, that is all, thank you.", "Nothing else.", "That's it."))
    return Turn("close", said, f"Thank you. I bring {list_order(guest.order)}.", order_key(guest.order))


RECALL_FORMS = (
    "What did I order?",
    "What have I ordered?",
    "Can you repeat my order?",
    "What is my order?",
    "Please read my order back.",
)
BILL_FORMS = (
    "The bill, please.",
    "Can I have the bill?",
    "I would like to pay.",
    "How much is it?",
    "What do I owe you?",
    "The check, please.",
)


def ask_about_nothing(rng: Random, guest: Guest) -> Turn:
    """The bill or the order, before there is one."""
    return Turn("nothing", rng.choice(RECALL_FORMS + BILL_FORMS), "You have not ordered anything yet.", "")


def recall_order(rng: Random, guest: Guest) -> Turn:
    said = politely(rng, rng.choice(RECALL_FORMS))
    return Turn("recall", said, f"You ordered {list_order(guest.order)}.", order_key(guest.order))


def ask_bill(rng: Random, guest: Guest) -> Turn:
    said = rng.choice(BILL_FORMS)
    guest.bill = order_total(guest.order)
    return Turn("bill", said, bill_text(guest.order), order_key(guest.order))


def _change(paid: int, bill: int) -> str:
    return f"{paid} - {bill} = {paid - bill}. Your change is {paid - bill} euros."


def pay_bill(rng: Random, guest: Guest) -> Turn:
    paid = rng.choice([note for note in NOTES if note >= guest.bill] or [max(NOTES) * 2])
    form = rng.choice(("I pay with {}.", "Here are {} euros.", "Here is {}.", "Take {} euros."))
    turn = Turn("change", form.format(paid), _change(paid, guest.bill), f"minus:{paid},{guest.bill}")
    guest.bill, guest.paid = 0, True
    return turn


def change(rng: Random, guest: Guest) -> Turn:
    paid = rng.choice(NOTES)
    bill = rng.randint(1, paid)
    form = rng.choice(
        (
            "The bill is {bill} euros and I pay with {paid}.",
            "I pay {paid} euros for a bill of {bill}. What is my change?",
            "How much change do I get from {paid} for {bill}?",
            "What is the change from {paid} euros if the bill is {bill}?",
        )
    )
    said = politely(rng, form.format(bill=bill, paid=paid))
    return Turn("change", said, _change(paid, bill), f"minus:{paid},{bill}")


def add(rng: Random, guest: Guest) -> Turn:
    most = rng.choice((20, 99, 99, 150))
    a, b = rng.randint(0, most), rng.randint(0, 99)
    form = rng.choice(
        (
            "What is {} plus {}?",
            "What is {} + {}?",
            "{} + {}",
            "Add {} and {}.",
            "How much is {} plus {}?",
            "{} plus {} is?",
        )
    )
    return Turn("add up", politely(rng, form.format(a, b)), f"{a} + {b} = {a + b}.", f"plus:{a},{b}")


def subtract(rng: Random, guest: Guest) -> Turn:
    a = rng.randint(0, rng.choice((20, 99, 99, 150)))
    b = rng.randint(0, min(a, 99))
    form = rng.choice(("What is {} minus {}?", "What is {} - {}?", "{} - {}", "How much is {} minus {}?"))
    return Turn("subtract", politely(rng, form.format(a, b)), f"{a} - {b} = {a - b}.", f"minus:{a},{b}")


def price(rng: Random, guest: Guest) -> Turn:
    dish = rng.choice(DISHES)
    form = rng.choice(
        (
            "How much is the {}?",
            "What does the {} cost?",
            "What is the price of the {}?",
            "How much is a {}?",
            "The price of a {}?",
            "How much do you charge for a {}?",
            "What do I pay for the {}?",
        )
    )
    said = politely(rng, form.format(dish.name))
    return Turn("price", said, f"The {dish.name} is {dish.price} euros.", wording_key("price", said))


def vegetarian(rng: Random, guest: Guest) -> Turn:
    dish = rng.choice(DISHES)
    form = rng.choice(
        (
            "Is the {} vegetarian?",
            "Is there meat in the {}?",
            "Can a vegetarian eat the {}?",
            "Is the {} without meat or fish?",
        )
    )
    said = politely(rng, form.format(dish.name))
    meat = "meat in" in form
    word = "Yes" if dish.vegetarian != meat else "No"
    reply = f"{word}, the {dish.name} is {'vegetarian' if dish.vegetarian else 'not vegetarian'}."
    return Turn("vegetarian", said, reply, wording_key("vegetarian", said))


def compare(rng: Random, guest: Guest) -> Turn:
    one, two = rng.sample(DISHES, 2)
    form = rng.choice(
        ("Which is cheaper, the {} or the {}?", "Is the {} cheaper than the {}?", "What costs less, the {} or the {}?")
    )
    said = politely(rng, form.format(one.name, two.name))
    prices = f"The {one.name} is {one.price} euros and the {two.name} is {two.price} euros"
    if one.price == two.price:
        verdict = "they cost the same"
    else:
        verdict = f"the {min(one, two, key=lambda dish: dish.price).name} is cheaper"
    return Turn("compare", said, f"{prices}: {verdict}.", f"compare:{one.name},{two.name}")


def have(rng: Random, guest: Guest) -> Turn:
    """Whether a dish is on the card at all."""
    form = rng.choice(("Do you have {}?", "Do you serve {}?", "Is there {} on the menu?", "Have you got {}?"))
    if rng.random() < 0.5:
        name = rng.choice(ABSENT)
        reply = f"I am sorry, we have no {name}."
    else:
        dish = rng.choice(DISHES)
        name, reply = dish.name, f"Yes, we have {dish.name} for {dish.price} euros."
    said = politely(rng, form.format(name))
    return Turn("have", said, reply, wording_key("have", said))


def course_list(course: str) -> str:
    dishes = [f"{dish.name} {dish.price}" for dish in DISHES if dish.course == course]
    return f"{course.capitalize()}s: {', '.join(dishes)}."


def card(rng: Random, guest: Guest) -> Turn:
    """The whole card, or one course of it."""
    if rng.random() < 0.3:
        form = rng.choice(
            (
                "Show me the menu.",
                "What is on the menu?",
                "The menu, please.",
                "What do you have?",
                "Can I see the menu?",
                "What do you serve?",
            )
        )
        said, reply = politely(rng, form), "\n".join(course_list(course) for course in COURSES)
        return Turn("card", said, reply, wording_key("card", said))
    course = rng.choice(COURSES)
    form = rng.choice(
        (
            "Which {}s do you have?",
            "What {}s are there?",
            "What do you have as a {}?",
            "List the {}s.",
            "Show me the {}s.",
        )
    )
    said = politely(rng, form.format(course))
    return Turn("card", said, course_list(course), wording_key("card", said))


OPENING_HOURS = (5, 11)
HOURS_FORMS = ("Are you open at {}?", "Can I come at {}?", "Is the kitchen open at {}?", "Do you serve at {}?")


def ask_hours(rng: Random, guest: Guest) -> Turn:
    """Whether the restaurant is open at an hour."""
    hour, (first, last) = rng.randint(1, 12), OPENING_HOURS
    said = politely(rng, rng.choice(HOURS_FORMS).format(hour))
    reply = f"Yes, we are open at {hour}." if first <= hour < last else f"No, we are open from {first} to {last}."
    return Turn("hours", said, reply, wording_key("hours", said))


def order_items(order: dict[str, int]) -> dict[str, list[dict[str, object]]]:
    """The order's JSON, which is also what the tool `place_order` takes."""
    return {"items": [{"dish": name, "count": quantity} for name, quantity in order.items()]}


def as_json(rng: Random, guest: Guest) -> Turn:
    order = random_order(rng)
    form = rng.choice(("Give this order as JSON: {}.", "Write {} as JSON.", "{} as JSON, please.", "As JSON: {}."))
    said = form.format(spoken_order(rng, order))
    return Turn("json", said[0].upper() + said[1:], json.dumps(order_items(order)), order_key(order))
