"""The caller of a request: its tenant, that tenant's quota, and the key it came with."""

from __future__ import annotations

from dataclasses import dataclass, field

from maitred.core.errors import PermissionDenied
from maitred.tenancy.quota import TenantQuota
from maitred.tenancy.tenant import LEAST_URGENT, Limits, Tenant

ANYBODY = Tenant(name="", tier="priority", priorities=(0, LEAST_URGENT), default_priority=0, adapters=("*",))
"""The one tenant of a server that knows none; without limits, and with all rights."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of one request."""

    tenant: Tenant
    quota: TenantQuota
    key_id: str = ""
    is_admin: bool = False
    background: bool = False  # its requests are lines of batches, served with what nobody else uses
    is_anybody: bool = field(init=False)  # of a server that knows no tenants

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_anybody", self.tenant is ANYBODY)

    def require_admin(self, what: str) -> None:
        """Raises PermissionDenied for a key that is not an administrator's."""
        if not self.is_admin:
            raise PermissionDenied(f"this key may not {what}; it takes one with `admin: true`")


def anybody() -> Caller:
    """Return the caller of a server without tenants, or the server itself."""
    return Caller(ANYBODY, TenantQuota(ANYBODY.name, Limits()), is_admin=True)
