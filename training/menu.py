"""The card of the restaurant and the words around it: dishes, prices, number words, names, things we do not know."""

# ruff: noqa: SIM905 (a word list reads better as a paragraph than as quoted words)

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Dish:
    """`price` is in whole euros."""

    name: str
    plural: str
    price: int
    course: str
    vegetarian: bool

    def count(self, quantity: int) -> str:
        return f"{quantity} {self.name if quantity == 1 else self.plural}"


HOUSE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "src/maitred/api/ops/static/restaurant.json").read_text(encoding="utf-8")
)
"""The card, the tools and the tables, in the one file that the page reads too."""

DISHES: tuple[Dish, ...] = tuple(Dish(**dish) for dish in HOUSE["dishes"])

BY_NAME = {dish.name: dish for dish in DISHES}
COURSES = ("starter", "main", "dessert", "drink")
MAX_QUANTITY = 5
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

ABSENT = tuple(
    """
    sushi ramen tacos burritos falafel hummus paella gnocchi lasagne goulash schnitzel sausages caviar
    oysters mussels squid tofu duck turkey venison rabbit bacon porridge muesli cheesecake tiramisu
    chocolate donuts cookies brandy whisky vodka cider champagne milk cocoa noodles dumplings kimchi
    couscous
    """.split()
)

NAMES = tuple(
    """
    Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Noah Olga Paul Rosa Sam Tina Uma
    Victor Wendy Xavier Yara Zoe Ali Bruno Chen Dora Erik Fatima Hana Ivan Jana Karim Lena Mehmet Nina
    Omar Priya
    """.split()
)

SYLLABLES = tuple(
    """
    ba be bo da de do fa fi ga ka ki la li lo ma mi mo na ni no ra ri ro sa se ta ti to va vi za zo
    """.split()
)

PLACES = tuple(
    """
    France Japan Brazil Kenya Canada Norway Egypt India Peru Spain Paris London Tokyo Cairo Berlin Rome
    Lima Oslo Madrid Vienna Boston Sydney Chicago Moscow Delhi Texas Mars
    """.split()
)

TOPICS = tuple(
    """
    love money history football music physics chemistry biology politics religion art cinema dinosaurs
    moons suns stars poetry painting chess tennis cars trains planes ships dogs cats horses birds whales
    gardening medicine law sleep dreams winter summer rain snow mountains rivers oceans volcanoes
    computers robots phones philosophy mathematics geometry algebra languages Latin Greek opera jazz
    dancing fashion travel magic dragons knights castles pirates kings queens wars peace science space
    rockets atoms cells genes evolution
    """.split()
)

WORDS = tuple(
    """
    apple river window garden yellow happy quiet table letter silver mountain paper bridge winter orange
    music little green open door house stone cloud paint ship market corner shadow candle forest night
    morning dance blue red old young fast slow warm cold bright dark sweet sour hello world fox dog cat
    bird fish tree
    """.split()
)
