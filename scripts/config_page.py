"""The table of docs/tensor.md: what is done with each field of a config."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from maitred.tensor.config import SCHEMA
from maitred.tensor.schema import Field

_PLACE = re.compile(r"(<!-- fields: .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def with_fields(page: str) -> str:
    """The page with its table as it should be."""
    return _PLACE.sub(lambda found: f"{found[1]}{table()}{found[2]}", page)


def table() -> str:
    """A row in Markdown for each message that is gone into."""
    lines = ["| message | honoured | told as ignored | refused |", "| --- | --- | --- | --- |"]
    for message in dict.fromkeys(_honoured_messages("ModelConfig")):
        fields = SCHEMA.messages[message]
        cells = (_names(fields, "="), _names(fields, "~"), _names(fields, "!"))
        lines.append(f"| `{message}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _honoured_messages(message: str) -> Iterator[str]:
    yield message
    for field in SCHEMA.messages[message]:
        if field.mark == "=" and SCHEMA.messages.get(field.type):
            yield from _honoured_messages(field.type)


def _names(fields: Iterable[Field], mark: str) -> str:
    told = (f"`{field.name}`" + (f" ({field.note})" if field.note else "") for field in fields if field.mark == mark)
    return ", ".join(told)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_fields(path.read_text()))
