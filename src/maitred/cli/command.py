"""A command: which dataclasses its flags come from, how words become their instances, and what its help looks like."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from maitred.cli.flags import Flag, Kind, flags_of, from_word, help_text, option
from maitred.errors import ConfigError, did_you_mean

T = TypeVar("T")


class UsageError(ConfigError):
    """The words of the command line, or a line of the config file, make no sense; exit code 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """Common to all commands."""

    config: str | None = option(None, metavar="FILE")
    """YAML file whose keys are the long flag names; the command line wins over it."""
    debug: bool = False
    """Show the traceback of a failure."""


class Options:
    """What the user asked for: one instance for each part of the command."""

    def __init__(self, parts: Mapping[type, object], given: Container[str] = ()) -> None:
        self._parts, self._given = parts, given

    def __getitem__(self, part: type[T]) -> T:
        value = self._parts[part]
        assert isinstance(value, part)
        return value

    def was_given(self, field: str) -> bool:
        """Whether the user set it, be it to its default."""
        return field in self._given


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One verb of `maitred`. Lives in a module of its own, as `COMMAND`, and is imported when it is run."""

    path: str  # "bench serve"
    summary: str  # one sentence
    run: Callable[[Options], int]  # gives the exit code
    parts: tuple[type, ...]  # dataclasses whose fields are the flags, in the order of --help
    positional: str | None = None  # the field that may also stand without its flag
    first: tuple[str, ...] = ()  # fields whose flags are wanted most often, shown before all parts
    examples: tuple[str, ...] = ()

    def flags(self) -> Iterator[Flag]:
        for part in (*self.parts, CommonOptions):
            yield from flags_of(part)

    def parse(self, words: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options:
        """Raises UsageError. Defaults < config file < environment < command line."""
        given = _parse_words(self, words)
        values = _from_file(self, given) | _from_environment(self, environ) | given
        missing = [flag.name for flag in self.flags() if flag.required and flag.field not in values]
        if missing:
            from maitred.engine.foreign import COMMANDS

            hint = f"; {COMMANDS[self.path]}" if self.path in COMMANDS else ""
            raise UsageError(f"{missing[0]} is required{hint}; see maitred {self.path} --help")
        return Options({part: _build(part, values) for part in (*self.parts, CommonOptions)}, values)


def _build(part: type, values: Mapping[str, object]) -> object:
    try:
        return part(**{flag.field: values[flag.field] for flag in flags_of(part) if flag.field in values})
    except ConfigError as error:
        raise UsageError(_in_words_of_flags(str(error), part)) from error


def _in_words_of_flags(message: str, part: type) -> str:
    """`max_num_seqs is 0` -> `--max-num-seqs is 0`: dataclasses name fields, people type flags."""
    for flag in flags_of(part):
        where = rf"\b{flag.field}\b" if "_" in flag.field else rf"^{flag.field}(?= is )"
        message = re.sub(where, flag.name, message)
    return message


def _from_environment(command: Command, environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for flag in command.flags():
        if flag.env is not None and environ.get(flag.env):
            value = from_word(flag, environ[flag.env])
            values[flag.field] = (value,) if flag.kind is Kind.LIST else value
    return values


def _from_file(command: Command, given: Mapping[str, object]) -> dict[str, object]:
    path = given.get("config")
    if path is None:
        return {}
    from maitred.cli.config_file import read_config_file

    return read_config_file(str(path), list(command.flags()))


# ---- argparse


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((100, 24)).columns, 116)
        super().__init__(prog, max_help_position=34, width=width)


def make_parser(command: Command) -> argparse.ArgumentParser:
    examples = "\n".join(f"  {line}" for line in command.examples)
    parser = _Parser(
        prog=f"maitred {command.path}",
        description=command.summary,
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=_Formatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
        usage=_usage(command),
    )
    first = parser.add_argument_group("Wanted most often") if command.first else None
    for part in (*command.parts, CommonOptions):
        lines = (part.__doc__ or part.__name__).strip().splitlines()
        group = parser.add_argument_group(lines[0].rstrip("."))
        for flag in flags_of(part):
            _add(first if first is not None and flag.field in command.first else group, flag)
            if flag.field == command.positional:
                number = "*" if flag.kind is Kind.LIST else "?"
                parser.add_argument(f"{flag.field}_", nargs=number, metavar=flag.metavar, help=argparse.SUPPRESS)
        if part is CommonOptions:
            group.add_argument("-h", "--help", action="help", help="Show this and leave.")
    return parser


def _usage(command: Command) -> str:
    bare = [_usage_word(flag) for flag in command.flags() if flag.field == command.positional]
    required = [
        f"{flag.short or flag.name} {flag.metavar}"
        for flag in command.flags()
        if flag.required and flag.field != command.positional
    ]
    return " ".join(["maitred", command.path, *bare, *required, "[OPTION ...]"])


def _usage_word(flag: Flag) -> str:
    word = f"{flag.metavar} ..." if flag.kind is Kind.LIST else flag.metavar
    return word if flag.required else f"[{word}]"


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    names = [name for name in (flag.short, flag.name) if name]
    text = help_text(flag).replace("%", "%%")
    extra: dict[str, Any] = {"dest": flag.field, "help": text}
    if flag.kind is Kind.SWITCH:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **extra)
    else:
        action = "append" if flag.kind in (Kind.LIST, Kind.MAPPING) else "store"
        if flag.bare is not None:
            extra |= {"nargs": "?", "const": flag.bare}
        group.add_argument(*names, action=action, metavar=flag.metavar, **extra)


def _parse_words(command: Command, words: Sequence[str]) -> dict[str, object]:
    parser = make_parser(command)
    glued = [word for word in words if re.match("-h[a-z]", word)]  # argparse would read -hf as -h, and show the help
    if glued:
        raise UsageError(_unknown_word(command, parser, glued))
    namespace, unknown = parser.parse_known_args(list(words))
    if unknown:
        raise UsageError(_unknown_word(command, parser, unknown))
    given: dict[str, object] = vars(namespace)
    values = {flag.field: _value(flag, given[flag.field]) for flag in command.flags() if flag.field in given}
    bare = given.get(f"{command.positional}_")
    if bare not in (None, []) and command.positional is not None:
        if command.positional in values:
            raise UsageError(f"both {bare!r} and --{command.positional} {values[command.positional]!r} given; drop one")
        values[command.positional] = tuple(bare) if isinstance(bare, list) else bare
    return values


def _value(flag: Flag, given: object) -> object:
    """argparse kept words; only here do they get types, so that every error is worded by us."""
    try:
        if isinstance(given, bool):
            return given
        if not isinstance(given, list):
            return from_word(flag, str(given))
        items = [from_word(flag, str(word)) for word in given]
    except ConfigError as error:
        raise UsageError(str(error)) from None
    if flag.kind is Kind.LIST:
        return tuple(items)
    return {key: value for pairs in items if isinstance(pairs, dict) for key, value in pairs.items()}


def _unknown_word(command: Command, parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    word = next((w for w in unknown if w.startswith("-")), unknown[0]).split("=")[0]
    where = f"see {parser.prog} --help"
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; {where}"
    return f"no option {word}{what_was_meant(word, list(parser._option_string_actions))}; {where}"


def what_was_meant(flag: str, own: Sequence[str]) -> str:
    """What another server's flag is called here, or which of `own` was mistyped; nothing if nobody knows."""
    from maitred.engine.foreign import EQUAL, flag_alike, flag_named

    has_engine = "--max-num-seqs" in own  # elsewhere flags of servers mean nothing
    told = flag_named(flag) if has_engine else None
    if told is None and ((near := did_you_mean(flag, own, cutoff=0.8)) or not has_engine):
        return near
    told = told or flag_alike(flag)
    if told is None:
        return ""
    names = set(re.findall(r"--[a-z0-9-]+", told))
    elsewhere = ", of maitred serve" if told.startswith(EQUAL) and names and not names & set(own) else ""
    return f"; {told}{elsewhere}"
