"""Debian's Chromium, driven by Playwright; where either is missing, these tests skip and say so."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
WAIT_MS = 90_000  # as tests.waiting.HANGS_S: it only ends a test that would hang
FLAGS = (
    "--headless",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass
class Watched:
    """A page, what it complained about, and where it sent requests."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


OpenPage = Callable[..., Any]


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """For this folder: Playwright's loop runs in this thread, where other folders' tests run theirs."""
    if CHROMIUM is None:
        pytest.skip("needs Debian's chromium; as root: scripts/debian-packages")
    with playwright_api().sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS), timeout=WAIT_MS)
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """`open_page(url, **context)`; afterwards nothing may have gone wrong, and nobody else may have been asked.

    `expected` names parts of console errors that belong to the test, such as a status that the server is to answer.
    Without a GPU, drawing sixty times a second is most of what the tests here would do: only those of it have motion.
    """
    opened: list[tuple[Watched, str, tuple[str, ...]]] = []

    def open_(url: str, *, expected: tuple[str, ...] = (), key: str | None = None, **context: Any) -> Any:
        page = browser.new_context(**{"reduced_motion": "reduce", **context}).new_page()
        page.set_default_timeout(WAIT_MS)
        watched = Watched(page)
        opened.append((watched, url, expected))
        page.on("console", lambda message: _heard(watched, message))
        page.on("pageerror", lambda error: watched.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (watched.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: watched.requests.append(request.url))
        if key is not None:
            page.add_init_script(f"sessionStorage.setItem('maitred.key', {key!r})")
        page.goto(url)
        return page

    yield open_
    for watched, url, expected in opened:
        watched.page.context.close()
        bad = [words for words in watched.complaints if not any(part in words for part in expected)]
        assert not bad, bad
        foreign = [asked for asked in watched.requests if not asked.startswith((f"{url}/", "data:", "blob:"))]
        assert not foreign, foreign


def _heard(watched: Watched, message: Any) -> None:
    if message.type in ("error", "warning"):
        watched.complaints.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")


@pytest.fixture
def expect() -> Any:
    """Playwright's assertions, which wait."""
    playwright_api().expect.set_options(timeout=WAIT_MS)
    return playwright_api().expect


def playwright_api() -> Any:
    return pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'maitred[dev]'")
