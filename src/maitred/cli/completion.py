"""`maitred completion SHELL`: a static script made from the flags, so that Tab starts no Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from maitred.cli.command import Command, Options, UsageError
from maitred.cli.flags import Flag, Kind, option
from maitred.cli.main import COMMANDS, load

SHELLS = ("bash", "zsh", "fish")
_FILES = {"FILE", "DIR", "LOG", "MODEL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """Completion."""

    shell: str = option("bash", choices=SHELLS)
    """The shell that reads the script."""

    def __post_init__(self) -> None:
        if self.shell not in SHELLS:
            raise UsageError(f"shell is {self.shell!r}; choose one of {', '.join(SHELLS)}")


def completion_script(shell: str) -> str:
    writers = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    return writers[shell]([load(path) for path in COMMANDS])


def _long_names(command: Command) -> list[str]:
    names = ["--help"]
    for flag in command.flags():
        names.append(flag.name)
        if flag.kind is Kind.SWITCH:
            names.append("--no-" + flag.key)
    return names


def _with_choices(command: Command) -> Iterator[Flag]:
    return (flag for flag in command.flags() if flag.choices)


def _subcommands() -> dict[str, list[str]]:
    """First word -> second words: `bench` -> [`serve`]."""
    return {first: [" ".join(p.split()[1:]) for p in paths] for first, paths in groupby(COMMANDS, _first_word)}


def _first_word(path: str) -> str:
    return path.split(maxsplit=1)[0]


def _bash(commands: list[Command]) -> str:
    cases = []
    for first, seconds in _subcommands().items():
        if seconds != [""]:
            cases.append(f'    "{first}") words="{" ".join(seconds)} --help" ;;')
    for command in commands:
        for flag in _with_choices(command):
            cases.append(f'    "{command.path} "*{flag.name}) words="{" ".join(flag.choices)}" ;;')
        cases.append(f'    "{command.path}"*) words="{" ".join(_long_names(command))}" ;;')
    top = " ".join([*_subcommands(), "--help", "--version"])
    return _BASH.replace("@TOP@", top).replace("@CASES@", "\n".join(cases))


# `line` is the command and the word before the cursor, so that "serve --dtype" can offer the values of --dtype.
_BASH = """\
# maitred completion for bash: eval "$(maitred completion bash)"
_maitred() {
  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" line words=""
  line="${COMP_WORDS[*]:1:$((COMP_CWORD-1))}"
  case "$line" in
    "") words="@TOP@" ;;
@CASES@
  esac
  if [[ "$previous" == -* && "$current" != -* && "$words" == *--help* ]] || [[ -z "$words" ]]; then
    COMPREPLY=($(compgen -f -- "$current"))
  else
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  fi
}
complete -o filenames -o bashdefault -F _maitred maitred
"""


def _zsh(commands: list[Command]) -> str:
    script = _bash(commands).replace("for bash", "for zsh").replace("completion bash", "completion zsh")
    return script.replace("_maitred() {", "autoload -Uz bashcompinit && bashcompinit\n_maitred() {", 1)


def _fish(commands: list[Command]) -> str:
    lines = ["# maitred completion for fish: maitred completion fish | source", "complete -c maitred -f"]
    for first in _subcommands():
        summary = next(line for path, (_, line) in COMMANDS.items() if _first_word(path) == first)
        lines.append(f"complete -c maitred -n __fish_use_subcommand -a {first} -d {_quoted(summary)}")
    for command in commands:
        lines += _fish_command(command)
    return "\n".join(lines) + "\n"


def _fish_command(command: Command) -> Iterator[str]:
    first, *rest = command.path.split()
    seen = f"'__fish_seen_subcommand_from {first}'"
    for second in rest:
        yield f"complete -c maitred -n {seen} -a {second} -d {_quoted(command.summary)}"
    for flag in command.flags():
        value = "" if flag.kind is Kind.SWITCH else " -r -F" if flag.metavar in _FILES else " -x"
        value += f" -a '{' '.join(flag.choices)}'" if flag.choices else ""
        yield f"complete -c maitred -n {seen} -l {flag.key}{value} -d {_quoted(flag.doc)}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _run(options: Options) -> int:
    print(completion_script(options[CompletionOptions].shell), end="")
    return 0


COMMAND = Command(
    path="completion",
    summary="Print the completion script of a shell.",
    run=_run,
    parts=(CompletionOptions,),
    positional="shell",
    examples=('eval "$(maitred completion bash)"', "maitred completion fish | source"),
)
