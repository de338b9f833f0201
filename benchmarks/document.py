"""Puts what a benchmark found between its marks in a page of docs/."""

from __future__ import annotations

from pathlib import Path


def write_section(page: Path, section: str, text: str) -> None:
    """Between `<!-- section: begin -->` and its end; they are added to the page if they are not there."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    whole = page.read_text(encoding="utf-8")
    if begin not in whole:
        whole = f"{whole.rstrip()}\n\n{begin}\n{end}\n"
    before, rest = whole.split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")
