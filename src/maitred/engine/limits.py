"""Limits that the system sets this process: descriptors (`ulimit -n`) and addresses (`ulimit -v`); Python's lock."""

from __future__ import annotations

import errno
import resource
import sys
from contextlib import suppress

from maitred.core.errors import ConfigError

SPARE_DESCRIPTORS = 64  # for the engine's next start, files and logs: no connection takes them
MIN_DESCRIPTORS = 128
_WANT_OF_MEMORY = ("can't start new thread", "emory allocation", "Cannot allocate memory")  # Python's, libraries'
MIN_ADDRESS_BYTES = 2**30  # both processes' code and threads, before any weights; below, libraries end the process
SWITCH_INTERVAL_S, STEP_SWITCH_INTERVAL_S = 0.0005, 0.0001


def hand_over_quickly(within_s: float = SWITCH_INTERVAL_S) -> None:
    """Let an event loop, or an engine's, wait no longer than this for Python's lock, which threads beside it hold when
    they tokenise nothing, or read no file. The interpreter's own 5 ms come anew with every callback, and every step.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), within_s))


def claim_descriptors() -> int:
    """Claim as many as the system allows (soft limit = hard limit). Raises ConfigError for too few to serve with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems call it unlimited, and then refuse so many
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft != resource.RLIM_INFINITY and soft < MIN_DESCRIPTORS:
        raise ConfigError(
            f"this process may have {soft} descriptors, and the server needs {MIN_DESCRIPTORS}; "
            "give it more, as in: ulimit -n 4096"
        )
    return soft


def is_spare(descriptor: int) -> bool:
    """Whether it is one of the last descriptors. The system gives the smallest that is free, so all below are taken."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and descriptor >= soft - SPARE_DESCRIPTORS


def check_addresses() -> None:
    """Raises ConfigError where `ulimit -v` leaves too few to load anything."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < MIN_ADDRESS_BYTES:
        raise ConfigError(
            f"ulimit -v leaves this process {soft / 2**30:.2f} GiB of addresses, and it needs "
            f"{MIN_ADDRESS_BYTES / 2**30:.0f} GiB besides the model's; raise that, and bound memory by a control group"
        )


def remedy_for(error: BaseException) -> str | None:
    """Advice in words for what the system did not give; None for any other error."""
    number = getattr(error, "errno", None)  # ZeroMQ's errors have one too, and are no OSErrors
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(error):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"too many open files, this process may have {soft}; give it more, as in: ulimit -n 4096"
    if number == errno.ENOMEM or any(words in str(error) for words in _WANT_OF_MEMORY):
        return "the system gives no more memory or threads; raise ulimit -v and ulimit -u, or the container's limits"
    if isinstance(error, MemoryError):
        return "out of memory; give less with --kv-cache-memory-bytes, --max-num-seqs or --max-model-len"
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # of Path.expanduser and Path.home
        return "this user has no home directory; set HOME to a folder"
    return None
