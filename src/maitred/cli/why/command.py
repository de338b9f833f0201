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
    url: str | None = option(None, metavar="URL")
    """A router (maitred route), or a server of several workers: it tells where it sent the request, and each term of
    the choice, of its last 1,000."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """An administrator's key, where there are keys."""


def _run(options: Options) -> int:
    from maitred.cli.why.session import explain

    asked = options[WhyOptions]
    if asked.url is not None:
        from maitred.cli.fleet.asking import RouterOptions
        from maitred.cli.why.choices import explain_choices

        return explain_choices(asked.request_id, RouterOptions(url=asked.url, api_key=asked.api_key))
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
        "maitred why chatcmpl-5f1c --url http://10.0.0.5:8000",
    ),
)
