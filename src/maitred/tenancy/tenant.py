"""Tenants: their keys, limits and urgency; read from the parsed `tenants.yaml`."""

from __future__ import annotations

import difflib
import hmac
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from reprlib import Repr
from typing import Any

from maitred.core.errors import ConfigError
from maitred.tenancy.keys import Key, KeyRing

LEAST_URGENT = 1000
# OpenAI's service tiers, each with the priority it means; 0 is most urgent
TIERS: dict[str, int] = {"priority": 0, "default": 1, "flex": 2}
CAPTURES = ("never", "asked", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a tenant; None is without limit. A sample is one of the `n` answers to one prompt."""

    requests_per_minute: int | None = None
    """HTTP requests let in within any 60 seconds."""
    tokens_per_minute: int | None = None
    """Tokens, prompt and output, of the requests let in within any 60 seconds."""
    compute_ms_per_minute: int | None = None
    """Measured computing (ms) of the requests that ended within the last 60 s; over it new requests are refused."""
    concurrency: int | None = None
    """Samples in flight at once, waiting or running."""
    max_queue: int | None = None
    """Samples in flight that still wait for their first token."""
    token_budget: int | None = None
    """Tokens, prompt and output, in all; kept in the ledger. Raise it to grant more."""

    @property
    def any(self) -> bool:
        return self != Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One customer, team or application."""

    name: str
    tier: str = "default"
    """priority, default or flex: how urgent its requests are when they do not say."""
    weight: float = 1.0
    """Share where a policy is fair by tenant: twice the weight, twice the service."""
    priorities: tuple[int, int] = (TIERS["default"], LEAST_URGENT)
    """Most and least urgent priority that its requests may ask for."""
    default_priority: int = TIERS["default"]
    """Priority of a request that asks for none."""
    default_max_tokens: int | None = None
    """Most output tokens of a request that says nothing; None is the model's own default."""
    ttft_slo_s: float | None = None
    """Objective (s) from arrival to the first token."""
    queue_timeout_s: float | None = None
    """A request that is in no step after this long (s) is given up."""
    timeout_s: float | None = None
    """A request that is not done after this long (s) is given up."""
    shared_cache_group: str | None = None
    """Tenants of one group share cached prompts, and can measure whether another asked the same; None shares none."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that it may ask for, or *, which is all; none unless named."""
    capture: str = CAPTURES[0]
    """Whether a server with --capture keeps its answers' tokens: never, asked (store: true) or always."""
    semantic_cache: bool = False
    """Whether a server or router with --result-cache-semantic answers its similar prompts with one answer."""
    limits: Limits = Limits()

    def lets_capture(self, store: bool | None) -> bool:
        """Return whether the answer to a request with this `store` may be captured; false always wins."""
        return store is not False and (self.capture == "always" or (self.capture == "asked" and store is True))

    def may_use(self, adapter: str) -> bool:
        """Return whether it may ask for this adapter, and see that it is there."""
        return adapter in self.adapters or "*" in self.adapters

    def priority_of_tier(self, service_tier: str | None) -> int:
        """The priority that OpenAI's `service_tier` comes to here: what it stands for, within the allowed range."""
        if service_tier in (None, "auto"):
            return self.default_priority
        low, high = self.priorities
        return max(low, min(high, TIERS[service_tier]))

    def cache_salt(self, secret: bytes, sent: str = "") -> str:
        """Return the salt that keeps its cached prompts apart from those of others; `sent` (the client's own) parts
        them further.

        Only `secret` makes a tenant's salt, so no other tenant can ask whether its prompt is cached.
        """
        group = f"group:{self.shared_cache_group}" if self.shared_cache_group is not None else f"tenant:{self.name}"
        return hmac.new(secret, f"{len(group)}:{group}:{sent}".encode("utf-8", "surrogatepass"), sha256).hexdigest()


def tier_of_priority(priority: int) -> str:
    """The service tier to name in an answer: the best one that is not more urgent than `priority`."""
    return max((tier for tier in TIERS if TIERS[tier] <= priority), key=TIERS.__getitem__)


@dataclass(frozen=True, slots=True)
class TenantTable:
    """All tenants, and the keys that lead to them."""

    tenants: Mapping[str, Tenant]
    keys: KeyRing


def read_tenants(parsed: object, file: str) -> TenantTable:
    """The table in a parsed YAML document. Raises ConfigError on one line: file, tenant, field and what to write."""
    root = _mapping(parsed, f"{file}: the file", {"tenants"})
    listed = root.get("tenants")
    if not isinstance(listed, dict) or not listed:
        raise ConfigError(f"{file}: tenants is missing or empty; write `tenants:` and below it a name for each")
    tenants: dict[str, Tenant] = {}
    keys: list[Key] = []
    for name, fields in listed.items():
        if not isinstance(name, str) or not 1 <= len(name) <= 64 or not _is_plain(name):
            raise ConfigError(f"{file}: tenant {_shown(name)}: a name has 1 to 64 characters of A-Z a-z 0-9 . _ -")
        tenants[name] = _tenant(name, {} if fields is None else fields, f"{file}: tenant {name!r}")
        keys += _keys(name, fields, f"{file}: tenant {name!r}")
    _refuse_twins(keys, file)
    return TenantTable(tenants, KeyRing(keys))


def _is_plain(text: str) -> bool:
    return all(c.isascii() and (c.isalnum() or c in "._-") for c in text)


# ---- one tenant

Reader = Callable[[Any, str], Any]
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def _shown(value: Any) -> str:
    """Return the value for messages; short, whatever is nested in it and however often."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # a number of over 4300 digits
        return f"a huge {type(value).__name__}"


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or not _is_unicode(value):
        raise ConfigError(f"{where} is {_shown(value)}; it must be a text")
    return value


def _is_unicode(text: str) -> bool:
    """YAML's escapes can write half of a surrogate pair, which no file or database takes later."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _switch(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} is {_shown(value)}; it must be true or false")
    return value


def _integer(low: int, high: int = 2**63 - 1) -> Reader:
    def read(value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            bounds = f"from {low} to {high}" if high <= LEAST_URGENT else f"of at least {low}"
            raise ConfigError(f"{where} is {_shown(value)}; it must be an integer {bounds}")
        return value

    return read


def _positive(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ConfigError(
            f"{where} is {_shown(value)}; it must be a number over 0, and at most {sys.float_info.max:.1e}"
        )
    return float(value)


def _one_of(*choices: str) -> Reader:
    def read(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(f"{where} is {_shown(value)}; choose one of {', '.join(choices)}")
        return value

    return read


def _range(value: Any, where: str) -> tuple[int, int]:
    read = _integer(0, LEAST_URGENT)
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"{where} is {_shown(value)}; write [most urgent, least urgent], such as [1, {LEAST_URGENT}]")
    low, high = read(value[0], f"{where}[0]"), read(value[1], f"{where}[1]")
    if low > high:
        raise ConfigError(f"{where} is {_shown(value)}; the first must not be over the second, 0 is most urgent")
    return low, high


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ConfigError(f'{where} is {_shown(value)}; write a list of names, or ["*"] for all')
    return tuple(_text(name, f"{where}[{index}]") for index, name in enumerate(value))


_LIMITS: dict[str, Reader] = {
    "requests_per_minute": _integer(1),
    "tokens_per_minute": _integer(1),
    "compute_ms_per_minute": _integer(1),
    "concurrency": _integer(1),
    "max_queue": _integer(1),
    "token_budget": _integer(0),
}
_TERMS: dict[str, Reader] = {
    "tier": _one_of(*TIERS),
    "weight": _positive,
    "priorities": _range,
    "default_priority": _integer(0, LEAST_URGENT),
    "default_max_tokens": _integer(1),
    "ttft_slo_s": _positive,
    "queue_timeout_s": _positive,
    "timeout_s": _positive,
    "shared_cache_group": _text,
    "adapters": _names,
    "capture": _one_of(*CAPTURES),
    "semantic_cache": _switch,
}
_KEY_FIELDS: dict[str, Reader] = {"id": _text, "sha256": _text, "prefix": _text, "name": _text, "admin": _switch}


def _tenant(name: str, fields: object, where: str) -> Tenant:
    values = _read(fields, where, {**_TERMS, **_LIMITS, "keys": _as_is})
    values.pop("keys", None)
    limits = Limits(**{field: values.pop(field) for field in _LIMITS if field in values})
    own = TIERS[values.get("tier", "default")]
    low, high = values.setdefault("priorities", (own, LEAST_URGENT))
    default = values.setdefault("default_priority", max(low, min(high, own)))
    if not low <= default <= high:
        raise ConfigError(f"{where}: default_priority is {default}; priorities allows {low} to {high}")
    return Tenant(name=name, limits=limits, **values)


def _keys(tenant: str, fields: object, where: str) -> list[Key]:
    listed = fields.get("keys") if isinstance(fields, dict) else None
    if listed is None:
        return []
    if not isinstance(listed, list):
        raise ConfigError(f"{where}: keys must be a list; `maitred keys create` writes it")
    return [_key(tenant, entry, f"{where}: keys[{index}]") for index, entry in enumerate(listed)]


def _key(tenant: str, entry: object, where: str) -> Key:
    values = _read(entry, where, _KEY_FIELDS)
    for field in ("id", "sha256"):
        if field not in values:
            raise ConfigError(f"{where}: {field} is missing; `maitred keys create` writes a whole entry")
    try:
        digest = bytes.fromhex(values.pop("sha256"))
    except ValueError:
        digest = b""
    if len(digest) != sha256().digest_size:
        raise ConfigError(f"{where}: sha256 must have 64 hexadecimal digits; `maitred keys hash` gives them")
    return Key(tenant=tenant, digest=digest, **values)


def _refuse_twins(keys: list[Key], file: str) -> None:
    for field in ("id", "digest"):
        seen: dict[Any, Key] = {}
        for key in keys:
            twin = seen.setdefault(getattr(key, field), key)
            if twin is not key:
                what = f"the id {key.id!r}" if field == "id" else f"the key of {key.id!r}"
                raise ConfigError(f"{file}: tenant {key.tenant!r}: {what} stands twice, first at {twin.tenant!r}")


def _as_is(value: Any, where: str) -> Any:
    return value


def _read(fields: object, where: str, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Read each field by its reader; a null is a field left out."""
    given = _mapping(fields, where, readers)
    return {name: readers[name](value, f"{where}: {name}") for name, value in given.items() if value is not None}


def _mapping(value: object, where: str, known: Mapping[str, Any] | set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must hold fields, such as {next(iter(known))}: ...")
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else []
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: {_shown(name)} is no field here; {hint}")
    return value
