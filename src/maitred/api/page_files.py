"""The names of the page's files. They hold no secret, so they need no key; a file that is not listed is not served."""

from __future__ import annotations

INDEX = "index.html"
PREFIX = "/static/"
FILES = frozenset(
    {
        INDEX,
        "icon.svg",
        # styles
        "base.css",
        "chat.css",
        "live.css",
        # scripts
        "main.js",
    }
)
PAGE_PATHS = frozenset({"/", *(PREFIX + name for name in FILES)})
