"""Opens the files that `serve --tenants` and `--ledger` name, and hears SIGHUP."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maitred.config import ServerConfig
from maitred.core.errors import ConfigError

if TYPE_CHECKING:
    from maitred.storage.key_files import TenantFile
    from maitred.storage.ledger import Ledger
    from maitred.tenancy.tenant import TenantTable


@dataclass(frozen=True, slots=True, kw_only=True)
class TenancyConfig:
    """Tenants: who may ask, and what is recorded of it."""

    tenants: str | None = None
    """YAML file with tenants, their limits and hashed keys, in force as soon as it changes; None knows no tenants."""
    ledger: str | None = None
    """SQLite file with a row for each request: tenant, key, tokens, how it ended; None keeps none."""


@contextmanager
def open_tenancy(config: TenancyConfig, server: ServerConfig) -> Iterator[tuple[TenantFile | None, Ledger | None]]:
    """Both files, watched and written until the block ends. Raises ConfigError."""
    if config.tenants is not None and server.api_keys:
        raise ConfigError(
            "--tenants and --api-key (or MAITRED_API_KEY) exclude each other: such a key would pass all limits; "
            "make one for a tenant with: maitred keys create"
        )
    with ExitStack() as stack:
        ledger, tenants = None, None
        if config.ledger is not None:
            from maitred.storage.ledger import Ledger

            ledger = Ledger(Path(config.ledger))
            stack.callback(ledger.close)
        if config.tenants is not None:
            from maitred.storage.key_files import TenantFile

            accept = _refuse_budgets if ledger is None else lambda table: None
            tenants = TenantFile(Path(config.tenants), accept=accept)
            stack.callback(tenants.close)
            _reload_at_hangup(tenants, stack)
        yield tenants, ledger


def _refuse_budgets(table: TenantTable) -> None:
    for tenant in table.tenants.values():
        if tenant.limits.token_budget is not None:
            raise ConfigError(
                f"tenant {tenant.name!r} has a token_budget, and only a ledger remembers what was used; "
                "add --ledger FILE"
            )


def _reload_at_hangup(tenants: TenantFile, stack: ExitStack) -> None:
    before = signal.signal(signal.SIGHUP, lambda number, frame: tenants.reload())
    stack.callback(signal.signal, signal.SIGHUP, before)
