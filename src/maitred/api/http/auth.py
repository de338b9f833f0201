"""Authentication: an API key leads to a tenant, in a time that tells nothing about the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from maitred.api.http.fleet_headers import vouched_caller
from maitred.core.errors import InvalidApiKey
from maitred.tenancy.caller import Caller, anybody
from maitred.tenancy.keys import Key, KeyRing, digest_of
from maitred.tenancy.quota import QuotaBook

if TYPE_CHECKING:
    from maitred.storage.key_files import TenantFile


class KeyHolder(NamedTuple):
    """What is kept of a caller, to find it again after a restart."""

    tenant: str
    key_id: str
    is_admin: bool


def authorization(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The header Authorization, or what Anthropic's clients send in its place: the key as `x-api-key`."""
    sent, key = headers.get(b"authorization"), headers.get(b"x-api-key")
    return b"Bearer " + key if sent is None and key is not None else sent


class Authenticator:
    """Finds the caller of a request. Without tenants and keys the server is open: every request may do everything."""

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        tenants: TenantFile | None = None,
        spent_tokens: Mapping[str, int] | None = None,  # by tenant, before this process
    ) -> None:
        self._own = KeyRing([Key(id="", tenant="", digest=digest_of(key.encode()), admin=True) for key in api_keys])
        self._tenants = tenants
        self.quotas = QuotaBook(spent_tokens or {})
        self._anybody = anybody()
        self._vouched = QuotaBook({})  # counted, and without limits
        self._is_open = tenants is None and not api_keys

    @property
    def is_open(self) -> bool:
        """Whether requests need no key."""
        return self._is_open

    def num_file_failures(self) -> int:
        """Times a change of the tenants could not be taken."""
        return self._tenants.num_failures if self._tenants is not None else 0

    def check(self, authorization: bytes | None, *, is_open: bool = False) -> Caller:
        """The caller; raises InvalidApiKey unless the path is open or the header brings a known key.

        `is_open` follows from the decoded path of the request line, never from anything made from the Host header
        (CVE-2026-48746).
        """
        if self._is_open or is_open:
            return self._anybody
        scheme, _, secret = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not secret.strip():
            raise InvalidApiKey("no API key; send the header Authorization: Bearer KEY")
        caller = self._find(secret.strip())
        if caller is None:
            raise InvalidApiKey("the API key is not valid here")
        return caller

    def vouched(self, headers: Mapping[bytes, bytes]) -> Caller:
        """The caller that a router with the fleet's token vouches for; the router has checked key and quota already."""
        return vouched_caller(headers, self._vouched, self._anybody)

    def in_background(self, holder: KeyHolder) -> Caller:
        """The caller of a line of a batch, under its tenant's terms of now. Raises InvalidApiKey if the key is gone."""
        if self._tenants is None and not holder.tenant:
            return replace(self._anybody, background=True)
        table = self._tenants.table if self._tenants is not None else None
        tenant = table.tenants.get(holder.tenant) if table is not None else None
        if table is None or tenant is None or all(key.id != holder.key_id for key in table.keys.keys):
            raise InvalidApiKey("the API key that left this batch here is not valid any more")
        return Caller(tenant, self.quotas.of(tenant), holder.key_id, holder.is_admin, background=True)

    def _find(self, secret: bytes) -> Caller | None:
        if self._tenants is None:
            return self._anybody if self._own.find(secret) is not None else None
        table = self._tenants.table
        key = table.keys.find(secret)
        if key is None:
            return None
        tenant = table.tenants[key.tenant]
        return Caller(tenant, self.quotas.of(tenant), key.id, key.admin)
