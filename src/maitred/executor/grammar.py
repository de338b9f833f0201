"""Grammars of an executor's requests: matchers live in a worker process, their masks in memory shared with it.

A step costs one message to the worker, which tells the sampled tokens, and one short answer: forced tokens, and
complete requests. The masks for the next tokens are written while the next forward pass runs. A worker that ends or
does not answer is begun again and told all tokens, so only time is lost; a request that it was working on twice ends
with an error.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maitred.core.request import RequestSpec, SamplingParams
from maitred.executor import grammar_frames
from maitred.executor.sampler_state import TokenMask

logger = logging.getLogger(__name__)
ANSWER_S = 10.0  # for masks; one takes microseconds, and is out of fuel after 20 ms
ADVANCE_S = 1.0  # for what came of tokens, which a whole step waits for
START_S = 30.0  # for the first answer of a worker, which reads the tokenizer before
MAX_FAULTS = 2  # of one request, or of one compilation
MAX_RESTARTS = 3  # in a row, without an answer between them

Done = Callable[[str, bool], None]
"""Told what is wrong with a grammar, empty when nothing is, and whether the grammar is at fault."""

# -P: the current folder, which may be a model's with Python code in it, is no place for modules
WORKER = (sys.executable, "-P", "-m", "maitred.executor.grammar_worker")


class BoundFacts(NamedTuple):
    """Facts that a new worker must be told of a request."""

    grammar: str
    forces: bool
    output: Callable[[], Sequence[int]]  # its output tokens now


@dataclass(slots=True, eq=False)
class GrammarSlot:
    """Grammar of one held request: the place of its mask, and its outcome."""

    number: int
    bound: BoundFacts
    mask: TokenMask
    told_in: int | None = None  # number of the step that told a worker of it, first
    error: str = ""
    complete: bool = False  # as a worker found that was begun again
    num_faults: int = 0
    draft_masks: Sequence[TokenMask] = ()  # where those after its drafts lie, one each
    num_allowed: int = 0  # of them, the first so many are there


class Grammars:
    """One executor's grammars. `prepare` is for any thread, all else for the executor's."""

    def __init__(
        self,
        tokenizer_folder: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        forces: bool = True,
        answer_s: float = ANSWER_S,
        advance_s: float = ADVANCE_S,
        start_s: float = START_S,
        command: Sequence[str] = WORKER,
    ) -> None:
        """Begins no process yet. `vocab_size` is the width of the logits; `forces` whether tokens are told that masks
        leave no choice for. A worker has `answer_s` (s) for masks, `advance_s` to tell what came of tokens, `start_s`
        for its first answer."""
        self._arguments = (str(vocab_size), tokenizer_folder, ",".join(map(str, eos_token_ids)))
        place = Path(tokenizer_folder)
        self._tokenizer_file = place if place.is_file() else place / "tokenizer.json"
        self._stamp = _stamp_of(self._tokenizer_file)  # of what the engine's own ids are of
        self._vocab_size, self._forces = vocab_size, forces
        self._answer_s, self._advance_s, self._start_s, self._command = answer_s, advance_s, start_s, command
        self._memory: grammar_frames.MaskMemory | None = None
        self._lock = threading.RLock()  # of memory, and of the worker's begin and end
        self._worker: GrammarProcess | None = None
        self._is_closed = False
        self._compilations: queue.SimpleQueue[tuple[str, Done] | None] = queue.SimpleQueue()
        self._compiling: threading.Thread | None = None
        # of the executor's thread
        self._told: GrammarProcess | None = None  # knows the slots
        self._slots: dict[int, GrammarSlot] = {}
        self._free: list[int] = list(range(grammar_frames.MAX_SLOTS))
        self._closed: list[int] = []
        self._opened: list[GrammarSlot] = []
        self.is_used = False  # by a request, once
        self._number = 0  # of the last step that was sent
        self._num_filled = 0  # number of the last step with masks
        self._num_restarts = 0  # since the last answer

    @property
    def worker_pid(self) -> int | None:
        """Process id; None while there is no worker."""
        return None if self._worker is None else self._worker.pid

    # -- before a request is scheduled

    def prepare(self, grammar: str, done: Done) -> None:
        """Compile a grammar, in the worker and beside its steps; `done` is called in a thread of this object."""
        if self._compiling is None:
            self._compiling = threading.Thread(target=self._compile_all, name="maitred-grammars", daemon=True)
            self._compiling.start()
        self._compilations.put((grammar, done))

    def _compile_all(self) -> None:
        while (asked := self._compilations.get()) is not None:
            grammar, done = asked
            done(*self._compile(grammar))

    def _compile(self, grammar: str) -> tuple[str, bool]:
        for _ in range(MAX_FAULTS):
            try:
                worker = self._current()
            except OSError as error:
                return f"no process for grammars could be begun: {error}", False
            try:
                compiled = worker.compile(grammar, self._answer_s)
            except WorkerLost:
                self._replace(worker)
                continue
            return compiled.error, compiled.is_grammars_fault
        return "compiling this grammar ended its process, or took longer than it may", False

    # -- in a step

    def enter(self, spec: RequestSpec, output: Callable[[], Sequence[int]]) -> GrammarSlot:
        """A request comes, which has `output()`; the worker hears of it with the next `tell`."""
        self.is_used = True
        slot = heapq.heappop(self._free)  # the executor holds fewer requests than there are slots
        memory = self._mapped()
        mask = _mask_at(memory, slot)
        forces = self._forces and may_force(spec.sampling)
        held = self._slots[slot] = GrammarSlot(slot, BoundFacts(spec.grammar, forces, output), mask)
        self._opened.append(held)
        return held

    def leave(self, held: GrammarSlot) -> None:
        """The request is forgotten."""
        del self._slots[held.number]
        heapq.heappush(self._free, held.number)
        if held in self._opened:
            self._opened.remove(held)
        else:
            self._closed.append(held.number)

    def tell(self) -> None:
        """Tell the worker of requests that came and went; their masks are made from now on. A busy worker hears of them
        later, so that messages never wait for it.
        """
        if self._opened and not self._is_busy:
            self._send([])

    @property
    def may_draft(self) -> bool:
        """Return whether `draft` may be called: the worker has answered everything, so that it never waits."""
        if self._is_busy and not self._opened:
            self._receive(self._answer_s, 0.0)
        return not self._is_busy and not self._opened

    def draft(self, drafted: Sequence[tuple[GrammarSlot, Sequence[int]]]) -> None:
        """Tokens were made up to follow `output()` of each: their masks are made while the next forward pass runs, and
        `num_allowed` says after `wait` how many there are."""
        memory, row, told = self._mapped(), grammar_frames.MAX_SLOTS, list[grammar_frames.Drafted]()
        for held, made in drafted:
            tokens = list(made[: grammar_frames.MAX_SLOTS + grammar_frames.MAX_DRAFTED - row])
            held.num_allowed = 0
            held.draft_masks = [_mask_at(memory, row + i) for i in range(len(tokens))]
            told.append(grammar_frames.Drafted(held.number, row, tokens))
            row += len(tokens)
        self._send([], told)

    def wait(self, patience_s: float = math.inf) -> bool:
        """Wait until the masks of all slots are there, except those that have an `error` or are `complete` now. False
        when they are not after `patience_s` (s), as when the worker had to be begun again.
        """
        until = time.monotonic() + patience_s
        while self._is_busy or self._opened:
            self.tell()
            if self._is_busy and self._receive(self._answer_s, until - time.monotonic()) is None and until < math.inf:
                return False
        return True

    def advance(self, sampled: Sequence[tuple[GrammarSlot, list[int]]]) -> list[grammar_frames.Outcome]:
        """Tokens were sampled, the last that `output()` gives for each; what came of them, as far as the worker lives
        to tell. Masks say the rest: of forced tokens they leave one."""
        outcomes: dict[int, grammar_frames.Outcome] = {}
        if self._send([grammar_frames.Advanced(held.number, tokens) for held, tokens in sampled]):
            answer = self._receive(self._advance_s, math.inf)
            outcomes = (
                {outcome.slot: outcome for outcome in answer.outcomes}
                if isinstance(answer, grammar_frames.Outcomes)
                else {}
            )
        return [
            outcomes.get(held.number) or grammar_frames.Outcome(held.number, [], False, held.error)
            for held, _ in sampled
        ]

    def close(self) -> None:
        """End worker and thread; idempotent."""
        with self._lock:
            self._is_closed = True
            worker, self._worker = self._worker, None
            memory, self._memory = self._memory, None
        self._compilations.put(None)
        if memory is not None:
            os.close(memory.fd)  # what is mapped goes with the last mask
        if worker is not None:
            worker.kill()

    # -- the worker

    @property
    def _is_busy(self) -> bool:
        return self._num_filled < self._number

    def _send(self, advanced: list[grammar_frames.Advanced], drafted: Sequence[grammar_frames.Drafted] = ()) -> bool:
        """Send to the worker; return whether it was told. Another one was started otherwise."""
        self._number += 1
        opened = [_opening(held, self._number) for held in self._opened]
        step = grammar_frames.Step(self._number, self._closed, opened, advanced, list(drafted))
        self._closed, self._opened = [], []
        try:
            if self._told is None or self._worker is not self._told:
                raise WorkerLost
            self._told.send(step)
        except WorkerLost:
            self._begin_again()
            return False
        return True

    def _receive(self, limit_s: float, patience_s: float) -> grammar_frames.Outcomes | grammar_frames.Filled | None:
        """Receive an answer; None when there is none yet, or another worker was started meanwhile."""
        assert self._told is not None, "nobody was asked"
        try:
            answer = self._told.receive(limit_s, patience_s)
        except WorkerLost:
            self._begin_again()
            return None
        if answer is not None:
            self._num_restarts = 0
        if isinstance(answer, grammar_frames.Filled):
            self._take_in(answer)
        return answer

    def _take_in(self, filled: grammar_frames.Filled) -> None:
        """Take in the answer on slots, except on slots that have changed hands."""
        self._num_filled = filled.number
        there = {number: held for number, held in self._slots.items() if (held.told_in or math.inf) <= filled.number}
        for number, error in filled.errors:
            if number in there:
                there[number].error = error
        for number in filled.complete:
            if number in there:
                there[number].complete = True
        for number, count in filled.allowed:
            if number in there:
                there[number].num_allowed = count

    def _begin_again(self) -> None:
        """A worker that knows of all slots and their tokens."""
        self._blame()
        self._replace(self._told)
        self._closed, self._opened = [], []
        self._number += 1
        opened = [_opening(held, self._number) for held in self._slots.values() if not held.error]
        self._num_restarts += 1
        try:
            if self._num_restarts > MAX_RESTARTS:
                raise OSError("it ended each time")
            self._told = self._current()
            self._told.send(grammar_frames.Step(self._number, [], opened, []))
        except WorkerLost:
            self._begin_again()
        except OSError as error:
            self._give_up(f"no process for grammars could be begun: {error}")

    def _blame(self) -> None:
        """Blame the request that was being worked on when the worker ended, if there was one."""
        if self._told is None:
            return
        memory = self._mapped()
        culprit = self._slots.get(-1 if memory.worked_on is None else memory.worked_on)
        memory.work_on(None)
        logger.warning("the process for grammars is begun again; requests with one wait for it")
        if culprit is not None:
            culprit.num_faults += 1
            if culprit.num_faults >= MAX_FAULTS:
                culprit.error = "the process for grammars ended each time that it worked on this request"

    def _give_up(self, why: str) -> None:
        for held in self._slots.values():
            held.error = held.error or why
        self._told, self._num_filled, self._num_restarts = None, self._number, 0

    def _current(self) -> GrammarProcess:
        """Raises OSError when no process can be begun, or none is to be."""
        with self._lock:
            if self._is_closed:
                raise OSError("the executor is closed")
            if self._worker is None:
                if _stamp_of(self._tokenizer_file) != self._stamp:
                    raise OSError(f"{self._tokenizer_file} changed since the start; restart to serve it as it is now")
                fd = self._mapped().fd
                self._worker = GrammarProcess(fd, self._arguments, start_s=self._start_s, command=self._command)
            return self._worker

    def _replace(self, lost: GrammarProcess | None) -> None:
        """Replace the worker by a new one, when it is next asked for; unless that happened already."""
        if lost is None:
            return
        with self._lock:
            lost.kill()  # its channels are closed when both threads have let go of it
            if self._worker is lost:
                self._worker = None

    def _mapped(self) -> grammar_frames.MaskMemory:
        with self._lock:
            if self._memory is None:
                self._memory = grammar_frames.MaskMemory(grammar_frames.new_memory(), self._vocab_size)
            return self._memory


def _stamp_of(file: Path) -> tuple[int, int] | None:
    """Size and time of a file; None where there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def may_force(sampling: SamplingParams) -> bool:
    """Return whether a mask of one token gives that token, whatever the logits, which are not asked for."""
    hides = sampling.min_tokens or sampling.bad_words or sampling.allowed_token_ids is not None
    return sampling.logprobs is None and not hides


def _mask_at(memory: grammar_frames.MaskMemory, row: int) -> TokenMask:
    return np.frombuffer(memory.memory, np.uint32, memory.num_words, memory.offset(row))


def _opening(held: GrammarSlot, step: int) -> grammar_frames.Opened:
    held.told_in = held.told_in or step
    return grammar_frames.Opened(held.number, held.bound.grammar, list(held.bound.output()), held.bound.forces)


SEND_S = 5  # a step larger than the channel's buffer waits for its reader


class WorkerLost(Exception):
    """The worker ended, or did not answer in time."""


class GrammarProcess:
    """One worker process. Steps are for one thread, compilations for another."""

    def __init__(self, memory_fd: int, arguments: Sequence[str], *, start_s: float, command: Sequence[str]) -> None:
        """`start_s`: how long its first answers may take (s). Raises OSError when there is no process for it."""
        self._steps, theirs = Pipe()
        _limit_sending(self._steps)
        self._compilations, theirs_too = Pipe()
        self._start_s = start_s
        self._has_answered = False
        self._sent_at = 0.0  # the last step
        descriptors = [theirs.fileno(), theirs_too.fileno(), memory_fd]
        with theirs, theirs_too:  # its own copies are all that is left open there: it ends when ours are closed
            self._process = subprocess.Popen(
                [*command, *map(str, descriptors), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for us
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, step: grammar_frames.Step) -> None:
        """Raises WorkerLost."""
        self._sent_at = time.monotonic()
        try:
            self._steps.send_bytes(grammar_frames.encode(step))
        except OSError:
            raise WorkerLost from None

    def receive(
        self, limit_s: float, patience_s: float = math.inf
    ) -> grammar_frames.Outcomes | grammar_frames.Filled | None:
        """The next answer to a step; None when it is not there after `patience_s`, though not due yet. Raises
        WorkerLost when it has not come `limit_s` after the step was sent.
        """
        left_s = self._sent_at + self._limit(limit_s) - time.monotonic()
        if patience_s < left_s and not self._is_there(self._steps, patience_s):
            return None
        return grammar_frames.decode_answer(self._await(self._steps, left_s))

    def compile(self, grammar: str, limit_s: float) -> grammar_frames.Compiled:
        """Raises WorkerLost."""
        try:
            self._compilations.send_bytes(grammar_frames.encode(grammar_frames.Compile(grammar)))
        except OSError:
            raise WorkerLost from None
        return grammar_frames.decode_compiled(self._await(self._compilations, self._limit(limit_s)))

    def kill(self) -> None:
        """Idempotent; nothing of it is there when this returns."""
        self._process.kill()
        self._process.wait()

    def _limit(self, limit_s: float) -> float:
        return limit_s if self._has_answered else max(limit_s, self._start_s)

    def _await(self, channel: Connection, limit_s: float) -> bytes:
        if not self._is_there(channel, limit_s):
            raise WorkerLost
        try:
            message = channel.recv_bytes()
        except (EOFError, OSError):
            raise WorkerLost from None
        self._has_answered = True
        return message

    def _is_there(self, channel: Connection, limit_s: float) -> bool:
        """Return whether there is something to receive, or the channel's end, within `limit_s`."""
        try:
            return channel.poll(max(0.0, limit_s))
        except OSError:
            raise WorkerLost from None


def _limit_sending(channel: Connection) -> None:
    """A worker that reads nothing keeps its engine for SEND_S at most."""
    with socket.socket(fileno=os.dup(channel.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
