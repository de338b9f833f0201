"""`maitred COMMAND ...`: finds the command, imports only its module, and turns every failure into one line.

The table below is all that `maitred --help` needs, so it appears without importing any command.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING

import maitred
from maitred.cli.console import fill_closed_streams
from maitred.core.errors import ConfigError, MaitredError, did_you_mean

if TYPE_CHECKING:
    from maitred.cli.command import Command


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class EndSignal:
    """Signal handler that notes whether a signal came."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def note_signals() -> None:
    """Note signals from now on; ignore SIGHUP, for which there may be nothing to read again. For the main thread."""
    ending = EndSignal()
    for number in SIGNALS:
        signal.signal(number, ending)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def noted() -> EndSignal:
    """Signals noted so far, and from now on; none ever unless `note_signals` was called."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler if isinstance(handler, EndSignal) else EndSignal()


def ignore_signals() -> None:
    """Ignore signals in the last lines of a process: Python's own end would put the system's handlers back."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# path -> (module that holds COMMAND, or module:NAME, and one line for the list); a group's own command after the group
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("maitred.cli.serve", "serve a model over HTTP, as OpenAI's API"),
    "route": ("maitred.cli.route", "one address for many servers: routing, failover, one queue"),
    "demo": ("maitred.cli.route:DEMO", "a fleet on this machine under load, and a page whose buttons strike it"),
    "top": ("maitred.cli.top", "watch a server's slots, queue and KV cache in the terminal"),
    "ps": ("maitred.cli.top:PS", "list the models that a server holds"),
    "chat": ("maitred.cli.chat", "talk to a model in the terminal, in process or at a URL"),
    "run": ("maitred.cli.run", "answer a file of OpenAI batch lines; resumes after a kill"),
    "fleet status": ("maitred.cli.fleet:STATUS", "list the replicas behind a router, and who waits for one"),
    "fleet drain": ("maitred.cli.fleet:DRAIN", "send a replica nothing new, and let it finish"),
    "fleet restart": ("maitred.cli.fleet:RESTART", "replace launched replicas one by one, the new one first"),
    "fleet scale": ("maitred.cli.fleet:SCALE", "set how many replicas a router launches"),
    "bench serve": ("maitred.cli.bench:SERVE", "load any OpenAI server and measure it"),
    "bench infer": ("maitred.cli.bench:INFER", "load any KServe v2 server and measure a model"),
    "plan": ("maitred.cli.plan", "find the devices that a load takes, by simulations of what serves"),
    "simulate": ("maitred.cli.simulate", "compare scheduling policies on a workload, without a model"),
    "keys": ("maitred.cli.keys", "make, list, hash and revoke the API keys of tenants"),
    "capture list": ("maitred.cli.optimize:CAPTURE_LIST", "list what serve --capture has kept, by tenant"),
    "capture erase": ("maitred.cli.optimize:CAPTURE_ERASE", "erase all that was captured of a tenant"),
    "prune": (
        "maitred.cli.optimize:PRUNE",
        "take neurons, heads or layers out of a model, and keep what passes a gate",
    ),
    "distill": ("maitred.cli.optimize:DISTILL", "teach a smaller model what a larger one knows"),
    "train-draft": ("maitred.cli.optimize:DRAFT", "train a draft model or a head for speculative decoding"),
    "quantize": ("maitred.cli.optimize:QUANTIZE", "store a model's matrices in 4 or 8 bits, if a gate lets it through"),
    "evaluate": ("maitred.cli.optimize:EVALUATE", "measure a model beside its parent, in the format that is served"),
    "finetune": ("maitred.cli.optimize:FINETUNE", "teach a model your documents: an adapter, or all weights"),
    "federate serve": ("maitred.cli.optimize:FEDERATE", "average adapters that clients train on data of their own"),
    "federate join": ("maitred.cli.optimize:JOIN", "train a federation's adapter on data that stays here"),
    "roofline": ("maitred.cli.roofline", "measure what this machine allows, and how far the engine is from it"),
    "profile": ("maitred.cli.profile", "measure this machine for simulate"),
    "explain": ("maitred.cli.models:EXPLAIN", "tell how a model would be run: fusions, kernels, formats, buffers"),
    "models check": (
        "maitred.cli.models:CHECK",
        "tell whether a Triton repository's models would be served, and why not",
    ),
    "models": ("maitred.cli.models:LIST", "list the models that come as packages, with their licences"),
    "tune": ("maitred.cli.tune", "find a tensor model's best batching, instances and threads"),
    "publish": ("maitred.cli.optimize:PUBLISH", "publish a model as the next version of a shelf"),
    "releases": ("maitred.cli.optimize:RELEASES", "list a shelf's versions, or put one into service again"),
    "replay": ("maitred.cli.replay", "make the decisions of a log again, and name the first that differs"),
    "why": ("maitred.cli.why", "tell what a request waited for, from the decision log"),
    "policies": ("maitred.cli.policies", "list the scheduling policies, and check that they keep their promises"),
    "completion": ("maitred.cli.completion", "print the completion script of bash, zsh or fish"),
}
EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for a failure, 2 for a slip in the words, 130 for Ctrl-C.

    Without `argv` the words are those of the process, and so are its signals.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    serves = argv is None and [word for word in words if word != "--debug"][:1] in (["serve"], ["route"], ["demo"])
    if serves:
        note_signals()  # before anything else, for there are things to put away from now on
    fill_closed_streams()
    try:
        return _exit_code(words)
    finally:
        if serves:
            ignore_signals()


def _exit_code(words: list[str]) -> int:
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # here, where a reader that has left is handled
        return code
    except SystemExit as left:  # argparse, after --help
        return int(left.code or 0)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, as in `maitred serve --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if "--debug" in words:
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        from maitred.cli.flags import UsageError

        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE


def _dispatch(words: list[str]) -> int:
    while words and words[0] == "--debug":
        words = [*words[1:], "--debug"]
    if words[:1] == ["help"] and len(words) > 1:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"maitred {maitred.__version__}")
        return 0
    command_path, rest = _find(words)
    if command_path is None:
        print(overview(words[0]))
        return 0
    command = load(command_path)
    return command.run(command.parse(rest))


def load(path: str) -> Command:
    module, _, name = COMMANDS[path][0].partition(":")
    command: Command = getattr(import_module(module), name or "COMMAND")
    return command


def _find(words: list[str]) -> tuple[str | None, list[str]]:
    """The command's path and the words after it; no path when a group stands alone (`maitred bench --help`)."""
    for path in COMMANDS:
        names = path.split()
        if words[: len(names)] == names:
            return path, words[len(names) :]
    inside = [path for path in COMMANDS if path.split()[0] == words[0]]
    if inside and (len(words) == 1 or words[1] in ("-h", "--help")):
        return None, []
    raise _unknown_command(words, inside)


def _unknown_command(words: list[str], inside: list[str]) -> ConfigError:
    from maitred.cli.flags import UsageError

    if words[0].startswith("-"):
        hint = did_you_mean(words[0], ["--help", "--version"])
        return UsageError(f"no option {words[0]}{hint}; a command comes first, see maitred --help")
    from maitred.engine.foreign import COMMANDS as FOREIGN

    if words[0] in FOREIGN:
        return UsageError(f"no command {words[0]!r}; {FOREIGN[words[0]]}")
    typed = " ".join(words[:2]) if inside else words[0]
    choices = inside or [*COMMANDS, *{path.split()[0] for path in COMMANDS}]
    return UsageError(f"no command {typed!r}{did_you_mean(typed, choices)}; maitred --help lists them")


def overview(group: str | None = None) -> str:
    """The help of `maitred` itself, or of a group of commands."""
    shown = {path: line for path, (_, line) in COMMANDS.items() if group in (None, path.split()[0])}
    width = max(map(len, shown))
    lines = [f"usage: maitred {group + ' ' if group else ''}COMMAND [OPTION ...]", ""]
    if group is None:
        lines += ["An LLM serving system that decides well who is served next.", ""]
    lines += ["commands:", *(f"  {path:{width}}  {line}" for path, line in shown.items()), ""]
    if group is None:
        lines += ["options:", "  -h, --help     show this and leave", "  -V, --version  show the version and leave", ""]
    example = f"maitred {next(iter(shown))} --help"
    lines.append(f"{example} lists that command's flags, with defaults and units.")
    return "\n".join(lines)


def one_line(error: BaseException) -> str:
    """Cause, then what to do, on one line; control characters of what is quoted are made inert."""
    from maitred.engine.limits import remedy_for

    remedy, ours = remedy_for(error), isinstance(error, MaitredError)
    if remedy:
        text = f"{error}; {remedy}" if ours else remedy
    elif ours:
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        text = f"{name}{error.strerror}; run again with --debug for the traceback"
    else:
        name = type(error).__name__
        text = f"unexpected {name}: {error}; this is a fault of maitred, run again with --debug for the traceback"
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


if __name__ == "__main__":
    sys.exit(main())
