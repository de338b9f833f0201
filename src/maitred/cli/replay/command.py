"""`maitred replay`: make the decisions of a log again and compare."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.command import Command, Options
from maitred.cli.flags import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The logs"""

    log: tuple[str, ...] = option((), metavar="LOG", env="MAITRED_DECISION_LOG")
    """Folders or files of decision logs; of a folder the newest run, and the others are named. None looks in
    ./decisions and here."""


def _run(options: Options) -> int:
    from maitred.cli.replay.session import replay_logs

    return replay_logs(options[ReplayOptions].log)


COMMAND = Command(
    path="replay",
    summary="Make every decision of a log again with this version's scheduler, compare them bit for bit, and name the "
    "first that differs (exit code 1).",
    run=_run,
    parts=(ReplayOptions,),
    positional="log",
    examples=(
        "maitred serve --decision-log decisions",
        "maitred replay decisions",
        "maitred replay decisions/20260101T120000-000.00000.decisions",
    ),
)
