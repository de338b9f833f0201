"""Writes the flag tables of docs/cli.md: `python -m maitred.cli.reference docs/cli.md`; a test holds them current."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from maitred.cli.command import CommonOptions, title
from maitred.cli.flags import FlagKind, flags_of, help_text
from maitred.cli.main import COMMANDS, load

BEGIN, END = "<!-- flags: begin -->", "<!-- flags: end -->"


def with_flags(page: str) -> str:
    """`page` with everything between its two marks written anew."""
    before, rest = page.split(BEGIN)
    lines = [line for path in COMMANDS for line in _of_command(path)]
    tables = "\n".join([*lines, "### Flags of every command", "", *_table(CommonOptions)])
    return f"{before}{BEGIN}\n\n{tables}\n{END}{rest.split(END)[1]}"


def _of_command(path: str) -> Iterator[str]:
    command = load(path)
    yield from (f"### `maitred {path}`", "", command.summary, "")
    for part in command.parts:
        yield from (f"**{title(part)}**", "", *_table(part))


def _table(part: type) -> Iterator[str]:
    yield from ("| flag | meaning |", "|---|---|")
    for flag in flags_of(part):
        names = ", ".join(f"`{name}`" for name in flag.names) + (
            "" if flag.kind is FlagKind.SWITCH else f" {flag.metavar}"
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in (names, help_text(flag))) + " |"
    yield ""


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_flags(page.read_text(encoding="utf-8")), encoding="utf-8")
