"""Settings of a fleet: where requests go, how long they are held, what counts as a fault; addresses of replicas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from maitred.config import RESUME_RULES
from maitred.config.field_checks import require_between
from maitred.core.errors import ConfigError, did_you_mean

BALANCES = ("round_robin", "least_load", "two_choices", "hash", "session", "prefix")
PLACEMENTS = ("pack", "spread")  # of launched replicas on the nodes of a Ray cluster
TIER_KEYS = ("replicas", "max_prompt_tokens", "spill_after_s", "escalate_below", "model")


class Tier(NamedTuple):
    """Replicas that are asked before those of the next tier."""

    name: str
    replicas: tuple[str, ...] = ()  # their URLs, as given on the command line; none is all that no other tier names
    max_prompt_tokens: int | None = None  # longer ones go to the next
    spill_after_s: float | None = None  # a request held so long (s) may go to the next; None waits on
    escalate_below: float | None = None  # where its answer has a token of less probability, the next is asked
    model: str | None = None  # asked of it in place of models of tiers before it


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Which replica a request goes to, and what becomes of it when that fails."""

    balance: str = field(default="prefix", metadata={"choices": BALANCES})
    """How a replica is chosen of those with room: round_robin, least_load, two_choices, hash, session or prefix."""
    max_load_ratio: float = 1.25
    """Nobody is sent to a replica with more than this times the mean in flight, plus one, while another has room."""
    slots: int = 64
    """Requests that a server which does not tell its slots works on at once; any but maitred's."""
    reserve: float = 0.125
    """Requests sent to a replica beyond its slots, as a share of them and rounded up, so that it need not wait for the
    router when one ends."""
    hold_timeout_s: float = 120.0
    """A request that no replica there is may take is answered 503 after this long (s)."""
    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Groups of replicas in the order in which they are asked: `replicas` lists URLs, `max_prompt_tokens` the longest
    prompt, `spill_after_s` how long a request waits before it may go to the next, `escalate_below` the probability of
    an answer's least likely token below which the next is asked instead, `model` what is asked of this tier in place of
    a model of those before it."""
    max_retries: int = 2
    """Further attempts of one request when a replica fails before the first byte of its answer."""
    retry_ratio: float = 0.1
    """Retries in all, as a share of requests, beyond as many as one replica can have in flight."""
    max_deaths: int = 2
    """A request during which so many replicas died is given to no other: it might be the cause."""
    silence_s: float = 2.25
    """A replica of which nothing was heard for this long (s) is taken out; replicas tell of themselves four times a
    second."""
    max_failures: int = 3
    """Failures in a row after which a replica is taken out."""
    swap_wait_s: float = 10.0
    """Of several models (--models): requests of loaded ones pass one that waits for another for so long (s) at most, as
    long as each load too; then the policy's order is kept until that model is there. 0 never lets one pass."""
    replica_drain_s: float = 30.0
    """A drained replica may finish what it has for this long (s); then the rest goes on elsewhere."""
    warm: int = 0
    """Replicas kept loaded and out of rotation, beyond those that there is need for: each takes over at once."""
    asleep: int = 0
    """Replicas kept asleep beyond those: their memory is given back, and they are there sooner than new ones."""
    resume: str = field(default="exact", metadata={"choices": RESUME_RULES})
    """What a request that has tokens does when its replica is gone: exact goes on where the same numbers are computed,
    and else ends with an error; always goes on; never ends with an error."""

    def __post_init__(self) -> None:
        for name, choices in (("balance", BALANCES), ("resume", RESUME_RULES)):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(
                    f"{name} is {value!r}{did_you_mean(value, choices)}; choose one of {', '.join(choices)}"
                )
        for name, low, high in _RANGES:
            require_between(name, getattr(self, name), low, high)
        tiers_of(self)

    def limit_of(self, slots: int) -> int:
        """Most requests in flight to a replica with so many slots."""
        return slots + ceil(slots * self.reserve)


_RANGES = (
    ("max_load_ratio", 1.0, 1e6),
    ("slots", 1, 1e6),
    ("reserve", 0.0, 10.0),
    ("hold_timeout_s", 0.0, 1e9),
    ("max_retries", 0, 100),
    ("retry_ratio", 0.0, 1.0),
    ("max_deaths", 1, 100),
    ("silence_s", 0.1, 1e6),
    ("max_failures", 1, 1000),
    ("swap_wait_s", 0.0, 1e6),
    ("replica_drain_s", 0.0, 1e6),
    ("warm", 0, 1000),
    ("asleep", 0, 1000),
)


def tiers_of(config: FleetConfig) -> tuple[Tier, ...]:
    """Tiers in the order in which they are asked; one for all where none is given. Raises ConfigError."""
    if not config.tiers:
        return (Tier(""),)
    tiers = tuple(_tier(name, given) for name, given in config.tiers.items())
    if tiers[-1].escalate_below is not None:
        raise ConfigError(f"tiers: {tiers[-1].name}: escalate_below is of a tier that has a next; this is the last")
    return tiers


def _tier(name: str, given: Mapping[str, Any]) -> Tier:
    if not isinstance(given, Mapping):
        raise ConfigError(f"tiers: {name} is {given!r}; give it {', '.join(TIER_KEYS)}")
    for key in given:
        if key not in TIER_KEYS:
            raise ConfigError(
                f"tiers: {name} has {key!r}{did_you_mean(key, TIER_KEYS)}; it takes {', '.join(TIER_KEYS)}"
            )
    for key in ("max_prompt_tokens", "spill_after_s", "escalate_below"):
        value = given.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise ConfigError(f"tiers: {name}: {key} is {value!r}; it must be a number of at least 0")
    if (given.get("escalate_below") or 0) > 1:
        raise ConfigError(f"tiers: {name}: escalate_below is {given['escalate_below']}; it is a probability, at most 1")
    if not isinstance(given.get("model"), str | None):
        raise ConfigError(f"tiers: {name}: model is {given['model']!r}; it must be a name")
    replicas = given.get("replicas", ())
    if not isinstance(replicas, list | tuple) or not all(isinstance(url, str) for url in replicas):
        raise ConfigError(f"tiers: {name}: replicas is {replicas!r}; it must be a list of URLs")
    return Tier(name, tuple(replicas), *(given.get(key) for key in TIER_KEYS[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedConfig:
    """What several routers share."""

    redis: str | None = None
    """Redis that routers share for quotas and the result cache, redis://[[user]:password@]host[:port][/db],
    rediss:// for TLS, redis+cluster:// for a cluster; needs the extra `redis`. While it is gone each goes on alone."""

    def __post_init__(self) -> None:
        if self.redis is not None and not re.match(r"(rediss?|rediss?\+cluster)://[^/]|unix://", self.redis):
            raise ConfigError("redis must look like redis://127.0.0.1:6379, rediss:// or redis+cluster://")


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
class RouteTarget:
    """A `--url` of `maitred route`: one replica, or a name that stands for several."""

    origin: Origin
    follows_name: bool = False  # dns://name:port
    weight: float = 1.0  # speed relative to the others, of one that does not tell its own


def parse_target(text: str) -> RouteTarget:
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


def _target(text: str, url: str, weight: float) -> RouteTarget:
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
        return RouteTarget(Origin(host, port), follows_name=True, weight=weight)
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")  # paths bring their own
    return RouteTarget(Origin(host, port or (443 if is_tls else 80), is_tls, prefix), weight=weight)


_REMEDY = "write http://HOST:PORT, https://HOST:PORT or dns://NAME:PORT"
