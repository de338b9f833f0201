"""Grammar worker: `python -m maitred.executor.grammar_worker STEPS COMPILATIONS MEMORY VOCAB_SIZE FOLDER EOS,EOS`, of
which the first three are inherited descriptors.

One thread keeps a matcher for each slot and answers steps; another makes the tokenizer, which holds the interpreter's
lock for up to a second, and compiles grammars, which does not. Nothing here is kept that tokens do not give again.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from maitred.executor import grammar_frames
from maitred.text.tokenizer import whole_json

MAX_FORCED = 64  # tokens told at once, so that an answer stays short; the rest is told later
MAX_COMPILED = 64  # grammars kept for the next request, of 0.3 to 2 MB each
COMPILER_NICENESS = 5  # the step's processors come first


class GrammarFault(Exception):
    """Why a request cannot go on."""


class _Model(msgspec.Struct):
    type: str = "BPE"


class _File(msgspec.Struct):
    """Parts of a tokenizer.json."""

    model: _Model
    added_tokens: list[dict[str, Any]] = []


def _with_rows(text: str, added: Sequence[dict[str, Any]], num_rows: int) -> str:
    """A tokenizer.json without added tokens for which the embedding has no row: no grammar can name those."""
    left = [token for token in added if token["id"] < num_rows]
    if len(left) == len(added):
        return text
    parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(parts | {"added_tokens": msgspec.Raw(msgspec.json.encode(left))}).decode()


class CompiledGrammars:
    """Compiled grammars, the least recently used of which is forgotten."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        text, eos_token = whole_json(folder), list(eos_token_ids) or None
        file = msgspec.json.decode(text, type=_File)
        kind = file.model.type
        if kind != "BPE":  # the library would take a Unigram's marks of spaces for letters
            raise ValueError(f"it is a {kind} tokenizer, and only BPE ones can be")
        text = _with_rows(text, file.added_tokens, vocab_size)
        try:
            self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token)
        except ValueError:  # more ordinary tokens than logits
            self._tokenizer = LLTokenizer(text, eos_token=eos_token)
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: str) -> LLMatcher:
        """A fresh one. Raises GrammarFault for a grammar that cannot be used."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return compiled.deep_copy()
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not compiled.is_error():
            compiled.compute_bitmask()  # what the first mask builds stays in all copies
        check(compiled, "the grammar cannot be used: ")
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()


def check(matcher: LLMatcher, what: str = "") -> None:
    """Raises GrammarFault for one in an error state, as when it is out of fuel."""
    if matcher.is_error():
        raise GrammarFault(what + matcher.get_error().partition("\n")[0][:500])


class WorkerSlot:
    """One request's matcher."""

    def __init__(self, matcher: LLMatcher, forces: bool, vocab_size: int) -> None:
        self._matcher, self._forces, self._vocab_size = matcher, forces, vocab_size

    def consume(self, token_ids: Sequence[int]) -> None:
        """Raises GrammarFault."""
        for token_id in token_ids:
            if self._matcher.is_stopped():
                return
            self._matcher.consume_token(token_id)
        check(self._matcher)

    def force(self) -> list[int]:
        """Tokens that the masks to come leave alone, consumed; one after another, as sampling would meet them."""
        matcher, forced = self._matcher, list[int]()
        while self._forces and len(forced) < MAX_FORCED and not matcher.is_stopped():
            ahead = matcher.compute_ff_tokens()
            if not ahead or ahead[0] >= self._vocab_size:  # a token that has no logit, and no embedding
                break
            matcher.consume_token(ahead[0])
            forced.append(ahead[0])
        check(matcher)
        return forced

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def masks_after(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Return the masks after each of these, were it output; end with the first that the grammar does not allow."""
        ahead = self._matcher.deep_copy()
        for token_id in token_ids:
            if ahead.is_stopped() or not ahead.validate_tokens([token_id]):
                return
            ahead.consume_token(token_id)
            if ahead.is_stopped():
                return
            mask = ahead.compute_bitmask()
            if ahead.is_error():  # it is met again, if these tokens are output
                return
            yield mask

    def mask(self) -> bytes:
        """Raises GrammarFault."""
        mask = self._matcher.compute_bitmask()
        check(self._matcher)
        return mask


class StepServer:
    """Answers steps: opens, advances, and fills masks."""

    def __init__(self, connection: Connection, memory: grammar_frames.MaskMemory, compiler: Compiler) -> None:
        self._connection, self._memory, self._compiler = connection, memory, compiler
        self._slots: dict[int, WorkerSlot] = {}

    def run(self) -> None:
        """Raises EOFError when the engine is gone."""
        while True:
            step = grammar_frames.decode_step(self._connection.recv_bytes())
            errors: dict[int, str] = {}
            for slot in step.closed:
                self._slots.pop(slot, None)
            for opened in step.opened:
                self._open(opened, errors)
            if step.advanced:
                outcomes = [self._advance(advanced) for advanced in step.advanced]
                self._connection.send_bytes(grammar_frames.encode(grammar_frames.Outcomes(step.number, outcomes)))
            touched = [opened.slot for opened in step.opened] + [advanced.slot for advanced in step.advanced]
            for slot in dict.fromkeys(touched):
                self._fill(slot, errors)
            allowed = [(drafted.slot, self._fill_after(drafted)) for drafted in step.drafted]
            self._memory.work_on(None)
            complete = [number for number in touched if number in self._slots and self._slots[number].complete]
            self._connection.send_bytes(
                grammar_frames.encode(grammar_frames.Filled(step.number, list(errors.items()), complete, allowed))
            )

    def _open(self, opened: grammar_frames.Opened, errors: dict[int, str]) -> None:
        self._memory.work_on(opened.slot)
        self._slots.pop(opened.slot, None)
        try:
            slot = WorkerSlot(self._compiler.grammars().matcher(opened.grammar), opened.forces, self._memory.vocab_size)
            slot.consume(opened.token_ids)
        except GrammarFault as fault:
            errors[opened.slot] = str(fault)
        else:
            self._slots[opened.slot] = slot

    def _advance(self, advanced: grammar_frames.Advanced) -> grammar_frames.Outcome:
        self._memory.work_on(advanced.slot)
        slot = self._slots.get(advanced.slot)
        if slot is None:
            return grammar_frames.Outcome(advanced.slot, [], False, "the grammar of this request could not be used")
        try:
            slot.consume(advanced.token_ids)
            return grammar_frames.Outcome(advanced.slot, slot.force(), slot.complete, "")
        except GrammarFault as fault:
            del self._slots[advanced.slot]
            return grammar_frames.Outcome(advanced.slot, [], False, str(fault))

    def _fill_after(self, drafted: grammar_frames.Drafted) -> int:
        """Fill the masks after drafts; return their number."""
        slot, count = self._slots.get(drafted.slot), 0
        if slot is None:
            return 0
        self._memory.work_on(drafted.slot)
        for mask in slot.masks_after(drafted.token_ids):
            self._memory.write(drafted.row + count, mask)
            count += 1
        return count

    def _fill(self, number: int, errors: dict[int, str]) -> None:
        slot = self._slots.get(number)
        if slot is None or slot.complete:
            return
        self._memory.work_on(number)
        try:
            self._memory.write(number, slot.mask())
        except GrammarFault as fault:
            errors[number] = str(fault)


class Compiler:
    """The other thread: its tokenizer, its grammars, and its channel."""

    def __init__(self, connection: Connection, make: Callable[[], CompiledGrammars]) -> None:
        self._connection, self._make = connection, make
        self._is_ready = threading.Event()
        self._grammars: CompiledGrammars | None = None
        self._failure = ""

    def start(self) -> None:
        threading.Thread(target=self._run, name="maitred-grammar-compiler", daemon=True).start()

    def grammars(self) -> CompiledGrammars:
        """Waits for them. Raises GrammarFault when there is no tokenizer for them."""
        self._is_ready.wait()
        if self._grammars is None:
            raise GrammarFault(self._failure)
        return self._grammars

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILER_NICENESS)
        with suppress(EOFError, OSError):
            try:
                self._grammars = self._make()
            except Exception as error:  # the library's own kinds among them
                self._failure = f"this model's tokenizer cannot be bound to a grammar: {error}"
            self._is_ready.set()
            while True:
                compile_ = grammar_frames.decode_compile(self._connection.recv_bytes())
                self._connection.send_bytes(grammar_frames.encode(self._compile(compile_.grammar)))
        os._exit(0)  # the engine is gone, whatever the other thread is at

    def _compile(self, grammar: str) -> grammar_frames.Compiled:
        try:
            grammars = self.grammars()
        except GrammarFault as fault:
            return grammar_frames.Compiled(str(fault))
        try:
            grammars.matcher(grammar)
        except GrammarFault as fault:
            return grammar_frames.Compiled(str(fault), is_grammars_fault=True)
        return grammar_frames.Compiled("")


def main(arguments: Sequence[str]) -> None:
    steps, compilations, memory, vocab_size = map(int, arguments[:4])
    eos_token_ids = [int(token) for token in arguments[5].split(",") if token]
    make = partial(CompiledGrammars, Path(arguments[4]), vocab_size, eos_token_ids)
    compiler = Compiler(Connection(compilations), make)
    compiler.start()
    with suppress(OSError):  # where memory lacks, this process goes before the engine does
        Path("/proc/self/oom_score_adj").write_text("500")
    with suppress(EOFError, OSError):
        StepServer(Connection(steps), grammar_frames.MaskMemory(memory, vocab_size), compiler).run()
    os._exit(0)  # the engine is gone, whatever the other thread is at


if __name__ == "__main__":
    main(sys.argv[1:])
