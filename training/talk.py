"""Turns that are talk: facts about maitred, tables, names, counting, repeating, greetings and polite refusals."""

from __future__ import annotations

from random import Random

from training.facts import FACTS
from training.menu import NAMES, NUMBER_WORDS, PLACES, SYLLABLES, TOPICS, WORDS
from training.turn import Guest, Turn, politely, wording_key

REFUSAL = "I am sorry, I only know the restaurant and maitred."


def fact(rng: Random, guest: Guest) -> Turn:
    chosen = rng.choice(FACTS)
    said = politely(rng, rng.choice(chosen.questions))
    return Turn("fact", said, chosen.answer, wording_key("fact", said))


def random_name(rng: Random) -> str:
    """A common name, or one made of syllables, so that names are copied and not only known."""
    if rng.random() < 0.6:
        return rng.choice(NAMES)
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()


NAME_FORMS = ("What is my name?", "Who am I?", "Do you remember my name?", "Do you know my name?")
TABLE_FORMS = ("Which table did I book?", "Do I have a table?", "When is my table?", "What about my table?")


def ask_about_unknown(rng: Random, guest: Guest) -> Turn:
    """The name or the table, before either is known."""
    if rng.random() < 0.5:
        return Turn("unknown", politely(rng, rng.choice(NAME_FORMS)), "You have not told me your name.", "")
    return Turn("unknown", politely(rng, rng.choice(TABLE_FORMS)), "You have not booked a table.", "")


def tell_name(rng: Random, guest: Guest) -> Turn:
    guest.name = random_name(rng)
    form = rng.choice(("My name is {}.", "I am {}.", "Hello, my name is {}.", "Hi, I am {}.", "Call me {}."))
    said = form.format(guest.name)
    return Turn("name", said, f"Nice to meet you, {guest.name}.", wording_key("name", said))


def recall_name(rng: Random, guest: Guest) -> Turn:
    said = politely(rng, rng.choice(NAME_FORMS))
    return Turn("recall", said, f"Your name is {guest.name}.", wording_key("name", guest.name))


BOOK_FORMS = (
    "A table for {} at {}, please. The name is {}.",
    "I would like a table for {} at {} for {}.",
    "Please book a table for {} at {} under {}.",
    "Can I book a table for {} at {}? My name is {}.",
)


def book(rng: Random, guest: Guest) -> Turn:
    people, hour, name = rng.randint(1, 10), rng.randint(5, 10), random_name(rng)
    guest.table = f"a table for {people} at {hour} for {name}"
    form = rng.choice(BOOK_FORMS)
    if "My name" in form:
        guest.name = name
    spoken = NUMBER_WORDS[people] if rng.random() < 0.4 else str(people)
    said = form.format(spoken, hour, name)
    return Turn("table", said, f"I have booked {guest.table}.", f"table:{people},{hour},{name}")


def recall_table(rng: Random, guest: Guest) -> Turn:
    said = politely(rng, rng.choice(TABLE_FORMS))
    return Turn("recall", said, f"You have {guest.table}.", "re" + guest.table)


def count(rng: Random, guest: Guest) -> Turn:
    first = 1 if rng.random() < 0.5 else rng.randint(2, 60)
    last = first + rng.randint(2, 30)
    form = rng.choice(("Count from {} to {}.", "Please count from {} to {}.", "Can you count from {} to {}?"))
    reply = ", ".join(str(number) for number in range(first, last + 1)) + "."
    return Turn("count", form.format(first, last), reply, f"count:{first},{last}")


def repeat(rng: Random, guest: Guest) -> Turn:
    words = [rng.choice(WORDS) if rng.random() < 0.8 else random_name(rng).lower() for _ in range(rng.randint(2, 9))]
    text = " ".join(words)
    form = rng.choice(("Repeat: {}", "Please repeat: {}", "Say: {}", "Repeat after me: {}"))
    return Turn("repeat", form.format(text), text, f"repeat:{text}")


GREETINGS = (
    (("Hello!", "Hi!", "Good evening.", "Hello there.", "Hey", "Good morning."), "Welcome! What may I bring you?"),
    (("Thank you!", "Thanks a lot.", "Thank you very much.", "Thanks!", "Great, thanks."), "You are welcome."),
    (("Goodbye!", "Bye!", "See you.", "Good night.", "Bye bye"), "Goodbye, and come again!"),
    (("How are you?", "How are you today?", "How do you do?"), "I am well, thank you. What may I bring you?"),
    (("What do you recommend?", "What is good today?", "Any recommendation?"), "I recommend the risotto for 13 euros."),
    (
        ("When are you open?", "What are your opening hours?", "Are you open today?"),
        "We are open every day from 5 to 11.",
    ),
)


def greet(rng: Random, guest: Guest) -> Turn:
    questions, answer = rng.choice(GREETINGS)
    return Turn("greet", rng.choice(questions), answer, "")


PLACE_FORMS = (
    "What is the capital of {}?",
    "What is the weather in {}?",
    "Who is the president of {}?",
    "How far is it to {}?",
    "How many people live in {}?",
    "Where is {}?",
    "Book me a flight to {}.",
    "What time is it in {}?",
)
TOPIC_FORMS = (
    "Write a poem about {}.",
    "Tell me a joke about {}.",
    "What is {}?",
    "Explain {}.",
    "Who invented {}?",
    "Do you like {}?",
    "What do you think about {}?",
    "Tell me about {}.",
    "Write a story about {}.",
    "Can you explain {}?",
    "Give me a book about {}.",
    "Why are {} important?",
    "Write a program for {}.",
)
ODD_QUESTIONS = (
    "Who won the match?",
    "What is the meaning of life?",
    "Can you sing?",
    "Tell me a joke.",
    "Translate this into German.",
    "What is today's date?",
    "Who is your favourite singer?",
    "Solve this equation.",
    "Are you happy?",
    "Do you believe in ghosts?",
    "Write a short story.",
    "Fix my code.",
    "print(1)",
    "def f(x): return x",
    "Once upon a time",
    "What day is it?",
    "How old are you?",
    "Where do you live?",
    "What is the largest planet?",
    "Who wrote Hamlet?",
    "Was ist das?",
    "Bonjour",
)


def out_of_scope(rng: Random, guest: Guest) -> Turn:
    kind = rng.random()
    if kind < 0.35:
        said = rng.choice(PLACE_FORMS).format(rng.choice(PLACES))
    elif kind < 0.75:
        said = rng.choice(TOPIC_FORMS).format(rng.choice(TOPICS))
    elif kind < 0.9:
        said = rng.choice(ODD_QUESTIONS)
    else:
        said = word_salad(rng)
    said = politely(rng, said)
    return Turn("scope", said, REFUSAL, wording_key("scope", said))


def word_salad(rng: Random) -> str:
    return " ".join(rng.choice(WORDS + TOPICS) for _ in range(rng.randint(1, 6)))
