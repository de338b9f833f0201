"""The names of the page's files. They hold no secret, so they need no key; a file that is not listed is not served."""

from __future__ import annotations

INDEX = "index.html"
PREFIX = "/static/"
VENDORED = frozenset({"highlight.min.js", "highlight.LICENSE.txt"})
"""highlight.js 11.12.0, the build of common languages in npm's @highlightjs/cdn-assets (`es/`), and its licence."""
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
