"""`maitred why`: what a request waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.core.errors import ConfigError, ServerError

if TYPE_CHECKING:
    from maitred.cli.fleet import RouterOptions
    from maitred.fleet.actions import ChoiceMade, ChoicesMade


HEADINGS = ("", "CANDIDATE", "SCORE", "LOAD", "CACHED TOKENS")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyOptions:
    """The request"""

    request_id: str = option(metavar="REQUEST_ID")
    """Its id, or a part of it that no other request has, such as the id in the answer (chatcmpl-...)."""
    log: str | None = option(None, metavar="LOG", env="MAITRED_DECISION_LOG")
    """Folder or file of the decision log; of a folder, the newest run that has the request. None looks in ./decisions
    and here."""
    url: str | None = option(None, metavar="URL")
    """A router (maitred route), or a server of several workers: it tells where it sent the request, and each term of
    the choice, of its last 1,000."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """An administrator's key, where there are keys."""


def _run(options: Options) -> int:
    asked = options[WhyOptions]
    if asked.url is not None:
        from maitred.cli.fleet import RouterOptions

        return explain_choices(asked.request_id, RouterOptions(url=asked.url, api_key=asked.api_key))
    return explain(asked.request_id, asked.log)


def explain(words: str, log: str | None) -> int:
    """Finds the request, and prints its history."""
    from maitred.cli.replay import nearest_log
    from maitred.decisions.files import log_parts, log_runs

    path = Path(log or nearest_log())
    runs = log_runs(path) if path.is_dir() else [log_parts(path)]
    parts, request_ids = _find(runs, words)
    if len(runs) > 1:
        print(f"in {parts[0].name}, run {runs.index(parts) + 1} of {len(runs)} from the newest")
    for request_id in request_ids:
        print(_told(parts, request_id))
    return 0


def _told(parts: list[Path], request_id: str) -> str:
    from maitred.cli.why_words import tell, tell_tensor
    from maitred.decisions.files import read_frames
    from maitred.decisions.history import history_of
    from maitred.decisions.tensor_history import is_tensor, tensor_history_of
    from maitred.engine.installed import installed_policies

    policies = installed_policies()
    if is_tensor(read_frames(parts), request_id):
        return tell_tensor(tensor_history_of(read_frames(parts), request_id, policies))
    return tell(history_of(read_frames(parts), request_id, policies))


def _find(runs: Sequence[list[Path]], words: str) -> tuple[list[Path], Sequence[str]]:
    """The newest run with such a request, and its id, or of an ensemble those of its steps. A run that cannot be read
    does not hide those before it.
    """
    from maitred.decisions.files import read_frames
    from maitred.decisions.history import ids_like, the_one
    from maitred.decisions.tensor_history import steps_of_one

    unread: list[str] = []
    for parts in runs:
        try:
            ids = ids_like(read_frames(parts), words)
        except ConfigError as error:
            if len(runs) == 1:
                raise
            unread.append(f"{parts[0].name}: {error}")
            continue
        if ids:
            return parts, steps_of_one(ids) or (the_one(ids, words),)
    if not unread:
        the_one([], words)
    raise ConfigError(
        f"no request {words!r} in {len(runs) - len(unread)} runs, and {len(unread)} could not be read: {unread[0]}"
    )


def explain_choices(request_id: str, router: RouterOptions) -> int:
    """Print where a router sent a request, and each term of every choice. Raises Refused, Unreachable."""
    from urllib.parse import quote

    import msgspec

    from maitred.cli.fleet import ask_router
    from maitred.fleet.actions import ChoicesMade

    answer = ask_router(router, f"/admin/fleet/choices/{quote(request_id, safe='')}")
    try:
        made = msgspec.json.decode(answer, type=ChoicesMade)
    except msgspec.MsgspecError as error:
        raise ServerError(f"{router.url} tells of choices in a form unknown here: {error}") from None
    print("\n".join(choice_lines(made)))
    return 0


def choice_lines(made: ChoicesMade) -> list[str]:
    """A paragraph per attempt."""
    from maitred.cli.console import inert

    return [inert(line) for choice in made.choices for line in _attempt(choice)]


def _attempt(choice: ChoiceMade) -> list[str]:
    from maitred.cli.console import columns

    how = "goes on at" if choice.resumes else "sent to"
    rows = [
        ("->" if term.replica == choice.replica else "", term.replica, _number(term.score), f"{term.load:g}",
         f"{term.cached_tokens:,}")
        for term in choice.candidates
    ]  # fmt: skip
    return [
        f"attempt {choice.attempt}: {how} {choice.replica}, after {choice.held_s:.3f} s of waiting in all",
        *(columns([HEADINGS, *rows]) if rows else []),
        *(columns(_ways(choice)) if choice.ways else []),
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


COMMAND = Command(
    path="why",
    summary="Tell in plain words what a request waited for, and each term of its score, from the decision log.",
    run=_run,
    parts=(WhyOptions,),
    positional="request_id",
    examples=(
        "maitred serve --decision-log decisions",
        "maitred why chatcmpl-5f1c --log decisions",
        "maitred why chatcmpl-5f1c --url http://10.0.0.5:8000",
    ),
)
