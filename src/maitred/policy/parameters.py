"""A policy's own parameters: what its factory takes by keyword, after the config.

    def tips_first(config, *, tip_s: Annotated[float, Range(0, 600)] = 60.0, by: Literal["sum", "share"] = "sum"): ...

A parameter that bears the name of a field of SchedulerConfig has that field's default and range, and may be given
as either; `policy_args` goes before the field.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, replace
from math import inf, isfinite
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from maitred.config import SCHEDULER_RANGES, PolicyArg, SchedulerConfig
from maitred.core.errors import ConfigError, did_you_mean
from maitred.policy.policy import Policy, PolicyFactory


class Range(NamedTuple):
    """Range of a parameter, both ends included."""

    low: float
    high: float


ANY = Range(-inf, inf)
_KINDS: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
_FIELDS = frozenset(field.name for field in fields(SchedulerConfig))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, as its factory declares it."""

    name: str
    kind: type
    default: PolicyArg | None = None  # None of one that is a field of SchedulerConfig, which has the default
    range: Range = ANY
    choices: tuple[PolicyArg, ...] = ()

    def checked(self, value: object) -> PolicyArg:
        """The value as the factory takes it. Raises ConfigError."""
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not self.kind or not isinstance(value, bool | int | float | str):
            raise ConfigError(f"policy argument {self.name} is {value!r}; it must be {_KINDS[self.kind]}")
        if self.choices and value not in self.choices:
            choices = ", ".join(map(str, self.choices))
            raise ConfigError(f"policy argument {self.name} is {value!r}; choose one of {choices}")
        if isinstance(value, int | float) and not (self.range.low <= value <= self.range.high and isfinite(value)):
            raise ConfigError(f"policy argument {self.name} is {value}; it must be {self.allowed}")
        return value

    @property
    def allowed(self) -> str:
        """Return the allowed values in words."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        return _KINDS[self.kind] if self.range == ANY else f"from {self.range.low:g} to {self.range.high:g}"


def parameters_of(make: PolicyFactory) -> dict[str, Parameter]:
    """Return the parameters by name, in the factory's order. Raises ConfigError for one that cannot be given."""
    keywords = [p for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY]
    # Their annotations alone: those of the config and the result may stand under TYPE_CHECKING.
    written = SimpleNamespace(__annotations__={p.name: p.annotation for p in keywords if p.annotation is not p.empty})
    hints = get_type_hints(written, getattr(inspect.unwrap(make), "__globals__", {}), include_extras=True)
    return {p.name: _parameter(p, hints.get(p.name)) for p in keywords}


def make_policy(make: PolicyFactory, config: SchedulerConfig) -> Policy:
    """Make a policy with its arguments in `config`. Raises ConfigError for an unknown one or a bad value."""
    parameters, given = parameters_of(make), config.policy_args
    for name in given:
        if name not in parameters:
            choices = f"choose from {', '.join(parameters)}" if parameters else "it has none"
            raise ConfigError(
                f"the policy {config.policy} has no argument {name!r}{did_you_mean(name, parameters)}; {choices}"
            )
    values = {name: parameters[name].checked(value) for name, value in given.items()}
    fields_given: dict[str, Any] = {name: value for name, value in values.items() if name in _FIELDS}
    config = replace(config, policy_args={}, **fields_given)
    config = replace(config, ageing_tokens_per_s=config.ageing_rate)
    arguments = {name: values.get(name, _default(parameters[name], config)) for name in parameters}
    return replace(make(config, **arguments), arguments=arguments)


def _default(parameter: Parameter, config: SchedulerConfig) -> PolicyArg:
    if parameter.name in _FIELDS:
        value: PolicyArg = getattr(config, parameter.name)
        return value
    assert parameter.default is not None, "_parameter saw to it"
    return parameter.default


def _parameter(declared: inspect.Parameter, hint: object) -> Parameter:
    name, default = declared.name, None if declared.default is declared.empty else declared.default
    bounds = SCHEDULER_RANGES.get(name, ANY)
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        bounds = next((extra for extra in extras if isinstance(extra, Range)), bounds)
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    kind = type(choices[0]) if choices else hint if isinstance(hint, type) else type(default)
    if kind not in _KINDS or (default is None and name not in _FIELDS):
        raise ConfigError(
            f"parameter {name!r} of the policy is declared {hint} with the default {default!r}; make it a bool, int, "
            "float or str with a default"
        )
    return Parameter(name, kind, default, Range(*bounds), choices)
