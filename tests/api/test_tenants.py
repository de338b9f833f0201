"""Keys of tenants: what they may ask, what they are refused and told, what administrators see."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import openai
import pytest

from maitred.api.http.fleet_headers import time_left, time_left_headers, vouching
from maitred.core.clock import ManualClock
from maitred.core.request import Charges, FinishReason, RequestSpec
from maitred.core.step import RequestProgress
from maitred.engine.live_requests import LiveRequest
from maitred.gate.gate import TimeLimits
from maitred.storage.key_files import read_tenant_file
from maitred.storage.ledger import Ledger
from maitred.tenancy.caller import ANYBODY, Caller
from maitred.tenancy.quota import TenantQuota
from maitred.tenancy.tenant import Limits, Tenant, TenantTable
from tests import ROOT
from tests.api.conftest import MESSAGES
from tests.fakes_api import FakeReplica, FakeTenants, RunningServer, make_model, running_server, says, table_of
from tests.waiting import HANGS_S, joined, until

TENANTS: dict[str, dict[str, Any]] = {
    "free": {},
    "urgent": {"tier": "priority"},
    "batch": {"tier": "flex", "priorities": [2, 5], "default_priority": 3},
    "rpm": {"requests_per_minute": 3},
    "tpm": {"tokens_per_minute": 400},
    "narrow": {"concurrency": 2, "max_queue": 1},
    "poor": {"token_budget": 60},
    "terms": {"weight": 3, "ttft_slo_s": 0.5, "queue_timeout_s": 5, "timeout_s": 9, "default_max_tokens": 7},
    "one": {"shared_cache_group": "family"},
    "two": {"shared_cache_group": "family"},
    "boss": {},
}


@pytest.fixture
def house() -> Iterator[RunningServer]:
    """No time passes there, so that limits by the minute tell what they should."""
    with running_server(tenants=FakeTenants(table_of(TENANTS)), clock=ManualClock(1000.0)) as server:
        yield server


def post(server: RunningServer, tenant: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, **fields}
    key = {"authorization": f"Bearer {tenant}"}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=key, timeout=HANGS_S)


def ask(server: RunningServer, tenant: str, **fields: Any) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=tenant, max_retries=0)
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **{"max_tokens": 20, **fields})


def get(server: RunningServer, tenant: str, path: str) -> httpx.Response:
    return httpx.get(server.url + path, headers={"authorization": f"Bearer {tenant}"})


def limits_of(response: httpx.Response) -> dict[str, str]:
    return {
        name.removeprefix("x-ratelimit-"): value
        for name, value in response.headers.items()
        if name.startswith("x-ratelimit-")
    }


# ---- who is asking


def test_only_keys_of_the_table_open_and_a_request_carries_its_tenants_terms(house):
    ask(house, "terms", max_tokens=None)
    request = house.replica.submitted[-1]
    assert (request.terms.tenant, request.terms.key_id, request.terms.weight) == ("terms", "key_terms", 3.0)
    assert (request.terms.priority, request.max_tokens, request.terms.ttft_slo_s) == (1, 7, 0.5)
    assert request.terms.start_by == pytest.approx(request.arrived_at + 5)
    assert request.terms.finish_by == pytest.approx(request.arrived_at + 9)
    assert (post(house, "nobody").status_code, httpx.get(f"{house.url}/v1/models").status_code) == (401, 401)


def test_another_table_is_in_force_at_the_next_request():
    source = FakeTenants(table_of({"a": {"requests_per_minute": 9}}))
    with running_server(tenants=source) as server:
        assert limits_of(post(server, "a"))["remaining-requests"] == "8"
        assert post(server, "b").status_code == 401
        source.table = table_of({"a": {"requests_per_minute": 5}, "b": {}})
        assert limits_of(post(server, "a"))["remaining-requests"] == "3", "what was used stays used"
        assert post(server, "b").status_code == 200
        source.table = table_of({"b": {}})
        assert post(server, "a").status_code == 401


# ---- priority and service tier


@pytest.mark.parametrize(("tenant", "fields", "priority", "tier"), [
    ("free", {"service_tier": "auto"}, 1, "default"),
    ("free", {"service_tier": "priority"}, 1, "default"),
    ("free", {"service_tier": "flex"}, 2, "flex"),
    ("free", {"service_tier": "auto", "priority": 700}, 700, "flex"),
    ("urgent", {"service_tier": "auto"}, 0, "priority"),
    ("urgent", {"service_tier": "default"}, 1, "default"),
    ("batch", {"service_tier": "auto"}, 3, "flex"),
    ("batch", {"service_tier": "priority"}, 2, "flex"),
])  # fmt: skip
def test_a_service_tier_is_a_priority_within_bounds_and_the_answer_tells_which(house, tenant, fields, priority, tier):
    answer = post(house, tenant, **fields)
    assert (answer.json()["service_tier"], house.replica.submitted[-1].terms.priority) == (tier, priority)
    stream = post(house, tenant, stream=True, **fields)
    assert f'"service_tier":"{tier}"' in stream.text


def test_no_service_tier_is_told_to_those_who_did_not_ask(house):
    assert "service_tier" not in post(house, "free").json()
    assert post(house, "free", service_tier="gold").json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(("tenant", "priority"), [("free", 0), ("batch", 1), ("batch", 6)])
def test_a_priority_the_key_may_not_ask_is_refused_with_the_range(house, tenant, priority):
    with pytest.raises(openai.PermissionDeniedError) as refused:
        ask(house, tenant, extra_body={"priority": priority})
    assert (refused.value.param, refused.value.code) == ("priority", "permission_denied")
    low, high = {"free": (1, 1000), "batch": (2, 5)}[tenant]
    assert f"may ask for {low} (most urgent) to {high}" in refused.value.message


# ---- cache salts


def test_tenants_never_share_blocks_unless_they_are_a_group(house):
    def hashes(tenant: str, **fields: Any) -> tuple[bytes, ...]:
        ask(house, tenant, extra_body=fields)
        request = house.replica.submitted[-1]
        assert request.block_hashes
        assert request.cache_salt
        return tuple(request.block_hashes)

    assert hashes("free") == hashes("free")
    assert hashes("one") == hashes("two")
    assert hashes("one", cache_salt="x") == hashes("two", cache_salt="x")
    apart = [hashes("free"), hashes("urgent"), hashes("one"), hashes("free", cache_salt="x"),
             hashes("urgent", cache_salt="x")]  # fmt: skip
    assert len(set(apart)) == len(apart)
    stolen = house.replica.submitted[0].cache_salt
    assert hashes("urgent", cache_salt=stolen) not in apart, "a known salt opens nobody's cache"


# ---- limits


def test_every_answer_of_a_limited_tenant_tells_what_is_left(house):
    models = get(house, "rpm", "/v1/models")
    assert limits_of(models) == {"limit-requests": "3", "remaining-requests": "3", "reset-requests": "0s"}
    for left in (2, 1, 0):
        answer = post(house, "rpm", stream=left == 1)
        assert answer.status_code == 200
        assert limits_of(answer)["remaining-requests"] == str(left)
        assert limits_of(answer)["reset-requests"] in ("1m0s", "1m1s")
    refused = post(house, "rpm")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert limits_of(refused)["remaining-requests"] == "0"
    assert 55 <= int(refused.headers["retry-after"]) <= 61
    assert float(refused.headers["retry-after-ms"]) <= 1000 * int(refused.headers["retry-after"])
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20}
    theirs = httpx.post(f"{house.url}/v1/messages", json=asked, headers={"x-api-key": "rpm"}, timeout=HANGS_S)
    told = [theirs.headers[f"anthropic-ratelimit-requests-{what}"] for what in ("limit", "remaining", "reset")]
    assert (theirs.status_code, told[:2], limits_of(theirs)) == (429, ["3", "0"], {})
    assert datetime.fromisoformat(told[2]) > datetime.now(UTC)
    assert limits_of(post(house, "free")) == {}
    assert post(house, "rpm", max_tokens=-1).status_code == 400, "a wrong request is told so first"


def test_openais_client_comes_again_when_it_is_told_to():
    """The clock is turned by hand: nearly a minute before the refusal, and what is missing when it was told."""
    clock, statuses = ManualClock(1000.0), []

    def wait_as_told(answer: httpx.Response) -> None:
        statuses.append(answer.status_code)
        clock.advance(float(answer.headers.get("retry-after-ms", 0)) / 1000)

    table = FakeTenants(table_of({"rpm": {"requests_per_minute": 1}}))
    with (
        running_server(tenants=table, clock=clock) as server,
        httpx.Client(event_hooks={"response": [wait_as_told]}, timeout=HANGS_S) as web,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="rpm", max_retries=1, http_client=web) as client,
    ):
        ask(server, "rpm")
        clock.advance(60.0)  # the window slides in parts of a second or so
        assert client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3).choices
    assert statuses == [429, 200]


def test_tokens_are_taken_before_and_given_back_after(house):
    answer = post(house, "tpm", max_tokens=300)
    used = answer.json()["usage"]["total_tokens"]
    assert limits_of(answer)["remaining-tokens"] == str(400 - used)
    too_many = post(house, "tpm", max_tokens=300, n=2)
    assert (too_many.status_code, too_many.headers["x-should-retry"]) == (429, "false")
    later = post(house, "tpm", max_tokens=370)
    assert later.status_code == 429
    assert "retry-after" in later.headers
    assert limits_of(later)["remaining-tokens"] == str(400 - used), "a refusal takes nothing"
    assert post(house, "tpm", max_tokens=None).status_code == 200, "who says nothing gets what there can be"
    assert house.replica.submitted[-1].max_tokens <= 400


def test_concurrency_and_queue_are_the_tenants_own():
    table = FakeTenants(table_of(TENANTS))
    with running_server(FakeReplica(queued=True), tenants=table) as server:
        waiting = threading.Thread(target=post, args=(server, "narrow"), daemon=True)
        waiting.start()
        until(lambda: server.replica.submitted)
        refused = post(server, "narrow")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "its max_queue is 1" in refused.json()["error"]["message"]
        assert post(server, "narrow", n=3).headers["x-should-retry"] == "false"
        page = get(server, "boss", "/metrics").text
        assert 'maitred_tenant_samples_waiting{tenant="narrow"} 1.0' in page
        assert 'maitred_tenant_refusals_total{limit="max_queue",tenant="narrow"} 1.0' in page
        server.replica.abort(server.replica.submitted[0].request_id)
        joined(waiting)
        page = get(server, "boss", "/metrics").text
        assert 'maitred_tenant_samples_in_flight{tenant="narrow"} 0.0' in page


def test_slots_come_back_whatever_happened():
    replica = FakeReplica(says("x" * 100), fail_after=3)
    with running_server(replica, tenants=FakeTenants(table_of(TENANTS))) as server:
        for _ in range(3):
            assert post(server, "narrow", max_tokens=60).status_code == 500
            assert '"code":"generation_failed"' in post(server, "narrow", max_tokens=60, stream=True).text
            assert post(server, "narrow", messages=[{"role": "user", "content": "x" * 600}]).status_code == 400
        replica.dead = "gone"
        assert post(server, "narrow").status_code == 503
        replica.dead, replica.fail_after = None, None
        assert post(server, "narrow").status_code == 200


def test_a_budget_ends_with_openais_own_code(house):
    assert post(house, "poor", max_tokens=30).status_code == 200
    spent = 0
    while True:
        answer = post(house, "poor", max_tokens=None)
        if answer.status_code != 200:
            break
        spent += 1
        assert spent < 20
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")
    assert answer.json()["error"]["type"] == "insufficient_quota"
    assert answer.headers["x-should-retry"] == "false"
    page = get(house, "boss", "/metrics").text
    assert 'maitred_tenant_refusals_total{limit="token_budget",tenant="poor"} 1.0' in page


def test_a_check_costs_microseconds_however_many_keys_there_are():
    table = table_of({f"t{i}": {"requests_per_minute": 10**9, "tokens_per_minute": 10**12} for i in range(200)})
    with running_server(tenants=FakeTenants(table)) as server:
        authenticator = server.server.app.authenticator
        least = math.inf
        for _ in range(20):
            began = time.thread_time()  # what other threads and processes take does not count
            for _ in range(50):
                caller = authenticator.check(b"Bearer t150")
                lease = caller.quota.enter(1, 0.0)
                lease.reserve(100, 0.0)
                dict(caller.quota.headers(0.0))
                lease.end(10)
            least = min(least, (time.thread_time() - began) / 50)
    assert least < 0.001, f"{least * 1e6:.0f} us with 200 keys"


# ---- administrators


@pytest.fixture
def kept(tmp_path) -> Iterator[RunningServer]:
    ledger = Ledger(tmp_path / "ledger.sqlite", model="tiny")
    replica = LedgerReplica(ledger)
    tenants = FakeTenants(table_of(TENANTS))
    with running_server(replica, tenants=tenants, ledger=ledger, price_per_hour=7.2) as server:
        yield server
    ledger.close()


class LedgerReplica(FakeReplica):
    """Tells the ledger what an engine would, at the end of each request."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def submit(self, *samples: RequestSpec) -> list[AsyncIterator[RequestProgress]]:
        streams = super().submit(*samples)
        for request, stream in zip(samples, streams, strict=True):
            charges = Charges(request.num_prompt_tokens, 1, num_generated_tokens=14, compute_us=1_500_000)
            ended = LiveRequest(request, stream, [0] * 14, charges, FinishReason.STOP)  # type: ignore[arg-type]
            self.ledger.opened(ended)
        return streams


def test_usage_is_read_as_from_openai(kept):
    for tenant, count in (("free", 3), ("urgent", 2)):
        for _ in range(count):
            ask(kept, tenant)
    kept.replica.ledger.flush()
    client = openai.OpenAI(base_url=f"{kept.url}/v1", api_key="x", admin_api_key="boss", max_retries=0)
    now = int(time.time())
    page = client.admin.organization.usage.completions(
        start_time=now - 3600, bucket_width="1h", group_by=["project_id", "service_tier"], limit=24
    )
    found = {(r.project_id, r.service_tier): r for bucket in page.data for r in bucket.results}
    assert set(found) == {("free", "default"), ("urgent", "priority")}
    free = found["free", "default"]
    prompt = kept.replica.submitted[0].num_prompt_tokens
    assert (free.num_model_requests, free.input_tokens, free.output_tokens) == (3, 3 * prompt, 42)
    assert (free.input_cached_tokens, free.model, free.api_key_id) == (3, None, None)
    assert not page.has_more


def test_what_was_computed_has_its_price_by_tenant(kept):
    for tenant, count in (("free", 3), ("urgent", 1)):
        for _ in range(count):
            ask(kept, tenant)
    kept.replica.ledger.flush()
    path = f"/v1/organization/usage/completions?start_time={int(time.time()) - 3600}&group_by=project_id"
    results = [r for bucket in get(kept, "boss", path).json()["data"] for r in bucket["results"]]
    told = {r["project_id"]: (r["engine_ms"], r["cost"]) for r in results}
    assert told == {"free": (4500.0, pytest.approx(0.009)), "urgent": (1500.0, pytest.approx(0.003))}


def test_usage_comes_in_pages_and_by_filter(kept):
    ask(kept, "free")
    kept.replica.ledger.flush()
    now = int(time.time())
    path, total, pages, page = "/v1/organization/usage/completions", 0, 0, ""
    while True:
        query = f"?start_time={now - 600}&bucket_width=1m&limit=4&project_ids=free&project_ids[]=poor{page}"
        answer = get(kept, "boss", path + query).json()
        assert len(answer["data"]) <= 4
        total += sum(r["num_model_requests"] for bucket in answer["data"] for r in bucket["results"])
        pages += 1
        if not answer["has_more"]:
            break
        page = f"&page={answer['next_page']}"
    assert (total, pages) == (1, 3)
    none = get(kept, "boss", f"{path}?start_time={now - 600}&models=other").json()
    assert not any(bucket["results"] for bucket in none["data"])


@pytest.mark.parametrize(
    ("query", "param"),
    [("", "start_time"), ("start_time=x", "start_time"), ("start_time=1&limit=99", "limit"),
     ("start_time=1&bucket_width=2d", "bucket_width"), ("start_time=1&bucket_width=", "bucket_width"),
     ("start_time=1&bucket_width=1d&bucket_width=2w", "bucket_width"), ("start_time=1&start_time=2", "start_time"),
     ("start_time=1&group_by=user_id", "group_by"),
     ("start_time=1&user_ids=a", "user_ids"), ("start_time=1&batch=1", "batch"), ("start_time=9&page=page_3", "page"),
     ("start_time=1&start=2", None), ("start_time=" + "9" * 30, "start_time"), ("a=1&" * 1001, None)],
)  # fmt: skip
def test_a_wrong_query_is_told(kept, query, param):
    answer = get(kept, "boss", f"/v1/organization/usage/completions?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_only_administrators_read_usage_and_metrics(kept, http):
    for path in ("/v1/organization/usage/completions?start_time=1", "/metrics"):
        refused = get(kept, "free", path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        assert get(kept, "boss", path).status_code == 200
    without = http.get("/v1/organization/usage/completions?start_time=1")
    assert without.status_code == 404
    assert "--ledger" in without.json()["error"]["message"]


def test_usage_of_a_lost_ledger_is_unavailable_and_comes_back(kept):
    path = kept.replica.ledger.path
    lost = path.with_name("lost")
    path.rename(lost)
    path.mkdir()  # so that no new one can begin
    asked = f"/v1/organization/usage/completions?start_time={int(time.time()) - 600}"
    refused = get(kept, "boss", asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_unavailable")
    assert ask(kept, "free"), "requests are answered all the same"
    path.rmdir()
    kept.replica.ledger.flush()
    assert sum(r["num_model_requests"] for b in get(kept, "boss", asked).json()["data"] for r in b["results"]) == 1


def test_clients_cannot_make_labels(house):
    for name in ("nobody", "free", "x" * 50):
        post(house, name, user=name)
    page = get(house, "boss", "/metrics").text
    assert set(TENANTS) >= {line.split('tenant="')[1].split('"')[0] for line in page.splitlines() if 'tenant="' in line}
    assert 'maitred_tenant_requests_total{tenant="free"} 1.0' in page
    assert 'maitred_tenant_tokens_total{kind="generated",tenant="free"} 14.0' in page


# ---- the example


def test_the_example_is_a_table_that_serves_and_one_that_cannot_be_taken_is_counted():
    table = read_tenant_file(ROOT / "examples" / "tenants.yaml")
    assert set(table.tenants) == {"shop", "team", "nightly", "operations"}
    assert table.tenants["shop"].limits.max_queue == 32
    keys = table_of({name: {} for name in table.tenants}).keys
    whole = FakeTenants(TenantTable(table.tenants, keys))
    with running_server(tenants=whole, model=make_model()) as server:
        for name in table.tenants:
            assert post(server, name).status_code == 200
    with running_server(tenants=FakeTenants(table_of({"boss": {}}), num_failures=2)) as server:
        assert "maitred_tenants_file_failures_total 2.0" in get(server, "boss", "/metrics").text


TOKEN = "0123456789abcdef0123456789abcdef"
ROUTER = {"x-maitred-fleet-token": TOKEN}
CHAT = "/v1/chat/completions"
LIMITED = {"free": {"requests_per_minute": 1}, "boss": {}}


@pytest.fixture
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    token = tmp_path_factory.mktemp("fleet") / "token"
    token.write_text(TOKEN)
    with running_server(tenants=FakeTenants(table_of(LIMITED)), fleet_token_file=str(token)) as running:
        yield running


def told(name: str, *, salt: str = "s", priority: int = 3, **terms: object) -> dict[str, str]:
    """The headers of a router for a tenant of its own."""
    tenant = Tenant(name=name, **terms)  # type: ignore[arg-type]
    caller = Caller(tenant, TenantQuota(name, tenant.limits), "kéy\n1")
    headers = vouching(caller, salt=salt, priority=priority, default_max_tokens=9)
    return {name.decode(): value.decode() for name, value in headers} | ROUTER


def asked(replica: RunningServer, headers: dict[str, str], **fields: object) -> tuple[int, RequestSpec | None]:
    """The status, and what reached the engine."""
    before = len(replica.replica.submitted)
    answer = httpx.post(replica.url + CHAT, json={"messages": MESSAGES, **fields}, headers=headers, timeout=HANGS_S)
    reached = replica.replica.submitted[before:]
    return answer.status_code, reached[0] if reached else None


def test_background_work_is_believed_of_a_router_and_of_nobody_else(replica):
    lines = replace(Caller(ANYBODY, TenantQuota("", Limits())), background=True)
    plain = {name.decode(): value.decode() for name, value in vouching(lines, salt="", priority=0)}
    assert plain["x-maitred-class"] == "background"
    status, spec = asked(replica, plain | ROUTER)
    assert spec is not None
    assert (status, spec.terms.background) == (200, True)
    status, spec = asked(replica, plain | told("small"))
    assert spec is not None
    assert (status, spec.terms.background, spec.terms.tenant) == (200, True, "small")
    status, spec = asked(replica, told("small"))
    assert (status, spec.terms.background) == (200, False)
    status, spec = asked(replica, {"authorization": "Bearer boss", "x-maitred-class": "background"})
    assert (status, spec.terms.background) == (200, False)


def test_a_routers_tenant_reaches_policy_and_metrics_and_is_asked_for_no_key(replica):
    status, spec = asked(replica, told("small", weight=2.5), service_tier="priority")
    assert status == 200
    assert spec is not None
    assert (spec.terms.tenant, spec.terms.weight, spec.terms.priority, spec.terms.key_id) == ("small", 2.5, 3, "kéy\n1")
    assert spec.max_tokens == 9
    page = httpx.get(replica.url + "/metrics", headers={"authorization": "Bearer boss"}).text
    assert "maitred_tenant_requests_total{" in page
    assert 'tenant="small"' in page


def test_a_routers_tenant_has_no_second_quota_and_no_administrators_rights(replica):
    assert [asked(replica, told("free"))[0] for _ in range(3)] == [200, 200, 200]
    assert httpx.get(replica.url + "/metrics", headers=told("free")).status_code == 403
    assert httpx.get(replica.url + "/metrics", headers=told("free") | {"x-maitred-admin": "1"}).status_code == 200


def test_without_the_token_or_a_key_a_routers_headers_say_nothing(replica):
    forged = told("small") | {"x-maitred-fleet-token": "another"}
    assert asked(replica, forged)[0] == 401
    status, spec = asked(replica, forged | {"authorization": "Bearer free", "x-maitred-time-left-ms": "1"})
    assert status == 200
    assert spec is not None
    assert (spec.terms.tenant, spec.terms.weight, spec.terms.priority, spec.terms.finish_by) == ("free", 1.0, 1, None)
    assert asked(replica, ROUTER)[0] == 401
    assert asked(replica, ROUTER | {"authorization": "Bearer boss"})[0] == 200


def test_tenants_share_a_cache_by_the_routers_salt_alone(replica):
    def salt(name: str, salt: str, **fields: object) -> str:
        spec = asked(replica, told(name, salt=salt), **fields)[1]
        assert spec is not None
        return spec.cache_salt

    assert salt("one", "family") == salt("two", "family")
    apart = {salt("one", "family"), salt("one", "own"), salt("one", "own", cache_salt="x"), "family", ""}
    assert len(apart) == 5


def test_a_replica_waits_no_longer_than_what_is_left_whatever_the_body_says(replica):
    limits = TimeLimits(2.0, None, 60.0)
    left = {name.decode(): value.decode() for name, value in time_left_headers(limits, 1.5)}
    spec = asked(replica, told("small") | left, timeout_ms=90_000, queue_timeout_ms=90_000)[1]
    assert spec is not None
    assert spec.terms.ttft_slo_s == 0.5
    assert spec.terms.finish_by == pytest.approx(spec.arrived_at + 58.5)
    assert spec.terms.start_by == pytest.approx(spec.arrived_at + 90.0)
    assert time_left(dict(time_left_headers(limits, 1.0))) == TimeLimits(1.0, None, 59.0)
    assert min(time_left(dict(time_left_headers(limits, 3.0)))[::2]) > 0  # type: ignore[type-var]


@pytest.mark.parametrize("header", ["x-maitred-weight", "x-maitred-priority", "x-maitred-time-left-ms"])
@pytest.mark.parametrize("value", ["nan", "-1", "much"])
def test_nonsense_of_a_router_is_told(replica, header, value):
    assert asked(replica, told("small") | {header: value})[0] == 400
