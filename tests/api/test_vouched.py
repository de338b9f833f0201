"""What a router says of who asks: believed of who shows the fleet's token, and dropped from everybody else."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from maitred.api.http.fleet_headers import time_left, time_left_headers, vouching
from maitred.core.request import RequestSpec
from maitred.gate.gate import TimeLimits
from maitred.tenancy.caller import Caller
from maitred.tenancy.quota import TenantQuota
from maitred.tenancy.tenant import Tenant
from tests.api.conftest import MESSAGES
from tests.api.test_tenants import table_of
from tests.fakes_api import FakeTenants, RunningServer, running_server
from tests.waiting import HANGS_S

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


def test_without_the_token_its_headers_say_nothing(replica):
    forged = told("small") | {"x-maitred-fleet-token": "another"}
    assert asked(replica, forged)[0] == 401
    status, spec = asked(replica, forged | {"authorization": "Bearer free", "x-maitred-time-left-ms": "1"})
    assert status == 200
    assert spec is not None
    assert (spec.terms.tenant, spec.terms.weight, spec.terms.priority, spec.terms.finish_by) == ("free", 1.0, 1, None)


def test_a_router_that_asks_for_no_key_vouches_for_nobody(replica):
    assert asked(replica, ROUTER)[0] == 401
    assert asked(replica, ROUTER | {"authorization": "Bearer free"})[0] == 200


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
