"""`maitred why ID --url`: where a router sent a request, and each term of every choice."""

from __future__ import annotations

import msgspec

from maitred.cli.console import inert
from maitred.cli.fleet.asking import RouterOptions, get
from maitred.cli.ps import table
from maitred.cluster.choices import ChoiceMade, ChoicesMade
from maitred.errors import ServerError

HEADINGS = ("", "CANDIDATE", "SCORE", "LOAD", "CACHED TOKENS")


def explain_choices(request_id: str, router: RouterOptions) -> int:
    """Raises Refused, Unreachable."""
    from urllib.parse import quote

    answer = get(router, f"/admin/fleet/choices/{quote(request_id, safe='')}")
    try:
        made = msgspec.json.decode(answer, type=ChoicesMade)
    except msgspec.MsgspecError as error:
        raise ServerError(f"{router.url} tells of choices in a form unknown here: {error}") from None
    print("\n".join(lines(made)))
    return 0


def lines(made: ChoicesMade) -> list[str]:
    """A paragraph per attempt."""
    return [inert(line) for choice in made.choices for line in _attempt(choice)]


def _attempt(choice: ChoiceMade) -> list[str]:
    how = "goes on at" if choice.resumes else "sent to"
    rows = [
        ("->" if term.replica == choice.replica else "", term.replica, _number(term.score), f"{term.load:g}",
         f"{term.cached_tokens:,}")
        for term in choice.candidates
    ]  # fmt: skip
    return [
        f"attempt {choice.attempt}: {how} {choice.replica}, after {choice.held_s:.3f} s of waiting in all",
        *(table([HEADINGS, *rows]) if rows else []),
        *(table(_ways(choice)) if choice.ways else []),
    ]


def _ways(choice: ChoiceMade) -> list[tuple[str, ...]]:
    """The one taken first; seconds, but for the cost, which is what all of them come to."""
    names = tuple(choice.ways[0].terms)
    headings = ("", "WAY", *(name.removesuffix("_s").upper() for name in names))
    marks = ["->"] + [""] * (len(choice.ways) - 1)
    return [headings] + [
        (mark, way.name, *(f"{way.terms[name]:.4g}" for name in names))
        for mark, way in zip(marks, choice.ways, strict=True)
    ]


def _number(score: float | None) -> str:
    return "never" if score is None else f"{score:.4g}"
