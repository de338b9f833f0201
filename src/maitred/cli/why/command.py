"""`maitred why`: what a request waited for."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.command import Command, Options
from maitred.cli.flags import option


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyOptions:
    """The request"""

    request_id: str = option(metavar="REQUEST_ID")
    """Its id, or a part of it that no other request has, such as the id in the answer (chatcmpl-...)."""
    log: str | None = option(None, metavar="LOG", env="MAITRED_DECISION_LOG")
    """Folder or file of the decision log; of a folder, the newest run that has the request. None looks in ./decisions
    and here."""


def _run(options: Options) -> int:
    from maitred.cli.why.session import explain

    asked = options[WhyOptions]
    return explain(asked.request_id, asked.log)


COMMAND = Command(
    path="why",
    summary="Tell in plain words what a request waited for, and each term of its score, from the decision log.",
    run=_run,
    parts=(WhyOptions,),
    positional="request_id",
    examples=(
        "maitred serve --decision-log decisions",
        "maitred why chatcmpl-5f1c --log decisions",
    ),
)
