"""A whole server, engine's process and all, whose wall clock a test sets while it runs (`set_clock.c` does it).

`python -m tests.reliability.clock_server FOLDER` prints its port when it listens. Its engine is the scripted one, whose
outputs go as far as FOLDER/gate says.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from maitred.api import serving
from maitred.api.http import server
from maitred.config import EngineConfig, ProcessConfig, SchedulerConfig, ServerConfig
from maitred.engine.child_process import in_child_process
from maitred.engine.starting import StartingEngine
from maitred.engine.supervisor import Start
from maitred.storage.ledger import Ledger
from tests import ROOT
from tests.engine.fake_child import Gate, command
from tests.fakes_api import table_of
from tests.waiting import HANGS_S

COMPILER = next((found for name in ("cc", "gcc", "clang", "g++") if (found := shutil.which(name))), None)
PER_MINUTE = 100
LEDGER = "ledger.sqlite"


def main(folder: Path) -> None:
    start = Start(
        config=EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1)),
        process=ProcessConfig(),
        open=in_child_process(command(f"gate={folder / 'gate'}")),
    )
    ledger = Ledger(folder / LEDGER, model="demo")
    running = StartingEngine(start, on_admitted=ledger.opened).wait()
    try:
        config = ServerConfig(port=0, log_level="error")
        app = serving.create_app(
            running.replica,
            running.model,
            config,
            admission=running.admission,
            ledger=ledger,
            tenants=SimpleNamespace(
                table=table_of({"guest": {"requests_per_minute": PER_MINUTE}, "boss": {}}), num_failures=0
            ),
        )
        server.HttpServer(app, config, on_open=lambda host, port: say(str(port))).run()
    finally:
        running.replica.stop()
        ledger.close()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Clock:
    """The wall clock of processes that were started with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self._added_ns = 0
        self.settled_at = 0.0  # unix seconds, here
        self._write(0, 0, 0, 0)
        library = folder / "set_clock.so"
        source = Path(__file__).with_name("set_clock.c")
        assert COMPILER is not None
        subprocess.run([COMPILER, "-x", "c", "-shared", "-fPIC", "-o", library, source], check=True)
        self.environment = {**os.environ, "LD_PRELOAD": str(library), "CLOCK_FILE": str(self._file)}

    @property
    def offset_s(self) -> float:
        """How much later it is there than here, once it is settled."""
        return self._added_ns / 1e9

    def set(self, offset_s: int) -> None:
        """From now on it is so many seconds later there than here."""
        self._added_ns = offset_s * 10**9
        self._write(self._added_ns, 0, 0, 0)

    def slew(self, by_s: int, over_s: int) -> None:
        """Within so many seconds, make it so much later there than it is now, by running faster or slower."""
        now_ns = time.time_ns()
        self._write(self._added_ns, by_s * 10**9, now_ns, over_s * 10**9)
        self._added_ns += by_s * 10**9
        self.settled_at = now_ns / 1e9 + over_s

    def _write(self, *values: int) -> None:
        if not self._file.exists():
            self._file.write_bytes(bytes(32))
        with self._file.open("r+b") as file:  # the same file: processes have it mapped
            file.write(struct.pack("=4q", *values))


@dataclass
class ClockServer:
    """The process, as a test sees it."""

    url: str
    gate: Gate
    clock: Clock


@contextmanager
def clock_server(folder: Path) -> Iterator[ClockServer]:
    """Ended with the block, which fails unless the server ends well."""
    running = ClockServer("", Gate(folder, 10), Clock(folder))
    words = [sys.executable, "-m", "tests.reliability.clock_server", str(folder)]
    environment = running.clock.environment
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        try:
            assert process.stdout is not None
            running.url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            yield running
            process.terminate()
            assert process.wait(HANGS_S) == 0
        finally:
            process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
