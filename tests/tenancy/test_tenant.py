"""tenants.yaml as data: what each field means, and how every slip is told."""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Any

import pytest

from maitred.core.errors import ConfigError
from maitred.tenancy import keys
from maitred.tenancy.keys import Key, KeyRing, digest_of
from maitred.tenancy.tenant import Limits, Tenant, TenantTable, read_tenants, tier_of_priority

DIGEST = sha256(b"secret").hexdigest()


def table(**fields: Any) -> TenantTable:
    return read_tenants({"tenants": {"acme": fields}}, "t.yaml")


def test_a_bare_tenant_has_no_limits_and_the_default_tier():
    tenant = read_tenants({"tenants": {"acme": None}}, "t.yaml").tenants["acme"]
    assert tenant == Tenant(name="acme")
    assert (tenant.priorities, tenant.default_priority, tenant.limits.any) == ((1, 1000), 1, False)


def test_every_field_is_read():
    tenant = table(
        tier="priority", weight=2, priorities=[0, 5], default_priority=3, default_max_tokens=100, ttft_slo_s=0.5,
        queue_timeout_s=10, timeout_s=60, shared_cache_group="family", requests_per_minute=60, tokens_per_minute=1000,
        concurrency=4, max_queue=2, token_budget=0,
    ).tenants["acme"]  # fmt: skip
    assert tenant == Tenant(
        name="acme",
        tier="priority",
        weight=2.0,
        priorities=(0, 5),
        default_priority=3,
        default_max_tokens=100,
        ttft_slo_s=0.5,
        queue_timeout_s=10.0,
        timeout_s=60.0,
        shared_cache_group="family",
        limits=Limits(requests_per_minute=60, tokens_per_minute=1000, concurrency=4, max_queue=2, token_budget=0),
    )


@pytest.mark.parametrize(("fields", "words"), [
    ({"requests_per_minut": 5}, "'requests_per_minut' is no field here; did you mean requests_per_minute?"),
    ({"zzz": 5}, "'zzz' is no field here; choose from"),
    ({"weight": 0}, "weight is 0; it must be a number over 0"),
    ({"weight": True}, "weight is True"),
    ({"weight": float("nan")}, "weight is nan"),
    ({"tier": "gold"}, "tier is 'gold'; choose one of priority, default, flex"),
    ({"tier": []}, "tier is []"),
    ({"concurrency": 0}, "concurrency is 0; it must be an integer of at least 1"),
    ({"concurrency": "4"}, "concurrency is '4'"),
    ({"priorities": [5, 1]}, "the first must not be over the second"),
    ({"priorities": 5}, "write [most urgent, least urgent]"),
    ({"priorities": [0, 1001]}, "priorities[1] is 1001; it must be an integer from 0 to 1000"),
    ({"default_priority": 0}, "default_priority is 0; priorities allows 1 to 1000"),
    ({"shared_cache_group": ""}, "shared_cache_group is ''; it must be a text"),
    ({"keys": {}}, "keys must be a list"),
    ({"keys": [{"id": "k"}]}, "keys[0]: sha256 is missing"),
    ({"keys": [{"sha256": DIGEST}]}, "keys[0]: id is missing"),
    ({"keys": [{"id": "k", "sha256": "abc"}]}, "sha256 must have 64 hexadecimal digits"),
    ({"keys": [{"id": "k", "sha256": DIGEST, "admin": "yes"}]}, "admin is 'yes'; it must be true or false"),
    ({"keys": [{"id": "k", "sha256": DIGEST}, {"id": "k", "sha256": "0" * 64}]}, "the id 'k' stands twice"),
    ({"keys": [{"id": "k", "sha256": DIGEST}, {"id": "l", "sha256": DIGEST}]}, "the key of 'l' stands twice"),
])  # fmt: skip
def test_a_slip_names_file_tenant_and_field_on_one_line(fields, words):
    with pytest.raises(ConfigError) as caught:
        table(**fields)
    message = str(caught.value)
    assert message.startswith("t.yaml: tenant 'acme': ")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "parsed",
    [None, [], "x", {}, {"tenants": None}, {"tenants": []}, {"tenants": {}}, {"tenant": {}}, {"tenants": {"a b": {}}},
     {"tenants": {5: {}}}, {"tenants": {"a": 5}}],
)  # fmt: skip
def test_a_file_of_another_shape_is_refused(parsed):
    with pytest.raises(ConfigError, match=r"^t\.yaml: "):
        read_tenants(parsed, "t.yaml")


@pytest.mark.parametrize(("tier", "asked", "priority", "told"), [
    ("default", None, 1, "default"), ("default", "auto", 1, "default"), ("default", "priority", 1, "default"),
    ("default", "flex", 2, "flex"), ("priority", "priority", 0, "priority"),
    ("priority", "default", 1, "default"), ("flex", "default", 2, "flex"),
])  # fmt: skip
def test_a_service_tier_is_bounded_by_what_the_tenant_may_ask(tier, asked, priority, told):
    tenant = table(tier=tier).tenants["acme"]
    assert (tenant.priority_of_tier(asked), tier_of_priority(priority)) == (priority, told)


def test_salts_part_tenants_unless_they_share_a_group():
    def salt(name: str, secret: bytes = b"s", sent: str = "", group: str | None = None) -> str:
        return Tenant(name=name, shared_cache_group=group).cache_salt(secret, sent)

    assert salt("a") == salt("a")
    assert salt("a", group="g") == salt("b", group="g")
    different = [salt("a"), salt("b"), salt("a", b"t"), salt("a", sent="x"), salt("a", group="a"), salt("b", group="g")]
    assert len(set(different)) == len(different)


SECRETS = (b"first", b"second", b"third")
RING = KeyRing([Key(id=f"k{i}", tenant="t", digest=digest_of(secret)) for i, secret in enumerate(SECRETS)])


def test_each_secret_finds_its_key():
    assert [RING.find(secret).id for secret in SECRETS] == ["k0", "k1", "k2"]


@pytest.mark.parametrize("wrong", [b"", b"firs", b"firstt", b"\xff", b"x" * 10_000])
def test_anything_else_finds_none(wrong):
    assert RING.find(wrong) is None
    assert KeyRing(()).find(wrong) is None


LONG = KeyRing([Key(id=f"long{i}", tenant="t", digest=digest_of(letter * 32)) for i, letter in enumerate((b"k", b"m"))])
ALMOST = [b"k" * shared + b"!" * (32 - shared) for shared in range(32)]


@pytest.mark.parametrize("sent", [*SECRETS, b"wrong", digest_of(b"first"), b"k" * 32, b"m" * 32, *ALMOST])
@pytest.mark.parametrize("ring", [RING, LONG])
def test_every_key_is_compared_in_constant_time_wherever_the_match_is(monkeypatch, ring, sent):
    """S3: both sides are whole digests, so that what is compared tells nothing of how much of a key was right."""
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(keys, "hmac", type("Counting", (), {"compare_digest": staticmethod(compare)}))
    found = ring.find(sent)
    assert compared == [(digest_of(sent), key.digest) for key in ring.keys]
    assert {len(side) for pair in compared for side in pair} == {32}
    assert found in ring.keys if digest_of(sent) in {key.digest for key in ring.keys} else found is None
