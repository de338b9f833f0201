"""`maitred keys`: makes, lists, hashes and revokes the API keys in a tenants file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from maitred.cli.command import Command, Options
from maitred.cli.console import columns, note
from maitred.cli.flags import UsageError, option
from maitred.core.errors import ConfigError, did_you_mean

ACTIONS = ("create", "list", "hash", "revoke")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptions:
    """Keys of tenants."""

    action: str = option(choices=ACTIONS)
    """create makes a key and shows its secret once, list shows what is known of each, hash takes a secret of your own
    from standard input, revoke takes a key out."""
    tenants: str = option("tenants.yaml", metavar="FILE")
    """The file with tenants and hashed keys; create makes it if it is not there."""
    tenant: str | None = option(None, metavar="NAME")
    """create, hash: whose key it is; list: only those of this tenant."""
    name: str | None = option(None, metavar="TEXT")
    """create, hash: what the key is for, in your words."""
    admin: bool = False
    """create, hash: the key may read usage and metrics, and change what all tenants share."""
    key: str | None = option(None, metavar="ID")
    """revoke: the key's id, as list shows it."""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(f"no action {self.action!r}{did_you_mean(self.action, ACTIONS)}; choose create, "
                              "list, hash or revoke")  # fmt: skip
        if self.action in ("create", "hash") and self.tenant is None:
            raise ConfigError(f"keys {self.action} needs --tenant NAME")
        if self.action == "revoke" and self.key is None:
            raise ConfigError("keys revoke needs --key ID; maitred keys list shows the ids")


def _run(options: Options) -> int:
    asked = options[KeyOptions]
    {"create": _create, "hash": _hash, "list": _list, "revoke": _revoke}[asked.action](asked)
    return 0


def _create(asked: KeyOptions) -> None:
    """The secret alone goes to standard output, so that it can be piped to where it is needed."""
    note(f"key {_add(asked, None)}; its secret is shown this once")


def _hash(asked: KeyOptions) -> None:
    secret = sys.stdin.readline().strip()
    if not secret:
        raise UsageError("keys hash reads the secret from standard input: maitred keys hash --tenant NAME < FILE")
    note(f"key {_add(asked, secret)}")


def _add(asked: KeyOptions, secret: str | None) -> str:
    from maitred.storage.key_files import add_key, make_key

    made = make_key(asked.tenant or "", secret=secret, name=asked.name or "", admin=asked.admin)
    add_key(Path(asked.tenants), made.key)
    if secret is None:
        print(made.secret)
    return f"{made.key.id} of tenant {made.key.tenant} is in {asked.tenants}"


def _list(asked: KeyOptions) -> None:
    from maitred.storage.key_files import read_tenant_file

    table = read_tenant_file(Path(asked.tenants))
    if asked.tenant is not None and asked.tenant not in table.tenants:
        hint = did_you_mean(asked.tenant, list(table.tenants))
        raise ConfigError(f"{asked.tenants} has no tenant {asked.tenant!r}{hint}")
    rows = [
        (key.id, key.tenant, f"{key.prefix}..." if key.prefix else "", "admin" if key.admin else "", key.name)
        for key in table.keys.keys
        if asked.tenant in (None, key.tenant)
    ]
    print("\n".join(columns([("ID", "TENANT", "SECRET", "ROLE", "NAME"), *rows], gap="  ")))


def _revoke(asked: KeyOptions) -> None:
    from maitred.storage.key_files import remove_key

    key = remove_key(Path(asked.tenants), asked.key or "")
    note(f"key {key.id} of tenant {key.tenant} opens nothing any more, once running servers have read the file")


COMMAND = Command(
    path="keys",
    summary="Make, list, hash and revoke the API keys of tenants; only hashes are kept.",
    run=_run,
    parts=(KeyOptions,),
    positional="action",
    examples=(
        "maitred keys create --tenant acme --name laptop",
        "maitred keys list --tenants tenants.yaml",
        "maitred keys revoke --key key_0123456789ab",
    ),
)
