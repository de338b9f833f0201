"""A process that says when requests are due: a byte for each, written when its time has come.

It is one of its own, for a thread would wait for the interpreter whenever the loop that it tells is busy, and that
loop's own timers are a thousandth of a second wide.
"""

from __future__ import annotations

import array
import sys
import time


def main() -> None:
    """Times (doubles, s of the machine's monotonic clock, ascending) on standard input until it ends."""
    times = array.array("d", sys.stdin.buffer.read())
    at = 0
    while at < len(times):
        time.sleep(max(0.0, times[at] - time.monotonic()))
        first, now = at, time.monotonic()
        while at < len(times) and times[at] <= now:
            at += 1
        sys.stdout.buffer.write(b"." * (at - first))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
