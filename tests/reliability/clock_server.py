"""A whole server, engine's process and all, whose wall clock a test sets while it runs (`set_clock.c` does it).

`python -m tests.reliability.clock_server FOLDER` prints its port when it listens. Its engine is the scripted one, whose
outputs go as far as FOLDER/gate says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from maitred.api import server
from maitred.clock import WallClock
from maitred.config import EngineConfig, ProcessConfig, SchedulerConfig, ServerConfig
from maitred.engine.keeper import Start
from maitred.engine.ledger import Ledger
from maitred.engine.process import start_engine_process
from tests.api.test_tenants import table_of
from tests.conftest import ROOT
from tests.engine.fake_child import Gate, command
from tests.waiting import HANGS_S

COMPILER = next((found for name in ("cc", "gcc", "clang", "g++") if (found := shutil.which(name))), None)
PER_MINUTE = 100
LEDGER = "ledger.sqlite"


def main(folder: Path) -> None:
    start = Start(
        config=EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1)),
        process=ProcessConfig(),
        command=command(f"gate={folder / 'gate'}"),
    )
    ledger = Ledger(folder / LEDGER, model="demo")
    running = start_engine_process(start, clock=WallClock(), on_admitted=ledger.opened)
    try:
        config = ServerConfig(port=0, log_level="error")
        app = server.create_app(
            running.replica,
            running.model,
            config,
            admission=running.admission,
            ledger=ledger,
            tenants=SimpleNamespace(table=table_of({"guest": {"requests_per_minute": PER_MINUTE}, "boss": {}})),
        )
        server.Server(app, config, on_open=lambda host, port: say(str(port))).run()
    finally:
        running.replica.stop()
        ledger.close()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass
class ClockServer:
    """The process, as a test sees it."""

    url: str
    gate: Gate
    clock_file: Path

    def set_clock(self, offset_s: int) -> None:
        """From now on it is so many seconds later there than here."""
        with self.clock_file.open("r+b") as file:
            file.write(offset_s.to_bytes(8, sys.byteorder, signed=True))


@contextmanager
def clock_server(folder: Path) -> Iterator[ClockServer]:
    """Ended with the block, which fails unless the server ends well."""
    running = ClockServer("", Gate(folder, 10), folder / "clock")
    running.clock_file.write_bytes(bytes(8))
    library = folder / "set_clock.so"
    source = Path(__file__).with_name("set_clock.c")
    assert COMPILER is not None
    subprocess.run([COMPILER, "-x", "c", "-shared", "-fPIC", "-o", library, source], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(running.clock_file)}
    words = [sys.executable, "-m", "tests.reliability.clock_server", str(folder)]
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
