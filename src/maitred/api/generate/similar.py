"""Answers to similar prompts: a request of a tenant that wants them takes this way in place of the result cache's."""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Raw

from maitred.api.generate.dialect import GenerationAsk, StreamWriter
from maitred.api.generate.generation import Generation
from maitred.api.generate.ways import Cached, KeepingStream
from maitred.api.http.app import App
from maitred.api.http.exchange import EventStream, Exchange
from maitred.api.http.results import WantedAnswer
from maitred.api.tensor.lease import tensors_of
from maitred.api.tensor.texts import Tokenizers, text_vector, tokens_of
from maitred.core.errors import MaitredError, ModelNotFound
from maitred.core.request import Terms
from maitred.engine.vectors import unit
from maitred.fleet.prefix_keys import read_asked, texts_of
from maitred.storage.result_cache import CachedAnswer, result_key
from maitred.storage.similar import Found, SimilarAnswers
from maitred.tensor.encoder_config import encoder_of, is_encoder

logger = logging.getLogger(__name__)
COMPARED = 1000  # characters of an answer
_NUMBER = re.compile(r"\b\d[\w.,:/-]*")
_text = msgspec.json.Decoder(str).decode


class _Message(msgspec.Struct):
    role: str
    content: Raw


_message = msgspec.json.Decoder(_Message).decode


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
        last = texts[-1] if asked.messages is UNSET else (message := _message(texts[-1])).content
        if asked.messages is not UNSET and message.role != "user":
            return None
        text = _text(last)
    except (IndexError, msgspec.MsgspecError):
        return None
    before, _, after = body.rpartition(bytes(last))
    numbers = " ".join(_NUMBER.findall(text))  # to an encoder order 4512 is order 4513
    rest = f"{len(before)} {numbers}\n".encode() + before + after
    return Compared(text, result_key(rest, path=path, tenant=tenant, revision=revision))


class SimilarPrompts:
    """What requests of one server share: the encoder, and what was asked."""

    def __init__(self, model: str, bound: float, check: float) -> None:
        self.model, self.answers = model, SimilarAnswers(bound, check)
        self._tokenizers = Tokenizers()
        self._checks: set[asyncio.Task[None]] = set()

    def way(self, app: App, exchange: Exchange, ask: GenerationAsk, wanted: WantedAnswer, body: bytes) -> Cached:
        """The way of a request to the result cache: to similar ones where its tenant wants that."""
        caller = exchange.caller
        if (caller.is_anybody or caller.tenant.semantic_cache) and self.answers.is_on:
            found = compared(body, path=exchange.scope["path"], tenant=caller.tenant.name, revision=wanted.revision)
            if found is not None:
                return Similar(app, exchange, ask, wanted, body, self, found)
        return Cached(app, exchange, ask, wanted, body)

    async def vectors(self, app: App, terms: Terms, *texts: str) -> list[np.ndarray]:
        """Float32 [width] of each text, of length 1. Raises a MaitredError, as for a text longer than the encoder's."""
        tensors = tensors_of(app)
        config = tensors.config(self.model)
        if not is_encoder(config):
            raise ModelNotFound(f"{self.model!r} of --result-cache-semantic is no encoder of texts")
        encoder, found = encoder_of(config), []
        tokenizer = await app.text.run_long(partial(self._tokenizers.of, self.model, config))
        for tokens in tokens_of(tokenizer, encoder, texts, add_special_tokens=True):
            now = app.clock.now()
            vector = await text_vector(tensors.infer, self.model, encoder, tokens, terms=terms, arrived_at=now)
            found.append(unit(vector))
        return found

    def check(self, app: App, terms: Terms, cached: str, computed: str) -> None:
        """Compare two answers, beside the requests that go on."""
        task = asyncio.create_task(self._check(app, terms, cached, computed))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check(self, app: App, terms: Terms, cached: str, computed: str) -> None:
        try:
            cosine = 1.0
            if cached != computed:
                one, other = await self.vectors(app, terms, cached or " ", computed or " ")
                cosine = float(one @ other)
        except MaitredError as error:
            logger.info("a check of --result-cache-semantic could not be made: %s", error)
            return
        if self.answers.checked(cosine):
            logger.warning(
                "--result-cache-semantic turned itself off: %d of %d checked answers were not alike (cosine under %g); "
                "raise its bound and start again",
                *(self.answers.num_wrong, self.answers.num_checked, self.answers.bound),
            )


class Similar(Cached):
    """An answer that the result cache may have, or keep, or have of a similar request."""

    def __init__(
        self,
        app: App,
        exchange: Exchange,
        ask: GenerationAsk,
        wanted: WantedAnswer,
        body: bytes,
        prompts: SimilarPrompts,
        of: Compared,
    ) -> None:
        super().__init__(app, exchange, ask, wanted, body)
        self._prompts, self._of = prompts, of
        self._vector: np.ndarray | None = None
        self._checked: Found | None = None
        caller = exchange.caller
        self._terms = Terms(tenant=caller.tenant.name, key_id=caller.key_id, priority=caller.tenant.default_priority)
        wanted.similar = self._find

    async def _find(self) -> tuple[CachedAnswer, str] | None:
        answers, cache, now = self._prompts.answers, self._app.results.cache, self._app.clock.now()
        if not answers.is_on:
            return None
        try:
            (self._vector,) = await self._prompts.vectors(self._app, self._terms, self._of.text)
        except MaitredError as error:
            logger.debug("no similar answer was looked for: %s", error)
            return None
        found = answers.find(self._of.rest, self._vector, lambda key: cache.find(key, now) is not None)
        if found is None:
            return None
        if answers.is_checked():
            self._checked = found
            return None
        answer = cache.find(found.key, now)
        return None if answer is None else (answer, f"{found.similarity:.4f}")

    async def begun(self, generation: Generation, writer: StreamWriter, events: EventStream) -> StreamWriter:
        return KeepingStream(writer, lambda sample, delta: sample.texts.append(delta.text))

    def ended(self) -> None:
        super().ended()
        outcome = self._exchange.outcome
        if self._vector is None or outcome is None:
            return
        text = "\n".join(sample.text[:COMPARED] for sample in outcome.samples)
        self._prompts.answers.keep(self._of.rest, self._vector, self._wanted.key, text)
        if self._checked is not None:
            self._prompts.check(self._app, self._terms, self._checked.answer, text)
