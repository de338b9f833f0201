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
        "answer.js",
        "blocks.js",
        "canvas.js",
        "charts.js",
        "chat.js",
        "client.js",
        "conversation.js",
        "dom.js",
        "engine.js",
        "events.js",
        "feed.js",
        "inert.js",
        "inline.js",
        "main.js",
        "markdown.js",
        "policy.js",
        "queue.js",
        "rush.js",
        "settings.js",
        "stats.js",
        "tenants.js",
        "theme.js",
        "tickets.js",
        "timeline.js",
        "words.js",
    }
)
