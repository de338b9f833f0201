"""scripts/install.py WHAT WORD...: `pip install WORD...`, told in one line as it goes, with the compiler's own count.

pip says nothing or everything: its words go to install.log in the environment, and are shown where it fails.
A word `needs:EXTRA` stands for the packages that maitred requires with that extra, without maitred itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
COMPILED = re.compile(r"\[(\d+)/(\d+)\] (?:Building|Linking)")  # NINJA_STATUS, below
COLLECTED = re.compile(r"Collecting ([\w.-]+)")
FIRST_COMPILED = 5  # files that a pace is taken from
EVERY_S = 10.0  # between two lines where no terminal can overwrite one
SHOWN_LINES = 40  # of the log, where pip fails
WIDTH = 79  # a longer line would not be overwritten where the terminal breaks it


class Progress:
    """One line that says what is being done; on a terminal overwritten, else told again every `EVERY_S`."""

    def __init__(self, what: str, write: Callable[[str], object], clock: Callable[[], float], *, is_terminal: bool):
        self._what, self._write, self._clock, self._is_terminal = what, write, clock, is_terminal
        self._began = self._told_at = clock()
        self._first: tuple[int, float] | None = None  # files compiled when the first one was heard of, and when
        self._write(f"{what} ..." + ("" if is_terminal else "\n"))

    def hear(self, line: str) -> None:
        """One line of pip's."""
        if compiled := COMPILED.search(line):
            self._tell(f"compiling {self._counted(int(compiled[1]), int(compiled[2]))}")
        elif collected := COLLECTED.match(line):
            self._tell(f"getting {collected[1]}")

    def _counted(self, done: int, total: int) -> str:
        now = self._clock()
        before, since = self._first = self._first or (done, now)
        if done < before + FIRST_COMPILED:
            return f"{done}/{total}, usually a minute in all"
        left_s = (now - since) / (done - before) * (total - done)
        return f"{done}/{total}, about " + (f"{left_s / 60:.0f} min left" if left_s > 90 else f"{left_s:.0f} s left")

    def _tell(self, doing: str) -> None:
        if self._is_terminal:
            self._write("\r" + f"{self._what}: {doing}".ljust(WIDTH)[:WIDTH])
        elif self._clock() >= self._told_at + EVERY_S:
            self._told_at = self._clock()
            self._write(f"{self._what}: {doing}\n")

    def end(self, how: str) -> None:
        line = f"{self._what}: {how} after {self._clock() - self._began:.0f} s"
        self._write(f"\r{line.ljust(WIDTH)}\n" if self._is_terminal else f"{line}\n")


def follow(lines: Iterable[str], progress: Progress, log: Path) -> list[str]:
    """Until there are no more; the last ones."""
    kept: list[str] = []
    with log.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(line)
            kept = [*kept[1 - SHOWN_LINES :], line]
            progress.hear(line)
    return kept


def needs_of(project: dict[str, Any], extra: str) -> list[str]:
    """Requirements of the core and of an extra; one that names others of the project (`maitred[a,b]`) has theirs."""

    def of(extra: str) -> Iterator[str]:
        for requirement in project["optional-dependencies"][extra]:
            if others := re.fullmatch(re.escape(project["name"]) + r"\[(.*)\]", requirement):
                for other in others[1].split(","):
                    yield from of(other)
            else:
                yield requirement

    return [*project["dependencies"], *of(extra)]


def main(what: str, words: list[str]) -> int:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    words = [
        each
        for word in words
        for each in (needs_of(project, word.removeprefix("needs:")) if word.startswith("needs:") else [word])
    ]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--verbose", "install", *words]
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "PYTHONUNBUFFERED": "1"}
    log = Path(sys.prefix) / "install.log"

    def write(text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)

    progress = Progress(what, write, time.monotonic, is_terminal=sys.stderr.isatty())
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as pip:
        assert pip.stdout is not None
        last = follow(pip.stdout, progress, log)
    progress.end("failed" if pip.returncode else "done")
    if pip.returncode:
        write(f"{''.join(last)}pip failed; all of its words are in {log}\n")
    return pip.returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)
