"""haproxy.cfg: bounded consistent hashing over servers, streams, and another server when one is gone.

Source: HAProxy 2.6 configuration manual, sections 4.2 (balance hash, hash-balance-factor, option redispatch, retry-on)
and 7.3 (json_query).
"""

from __future__ import annotations

from urllib.parse import urlsplit

from maitred.cli.manifests.options import HaproxyOptions
from maitred.errors import ConfigError

MOST_ADDRESSES = 32  # of one name

_PAGE = """\
# Made by `maitred manifests haproxy`. Check it with: haproxy -c -f haproxy.cfg
global
    log stdout format raw local0
    tune.bufsize 65536 # of the body, the key is read as far as it fits; only who fits whole can be sent again
    hard-stop-after {stop_s}s # at a reload, answers under way are finished by the old process

defaults
    mode http
    log global
    option httplog
    option http-no-delay # a token is not held back for the next one
    timeout connect 3s
    timeout http-request 10s
    timeout http-keep-alive 75s
    timeout client 75s
    timeout queue 60s
    timeout server {answer_s}s # a stream is never silent for longer than --sse-keep-alive-s
{resolvers}
frontend maitred
    bind {listen}
    default_backend replicas

backend replicas
    # The same conversation goes where its prefix is: by session, cache key or user, else by how the prompt begins.
    http-request wait-for-body time 10s if METH_POST
    http-request set-var(txn.key) req.hdr(x-session-id) if {{ req.hdr(x-session-id) -m found }}
    http-request set-var(txn.key) req.body,json_query('$.prompt_cache_key') unless {{ var(txn.key) -m found }}
    http-request set-var(txn.key) req.body,json_query('$.user') unless {{ var(txn.key) -m found }}
    http-request set-var(txn.key) req.body,bytes(0,1024) unless {{ var(txn.key) -m found }}
    balance hash var(txn.key)
    hash-type consistent djb2 avalanche
    hash-balance-factor {factor} # nobody above so many percent of the mean
    # Another server before the first byte: when one does not answer, or says that it is full. Never after it.
    option redispatch 1
    retries 3
    retry-on conn-failure empty-response 503
    # /ready is 503 while a server loads or drains: it gets nothing new, and finishes what it has.
    option httpchk GET /ready
    http-check expect status 200
    default-server check inter 1s fastinter 250ms fall 2 rise 1 init-addr last,libc,none
{servers}
"""

_RESOLVERS = """
resolvers cluster
    parse-resolv-conf
    hold valid 5s
    hold obsolete 30s
"""


def files(options: HaproxyOptions) -> dict[str, str]:
    """By file name. Raises ConfigError for a backend that is no address."""
    servers = [_server(number, url) for number, url in enumerate(options.backends, start=1)]
    page = _PAGE.format(
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
