"""`maitred capture`: lists and erases what `serve --capture` has kept."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from maitred.cli.command import Command, Options
from maitred.cli.console import columns, inert, note
from maitred.cli.flags import option


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Captured traffic"""

    folder: str = option(metavar="DIR")
    """The folder of serve --capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EraseOptions:
    """What is erased"""

    tenant: str = option(metavar="NAME")
    """All of this tenant, also what a running server has not written yet."""


def _list(options: Options) -> int:
    from maitred.storage.capture import captured

    rows = [("TENANT", "MODEL", "ANSWERS", "TOKENS", "FROM", "TO")]
    for (tenant, model), held in sorted(captured(Path(options[CaptureOptions].folder)).items()):
        first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (held.first_at, held.last_at))
        rows.append((inert(tenant), inert(model), f"{held.num_answers:,}", f"{held.num_tokens:,}", first, last))
    print("\n".join(columns(rows, gap="  ")))
    return 0


def _erase(options: Options) -> int:
    from maitred.storage.capture import erase

    folder, tenant = options[CaptureOptions].folder, options[EraseOptions].tenant
    num_erased = erase(Path(folder), tenant, now=time.time())
    note(f"{num_erased:,} answers of {inert(tenant)} are gone from {folder}; to keep no more, say capture: never in "
         "the tenants file")  # fmt: skip
    return 0


LIST = Command(
    path="capture list",
    summary="List what serve --capture has kept, by tenant and model.",
    run=_list,
    parts=(CaptureOptions,),
    positional="folder",
    examples=("maitred capture list ./captured",),
)
ERASE = Command(
    path="capture erase",
    summary="Erase all that was captured of a tenant, file by file, beside running servers.",
    run=_erase,
    parts=(CaptureOptions, EraseOptions),
    positional="folder",
    examples=("maitred capture erase ./captured --tenant shop",),
)
