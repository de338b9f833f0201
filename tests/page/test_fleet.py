"""The page of a router in a real browser: its replicas, what each does, and who is held."""

from __future__ import annotations

from types import SimpleNamespace
from urllib.parse import urlsplit

from maitred.fleet.swapping import FleetModel, ModelSet
from tests.api.test_tenants import table_of
from tests.fakes_api import FakeReplica, running_server
from tests.fleet.routers import running_router
from tests.page.test_chat import ask
from tests.page.test_live import live_requests
from tests.page.worlds import FOREVER, serving
from tests.waiting import until

GONE = ("ERR_",)  # the page asks every second, also when a test has ended its router


def at(router) -> SimpleNamespace:
    return SimpleNamespace(port=urlsplit(router.url).port)


def test_the_fleet_is_shown_as_it_is_loaded(open_page, expect):
    with (
        serving(FOREVER, repeats=True, num_slots=1) as replica,
        running_router(replica.url, "http://127.0.0.1:9") as router,
    ):
        until(lambda: "ready" in router.states)
        page = open_page(router.url, expected=GONE)
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#model")).to_have_value("tiny")
        expect(page.locator("#engine")).to_be_hidden()
        expect(page.locator("#stat-ready")).to_have_text("1")
        row = page.locator("#replicas tbody tr").filter(has_text=replica.url.removeprefix("http://"))
        expect(row).to_contain_text("ready")
        expect(row).to_contain_text("0 of 1")
        with live_requests(at(router), 4):  # one in the slot, one in the reserve, two held
            expect(row).to_contain_text("2 of 1")
            expect(page.locator("#stat-held")).to_have_text("2")
            expect(page.locator("#stat-oldest")).not_to_have_text("–")
        expect(page.locator("#stat-held")).to_have_text("0")
        expect(page.locator("#replicas tbody tr")).to_have_count(2)


def test_the_chat_goes_through_the_router(open_page, expect):
    with serving("Good evening.") as replica, running_router(replica.url) as router:
        until(lambda: router.states == ["ready"])
        page = open_page(router.url, expected=GONE)
        ask(page)
        expect(page.locator(".turn.assistant .text")).to_have_text("Good evening.")


def test_before_any_replica_told_a_model_the_page_shows_the_fleet_and_learns_it_later(open_page, expect):
    with running_router("http://127.0.0.1:9") as router:
        page = open_page(router.url, expected=GONE)
        expect(page.locator("#model")).to_contain_text("nothing yet")
        expect(page.locator("#stat-ready")).to_have_text("0")
        expect(page.locator("#replicas tbody tr")).to_contain_text("starting")


def test_several_models_are_listed_with_their_states_and_loaded_by_a_button(open_page, expect):
    models = (
        FleetModel(name="chat", aliases=("gpt-x",), names=("gpt-x",), memory_bytes=3 * 2**30),
        FleetModel(name="coder"),
    )
    with running_router(several=ModelSet(models, 4 * 2**30)) as router:  # which starts none: it has no launcher
        page = open_page(router.url, expected=GONE)
        expect(page.locator("#model option")).to_have_text(["chat", "coder"])
        row = page.locator("#swap-rows tbody tr").filter(has_text="chat, gpt-x")
        expect(row).to_contain_text("unloaded")
        expect(row).to_contain_text("3.0 GiB")
        row.get_by_role("button", name="Load").click()
        expect(row).to_contain_text("loading")
        expect(page.locator("#swaps-note")).to_have_text("1 of 2 in memory, 3.0 GiB")


def test_a_tenant_has_the_chat_and_an_administrator_the_fleet_too(open_page, expect):
    tenants = SimpleNamespace(table=table_of({"guest": {}, "boss": {}}))
    with running_server(FakeReplica()) as replica, running_router(replica.url, tenants=tenants) as router:
        until(lambda: router.states == ["ready"])
        guest = open_page(router.url, key="guest", expected=("403", *GONE))
        expect(guest.locator("#state")).to_have_text("ready")
        expect(guest.locator("#fleet")).to_be_hidden()
        boss = open_page(router.url, key="boss", expected=GONE)
        expect(boss.locator("#fleet")).to_be_visible()


def test_on_a_phone_the_fleet_is_behind_its_tab_and_nothing_scrolls_sideways(open_page, expect):
    with running_server(FakeReplica()) as replica, running_router(replica.url) as router:
        until(lambda: router.states == ["ready"])
        page = open_page(router.url, viewport={"width": 390, "height": 844}, expected=GONE)
        page.get_by_role("button", name="Fleet").click()
        expect(page.locator("#stat-ready")).to_have_text("1")
        expect(page.locator("#chat")).to_be_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_router_that_is_gone_is_told_of(open_page, expect):
    with running_server(FakeReplica()) as replica:
        with running_router(replica.url) as router:
            page = open_page(router.url, expected=("ERR_",))
            expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#state")).to_have_text("not live")
        expect(page.locator("#fleet-trouble")).to_contain_text("cannot be reached")
