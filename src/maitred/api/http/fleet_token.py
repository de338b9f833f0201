"""The secret that a router and its replicas share; requests that show it are believed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hmac import compare_digest
from pathlib import Path

from maitred.core.errors import ConfigError
from maitred.fleet.launch import TOKEN_VARIABLE

HEADER = b"x-maitred-fleet-token"
MIN_CHARS = 16


class FleetToken:
    """The secret, checked in headers; if it is None, no request can show it."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret

    @property
    def is_set(self) -> bool:
        return self._secret is not None

    def shown(self) -> list[tuple[bytes, bytes]]:
        """The header that shows the secret, for servers that may hear it."""
        return [(HEADER, self._secret)] if self._secret is not None else []

    def is_shown_by(self, headers: Mapping[bytes, bytes]) -> bool:
        """Takes as long for a wrong one as for the right one."""
        return self._secret is not None and compare_digest(headers.get(HEADER, b""), self._secret)


def read_fleet_token(path: str | None) -> FleetToken:
    """The file's first line, else the environment's. Raises ConfigError for a file without one."""
    if path is None:
        inherited = os.environ.get(TOKEN_VARIABLE)
        return FleetToken(inherited.encode() if inherited else None)
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the fleet's token from {path}: {error.strerror}") from None
    if len(secret) < MIN_CHARS or any(byte <= 32 or byte >= 127 for byte in secret):
        raise ConfigError(
            f"{path} holds no fleet token: it takes one line of {MIN_CHARS} or more printable characters without "
            "spaces, the same for the router and its replicas; write one with: openssl rand -hex 32"
        )
    return FleetToken(secret)
