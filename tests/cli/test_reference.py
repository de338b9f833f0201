from __future__ import annotations

from pathlib import Path

from maitred.cli.completion import with_flags
from maitred.cli.main import COMMANDS, load

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_has_every_flag_of_every_command():
    text = PAGE.read_text(encoding="utf-8")
    assert with_flags(text) == text, "write it anew: python -m maitred.cli.completion docs/cli.md"
    for path in COMMANDS:
        assert f"### `maitred {path}`" in text
        assert all(f"`{flag.name}`" in text for flag in load(path).flags())
