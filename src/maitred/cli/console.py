"""Terminal output: notes to stderr, results to stdout, and foreign text cannot steer it."""

from __future__ import annotations

import io
import os
import sys
import unicodedata
from collections.abc import Sequence

from maitred.core.errors import ConfigError

# Marks that reorder or hide text (bidi overrides and isolates), used to make a terminal show what was not said.
_BIDI = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_KEPT = {"\n", "\t"}


def inert(text: str) -> str:
    """`text` without control characters: an escape sequence becomes plain letters, whatever chunk it came in."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c for c in text if c in _KEPT or not (unicodedata.category(c) == "Cc" or ord(c) in _BIDI))


def note(text: str) -> None:
    """One line for the person at the terminal; never part of a result."""
    print(text, file=sys.stderr, flush=True)


def seconds_text(seconds: float | None) -> str:
    """0.0123 -> `12.3ms`."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1e3:.3g}ms" if seconds < 0.1 else f"{seconds * 1e3:.0f}ms"
    return f"{seconds:.2f}s" if seconds < 100 else f"{seconds:.0f}s"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table with its first column to the left and figures to the right; no cell steers the terminal."""
    rows = [[inert(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def columns(rows: Sequence[Sequence[str]], gap: str = "   ") -> list[str]:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(map(str.ljust, row, widths)).rstrip() for row in rows]


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m"


class _ClosedOutput(io.TextIOBase):
    """A closed standard output: a command that writes there ends with a remedy; `serve` does not, and runs."""

    def write(self, text: str) -> int:
        raise ConfigError("standard output is closed; send it to a file, a program or /dev/null")


def fill_closed_streams() -> None:
    """Else the next file or socket gets the number of a standard stream, and what others write there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the smallest number that is free: this one
    if sys.stdout is None:
        sys.stdout = _ClosedOutput()
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
