"""A command: which dataclasses its flags come from, how words become their instances, and what its help looks like."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from maitred.cli.flags import Flag, FlagKind, UsageError, flags_of, help_text, option
from maitred.core.errors import ConfigError

if TYPE_CHECKING:
    import yaml

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """Common to all commands."""

    config: str | None = option(None, metavar="FILE")
    """YAML file whose keys are the long flag names; the command line wins over it."""
    debug: bool = False
    """Show the traceback of a failure."""


class Options:
    """Parsed arguments: one instance for each part of the command."""

    def __init__(
        self, parts: Mapping[type, object], given: Container[str] = (), after_dashes: tuple[str, ...] = ()
    ) -> None:
        self._parts, self._given = parts, given
        self.after_dashes = after_dashes
        """Words after `--`, of a command that takes them."""

    def __getitem__(self, part: type[T]) -> T:
        value = self._parts[part]
        assert isinstance(value, part)
        return value

    def with_part(self, part: object) -> Options:
        """The same with another instance of one part."""
        return Options({**self._parts, type(part): part}, self._given, self.after_dashes)

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
    first: tuple[str, ...] = ()  # fields whose flags are wanted most often, shown before all parts in this order
    examples: tuple[str, ...] = ()
    after_dashes: str = ""  # what may follow `--`, as the usage line shows it; empty for nothing

    def flags(self) -> Iterator[Flag]:
        for part in (*self.parts, CommonOptions):
            yield from flags_of(part)

    def parse(self, words: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options:
        """Raises UsageError. Defaults < config file < environment < command line."""
        words, after = _cut(words) if self.after_dashes else (words, ())
        given = _parse_words(self, words)
        values: dict[str, object] = {}
        if "config" in given:
            values = read_config_file(str(given["config"]), list(self.flags()))
        for flag in self.flags():
            if flag.env and flag.env in environ and flag.field not in given:
                values[flag.field] = flag.join(flag.parse(environ[flag.env]))
        values |= given
        missing = [flag for flag in self.flags() if flag.required and flag.field not in values]
        if missing:
            from maitred.engine.foreign import COMMANDS

            hint = f"; {COMMANDS[self.path]}" if self.path in COMMANDS else ""
            is_bare = missing[0].field == self.positional  # people write it without a flag
            name = missing[0].metavar if is_bare else missing[0].name
            raise UsageError(f"{name} is required{hint}; see maitred {self.path} --help")
        return Options(
            {part: _build(part, values, self.positional) for part in (*self.parts, CommonOptions)}, values, after
        )


def deferred(where: str) -> Callable[[Options], int]:
    """What a command runs, as `module:function`, of a module that is too heavy for its help: imported when it runs."""
    module, _, name = where.partition(":")

    def run(options: Options) -> int:
        code: int = getattr(import_module(module), name)(options)
        return code

    return run


def _cut(words: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """Words before the first `--`, and after it."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], tuple(words[at + 1 :])


def _build(part: type, values: Mapping[str, object], positional: str | None) -> object:
    flags = flags_of(part)
    try:
        return part(**{flag.field: values[flag.field] for flag in flags if flag.field in values})
    except ConfigError as error:  # dataclasses name fields, people type flags
        message = str(error)
        for flag in flags:
            if flag.required and flag.field == positional:
                continue
            where = rf"\b{flag.field}\b" if "_" in flag.field else rf"^{flag.field}(?= is )"
            message = re.sub(where, flag.name, message)
        raise UsageError(message) from error


# ---- argparse


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def make_parser(command: Command) -> argparse.ArgumentParser:
    width = min(shutil.get_terminal_size((100, 24)).columns, 116)
    parser = _Parser(
        prog=f"maitred {command.path}",
        description=command.summary,
        epilog="\n  ".join(["examples:", *command.examples]) if command.examples else None,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=width),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
        usage=_usage(command),
    )
    by_field = {flag.field: flag for flag in command.flags()}
    first = parser.add_argument_group("Wanted most often")
    for field in command.first:
        _add(first, by_field[field])
    for part in (*command.parts, CommonOptions):
        group = parser.add_argument_group(title(part))
        for flag in flags_of(part):
            if flag.field not in command.first:
                _add(group, flag)
    group.add_argument("-h", "--help", action="help", help="Show this and leave.")
    if command.positional is not None:
        number = "*" if by_field[command.positional].kind is FlagKind.LIST else "?"
        parser.add_argument("_", nargs=number, help=argparse.SUPPRESS)
    return parser


def title(part: type) -> str:
    return (part.__doc__ or part.__name__).strip().splitlines()[0].rstrip(".")


def _usage(command: Command) -> str:
    words = ["maitred", command.path]
    for flag in sorted(command.flags(), key=lambda flag: flag.field != command.positional):
        if flag.field == command.positional:
            word = flag.metavar + (" ..." if flag.kind is FlagKind.LIST else "")
            words.append(word if flag.required else f"[{word}]")
        elif flag.required:
            words.append(f"{flag.short or flag.name} {flag.metavar}")
    after = [f"[-- {command.after_dashes}]"] if command.after_dashes else []
    return " ".join([*words, "[OPTION ...]", *after])


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    names = [name for name in (flag.short, flag.name) if name]
    says: dict[str, Any] = {"dest": flag.field, "help": help_text(flag).replace("%", "%%")}
    if flag.kind is FlagKind.SWITCH:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **says)
        return
    says |= {"metavar": flag.metavar, "type": flag.parse}  # so that every error is worded by us
    if flag.kind.join is not None:
        says["action"] = "extend"
    if flag.bare is not None:
        says |= {"nargs": "?", "const": flag.bare}
    group.add_argument(*names, **says)


def _parse_words(command: Command, words: Sequence[str]) -> dict[str, object]:
    unknown = [word for word in words if re.match("-h[a-z]", word)]  # argparse would read -hf as -h, and show the help
    if not unknown:
        namespace, unknown = make_parser(command).parse_known_args(list(words))
    if unknown:
        raise _unknown_word(command, unknown)
    given, flags = vars(namespace), {flag.field: flag for flag in command.flags()}
    values = {field: flags[field].join(value) for field, value in given.items() if field in flags}
    field, bare = command.positional, given.get("_")
    if field is not None and bare not in (None, []):
        if field in values:
            raise UsageError(f"both {bare!r} and --{field} {values[field]!r} given; drop one")
        values[field] = tuple(bare) if isinstance(bare, list) else flags[field].parse(bare)
    return values


def _unknown_word(command: Command, unknown: Sequence[str]) -> UsageError:
    word = next((w for w in unknown if w.startswith("-")), unknown[0]).split("=")[0]
    if not word.startswith("-"):
        return UsageError(f"unexpected argument {word!r}; see maitred {command.path} --help")

    from maitred.engine.foreign import what_was_meant

    own = ["-h", "--help", *(name for flag in command.flags() for name in flag.names)]
    return UsageError(f"no option {word}{what_was_meant(word, own)}; see maitred {command.path} --help")


def read_config_file(path: str, flags: Sequence[Flag]) -> dict[str, object]:
    """Field -> value. Raises UsageError with file, line and key."""
    import yaml

    from maitred.engine.foreign import what_was_meant

    # lists may go by their plural: `api-keys` as well as `api-key`
    by_key = {key: f for f in flags if f.field != "config" for key in (f.field.replace("_", "-"), f.key)}
    values: dict[str, object] = {}
    for key_node, value_node in _entries(path):
        where, key = f"{path}:{key_node.start_mark.line + 1}", str(key_node.value).replace("_", "-")
        if key not in by_key:
            meant = what_was_meant(f"--{key}", [flag.name for flag in by_key.values()])
            meant = meant.replace("did you mean --", "did you mean ")  # here a key
            raise UsageError(f"{where}: no option {key_node.value!r}{meant}")
        flag, value = by_key[key], None
        if flag.field in values:
            raise UsageError(f"{where}: {key_node.value!r} stands twice; keep one")
        try:
            value = yaml.constructor.SafeConstructor().construct_document(value_node)  # no objects, no code
            if value is not None:  # null leaves the default
                values[flag.field] = typed(flag, value)
        except (ValueError, UsageError, yaml.YAMLError) as error:
            is_worded = flag.env is not None and isinstance(error, UsageError)  # of a key
            told = str(error) if is_worded else f"{flag.key} is {value!r}; it must be {flag.kind.form}"
            raise UsageError(f"{where}: {told}") from None
    return values


def typed(flag: Flag, value: Any) -> Any:
    """The flag's value from what YAML read. Raises ValueError and UsageError."""
    if flag.kind in (FlagKind.SWITCH, FlagKind.MAPPING):
        return _require(value, bool if flag.kind is FlagKind.SWITCH else dict)
    if flag.kind is FlagKind.LIST and isinstance(value, list):
        return tuple(word for item in value for word in flag.parse(str(_require(item, str, int, float))))
    return flag.join(flag.parse(str(_require(value, str, int, float))))


def _require(value: object, *kinds: type) -> object:
    if type(value) not in kinds:  # a bool is an int to Python, a slip to us
        raise ValueError(value)
    return value


def _entries(path: str) -> list[tuple[yaml.Node, yaml.Node]]:
    import yaml

    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {path}: is not UTF-8 text; give a YAML file") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path}:{line}: is not valid YAML: {error.problem}") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: holds no keys; write lines such as `port: 8000`")
    return root.value if root is not None else []
