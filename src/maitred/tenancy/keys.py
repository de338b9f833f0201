"""API keys: only their sha256 is kept, and finding one takes as long whatever was sent.

A plain hash suffices, because a key is 256 random bits, beyond guessing; slow hashes are for passwords.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

PREFIX_CHARS = 8  # of the secret; shown so that people can tell keys apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of one tenant. The secret itself is not here."""

    id: str
    tenant: str
    digest: bytes  # sha256 of the secret
    prefix: str = ""  # how the secret begins
    name: str = ""  # what the key is for, in its owner's words
    admin: bool = False  # may read usage and change what all tenants share


def digest_of(secret: bytes) -> bytes:
    return sha256(secret).digest()


class KeyRing:
    """All keys. Each look-up compares every one of them, each in constant time, and never leaves early.

    So neither the length nor the position of the first wrong byte shows in the time (CVE-2025-59425 was a plain
    comparison); only the number of keys shows.
    """

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = tuple(keys)
        self._digests = tuple(key.digest for key in keys)

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, secret: bytes) -> Key | None:
        """The key of `secret`, or None. About 0.1 us for each key on the ring."""
        digest = digest_of(secret)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return self.keys[matches.index(True)] if any(matches) else None
