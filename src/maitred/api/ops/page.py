"""The page at `/`: a fixed list of files, read once, served with headers that let nothing else run.

Reports are made of the same modules and styles, all in one file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange, Header
from maitred.api.http.service import Service
from maitred.core.errors import RouteNotFound

INDEX = "index.html"
PREFIX = "/static/"
VENDORED = frozenset({"highlight.min.js", "highlight.LICENSE.txt"})
"""highlight.js 11.12.0, the build of common languages in npm's @highlightjs/cdn-assets (`es/`), and its licence."""
FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".json": b"application/json",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
# The files hold no secret, so they need no key; a file that was not there at the start is not served.
FILES = frozenset(path.name for path in FOLDER.iterdir() if path.suffix in _TYPES)
# Scripts, styles, pictures and connections come from here or not at all; nothing inline, nothing framed.
SECURITY: tuple[Header, ...] = (
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        b"require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, slots=True)
class PageFile:
    body: bytes
    content_type: bytes
    etag: bytes


@cache
def page_file(name: str) -> PageFile:
    """One of FILES, read when first asked for."""
    body = (FOLDER / name).read_bytes()
    return PageFile(body, _TYPES[Path(name).suffix], b'"' + sha256(body).hexdigest()[:32].encode() + b'"')


async def index(server: Service, exchange: Exchange) -> None:
    """The page itself."""
    await _answer(exchange, INDEX)


async def asset(server: Service, exchange: Exchange) -> None:
    """A file that the page asks for."""
    name = exchange.parameter
    if name not in FILES:
        raise RouteNotFound(f"there is nothing at {PREFIX}{shortened(name)}")
    await _answer(exchange, name)


async def _answer(exchange: Exchange, name: str) -> None:
    file = page_file(name)
    # Asked for each time, answered with 304 while it is the same: a new version of the server shows at once.
    headers = (*SECURITY, (b"etag", file.etag), (b"cache-control", b"no-cache"))
    if file.etag in exchange.headers.get(b"if-none-match", b""):
        await exchange.send({"type": "http.response.start", "status": 304, "headers": list(headers)})
        await exchange.send({"type": "http.response.body", "body": b""})
        return
    await exchange.answer(file.body, 200, ((b"content-type", file.content_type), *headers))


# ---- reports

TEMPLATE = FOLDER.parent / "report" / "report.html"
_IMPORTED = re.compile(r'^import \{ (.+) \} from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORTED = re.compile(r"^export (?=(?:async )?(?:function|class|const) ([\w$]+))", re.MULTILINE)


def report_page(contents: Mapping[str, Any]) -> str:
    """One file with everything in it, which shows `contents` as `sim.report` makes them."""
    styles = [*(FOLDER / name for name in ("base.css", "live.css", "compare.css")), TEMPLATE.with_suffix(".css")]
    data = json.dumps(contents, separators=(",", ":"))
    parts = {
        "styles": "\n".join(path.read_text() for path in styles),
        "theme": (FOLDER / "theme.js").read_text(),
        "icon": (FOLDER / "icon.svg").read_text(),
        "modules": _one_script(TEMPLATE.with_suffix(".js")),
        "contents": data.replace("<", "\\u003c"),  # so that no text in it ends the script
    }
    words = re.split(r"\{\{ (\w+) \}\}", TEMPLATE.read_text())
    return "".join(parts[word] if number % 2 else word for number, word in enumerate(words))


def _one_script(entry: Path) -> str:
    """A module after those that it imports, each a function that returns what it exports."""
    made: dict[str, str] = {}

    def add(path: Path) -> None:
        text = path.read_text()
        for _, name in _IMPORTED.findall(text):
            if name not in made:
                add(FOLDER / f"{name}.js")
        body = _IMPORTED.sub(lambda line: f"const {{ {line[1].replace(' as ', ': ')} }} = modules.{line[2]};", text)
        exports = ", ".join(_EXPORTED.findall(text))
        made[path.stem] = (
            f"modules.{path.stem} = (() => {{\n{_EXPORTED.sub('', body)}\nreturn {{ {exports} }};\n}})();\n"
        )

    add(entry)
    return '"use strict";\nconst modules = {};\n' + "".join(made.values())
