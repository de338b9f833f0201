"""The documentation's form: links that lead somewhere, pages that begin with an example, a README of two screens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GUIDES = [page for page in PAGES if page.parent in (ROOT / "docs", ROOT / "docs" / "experiments")]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith(("http:", "https:", "mailto:")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_that_a_page_names_is_there(page: Path):
    for path in re.findall(r"`((?:\w+/)+\w+\.py)", page.read_text(encoding="utf-8")):
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "src" / "maitred", ROOT / "tests")), path


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_an_example_and_says_when_to_use_it(page: Path):
    title, _, rest = page.read_text(encoding="utf-8").partition("\n\n")
    assert title.startswith("# ")
    assert rest.startswith("```")
    assert "\nUse it " in rest.split("\n## ")[0]


def test_the_readme_fits_two_screens():
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 120
