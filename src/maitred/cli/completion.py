"""Text made from the flags: the script that `maitred completion SHELL` prints, so that Tab starts no Python, and the
tables of docs/cli.md: `python -m maitred.cli.completion docs/cli.md` writes them, and a test holds them current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from maitred.cli.command import Command, CommonOptions, Options, title
from maitred.cli.flags import FlagKind, UsageError, flags_of, help_text, option
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
    if shell == "fish":
        return "\n".join(["# maitred completion for fish: maitred completion fish | source", *_fish()]) + "\n"
    cases = "\n".join(f'    {line}) words="{" ".join(words)}" ;;' for line, words in _offers())
    before = "autoload -Uz bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return _BASH.replace("@SHELL@", shell).replace("@BEFORE@", before).replace("@CASES@", cases)


def _offers() -> Iterator[tuple[str, Sequence[str]]]:
    """(bash's pattern of the command and the word before the cursor, the words that may follow)."""
    yield '""', [*dict.fromkeys(path.split()[0] for path in COMMANDS), "--help", "--version"]
    for group in {path.split()[0] for path in COMMANDS if " " in path}:
        yield f'"{group}"', [*(path.split()[1] for path in COMMANDS if path.startswith(f"{group} ")), "--help"]
    for path in COMMANDS:
        flags = list(load(path).flags())
        yield from ((f'"{path} "*{flag.name}', flag.choices) for flag in flags if flag.choices)
        yield f'"{path}"*', ["--help", *(name for flag in flags for name in flag.names)]


_BASH = """\
# maitred completion for @SHELL@: eval "$(maitred completion @SHELL@)"
@BEFORE@_maitred() {
  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" line words=""
  line="${COMP_WORDS[*]:1:$((COMP_CWORD-1))}"
  case "$line" in
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


def _fish() -> Iterator[str]:
    yield "complete -c maitred -f"
    for path, (_, summary) in COMMANDS.items():
        first, *rest = path.split()
        seen = f"complete -c maitred -n '__fish_seen_subcommand_from {first}'"
        yield f"complete -c maitred -n __fish_use_subcommand -a {first} -d {_quoted(summary)}"
        yield from (f"{seen} -a {second} -d {_quoted(summary)}" for second in rest)
        for flag in load(path).flags():
            value = "" if flag.kind is FlagKind.SWITCH else " -r -F" if flag.metavar in _FILES else " -x"
            value += f" -a '{' '.join(flag.choices)}'" if flag.choices else ""
            yield f"{seen} -l {flag.key}{value} -d {_quoted(flag.doc)}"


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


BEGIN, END = "<!-- flags: begin -->", "<!-- flags: end -->"


def with_flags(page: str) -> str:
    """`page` with everything between its two marks written anew."""
    before, rest = page.split(BEGIN)
    lines = [line for path in COMMANDS for line in _of_command(path)]
    tables = "\n".join([*lines, "### Flags of every command", "", *_table(CommonOptions)])
    return f"{before}{BEGIN}\n\n{tables}\n{END}{rest.split(END)[1]}"


def _of_command(path: str) -> Iterator[str]:
    command = load(path)
    yield from (f"### `maitred {path}`", "", command.summary, "")
    for part in command.parts:
        yield from (f"**{title(part)}**", "", *_table(part))


def _table(part: type) -> Iterator[str]:
    yield from ("| flag | meaning |", "|---|---|")
    for flag in flags_of(part):
        names = ", ".join(f"`{name}`" for name in flag.names) + (
            "" if flag.kind is FlagKind.SWITCH else f" {flag.metavar}"
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in (names, help_text(flag))) + " |"
    yield ""


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_flags(page.read_text(encoding="utf-8")), encoding="utf-8")
