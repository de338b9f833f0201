"""Addresses of replicas, as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from maitred.core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._:%-]+")


@dataclass(frozen=True, slots=True)
class Origin:
    """Address at which one replica listens."""

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""  # of every path, without a slash at its end

    @property
    def authority(self) -> str:
        """Host and port as a URL and a Host header have them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.prefix}"


@dataclass(frozen=True, slots=True)
class Target:
    """A `--url` of `maitred route`: one replica, or a name that stands for several."""

    origin: Origin
    follows_name: bool = False  # dns://name:port
    weight: float = 1.0  # speed relative to the others, of one that does not tell its own


def parse_target(text: str) -> Target:
    """`http://host:8000`, `https://host/prefix`, `dns://name:8000`, each with `=WEIGHT` or not. Raises ConfigError."""
    url, equals, weight = text.rpartition("=")
    if not equals:
        return _target(text, text, 1.0)
    try:
        value = float(weight)
    except ValueError:
        raise ConfigError(f"{text!r}: what follows = is a weight, a number such as 2 or 0.5") from None
    if not 0 < value < float("inf"):
        raise ConfigError(f"{text!r}: a weight is above 0")
    return _target(text, url, value)


def _target(text: str, url: str, weight: float) -> Target:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{text!r} is no URL: {error}; {_REMEDY}") from None
    if parts.scheme not in ("http", "https", "dns") or not host or not _NAME.fullmatch(host):
        raise ConfigError(f"{text!r} is no URL of a server; {_REMEDY}")
    if parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{text!r}: a server's URL has no user, query or fragment; {_REMEDY}")
    if parts.scheme == "dns":
        if port is None or parts.path.strip("/"):
            raise ConfigError(f"{text!r}: a name to follow has a port and no path, such as dns://replicas:8000")
        return Target(Origin(host, port), follows_name=True, weight=weight)
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")  # paths bring their own
    return Target(Origin(host, port or (443 if is_tls else 80), is_tls, prefix), weight=weight)


_REMEDY = "write http://HOST:PORT, https://HOST:PORT or dns://NAME:PORT"
