"""`--result-cache-semantic`: which answer of the result cache a prompt gets that is very near to another one.

Requests of one `rest` (tenant, model, everything in the body but the last text of the user) are compared by the cosine
of that text's vector, which the service's own /v1/embeddings makes. Some of the answers found so are computed all the
same: what they show decides whether the rule stays. A semantic cache after GPTCache (Bang, 2023,
https://aclanthology.org/2023.nlposs-1.24/).
"""

from __future__ import annotations

import asyncio
import logging
import re
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Raw

from maitred.api.http.exchange import Exchange
from maitred.api.http.results import WantedAnswer
from maitred.api.http.service import Service
from maitred.config.server import semantic_of
from maitred.engine.vectors import unit
from maitred.fleet.prefix_keys import read_asked, texts_of
from maitred.storage.result_cache import CachedAnswer, result_key
from maitred.tenancy.caller import anybody

logger = logging.getLogger(__name__)
EMBEDDINGS = "/v1/embeddings"
COMPARED = 1000  # characters of an answer
WAIT_S, PAUSE_S = 2.0, 10.0  # for vectors; and without asking again, where there were none
SPOKEN = frozenset(  # keys of texts and calls in answers of any dialect
    ("content", "text", "delta", "response", "text_output", "thinking", "arguments", "partial_json")
)
MAX_TEXTS = 1024  # of one rest, 1.5 MiB of vectors of MiniLM's width; the oldest go first
MAX_RESTS = 256
MAX_WRONG = 0.01
LEAST_CHECKED = 100
"""Checks over which a share is counted: fewer are counted as so many, so that one mismatch alone is not 1%."""
_NUMBER = re.compile(r"\b\d[\w.,:/-]*")
_text = msgspec.json.Decoder(str).decode


class _Message(msgspec.Struct):
    role: str
    content: Raw


class _Vector(msgspec.Struct):
    embedding: str


class _Vectors(msgspec.Struct):
    data: list[_Vector]


_message, _vectors = msgspec.json.Decoder(_Message).decode, msgspec.json.Decoder(_Vectors).decode


class Compared(NamedTuple):
    """A body as it is compared: one text by its vector, all the rest and the text's numbers byte by byte."""

    text: str
    rest: bytes  # 32 bytes


def compared(body: bytes, *, path: str, tenant: str, revision: str) -> Compared | None:
    """The last message's text, where that is the user's, or the prompt; None where there is no such text. Path, tenant
    and `revision` are as of `result_key`.
    """
    texts = texts_of(asked := read_asked(path, body))
    try:
        last, is_text = texts[-1], asked.messages is UNSET or bytes(texts[-1])[:1] == b'"'  # or a response's input
        if not is_text:
            message = _message(last)
            if message.role != "user":
                return None
            last = message.content
        text = _text(last)
    except (IndexError, msgspec.MsgspecError):
        return None
    before, _, after = body.rpartition(bytes(last))
    numbers = " ".join(_NUMBER.findall(text))  # to an encoder order 4512 is order 4513
    rest = f"{len(before)} {numbers}\n".encode() + before + after
    return Compared(text, result_key(rest, path=path, tenant=tenant, revision=revision))


def spoken(answer: CachedAnswer) -> str:
    """The first characters of what an answer says, sample by sample, whole or in events."""
    found: dict[int, list[str]] = {}
    for line in answer.body.splitlines():
        try:
            _collect(msgspec.json.decode(line.removeprefix(b"data:")), 0, found)
        except msgspec.DecodeError:
            continue  # no event's data
    return "\n".join("".join(texts)[:COMPARED] for _, texts in sorted(found.items())) or " "


def _collect(value: Any, index: int, found: dict[int, list[str]]) -> None:
    for part in value if isinstance(value, list) else ():
        _collect(part, index, found)
    if isinstance(value, dict):
        index = place if isinstance(place := value.get("index"), int) else index
        for key, part in value.items():
            if not isinstance(part, str):
                _collect(part, index, found)
            elif key in SPOKEN:
                found.setdefault(index, []).append(part)


@dataclass(slots=True)
class _Texts:
    """What was asked under one rest, the oldest first."""

    vectors: np.ndarray  # [requests, width], float32, of length 1
    keys: list[bytes] = field(default_factory=list)  # of the result cache


@dataclass(slots=True)
class SimilarAnswers:
    """Answers by the vectors of what was asked; `bound` is the least cosine of a hit, `check` the share of hits that is
    computed too. Pure."""

    bound: float
    check: float
    num_hits: int = 0
    num_checked: int = 0
    num_wrong: int = 0
    _rests: OrderedDict[bytes, _Texts] = field(default_factory=OrderedDict)
    _num_taken: int = 0  # hits to be computed

    @property
    def is_on(self) -> bool:
        """False once more than 1% of the checks have shown another answer."""
        return self.num_wrong <= MAX_WRONG * max(self.num_checked, LEAST_CHECKED)

    def find(self, rest: bytes, vector: np.ndarray, is_kept: Callable[[bytes], bool]) -> tuple[bytes, float] | None:
        """Key and cosine of the nearest request within the bound whose answer is kept; `vector` has length 1."""
        texts = self._rests.get(rest)
        if texts is None or not self.is_on:
            return None
        self._rests.move_to_end(rest)
        cosines = texts.vectors @ vector
        for index in np.argsort(-cosines, kind="stable"):
            if not cosines[index] >= self.bound:
                return None
            if is_kept(texts.keys[index]):
                return texts.keys[index], float(cosines[index])
        return None

    def is_checked(self) -> bool:
        """Whether this hit is computed too: every so many, from the first on."""
        self.num_hits += 1
        is_due = self.num_hits * self.check > self._num_taken
        self._num_taken += is_due
        return is_due

    def checked(self, cosine: float) -> bool:
        """Count a check whose two answers are so near; whether this one turned the rule off."""
        was_on = self.is_on
        self.num_checked += 1
        self.num_wrong += not cosine >= self.bound
        return was_on and not self.is_on

    def keep(self, rest: bytes, vector: np.ndarray, key: bytes) -> None:
        """Note a request that the result cache now has an answer to."""
        texts = self._rests.setdefault(rest, _Texts(np.empty((0, len(vector)), np.float32)))
        self._rests.move_to_end(rest)
        if key in texts.keys:  # computed again
            return
        first = len(texts.keys) >= MAX_TEXTS
        texts.vectors = np.vstack((texts.vectors[first:], vector))
        texts.keys = [*texts.keys[first:], key]
        if len(self._rests) > MAX_RESTS:
            self._rests.popitem(last=False)


class SimilarPrompts:
    """What requests of one service share: the model of vectors, and what was asked."""

    def __init__(self, service: Service) -> None:
        config = service.config
        self.model, bound = semantic_of(config.result_cache_semantic or "")
        self.answers = service.results.similar = SimilarAnswers(bound, config.result_cache_check)
        service.results.on_wanted = self._wanted
        self._service, self._checks = service, set[asyncio.Task[None]]()
        self._paused_until = 0.0

    def _wanted(self, exchange: Exchange, body: bytes, wanted: WantedAnswer) -> None:
        """Have a request look for similar ones, where its tenant wants that."""
        tenant = exchange.caller.tenant
        if (exchange.caller.is_anybody or tenant.semantic_cache) and self.answers.is_on:
            path = exchange.scope["path"]
            if found := compared(body, path=path, tenant=tenant.name, revision=wanted.revision):
                wanted.similar = Similar(self, self._service, wanted.key, found)

    async def vectors(self, *texts: str, cut_to: int | None = None) -> list[np.ndarray] | None:
        """Float32 [width] of each text, of length 1. None where there are none: for a text longer than the model's,
        unless it is cut (-1), and for some time after a failure."""
        service, now = self._service, self._service.clock.now()
        if now < self._paused_until:
            return None
        asked = {"model": self.model, "input": texts, "encoding_format": "base64", "truncate_prompt_tokens": cut_to}
        headers, status, told = [(b"content-type", b"application/json")], 504, f"no answer within {WAIT_S:g} s".encode()
        try:
            async with asyncio.timeout(WAIT_S):
                status, _, told = await service.ask(EMBEDDINGS, headers, msgspec.json.encode(asked), anybody)
        except TimeoutError:
            pass
        if status == 200:
            return [unit(np.frombuffer(b64decode(each.embedding), "<f4")) for each in _vectors(told).data]
        if status != 400:
            self._paused_until = now + PAUSE_S
            text = "%s of --result-cache-semantic made no vectors (%d: %s); no similar answers for %g s"
            logger.warning(text, self.model, status, told[:300].decode(errors="replace"), PAUSE_S)
        return None

    def check(self, cached: CachedAnswer, computed: CachedAnswer) -> None:
        """Compare two answers, beside the requests that go on."""
        task = asyncio.create_task(self._check(spoken(cached), spoken(computed)))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check(self, cached: str, computed: str) -> None:
        same = [np.ones(1)] * 2
        vectors = same if cached == computed else await self.vectors(cached, computed, cut_to=-1)
        if vectors is not None and self.answers.checked(float(vectors[0] @ vectors[1])):
            logger.warning(
                "--result-cache-semantic turned itself off: %d of %d checked answers were not alike (cosine under %g); "
                "raise its bound and start again",
                *(self.answers.num_wrong, self.answers.num_checked, self.answers.bound),
            )


class Similar:
    """A request that may have the answer of a similar one."""

    def __init__(self, prompts: SimilarPrompts, service: Service, key: bytes, of: Compared) -> None:
        self._prompts, self._service, self._key, (self._text, self._rest) = prompts, service, key, of
        self._vector: np.ndarray | None = None
        self._checked: CachedAnswer | None = None

    async def find(self) -> tuple[CachedAnswer, str] | None:
        """The answer to the nearest request, and how near that is; None where it is computed."""
        answers, cache, now = self._prompts.answers, self._service.results.cache, self._service.clock.now()
        if not answers.is_on or (vectors := await self._prompts.vectors(self._text)) is None:
            return None
        (self._vector,) = vectors
        self._rest += b"%d" % len(self._vector)  # another model may come under the name
        found = answers.find(self._rest, self._vector, lambda key: cache.find(key, now) is not None)
        answer = None if found is None else cache.find(found[0], now)
        if found is None or answer is None:
            return None
        if answers.is_checked():
            self._checked = answer
            return None
        return answer, f"{found[1]:.4f}"

    def kept(self, answer: CachedAnswer) -> None:
        """Note what was computed, and the cache has now."""
        if self._vector is not None:
            self._prompts.answers.keep(self._rest, self._vector, self._key)
            if self._checked is not None:
                self._prompts.check(self._checked, answer)
