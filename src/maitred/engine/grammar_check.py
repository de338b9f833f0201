"""Compiles new grammars in a small process with limits, so that a hostile one does no harm.

    python -P -m maitred.engine.grammar_check

reads msgpack `Question`s from stdin and answers with `Verdict`s on stdout, each after its length in four bytes. It has
no vocabulary, and needs none to find out whether a grammar can be compiled.
"""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from select import select
from typing import Any, NamedTuple

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.text.schema import UNSUPPORTED_SCHEMA, Source, ignored_keywords, without_failing

COMMAND = (sys.executable, "-P", "-m", "maitred.engine.grammar_check")
TIME_LIMIT_S = 4.0  # for one grammar; of processor time
CLOCK_LIMIT_S = 5.5  # beside a busy machine; every question has an answer within 6 s
MEMORY_LIMIT_BYTES = 1 << 30
MAX_GRAMMAR_BYTES = 4 * 1024 * 1024
MAX_VERDICTS = 1024  # kept
MAX_ERROR_CHARS = 600
_NO_VOCABULARY = "no tokenizer - can't validate"
_LENGTH = struct.Struct("<I")


class Question(msgspec.Struct, frozen=True):
    """`kind` as `llguidance.grammar_from` has it; "llguidance" is a grammar in its own form."""

    kind: str
    text: str


class Verdict(msgspec.Struct, frozen=True):
    """Outcome for a grammar: `grammar` as llguidance takes it, or the `error` in it."""

    grammar: str = ""
    error: str | None = None
    warnings: tuple[str, ...] = ()  # what was left out of it, in llguidance's words
    left_out: tuple[str, ...] = ()  # keywords that had to be left out for anything to compile
    text: str = ""  # where there are such: the question's without them
    cause: str = ""  # and why


class Checked(NamedTuple):
    """A client's shape that can be enforced, as far as `ignored` leaves it."""

    grammar: str  # as llguidance takes it
    ignored: tuple[str, ...]  # keywords
    source: Source  # what was checked, without what had to be left out


_TOO_LONG = f"it was not compiled in {TIME_LIMIT_S:g} s; make it smaller"
_DIED = f"it cannot be compiled in {MEMORY_LIMIT_BYTES >> 20} MiB; make it smaller"


class GrammarChecker:
    """Asks a process, begun when it is first needed, and remembers. Threads may share it: one asks at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock = threading.Lock()

    def checked(self, source: Source) -> Checked:
        """Raises InvalidRequest, `unsupported_schema`, that names what is wrong or cannot be enforced."""
        verdict = self.check(source.kind, source.text)
        if verdict.error is not None:
            message = f"{source.path} cannot be compiled: {verdict.error}"
            raise InvalidRequest(message, param=source.path, code=UNSUPPORTED_SCHEMA)
        ignored = tuple(sorted({*source.left_out, *verdict.left_out, *ignored_keywords(verdict.warnings)}))
        if ignored and source.is_strict:
            message = f"{source.path} is strict, and has what cannot be enforced: {', '.join(ignored)}"
            because = f" ({verdict.cause})" if verdict.cause else ""
            raise InvalidRequest(message + because, param=source.path, code=UNSUPPORTED_SCHEMA)
        return Checked(verdict.grammar, ignored, source._replace(text=verdict.text or source.text))

    def check(self, kind: str, text: str) -> Verdict:
        """Waits for at most CLOCK_LIMIT_S, and for those that asked before."""
        key = sha256(f"{kind}:{text}".encode("utf-8", "surrogatepass")).digest()
        known = self._verdicts.get(key)
        if known is not None:
            return known
        if len(text) > MAX_GRAMMAR_BYTES:
            return Verdict(error=f"it has {len(text)} characters; at most {MAX_GRAMMAR_BYTES}")
        with self._lock:
            verdict = self._ask(Question(kind, text))
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _ask(self, question: Question) -> Verdict:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, msgspec.msgpack.encode(question))
            if not select([process.stdout], [], [], CLOCK_LIMIT_S)[0]:
                self.close()
                return Verdict(error=_TOO_LONG)
            return msgspec.msgpack.decode(_read(process.stdout), type=Verdict)
        except (OSError, EOFError, msgspec.DecodeError):
            was_slow = process.wait() == -24  # SIGXCPU
            self.close()
            return Verdict(error=_TOO_LONG if was_slow else _DIED)


def _write(stream: Any, frame: bytes) -> None:
    stream.write(_LENGTH.pack(len(frame)) + frame)
    stream.flush()


def _read(stream: Any) -> bytes:
    """Raises EOFError at the stream's end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    frame: bytes = stream.read(_LENGTH.unpack(head)[0])
    return frame


def _answered(question: Question) -> Verdict:
    """Verdict on the grammar, without those keywords of its schemas that cannot be compiled."""
    verdict = _compiled(question)
    if verdict.error is None or question.kind not in ("json_schema", "llguidance"):
        return verdict
    try:
        made, left_out = without_failing(json.loads(question.text), _compiles)
    except RecursionError:
        return verdict
    if not left_out:
        return verdict
    text = json.dumps(made, ensure_ascii=False)
    again = _compiled(Question(question.kind, text))
    return msgspec.structs.replace(again, left_out=tuple(left_out), text=text, cause=verdict.error)


def _compiles(schema: Mapping[str, Any]) -> bool:
    return _error_in(json.dumps({"x-guidance": {"lenient": True}, **schema})) is None


@lru_cache(maxsize=4096)
def _error_in(schema: str) -> str | None:
    return _compiled(Question("json_schema", schema)).error


def _compiled(question: Question) -> Verdict:
    from llguidance import LLMatcher, grammar_from  # noqa: PLC0415  the server needs it only here

    try:
        kind: Any = question.kind
        grammar = grammar_from(kind, question.text)
        is_error, told = LLMatcher.validate_grammar_with_warnings(grammar)
    except RecursionError:
        return Verdict(error="it is nested too deeply")
    except Exception as error:  # of the converters, whose kinds are not documented
        return Verdict(error=_cut(str(error)) or type(error).__name__)
    if is_error:
        return Verdict(error=_cut(told[0]))
    warnings = tuple(text for text in told if not text.startswith(_NO_VOCABULARY))
    return Verdict(grammar, None if len(warnings) < len(told) else _why_nothing_fits(grammar), warnings)


def _why_nothing_fits(grammar: str) -> str | None:
    """Fault of a grammar that can be compiled, and that no text begins; of one without special tokens."""
    from llguidance import LLMatcher, LLTokenizer  # noqa: PLC0415

    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    matcher.compute_bitmask()
    if matcher.is_error():
        return f"no text fits it: {_cut(matcher.get_error().splitlines()[0])}"
    matcher.consume_tokens(matcher.compute_ff_tokens())  # to the first place where there is a choice
    matcher.compute_bitmask()
    return f"it is too wide: {_cut(matcher.get_error().splitlines()[0])}" if matcher.is_error() else None


def _cut(error: str) -> str:
    """llguidance quotes the whole of what it was given, then says what is wrong with it."""
    half = MAX_ERROR_CHARS // 2
    return error if len(error) <= MAX_ERROR_CHARS else f"{error[:half]} ... {error[-half:]}"


def _limit_time() -> None:
    """Limit processor time from here on: a process that has answered many questions may answer more."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = usage.ru_utime + usage.ru_stime
    resource.setrlimit(resource.RLIMIT_CPU, (int(used_s + TIME_LIMIT_S) + 1, resource.RLIM_INFINITY))


def main() -> None:
    """Answer questions until stdin ends, with the server."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError):
        while True:
            question = msgspec.msgpack.decode(_read(sys.stdin.buffer), type=Question)
            _limit_time()
            _write(sys.stdout.buffer, msgspec.msgpack.encode(_answered(question)))


if __name__ == "__main__":
    main()
