"""Writes the flag tables of docs/cli.md: `python -m maitred.cli.reference docs/cli.md`; a test holds them current."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from maitred.cli.command import Command, CommonOptions
from maitred.cli.flags import Flag, Kind, flags_of, help_text
from maitred.cli.main import COMMANDS, load

BEGIN, END = "<!-- flags: begin -->", "<!-- flags: end -->"


def with_flags(page: str) -> str:
    """`page` with everything between its two marks written anew."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{flag_tables()}\n{END}{after}"


def flag_tables() -> str:
    lines: list[str] = []
    for path in COMMANDS:
        lines += _command_lines(load(path))
    lines += ["### Flags of every command", "", *_table(CommonOptions)]
    return "\n".join(lines)


def _command_lines(command: Command) -> Iterator[str]:
    yield f"### `maitred {command.path}`"
    yield ""
    yield command.summary
    yield ""
    for part in command.parts:
        yield f"**{(part.__doc__ or '').strip().splitlines()[0].rstrip('.')}**"
        yield ""
        yield from _table(part)


def _table(part: type) -> Iterator[str]:
    yield "| flag | meaning |"
    yield "|---|---|"
    for flag in flags_of(part):
        yield f"| {_names(flag)} | {help_text(flag).replace('|', chr(92) + '|')} |"
    yield ""


def _names(flag: Flag) -> str:
    names = [name for name in (flag.short, flag.name) if name]
    if flag.kind is Kind.SWITCH:
        names.append("--no-" + flag.key)
        return ", ".join(f"`{name}`" for name in names)
    return ", ".join(f"`{name}`" for name in names) + " " + flag.metavar.replace("|", "\\|")


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_flags(page.read_text(encoding="utf-8")), encoding="utf-8")
