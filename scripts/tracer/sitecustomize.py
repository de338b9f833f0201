"""Calls between functions of maitred, written down while a phase lasts; for a server with this folder in PYTHONPATH.

Python imports this file by its name in every process that starts, the engine's too. `CALLS_TO` names the file for the
calls, one a line (phase, caller, callee; a function is `file:line`), and the first byte of `CALLS_PHASE` says which
phase it is now; in phase 0 nothing is written.
"""

import mmap
import os
import sys
import threading
from types import FrameType

SOURCES = os.environ["CALLS_FROM"]
LOG = os.open(os.environ["CALLS_TO"], os.O_WRONLY | os.O_APPEND)  # a short line is appended whole, by every process
with open(os.environ["CALLS_PHASE"], "rb") as shared:
    PHASE = mmap.mmap(shared.fileno(), 1, prot=mmap.PROT_READ)
known: set[tuple[int, int, int]] = set()  # what was written already


def write_call(frame: FrameType, event: str, argument: object) -> None:
    """Python's trace function, called as each function begins or goes on; by returning None it hears of no line."""
    phase, code = PHASE[0], frame.f_code
    if not phase or not code.co_filename.startswith(SOURCES):
        return
    caller = frame.f_back.f_code if frame.f_back else None
    call = (phase, id(caller), id(code))
    if call in known:
        return
    known.add(call)
    by = f"{caller.co_filename}:{caller.co_firstlineno}" if caller else "-"
    os.write(LOG, f"{phase}\t{by}\t{code.co_filename}:{code.co_firstlineno}\n".encode())


threading.settrace(write_call)
sys.settrace(write_call)
