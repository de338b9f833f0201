"""Workloads described in a few lines (`WorkloadSpec`): arrivals, classes of requests, tenants, shared prefixes, turns.

All chance comes from seeded generators, one for each kind of draw, so that changing one leaves the others alone.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from maitred.config.field_checks import require_at_least, require_between
from maitred.core.errors import ConfigError
from maitred.sim.workload import Arrival, TokenSpan, Turn, chain
from maitred.tenancy.caller import ANYBODY
from maitred.tenancy.tenant import Limits, Tenant


def arrival_times(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Seconds since the start, without end. Gaps are gamma: mean 1/rate (s), variance 1/(burstiness * rate**2).

    An infinite `rate` sends everything at once.
    """
    at = 0.0
    while True:
        yield at
        if not math.isinf(rate):
            at += rng.gammavariate(burstiness, 1 / (burstiness * rate))


Draw = Callable[[random.Random], int]  # one length, at least 1


def _fixed(length: float) -> Draw:
    return lambda rng: int(length)


def _uniform(low: float, high: float) -> Draw:
    if low > high:
        raise ValueError("the first number is the smaller one")
    return lambda rng: rng.randint(int(low), int(high))


def _normal(mean: float, deviation: float) -> Draw:
    return lambda rng: round(rng.gauss(mean, deviation))


def _lognormal(median: float, sigma: float) -> Draw:
    if median <= 0:
        raise ValueError("the median must be over 0")
    return lambda rng: round(rng.lognormvariate(math.log(median), sigma))


def _zipf(exponent: float, longest: float) -> Draw:
    if not 1 <= longest <= 10_000_000:
        raise ValueError("the longest must be from 1 to 10000000")
    steps = list(itertools.accumulate(k**-exponent for k in range(1, int(longest) + 1)))
    return lambda rng: 1 + bisect.bisect_left(steps, rng.random() * steps[-1])


def _choice(*lengths: float) -> Draw:
    return lambda rng: int(rng.choice(lengths))


# name -> (how to write its numbers, how many or None for any, maker)
DISTRIBUTIONS: dict[str, tuple[str, int | None, Callable[..., Draw]]] = {
    "uniform": ("uniform:LOW,HIGH", 2, _uniform),
    "normal": ("normal:MEAN,DEVIATION", 2, _normal),
    "lognormal": ("lognormal:MEDIAN,SIGMA", 2, _lognormal),
    "zipf": ("zipf:EXPONENT,LONGEST", 2, _zipf),
    "choice": ("choice:A,B,...", None, _choice),
}


def parse_length(text: str, flag: str) -> Draw:
    """Raises ConfigError that lists the forms; `flag` names the culprit."""
    name, colon, rest = text.partition(":")
    try:
        if not colon:
            return _at_least_one(_fixed(_positive(name)))
        form, count, make = DISTRIBUTIONS[name]
        numbers = [_positive(word) for word in rest.split(",")]
        if count is not None and len(numbers) != count:
            raise ValueError(f"write {form}")
        return _at_least_one(make(*numbers))
    except (KeyError, ValueError) as error:
        forms = ", ".join(["N", *(form for form, _, _ in DISTRIBUTIONS.values())])
        cause = f" ({error})" if isinstance(error, ValueError) else ""
        raise ConfigError(f"{flag} is {text!r}{cause}; write tokens as one of {forms}") from None


def _positive(word: str) -> float:
    value = float(word)
    if not 0 < value < math.inf:
        raise ValueError(f"{word} is not over 0")
    return value


def _at_least_one(draw: Draw) -> Draw:
    return lambda rng: max(1, draw(rng))


KINDS = ("poisson", "gamma", "diurnal")
P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSpec:
    """One kind of request in the mixture."""

    share: float = 1.0
    """Part of the arrivals, relative to the other classes'."""
    input: str = "128"
    """Prompt tokens of its own: N, uniform:A,B, lognormal:MEDIAN,SIGMA and so on."""
    output: str = "64"
    """Tokens it generates, in the same forms."""
    max_tokens: int = 1024
    """Tokens that the client allows; raised to the output if that is longer."""
    prefix_tokens: int = 0
    """Tokens that begin the prompt alike for all that share the prefix."""
    num_prefixes: int = 1
    """Different shared prefixes, chosen at random."""
    turns: str = "1"
    """Requests of one conversation; each extends the prompt and answer of the one before by `input` tokens."""
    think_s: float = 10.0
    """Mean pause (s) between an answer and the next turn, exponential."""
    priority: int | None = None
    """0 is most urgent; None is the tenant's in `--tenants`, else 0."""
    ttft_slo_s: float | None = None
    """Objective (s) from arrival to first token."""
    start_within_s: float | None = None
    """Given up if it is in no step by then."""
    deadline_s: float | None = None
    """Given up if it is not done by then."""
    tenant: str | None = None
    """Tenant of its requests; None draws from the workload's tenants."""
    background: int = 0
    """So many of its requests wait from the start, as background work beside the arrivals; 0 is an ordinary class."""

    def __post_init__(self) -> None:
        require_at_least("share", self.share, 0)
        require_at_least("max_tokens", self.max_tokens, 1)
        require_at_least("prefix_tokens", self.prefix_tokens, 0)
        require_at_least("num_prefixes", self.num_prefixes, 1)
        require_at_least("think_s", self.think_s, 0)
        require_at_least("priority", self.priority or 0, 0)
        require_at_least("background", self.background, 0)
        for name in ("input", "output", "turns"):
            parse_length(getattr(self, name), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSpec:
    """One tenant in the mixture."""

    share: float = 1.0
    """Part of the arrivals, relative to the other tenants'."""
    weight: float = 1.0
    """Weight in fair shares: twice the weight, twice the service."""
    priority: int | None = None
    """Priority in place of the class's."""
    requests_per_minute: int | None = None
    """Limits as in tenants.yaml; a request refused by them counts as failed."""
    tokens_per_minute: int | None = None
    compute_ms_per_minute: int | None = None
    concurrency: int | None = None
    max_queue: int | None = None
    token_budget: int | None = None

    def __post_init__(self) -> None:
        require_at_least("share", self.share, 0)
        require_at_least("weight", self.weight, 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One of several models behind one address; all take the times of the simulated one."""

    share: float = 1.0
    """Part of the arrivals, relative to the other models'."""
    memory_bytes: int = 1
    """Weights and KV."""
    load_s: float = 10.0
    """Seconds that a load takes."""

    def __post_init__(self) -> None:
        for name in ("share", "memory_bytes", "load_s"):
            require_at_least(name, getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A synthetic workload, as a YAML or JSON file describes it."""

    kind: str = "poisson"
    """poisson, gamma (bursts) or diurnal (a day's tide)."""
    rate: float = 1.0
    """Arrivals per second on average: requests, or conversations where a class has turns."""
    burstiness: float = 1.0
    """gamma: shape of the gaps' distribution; 1 is Poisson, below 1 comes in bursts, above 1 is more even."""
    period_s: float = 86_400.0
    """diurnal: length of a day."""
    amplitude: float = 0.8
    """diurnal: from rate * (1 - amplitude) by night to rate * (1 + amplitude) by day."""
    num_requests: int = 1000
    """Number of requests in all, turns included."""
    seed: int = 0
    """Same seed, same workload."""
    classes: Mapping[str, ClassSpec] = field(default_factory=lambda: {"all": ClassSpec()})
    """Name -> class."""
    tenants: Mapping[str, TenantSpec] = field(default_factory=dict)
    """Name -> tenant; none is one without a name."""
    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    """Name -> one of several models, of which as many are loaded at a time as `--models-memory-bytes` holds."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}; choose one of {', '.join(KINDS)}")
        for name in ("rate", "burstiness", "period_s"):
            require_at_least(name, getattr(self, name), 1e-9)
        require_at_least("num_requests", self.num_requests, 1)
        require_between("amplitude", self.amplitude, 0, 1)
        if not any(c.share > 0 and not c.background for c in self.classes.values()):
            raise ConfigError("classes is empty, or has none that arrives with a share over 0; give at least one class")
        if self.tenants and not any(t.share > 0 for t in self.tenants.values()):
            raise ConfigError("tenants have no share over 0; give at least one")


# ---- from a mapping (YAML, JSON) to a spec


def parse_spec(described: Mapping[str, Any], name: str) -> WorkloadSpec:
    """Raises ConfigError that names the field at fault and the nearest known one."""
    values = dict(described)
    for part, kind in (("classes", ClassSpec), ("tenants", TenantSpec), ("models", ModelSpec)):
        if part in values:
            named = _mapping(values[part], f"{name}: {part}")
            values[part] = {
                str(key): _build(kind, _mapping(value or {}, f"{name}: {part}.{key}"), f"{name}: {part}.{key}")
                for key, value in named.items()
            }
    return _build(WorkloadSpec, values, name)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}; it must be a mapping of names to values")
    return value


def _build(kind: type[P], values: Mapping[str, Any], where: str) -> P:
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{where}: no field {key!r}{_nearest(str(key), known)}; known are {', '.join(known)}")
        if not _fits(value, str(known[key].type)):
            raise ConfigError(f"{where}: {key} is {value!r}; it must be {known[key].type}")
    worded = {key: str(value) if known[key].type == "str" else value for key, value in values.items()}
    try:
        return kind(**worded)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _fits(value: Any, declared: str) -> bool:
    if value is None:
        return "None" in declared
    if isinstance(value, bool):
        return False
    if declared.startswith("Mapping"):
        return isinstance(value, Mapping)
    if declared.startswith("str"):
        return isinstance(value, str | int | float)  # a length of 128 need not be quoted
    return isinstance(value, int) or (declared.startswith("float") and isinstance(value, float))


def _nearest(word: str, choices: Mapping[str, object]) -> str:
    near = get_close_matches(word, choices, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


# ---- from a spec to arrivals


class SyntheticWorkload:
    """The arrivals of a spec, `rate_scale` times as fast."""

    def __init__(self, spec: WorkloadSpec, rate_scale: float = 1.0) -> None:
        self.spec = spec
        self._rate = spec.rate * rate_scale

    @property
    def tenants(self) -> dict[str, Tenant]:
        """Tenants with their limits; any priority may be theirs."""
        names = [f.name for f in fields(Limits)]
        return {
            name: replace(ANYBODY, name=name, weight=t.weight, limits=Limits(**{n: getattr(t, n) for n in names}))
            for name, t in self.spec.tenants.items()
        }

    def arrivals(self) -> Iterator[Arrival]:
        spec = self.spec
        for name, kind in spec.classes.items():
            drawing = _Drawing(spec, {name: kind}, f"{spec.seed}/{name}")
            for number in range(kind.background):
                yield replace(drawing.arrival(number, 0.0, 1), background=True)
        arriving = {name: kind for name, kind in spec.classes.items() if not kind.background}
        drawing = _Drawing(spec, arriving, str(spec.seed))
        num_left = spec.num_requests
        for number, at in enumerate(self._times(random.Random(f"{spec.seed}/arrivals"))):
            arrival = drawing.arrival(number, at, num_left)
            yield arrival
            num_left -= 1 + len(arrival.turns)
            if num_left <= 0:
                return

    def _times(self, rng: random.Random) -> Iterator[float]:
        if self.spec.kind == "diurnal":
            return self._tide(rng)
        shape = self.spec.burstiness if self.spec.kind == "gamma" else 1.0
        return arrival_times(self._rate, shape, rng)

    def _tide(self, rng: random.Random) -> Iterator[float]:
        """Poisson with a rate that changes: arrivals at the highest rate, thinned (Lewis and Shedler 1979)."""
        amplitude, period_s, at = self.spec.amplitude, self.spec.period_s, 0.0
        highest = self._rate * (1 + amplitude)
        while True:
            at += rng.expovariate(highest)
            rate = self._rate * (1 - amplitude * math.cos(2 * math.pi * at / period_s))  # begins at night
            if rng.random() * highest <= rate:
                yield at


class _Drawing:
    """The generators of one pass over a workload."""

    def __init__(self, spec: WorkloadSpec, classes: Mapping[str, ClassSpec], seed: str) -> None:
        self._spec = spec
        streams = ("classes", "tenants", "lengths", "prefixes", "thoughts", "models")
        self._rngs = {name: random.Random(f"{seed}/{name}") for name in streams}
        self._classes = list(classes.items())
        self._class_shares = list(itertools.accumulate(c.share for _, c in self._classes))
        self._tenants = list(spec.tenants.items())
        self._tenant_shares = list(itertools.accumulate(t.share for _, t in self._tenants))
        self._draws: dict[str, tuple[Draw, Draw, Draw]] = {
            name: (parse_length(c.input, "input"), parse_length(c.output, "output"), parse_length(c.turns, "turns"))
            for name, c in self._classes
        }

    def arrival(self, number: int, at: float, num_left: int) -> Arrival:
        rngs = self._rngs
        ((name, kind),) = rngs["classes"].choices(self._classes, cum_weights=self._class_shares)
        tenant, terms = self._tenant(kind)
        draw_input, draw_output, draw_turns = self._draws[name]
        lengths = rngs["lengths"]
        prompt, output = kind.prefix_tokens + draw_input(lengths), draw_output(lengths)
        num_turns = min(draw_turns(lengths), num_left)
        turns = tuple(self._turn(kind, draw_input, draw_output) for _ in range(num_turns - 1))
        return Arrival(
            at=at,
            request_id=f"{name}-{number}",
            prompt_tokens=prompt,
            output_tokens=output,
            max_tokens=max(output, kind.max_tokens),
            tenant=tenant,
            model=self._model(),
            priority=kind.priority if terms.priority is None else terms.priority,
            weight=terms.weight,
            ttft_slo_s=kind.ttft_slo_s,
            start_within_s=kind.start_within_s,
            deadline_s=kind.deadline_s,
            spans=self._prefix(name, kind, tenant),
            own=(name.encode() if kind.background else b"s") + number.to_bytes(8, "little"),
            turns=turns,
        )

    def _tenant(self, kind: ClassSpec) -> tuple[str, TenantSpec]:
        if kind.tenant is not None:
            return kind.tenant, self._spec.tenants.get(kind.tenant, TenantSpec())
        if not self._tenants:
            return "", TenantSpec()
        ((name, terms),) = self._rngs["tenants"].choices(self._tenants, cum_weights=self._tenant_shares)
        return name, terms

    def _model(self) -> str:
        if not (models := self._spec.models):
            return ""
        shares = [model.share for model in models.values()]
        return self._rngs["models"].choices(list(models), weights=shares)[0]

    def _turn(self, kind: ClassSpec, draw_input: Draw, draw_output: Draw) -> Turn:
        lengths, thoughts = self._rngs["lengths"], self._rngs["thoughts"]
        new, output = draw_input(lengths), draw_output(lengths)
        think_s = thoughts.expovariate(1 / kind.think_s) if kind.think_s > 0 else 0.0
        return Turn(think_s=think_s, new_tokens=new, output_tokens=output, max_tokens=max(output, kind.max_tokens))

    def _prefix(self, name: str, kind: ClassSpec, tenant: str) -> tuple[TokenSpan, ...]:
        if not kind.prefix_tokens:
            return ()
        number = self._rngs["prefixes"].randrange(kind.num_prefixes)
        return chain([f"{name}/{number}"], kind.prefix_tokens, root=tenant)
