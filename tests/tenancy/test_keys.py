"""Finding a key compares all of them, whatever was sent."""

from __future__ import annotations

import hmac

import pytest

from maitred.tenancy import keys
from maitred.tenancy.keys import Key, KeyRing, digest_of

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
