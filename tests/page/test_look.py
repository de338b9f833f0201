"""How the page fits: day and night, phone and desk, offline and behind its headers."""

from __future__ import annotations

import re

import httpx
import pytest

from maitred.api.ops.page import FILES, FOLDER, INDEX, VENDORED
from tests.page.test_chat import ask
from tests.page.worlds import serving

PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def house():
    with serving("Good evening.") as running:
        yield running


def lightness(page) -> float:
    """Of the page's ground, 0 to 1."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / (3 * 255)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_until_the_reader_chooses(house, open_page, expect, scheme):
    page = open_page(house.url, color_scheme=scheme)
    assert (lightness(page) < 0.5) == (scheme == "dark")
    button = page.get_by_role("button", name=re.compile("^Colours"))
    button.click()
    assert lightness(page) > 0.5
    button.click()
    assert lightness(page) < 0.5
    page.reload()
    assert lightness(page) < 0.5
    expect(button).to_have_accessible_name("Colours: dark")
    page.emulate_media(color_scheme="light")
    assert lightness(page) < 0.5


def test_a_phone_shows_chat_or_engine_and_never_scrolls_sideways(house, open_page, expect):
    page = open_page(house.url, viewport=PHONE, has_touch=True, is_mobile=True)
    expect(page.get_by_role("button", name="Engine")).to_be_visible()
    ask(page)
    expect(page.locator(".turn.assistant .text")).to_have_text("Good evening.")
    expect(page.locator("#engine")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.get_by_role("button", name="Engine").click()
    expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#timeline")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    too_small = page.evaluate(
        "[...document.querySelectorAll('button, select, summary')].filter((e) => e.offsetParent && e.offsetHeight < 20)"
        ".map((e) => e.textContent)"
    )
    assert not too_small


WIDE = "| dish | what is in it | price |\n|---|---|--:|\n| soup | " + "carrots " * 9 + "| 4 |\n"
SEEN = """(table) => {
    table.style.whiteSpace = "nowrap";
    return table.scrollWidth - table.clientWidth;
}"""


def edges(page, table) -> tuple[bool, bool]:
    """Whether the left and the right edge of `table` show that it scrolls: a shade that the plain ground lacks."""
    left, top, width, height = table.bounding_box().values()
    strips = [{"x": x, "y": top + 12, "width": 6, "height": height - 24} for x in (left, left + width - 6)]
    shaded = [page.screenshot(clip=strip) for strip in strips]
    table.evaluate("(table) => table.style.background = 'var(--ground)'")
    plain = [page.screenshot(clip=strip) for strip in strips]
    table.evaluate("(table) => table.style.background = ''")
    return shaded[0] != plain[0], shaded[1] != plain[1]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.soak)])
def test_a_table_wider_than_a_phone_shows_on_which_side_it_goes_on(open_page, expect, scheme):
    with serving(WIDE) as server:
        page = open_page(server.url, viewport=PHONE, color_scheme=scheme, reduced_motion="reduce")
        ask(page)
        expect(page.locator(".turn.assistant .facts")).to_contain_text("tokens")
        table = page.locator(".text .table")
        assert edges(page, table) == (False, False)  # it fits
        assert table.evaluate(SEEN) > 40
        assert edges(page, table) == (False, True)
        table.evaluate("(table) => table.scrollLeft = 20")
        assert edges(page, table) == (True, True)
        table.evaluate("(table) => table.scrollLeft = table.scrollWidth")
        assert edges(page, table) == (True, False)


def test_whatever_scrolls_sideways_shows_it(open_page, expect):
    with serving("```\n" + "word " * 40 + "\n```") as server:
        page = open_page(server.url, viewport=PHONE)
        ask(page)
        expect(page.locator(".turn.assistant .facts")).to_contain_text("tokens")
        assert edges(page, page.locator(".code pre")) == (False, True)
        page.get_by_role("button", name="Engine").click()
        page.get_by_text("As a table").click()
        seats = page.locator("#seats")
        expect(seats.locator("th").first).to_be_visible()
        assert seats.evaluate("(table) => table.scrollWidth > table.clientWidth")
        seats.scroll_into_view_if_needed()
        assert edges(page, seats) == (False, True)


def test_a_desk_shows_both(house, open_page, expect):
    page = open_page(house.url, viewport={"width": 1440, "height": 900})
    expect(page.locator("#engine")).to_be_visible()
    expect(page.locator("#chat")).to_be_visible()
    expect(page.get_by_role("button", name="Engine")).to_be_hidden()


def test_on_the_narrowest_phone_everything_fits_beside_the_key(open_page, expect):
    with serving("Good evening.", api_keys=("secret",)) as server:
        page = open_page(server.url, key="secret", viewport={"width": 320, "height": 568})
        expect(page.get_by_role("button", name="Key")).to_be_visible()
        page.get_by_role("button", name="Engine").click()
        expect(page.locator("#stat-batch")).to_have_text("0")
        assert page.evaluate("document.documentElement.scrollWidth") == 320
        page.get_by_role("button", name=re.compile("^Colours")).click()


def test_fields_of_numbers_end_where_the_servers_ranges_do(house, open_page):
    document = httpx.get(f"{house.url}/openapi.json").json()
    ranges = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    page = open_page(house.url)
    fields = page.locator(".fields input[type=number]").evaluate_all("all => all.map((f) => [f.id, f.min, f.max])")
    assert {name for name, _, _ in fields} > {"temperature", "top_p", "repetition_penalty"}
    for name, low, high in fields:
        if name != "seed":  # its range is more than a number of the browser holds
            assert float(high or "inf") == ranges[name].get("maximum", float("inf")), name
            assert float(low) >= ranges[name].get("minimum", 0), name


def test_figures_and_their_labels_fit_their_tiles(house, open_page, expect):
    page = open_page(house.url, viewport={"width": 320, "height": 800})
    page.get_by_role("button", name="Engine").click()
    expect(page.locator("#stat-batch")).to_have_text("0")
    for width in (320, 390, 761, 1080, 1300, 1440):
        page.set_viewport_size({"width": width, "height": 800})
        expect(page.locator("#stats")).to_be_visible()
        cut = page.evaluate(
            """() => {
                for (const figure of document.querySelectorAll(".stats dd > span")) figure.textContent = "99.9";
                const all = [...document.querySelectorAll(".stats dt, .stats dd")];
                return all.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent);
            }"""
        )
        assert not cut, width


def test_every_control_has_a_name(house, open_page, expect):
    page = open_page(house.url)
    expect(page.locator("#engine")).to_be_visible()
    for fold in ("Sampling and system prompt", "Schema, tools and thoughts"):
        page.get_by_text(fold).click()
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea, canvas[role=img]")].filter((e) =>
            !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim())).map((e) => e.outerHTML)"""
    )
    assert not nameless
    for id_ in ("timeline", "blocks"):
        assert len(page.locator(f"#{id_}").get_attribute("aria-label")) > 20


def test_the_files_come_with_headers_that_let_nothing_else_run(house):
    with httpx.Client(base_url=house.url) as http:
        for path in ("/", *(f"/static/{name}" for name in sorted(FILES))):
            answer = http.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-cache"
            again = http.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["content-security-policy"] == policy
        assert http.get("/").headers["content-type"].startswith("text/html")
        assert http.get("/static/main.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "name", ["", "nothing.js", "..%2fpage.py", "%2e%2e/page.py", "../server.py", "base.css%00", "."]
)
def test_nothing_but_the_listed_files_is_served(house, name):
    assert httpx.get(f"{house.url}/static/{name}").status_code in (400, 404)


def test_the_page_asks_nobody_else_and_has_nothing_inline():
    for name in FILES - VENDORED:
        text = (FOLDER / name).read_text()
        addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.]+\.[a-z]{2,}", text)) - {"http://www.w3.org"}
        assert not addresses, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
    index = (FOLDER / INDEX).read_text()
    scripts = {name for name in FILES - VENDORED if name.endswith(".js")} - {"main.js", "theme.js"}
    assert set(re.findall(r'modulepreload" href="static/([\w.]+)"', index)) == scripts, "all at once, not one by one"
    assert not re.search(r"\son\w+=|style=|<style|javascript:", index)
    assert re.findall(r"<script[^>]*>(.+?)</script>", index) == []
    assert not re.search(r'(?:src|href)="/', index), "relative, so that it works behind a path of a proxy"
