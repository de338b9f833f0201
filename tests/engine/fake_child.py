"""An engine's process without a model: the real child around a scripted executor, whose bad habits a test can choose.

Run as `python -m tests.engine.fake_child HABITS FOLDER`, where HABITS are words such as `step_s=0.01,deterministic=0`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

import msgspec
import zmq

from maitred.config import EngineConfig
from maitred.core.clock import WallClock
from maitred.core.errors import CheckpointError
from maitred.core.request import RequestSpec
from maitred.core.step import ModelOutput, SampledRow, SchedulerOutput
from maitred.engine import child_process
from maitred.engine.child import main
from maitred.engine.child_process import REPORTS
from maitred.engine.loop import Builder, LoadedEngine
from maitred.engine.memory import MemoryPlan
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.scheduler.engine_core import EngineCore
from maitred.text.tokenizer import Tokenizer
from tests.engine.worlds import model_facts
from tests.fakes import FakeExecutor, make_scheduler
from tests.waiting import HANGS_S

BLOCK_SIZE = 4
_tokenizer = Tokenizer.from_folder(BUILTIN_FOLDER)
LETTERS = tuple(_tokenizer.encode(letter, add_special_tokens=False)[0] for letter in ascii_lowercase)


@dataclass
class Habits:
    """What goes wrong, and how fast it is."""

    step_s: float = 0.0
    deterministic: int = 1
    die_at: int = -1  # output position at which a request whose prompt has the token 13 kills the process
    hang_at: int = -1  # the same, but the step never ends
    raise_at: int = -1
    refuse: int = 0  # loading fails
    no_memory: int = 0
    exit_at_start: int = 0
    gate: str = ""  # a file with a number: no output goes beyond it, the step that would waits for a larger one;
    # below zero, nothing is loaded
    other_model: int = 0  # each process finds other weights
    shout_at: int = -1  # the same, but it says a line of `shout_bytes` to the server
    shout_bytes: int = 0
    garbage: int = 0  # writes what is no frame before it loads, and as a stranger
    max_frame_bytes: int = child_process.MAX_FRAME_BYTES
    max_model_len: int = 512

    @classmethod
    def read(cls, words: str) -> Habits:
        pairs = (word.split("=") for word in words.split(",") if word)
        return cls(**{name: value if name == "gate" else type(getattr(cls(), name))(value) for name, value in pairs})


class Gate:
    """How far outputs may go, in the hands of a test: what is in flight when is then nobody's luck."""

    def __init__(self, folder: Path, open_to: int) -> None:
        self._path = folder / "gate"
        self.open_to(open_to)
        self.habit = f"gate={self._path}"

    def open_to(self, num_output: int) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(str(num_output))
        new.replace(self._path)

    def shut(self) -> None:
        """The next engine does not load before it is opened again."""
        self.open_to(-1)

    def open(self) -> None:
        self.open_to(10**9)


class ChainedExecutor(FakeExecutor):
    """Each token is a function of everything before it, of the seed and of the sample: what a resumed request must
    bring back exactly. A letter always, so that texts are readable.
    """

    def __init__(self, habits: Habits, tell: Callable[[str], None]) -> None:
        super().__init__(self._next)
        self._habits, self._tell = habits, tell
        self._known: dict[str, list[int]] = {}

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        time.sleep(self._habits.step_s)
        for new in plan.new_requests:
            self._known[new.request_id] = [*new.spec.prompt_token_ids, *new.output_token_ids]
        output = super().execute(plan)
        return ModelOutput(tuple(self._remember(row) for row in output.rows))

    def _remember(self, row: SampledRow) -> SampledRow:
        self._known[row.request_id].extend(row.token_ids)
        return row

    def _next(self, request_id: str, position: int) -> int:
        known, spec = self._known[request_id], self._requests[request_id]
        assert len(known) == position, f"{request_id} has {len(known)} tokens, and position {position} is sampled"
        self._wait_at_the_gate(position - spec.num_prompt_tokens)
        self._misbehave(spec, position - spec.num_prompt_tokens)
        return next_token(known, spec.seed, spec.sample_index)

    def _wait_at_the_gate(self, num_output: int) -> None:
        while self._habits.gate and num_output >= int(Path(self._habits.gate).read_text()):
            time.sleep(0.002)

    def _misbehave(self, spec: RequestSpec, num_output: int) -> None:
        habits = self._habits
        if 13 not in spec.prompt_token_ids:
            return
        if num_output == habits.die_at:
            os.kill(os.getpid(), signal.SIGSEGV)
        if num_output == habits.hang_at:
            while True:
                time.sleep(0.01)
        if num_output == habits.raise_at:
            raise RuntimeError("the model fell over")
        if num_output == habits.shout_at:
            self._tell("x" * habits.shout_bytes)


def next_token(known: list[int], seed: int, sample_index: int) -> int:
    digest = hashlib.sha256(repr((known, seed, sample_index)).encode()).digest()
    return LETTERS[digest[0] % len(LETTERS)]


def expected(prompt: list[int], max_tokens: int, seed: int = 0, sample_index: int = 0) -> list[int]:
    """What an engine gives that nothing happened to."""
    known = list(prompt)
    for _ in range(max_tokens):
        known.append(next_token(known, seed, sample_index))
    return known[len(prompt) :]


def build_fake(
    habits: Habits,
) -> Builder:
    def build(
        config: EngineConfig, names: tuple[str, ...], tell: Callable[[str], None], wake: Callable[[], None]
    ) -> LoadedEngine:
        while habits.gate and int(Path(habits.gate).read_text()) < 0:
            time.sleep(0.002)
        if habits.exit_at_start:
            sys.stderr.write("something went wrong here\n")
            sys.stderr.flush()
            os._exit(7)
        if habits.no_memory:
            raise MemoryError
        if habits.refuse:
            raise CheckpointError("there is no such model; choose another")
        tell("memory  none is needed")
        facts = model_facts(habits.max_model_len)
        if habits.other_model:
            facts = msgspec.structs.replace(facts, revision=str(os.getpid()))
        executor = ChainedExecutor(habits, tell)
        scheduler = make_scheduler(
            num_blocks=2048,
            block_size=BLOCK_SIZE,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.token_budget,
            policy=config.scheduler.policy,
        )
        plan = MemoryPlan(
            available_bytes=1,
            weights_bytes=0,
            bytes_per_block=1,
            block_size=BLOCK_SIZE,
            num_blocks=2048,
            max_model_len=habits.max_model_len,
            model_context=habits.max_model_len,
            longest_context=habits.max_model_len,
        )
        return LoadedEngine(
            core=EngineCore(scheduler, executor, WallClock()),
            facts=facts,
            memory_plan=plan,
            deterministic=bool(habits.deterministic),
            close=executor.close,
        )

    return build


def _write_garbage(folder: Path) -> None:
    """What an attacker might send, who found the socket. The last is so large that he is cut off."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{folder / REPORTS}")
        for garbage in (pickle.dumps(OSError("boom")), b"", b"\xc1" * 1000, msgspec.msgpack.encode(["Ready", 1])):
            socket.send(garbage)
        closed = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.send(bytes(2 * child_process.MAX_FRAME_BYTES + 1))
        assert closed.poll(HANGS_S * 1000)
        socket.close(linger=0)


def command(habits: str = "") -> tuple[str, ...]:
    """The words that start it."""
    return (sys.executable, "-m", "tests.engine.fake_child", habits)


if __name__ == "__main__":
    chosen = Habits.read(sys.argv[1])
    child_process.MAX_FRAME_BYTES = chosen.max_frame_bytes
    if chosen.garbage:  # now: when we have spoken, nobody finds the socket any more
        _write_garbage(Path(sys.argv[-1]))
    sys.exit(main(sys.argv[2:], build_fake(chosen)))
