"""The page at `/`: a fixed list of files, read once, served with headers that let nothing else run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange, Header
from maitred.api.http.service import Service
from maitred.core.errors import RouteNotFound

INDEX = "index.html"
PREFIX = "/static/"
VENDORED = frozenset({"highlight.min.js", "highlight.LICENSE.txt"})
"""highlight.js 11.12.0, the build of common languages in npm's @highlightjs/cdn-assets (`es/`), and its licence."""
# The files hold no secret, so they need no key; a file that is not listed is not served.
FILES = VENDORED | frozenset(
    {
        INDEX,
        "icon.svg",
        "restaurant.json",  # the card and the tools; training reads them too
        # styles
        "base.css",
        "chat.css",
        "live.css",
        # scripts
        "answer.js",
        "blocks.js",
        "canvas.js",
        "charts.js",
        "calls.js",
        "chat.js",
        "client.js",
        "code.js",
        "conversation.js",
        "conversations.js",
        "demo.js",
        "dom.js",
        "engine.js",
        "events.js",
        "exports.js",
        "feed.js",
        "fleet.js",
        "inert.js",
        "inline.js",
        "kept.js",
        "lanes.js",
        "main.js",
        "markdown.js",
        "models.js",
        "policy.js",
        "queue.js",
        "restaurant.js",
        "rush.js",
        "settings.js",
        "stats.js",
        "tenants.js",
        "theme.js",
        "tickets.js",
        "timeline.js",
        "turns.js",
        "words.js",
    }
)
FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".json": b"application/json",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
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
