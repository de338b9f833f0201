"""Stands for `maitred serve` where a test needs one that misbehaves: `python -m tests.fleet.fake_serve WAY ...`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from maitred.executor.parent import end_with_parent
from maitred.fleet.launch import Listening, Loaded, announce


def main(words: list[str]) -> int:
    way, fd = words[0], int(words[words.index("--announce-fd") + 1])
    end_with_parent(fd)
    if way == "usage":
        say("error: no option --bogus")
        return 2
    if way == "garbage":
        os.write(fd, b"hello\n")
    if way == "silent":
        time.sleep(3600)
    if way == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if way == "environment":
        say(str({name: os.environ.get(name) for name in ("MAITRED_FLEET_TOKEN", "MAITRED_API_KEY")}))
    if way == "chatty":
        say("error: the disk is full")
        say("12:00:00.123 INFO access method=POST path=/v1/completions status=200")
    if way == "json":
        say('{"level":"info"}')
    announce(fd, Listening("http://127.0.0.1:1", os.getpid()))
    if way == "dies_once" and not Path(words[1]).exists():
        Path(words[1]).touch()
        return 1
    announce(fd, Loaded({"all": 0.1}))
    if way == "dies" or words[1] == "dies":
        return 1
    time.sleep(3600)
    return 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
