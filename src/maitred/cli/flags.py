"""Flags are fields: dataclasses with a docstring per field give flags, help, defaults and config-file keys."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

from maitred import config
from maitred.engine.memory import format_bytes
from maitred.errors import ConfigError


class Kind(Enum):
    TEXT = "text"
    INTEGER = "an integer"
    NUMBER = "a number"
    BYTES = "a number of bytes, such as 4096 or 8GiB"
    SWITCH = "true or false"
    LIST = "a list"
    MAPPING = "pairs KEY=VALUE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One setting, as the command line and the config file know it."""

    owner: type  # the dataclass that holds the field
    field: str  # "max_num_seqs"
    name: str  # "--max-num-seqs"
    kind: Kind
    default: object
    metavar: str  # the unit, or what to write
    doc: str
    short: str | None = None  # "-i"
    env: str | None = None  # taken from the environment when the command line is silent
    choices: tuple[str, ...] = ()  # for completion; the dataclass itself refuses others
    bare: str | None = None  # the value when the flag stands without one; None is an error
    required: bool = False

    @property
    def key(self) -> str:
        """The key in a config file: the long name without dashes before it."""
        return self.name.removeprefix("--")


def option(
    default: object = dataclasses.MISSING,
    *,
    metavar: str | None = None,
    short: str | None = None,
    name: str | None = None,
    env: str | None = None,
    choices: tuple[str, ...] = (),
    bare: str | None = None,
) -> typing.Any:
    """A dataclass field that says more about its flag than its type does. Without `default` it must be given."""
    metadata = {"metavar": metavar, "short": short, "name": name, "env": env, "choices": choices, "bare": bare}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# config.py knows nothing of command lines, so what its fields cannot say stands here.
SINGULAR = {
    "api_keys": "--api-key",
    "served_model_names": "--served-model-name",
    "policy_args": "--policy-arg",
    "drain_timeout_s": "--drain-timeout",
}
ENVIRONMENT = {"api_keys": "MAITRED_API_KEY"}
CHOICES: dict[str, tuple[str, ...]] = {
    "executor": config.EXECUTORS,
    "device": config.DEVICES,
    "dtype": config.DTYPES,
    "lm_head_dtype": config.LM_HEAD_DTYPES,
    "kv_dtype": config.KV_DTYPES,
    "bind_threads": config.BIND_THREADS,
    "log_level": config.LOG_LEVELS,
    "log_format": config.LOG_FORMATS,
    "metrics_compat": config.METRICS_COMPAT,
    "policy": config.POLICY_NAMES,
    "predictor": config.PREDICTOR_NAMES,
    "resume": config.RESUME_RULES,
}
METAVARS = {
    "model": "MODEL",
    "revision": "REV",
    "chat_template": "FILE",
    "generation_config": "KEY=VALUE",
    "host": "ADDRESS",
    "port": "PORT",
    "api_keys": "KEY",
    "served_model_names": "NAME",
    "cors_origins": "ORIGIN",
    "decision_log": "DIR",
    "tenants": "FILE",
    "ledger": "FILE",
    "policy": "NAME",
    "policy_args": "NAME=VALUE",
    "block_size": "TOKENS",
    "num_threads": "THREADS",
    "int4_group_size": "WEIGHTS",
    "default_max_n": "SAMPLES",
}
_METAVAR_ENDINGS = (
    ("_tokens_per_s", "TOKENS"),
    ("_s", "SECONDS"),
    ("_bytes", "BYTES"),
    ("_tokens", "TOKENS"),
    ("_len", "TOKENS"),
    ("_seqs", "REQUESTS"),
    ("_requests", "REQUESTS"),
)
_METAVAR_BY_KIND = {Kind.INTEGER: "N", Kind.NUMBER: "X", Kind.MAPPING: "KEY=VALUE"}


@cache
def flags_of(owner: type) -> tuple[Flag, ...]:
    """The flags of a config dataclass, in the order of its fields, without fields that are dataclasses themselves."""
    hints = typing.get_type_hints(owner)
    docs = _field_docs(owner)
    fields = [f for f in dataclasses.fields(owner) if not dataclasses.is_dataclass(hints[f.name])]
    return tuple(_flag(owner, f, hints[f.name], docs.get(f.name, "")) for f in fields)


def _flag(owner: type, field: dataclasses.Field[typing.Any], hint: object, doc: str) -> Flag:
    kind = _kind(field.name, hint)
    choices = field.metadata.get("choices") or CHOICES.get(field.name, ())
    default = field.default_factory() if callable(field.default_factory) else field.default
    return Flag(
        owner=owner,
        field=field.name,
        name=field.metadata.get("name") or SINGULAR.get(field.name) or "--" + field.name.replace("_", "-"),
        kind=kind,
        default=default,
        metavar=field.metadata.get("metavar") or _metavar(field.name, kind, choices),
        doc=doc,
        short=field.metadata.get("short"),
        env=field.metadata.get("env") or ENVIRONMENT.get(field.name),
        choices=tuple(choices),
        bare=field.metadata.get("bare"),
        required=default is dataclasses.MISSING,
    )


def _kind(name: str, hint: object) -> Kind:
    members = [t for t in typing.get_args(hint) if t is not type(None)]
    if isinstance(hint, types.UnionType) and len(members) == 1:
        hint = members[0]
    origin = typing.get_origin(hint) or hint
    if origin is int and name.endswith("_bytes"):
        return Kind.BYTES
    kinds: dict[object, Kind] = {
        str: Kind.TEXT,
        int: Kind.INTEGER,
        float: Kind.NUMBER,
        bool: Kind.SWITCH,
        tuple: Kind.LIST,
        Mapping: Kind.MAPPING,
    }
    if origin not in kinds:
        raise TypeError(f"field {name} of type {hint} has no form on the command line; teach cli/flags.py one")
    return kinds[origin]


def _metavar(name: str, kind: Kind, choices: Sequence[str]) -> str:
    if name in METAVARS:
        return METAVARS[name]
    if choices:
        return "|".join(choices)
    for ending, metavar in _METAVAR_ENDINGS:
        if name.endswith(ending):
            return metavar
    return _METAVAR_BY_KIND.get(kind, "TEXT")


def _field_docs(owner: type) -> dict[str, str]:
    """The string below each field of a class, which Python itself does not keep."""
    docs: dict[str, str] = {}
    for base in reversed(owner.__mro__[:-1]):
        body = _class_bodies(base.__module__).get(base.__name__, [])
        for statement, after in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        docs[statement.target.id] = inspect.cleandoc(text).replace("\n", " ")
    return docs


@cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def help_text(flag: Flag) -> str:
    """The field's docstring in the words of the command line, then its default and environment variable."""
    text = re.sub(r"\bNone\b", "unset", flag.doc)
    notes = ["required" if flag.required else f"default: {default_text(flag)}"]
    if flag.kind in (Kind.LIST, Kind.MAPPING):
        notes.append("may be repeated")
    if flag.env is not None:
        notes.append(f"environment: {flag.env}")
    return f"{text} [{'; '.join(notes)}]"


def default_text(flag: Flag) -> str:
    value = flag.default
    if value is None or value in ((), {}):
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if flag.kind is Kind.BYTES and isinstance(value, int):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- from words to values

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def bytes_number(text: str) -> int:
    """`8GiB`, `500MB`, `4096` -> bytes. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[match[2].upper()])


_FROM_WORD: dict[Kind, Callable[[str], object]] = {
    Kind.TEXT: str,
    Kind.INTEGER: int,
    Kind.NUMBER: float,
    Kind.BYTES: bytes_number,
    Kind.LIST: str,  # one word is one item
}


def from_word(flag: Flag, word: str) -> object:
    """The value of one word of the command line (one item, for a list). Raises ConfigError."""
    if flag.kind is Kind.MAPPING:
        return _pairs(flag, word)
    try:
        return _FROM_WORD[flag.kind](word)
    except ValueError:
        raise ConfigError(f"{flag.name} is {word!r}; it must be {flag.kind.value}") from None


def _pairs(flag: Flag, word: str) -> dict[str, object]:
    """`temperature=0.2` or a JSON object."""
    import json

    if word.lstrip().startswith("{"):
        try:
            return dict(json.loads(word))
        except ValueError as error:
            raise ConfigError(f"{flag.name} is not valid JSON: {error}") from None
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"{flag.name} is {word!r}; write KEY=VALUE, for example temperature=0.2, or a JSON object")
    try:
        return {key.strip(): json.loads(value)}
    except ValueError:
        return {key.strip(): value}


def from_yaml(flag: Flag, value: object) -> object:
    """The value of a config file's entry, already read by YAML. Raises ValueError when it has the wrong type."""
    if value is None:
        return flag.default if not flag.required else None
    if flag.kind is Kind.SWITCH:
        return _require(value, bool)
    if flag.kind is Kind.LIST:
        items = value if isinstance(value, list) else [value]
        return tuple(str(_require(item, str | int | float)) for item in items)
    if flag.kind is Kind.MAPPING:
        return _require(value, dict)
    if isinstance(value, bool):  # a bool is an int to Python, a slip to us
        raise ValueError(value)
    if flag.kind is Kind.INTEGER:
        return _require(value, int)
    if flag.kind is Kind.NUMBER:
        return float(_require(value, int | float))
    if flag.kind is Kind.BYTES:
        return bytes_number(str(_require(value, int | str)))
    return str(_require(value, str | int | float))


def _require(value: typing.Any, kind: type | types.UnionType) -> typing.Any:
    if not isinstance(value, kind):
        raise ValueError(value)
    return value
