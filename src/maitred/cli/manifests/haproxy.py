"""haproxy.cfg: bounded consistent hashing over servers, streams, and another server when one is gone.

Source: HAProxy 2.6 configuration manual, sections 4.2 (balance hash, hash-balance-factor, option redispatch, retry-on)
and 7.3 (json_query).
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from maitred.cli.manifests.options import HaproxyOptions
from maitred.errors import ConfigError

MOST_ADDRESSES = 32  # of one name
PAGE = Path(__file__).parent / "templates/haproxy/haproxy.cfg"

_RESOLVERS = """
resolvers cluster
    parse-resolv-conf
    hold valid 5s
    hold obsolete 30s
"""


def files(options: HaproxyOptions) -> dict[str, str]:
    """By file name. Raises ConfigError for a backend that is no address."""
    servers = [_server(number, url) for number, url in enumerate(options.backends, start=1)]
    page = PAGE.read_text(encoding="utf-8").format(
        listen=options.listen,
        answer_s=options.answer_timeout_s,
        stop_s=options.answer_timeout_s + 30,
        factor=round(100 * options.max_load_ratio),
        resolvers=_RESOLVERS if any(url.startswith("dns:") for url in options.backends) else "",
        servers="\n".join(f"    {server}" for server in servers),
    )
    return {"haproxy.cfg": page}


def _server(number: int, url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if (
        parts.scheme not in ("http", "https", "dns")
        or not parts.hostname
        or port is None
        or parts.path not in ("", "/")
    ):
        raise ConfigError(
            f"backend {url!r} is no address; it must look like http://10.0.0.1:8000 or dns://replicas:8000"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if parts.scheme == "dns":
        return f"server-template replica{number}- {MOST_ADDRESSES} {host}:{port} resolvers cluster"
    tls = " ssl verify required ca-file @system-ca sni str(" + parts.hostname + ")" if parts.scheme == "https" else ""
    return f"server replica{number} {host}:{port}{tls}"
