"""`maitred serve` as a process of its own, for benchmarks."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def served(*words: str) -> Iterator[str]:
    """Its URL, once it is ready; `words` follow `maitred serve`."""
    command = (sys.executable, "-P", "-m", "maitred", "serve", *words, "--host", "127.0.0.1", "--port", "0")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    break
            else:
                raise SystemExit(f"it did not start:\n{''.join(said)}")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield found[0]
        finally:
            process.terminate()
