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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from maitred import config
from maitred.core.errors import ConfigError, did_you_mean
from maitred.engine.memory import format_bytes


class UsageError(ConfigError):
    """The words of the command line, or a line of the config file, make no sense; exit code 2."""


def names_in(flag: str, listed: str, choices: Iterable[str]) -> tuple[str, ...]:
    """Names of a flag's list, each once. Raises UsageError for one that is no choice, and for none."""
    names = tuple(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))
    if not names:
        raise UsageError(f"{flag} names none; give one or more of " + ", ".join(choices))
    for name in names:
        check_known(flag, name, choices)
    return names


def check_known(flag: str, name: str, choices: Iterable[str]) -> None:
    """Raises UsageError for a name that is no choice."""
    if name not in (known := list(choices)):
        raise UsageError(f"{flag} is {name!r}{did_you_mean(name, known)}; choose from {', '.join(known)}")


def bytes_number(text: str) -> int:
    """`8GiB`, `500MB`, `4096` -> bytes; K, M, G and T alone are powers of 1024. Raises ValueError."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*(?:([KMGT])(IB|B)?|B)?", text.strip().upper())
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * (1000 if match[3] == "B" else 1024) ** " KMGT".index(match[2] or " "))


def _pairs(text: str) -> Iterable[tuple[str, object]]:
    """Pairs of `temperature=0.2`, or of a JSON object."""
    from json import loads

    if text.lstrip().startswith("{"):
        try:
            return dict(loads(text)).items()
        except ValueError as error:
            raise ValueError(f"it is not valid JSON: {error}") from None
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError("write KEY=VALUE, for example temperature=0.2, or a JSON object")
    try:
        return [(key.strip(), loads(value))]
    except ValueError:
        return [(key.strip(), value)]


class FlagKind(Enum):
    """Kind of a flag: its type, what errors and help call it, and how words become it."""

    TEXT = str, "text", "TEXT", str
    INTEGER = int, "an integer", "N", int
    NUMBER = float, "a number", "X", float
    BYTES = None, "a number of bytes, such as 4096 or 8GiB", "BYTES", bytes_number
    SWITCH = bool, "true or false", "", str
    LIST = tuple, "a list", "TEXT", lambda word: (word,), tuple
    MAPPING = Mapping, "pairs KEY=VALUE", "KEY=VALUE", _pairs, dict

    def __init__(
        self,
        type_of_field: object,
        form: str,
        metavar: str,
        parse: Callable[[str], Any],
        join: Callable[[Any], object] | None = None,  # puts together what several words gave; None: one word is all
    ) -> None:
        self.type_of_field, self.form, self.metavar, self.parse, self.join = type_of_field, form, metavar, parse, join


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flag:
    """One setting, as the command line and the config file know it."""

    owner: type  # the dataclass that holds the field
    field: str  # "max_num_seqs"
    kind: FlagKind
    default: object
    doc: str
    name: str  # "--max-num-seqs"; this and what follows may be given to `option`
    metavar: str  # the unit, or what to write
    short: str | None = None  # "-i"
    env: str | None = None  # taken from the environment when the command line is silent
    choices: tuple[str, ...] = ()  # for completion; the dataclass itself refuses others
    bare: str | None = None  # the value when the flag stands without one; None is an error

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def key(self) -> str:
        """The key in a config file: the long name without dashes before it."""
        return self.name.removeprefix("--")

    @property
    def names(self) -> list[str]:
        """Every spelling."""
        return [*filter(None, (self.short, self.name)), *(["--no-" + self.key] if self.kind is FlagKind.SWITCH else [])]

    def parse(self, word: str) -> Any:
        """The value of a word, or its values where the flag may be repeated. Raises UsageError."""
        if self.env is not None and (not word or word != word.strip()):
            raise UsageError(
                f"{self.name} is {word!r}; no request can bring a key that is empty or begins or ends with a space, "
                f"so give another, or leave out {self.name} (and unset {self.env})"
            )
        try:
            return self.kind.parse(word)
        except ValueError as error:
            remedy = error if self.kind is FlagKind.MAPPING else f"it must be {self.kind.form}"
            raise UsageError(f"{self.name} is {word!r}; {remedy}") from None

    def join(self, values: Any) -> object:
        """The field's value, from what all words were parsed to."""
        return self.kind.join(values) if self.kind.join is not None else values


def option(default: Any = dataclasses.MISSING, **says: object) -> Any:
    """A dataclass field that says more of its flag than its name and type do: `metavar` and the like, as in `Flag`.
    Without `default` it must be given."""
    return dataclasses.field(default=default, metadata=says)


# config.py knows nothing of command lines, so what its fields cannot say stands here.
_SAYS: dict[str, dict[str, object]] = {
    "api_keys": {"name": "--api-key", "env": "MAITRED_API_KEY"},
    "served_model_names": {"name": "--served-model-name"},
    "lora": {"metavar": "NAME=DIR"},
    "policy_args": {"name": "--policy-arg", "metavar": "NAME=VALUE"},
    "drain_timeout_s": {"name": "--drain-timeout"},
    "policy": {"choices": config.POLICY_NAMES},
}
_METAVARS = {
    "model": "MODEL", "revision": "REV", "host": "ADDRESS", "port": "PORT", "api_keys": "KEY", "policy": "NAME",
    "served_model_names": "NAME", "cors_origins": "ORIGIN", "chat_template": "FILE", "tenants": "FILE",
    "fleet_token_file": "FILE", "ledger": "FILE", "slo": "NAME:TIME", "decision_log": "DIR", "block_size": "TOKENS",
    "num_threads": "THREADS", "lora_dir": "DIR", "max_lora_rank": "RANK", "tensor_parallel": "RANKS",
    "default_max_n": "SAMPLES", "trust_key": "PEM",
}  # fmt: skip
_UNITS = {"tokens_per_s": "TOKENS", "s": "SECONDS", "bytes": "BYTES", "tokens": "TOKENS", "len": "TOKENS",
          "seqs": "REQUESTS", "requests": "REQUESTS"}  # fmt: skip


@cache
def flags_of(owner: type) -> tuple[Flag, ...]:
    """The flags of a config dataclass, in the order of its fields, without fields that are dataclasses themselves."""
    hints, docs = typing.get_type_hints(owner), _field_docs(owner)
    fields = [f for f in dataclasses.fields(owner) if not dataclasses.is_dataclass(hints[f.name])]
    return tuple(_flag(owner, f, _kind(f.name, hints[f.name]), docs.get(f.name, "")) for f in fields)


def _flag(owner: type, field: dataclasses.Field[Any], kind: FlagKind, doc: str) -> Flag:
    default = field.default_factory() if callable(field.default_factory) else field.default
    says: dict[str, Any] = {"name": "--" + field.name.replace("_", "-")}
    says |= _SAYS.get(field.name, {}) | dict(field.metadata)
    says.setdefault("metavar", _metavar(field.name, kind, says.get("choices", ())))
    return Flag(owner=owner, field=field.name, kind=kind, default=default, doc=doc, **says)


def _kind(name: str, hint: object) -> FlagKind:
    members = [t for t in typing.get_args(hint) if t is not type(None)] if isinstance(hint, types.UnionType) else [hint]
    origin = typing.get_origin(members[0]) or members[0]
    found = [kind for kind in FlagKind if kind.type_of_field is origin]
    if len(members) > 1 or not found:
        raise TypeError(f"field {name} of type {hint} has no form on the command line; teach cli/flags.py one")
    return FlagKind.BYTES if found[0] is FlagKind.INTEGER and name.endswith("_bytes") else found[0]


def _metavar(name: str, kind: FlagKind, choices: tuple[str, ...]) -> str:
    unit = next((unit for ending, unit in _UNITS.items() if name.endswith("_" + ending)), kind.metavar)
    return _METAVARS.get(name) or "|".join(choices) or unit


def _field_docs(owner: type) -> dict[str, str]:
    """The string below each field of a class, which Python itself does not keep."""
    docs: dict[str, str] = {}
    for base in reversed(owner.__mro__[:-1]):
        for statement in itertools.pairwise(_class_bodies(base.__module__).get(base.__name__, [])):
            match statement:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


@cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def help_text(flag: Flag) -> str:
    """The field's docstring in the words of the command line, then its default and environment variable."""
    notes = ["required" if flag.required else f"default: {_default_text(flag)}"]
    if flag.kind.join is not None:
        notes.append("may be repeated")
    if flag.env is not None:
        notes.append(f"environment: {flag.env}")
    doc = re.sub(r"\bNone\b", "unset", flag.doc)
    return f"{doc} [{'; '.join(notes)}]"


def _default_text(flag: Flag) -> str:
    value = flag.default
    if value is None or value in ((), {}):
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if flag.kind is FlagKind.BYTES and isinstance(value, int):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
