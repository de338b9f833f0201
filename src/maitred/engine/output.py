"""Text from progress: detokenise, apply stop strings, merge the samples of one prompt, gather whole outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from maitred.core.request import Charges, FinishReason, RequestSpec
from maitred.core.step import RequestProgress, RequestTiming, TokenLogprobs
from maitred.engine.intake import ServedModel
from maitred.engine.replica import Replica
from maitred.text.detokenizer import Detokenizer, StopStringMatcher
from maitred.text.tokenizer import Tokenizer

MAX_MERGED = 64  # deltas of a prompt's samples on their way together; what a slow consumer leaves stays in its streams


class Piece(NamedTuple):
    """Output that became certain with one token: text, then the token itself if it is a mark."""

    text: str
    mark: int | None = None


class TextDelta(msgspec.Struct, frozen=True):
    """Gain of one sample. The last one has a finish_reason; text may lag behind tokens (stop strings, UTF-8)."""

    index: int
    text: str = ""
    pieces: tuple[Piece, ...] = ()  # where marks are looked for, in place of text: one a token, and one of the end
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # chunk by chunk, for prompt positions 1..
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string; None for end-of-sequence
    error: str | None = None
    is_requests_fault: bool = False
    charges: Charges | None = None  # with the first and the last
    timing: RequestTiming | None = None


class SampleText:
    """Turns one request's progress into text: the state between two deltas."""

    def __init__(self, tokenizer: Tokenizer, request: RequestSpec, marks: Collection[int] | None = None) -> None:
        """With `marks`, ids of tokens, the text comes in pieces, and these tokens are no text."""
        sampling = request.sampling
        self.index, self.request_id = request.sample_index, request.request_id
        self._tokenizer, self._marks = tokenizer, marks
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids=request.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        self._matcher = StopStringMatcher(sampling.stop, include=sampling.include_stop_str_in_output)
        self._stops = any(sampling.stop)
        self._min_tokens = sampling.min_tokens
        hidden = () if sampling.include_stop_str_in_output else (*request.eos_token_ids, *sampling.stop_token_ids)
        self._hidden_ends = frozenset(hidden)
        self._num_tokens = 0
        self.stopped = False  # by a stop string: the request must be ended, later progress is dropped
        if request.resumed is not None:  # another server gave the text of these
            self.push(RequestProgress(request.request_id, tuple(request.resumed.output_token_ids)))

    def push(self, progress: RequestProgress) -> TextDelta:
        """The delta for `progress`; when it completes a stop string, `stopped` is set and the delta is the last."""
        texts: list[str] = []
        pieces: list[Piece] = []
        if self._marks is not None:
            taken, stop_string = self._take_pieces(progress, self._marks, pieces)
        else:
            taken, stop_string = self._take(progress, texts)
        finish, stop_reason = progress.finish_reason, progress.stop_reason
        if stop_string is not None:
            self.stopped = True
            finish, stop_reason = FinishReason.STOP, stop_string
        elif finish is not None:
            stop_string = self._feed(self._detokenizer.flush(), texts)
            if stop_string is not None:
                finish, stop_reason = FinishReason.STOP, stop_string
            else:
                texts.append(self._matcher.flush())
        if self._marks is not None and texts:
            pieces.append(Piece("".join(texts)))
        return TextDelta(
            index=self.index,
            text="".join(piece.text for piece in pieces) if pieces else "".join(texts),
            pieces=tuple(pieces),
            token_ids=progress.new_token_ids[:taken],
            logprobs=progress.logprobs[:taken] if progress.logprobs is not None else None,
            prompt_logprobs=progress.prompt_logprobs,
            finish_reason=finish,
            stop_reason=stop_reason,
            error=progress.error,
            is_requests_fault=progress.is_requests_fault,
            charges=progress.charges,
            timing=progress.timing,
        )

    def _ended_by_token(self, progress: RequestProgress) -> bool:
        """Whether the last new token says that it was the end, and is no part of the text."""
        tokens = progress.new_token_ids
        return progress.finish_reason is FinishReason.STOP and bool(tokens) and tokens[-1] in self._hidden_ends

    def _take_pieces(
        self, progress: RequestProgress, marks: Collection[int], pieces: list[Piece]
    ) -> tuple[int, str | None]:
        """Take progress as `_take`, token by token, so that the pieces show where a mark stood among them."""
        tokens = progress.new_token_ids
        ended_by_token = self._ended_by_token(progress)
        for position, token in enumerate(tokens):
            self._num_tokens += 1
            texts: list[str] = []
            if ended_by_token and position == len(tokens) - 1:
                stop_string = None
            elif token in marks:
                stop_string = self._feed_mark(token, texts)
            else:
                stop_string = self._feed(self._detokenizer.push((token,)), texts)
            pieces.append(Piece("".join(texts), token if token in marks and stop_string is None else None))
            if stop_string is not None:
                return position + 1, stop_string
        return len(tokens), None

    def _feed_mark(self, token: int, texts: list[str]) -> str | None:
        """Feed a mark's letters, which may end a stop string; else nothing before it is held back any more."""
        letters = self._tokenizer.token_text(token)
        self._feed(self._detokenizer.flush(), texts)
        if not self._stops or token in self._tokenizer.special_token_ids:
            texts.append(self._matcher.flush())
            return None
        stop_string = self._feed(letters, texts)
        if stop_string is None:
            texts.append(self._matcher.flush())
            held = "".join(texts).removesuffix(letters)
            texts[:] = [held]
        return stop_string

    def _take(self, progress: RequestProgress, pieces: list[str]) -> tuple[int, str | None]:
        """Feed the new tokens, one by one where a stop string may end it; how many were used, and that stop string."""
        tokens = progress.new_token_ids
        ended_by_token = self._ended_by_token(progress)
        if not self._stops:
            pieces.append(self._detokenizer.push(tokens[:-1] if ended_by_token else tokens))
            return len(tokens), None
        for position, token in enumerate(tokens):
            self._num_tokens += 1
            if ended_by_token and position == len(tokens) - 1:
                break
            stop_string = self._feed(self._detokenizer.push((token,)), pieces)
            if stop_string is not None:
                return position + 1, stop_string
        return len(tokens), None

    def _feed(self, text: str, pieces: list[str]) -> str | None:
        if not text:
            return None
        if self._num_tokens <= self._min_tokens:  # text before min_tokens can neither be nor begin a stop string
            pieces.append(text)
            return None
        result = self._matcher.push(text)
        pieces.append(result.text)
        return result.stopped


async def stream_text(
    replica: Replica, model: ServedModel, requests: Sequence[RequestSpec], marks: Collection[int] | None = None
) -> AsyncIterator[TextDelta]:
    """Deltas of all samples of one prompt as they come; closing the iterator ends every unfinished sample.

    With `marks` the text is in pieces. Raises EngineDead when the replica dies.
    """
    unfinished = {request.request_id for request in requests}
    texts = [SampleText(model.tokenizer, request, marks) for request in requests]
    streams = list(zip(texts, replica.submit(*requests), strict=True))
    try:
        merged = _one(replica, *streams[0]) if len(streams) == 1 else _merge(replica, streams)
        async for request_id, delta in merged:
            if delta.finish_reason is not None:
                unfinished.discard(request_id)
            yield delta
    finally:
        for request_id in unfinished:
            replica.abort(request_id)


async def _one(
    replica: Replica, sample: SampleText, stream: AsyncIterator[RequestProgress]
) -> AsyncIterator[tuple[str, TextDelta]]:
    request_id = sample.request_id
    async for progress in stream:
        delta = sample.push(progress)
        if sample.stopped and progress.finish_reason is None:
            replica.abort(request_id, FinishReason.STOP)
            delta = await _completed(delta, stream)
        yield request_id, delta
        if delta.finish_reason is not None:
            return


async def _completed(delta: TextDelta, stream: AsyncIterator[RequestProgress]) -> TextDelta:
    """`delta`, which a stop string made the last, with what only the request's last progress says."""
    async for progress in stream:
        if progress.finish_reason is not None:
            return msgspec.structs.replace(delta, timing=progress.timing, charges=progress.charges)
    return delta


async def _merge(
    replica: Replica, streams: Sequence[tuple[SampleText, AsyncIterator[RequestProgress]]]
) -> AsyncIterator[tuple[str, TextDelta]]:
    queue: asyncio.Queue[tuple[str, TextDelta] | BaseException] = asyncio.Queue(MAX_MERGED)

    async def pump(sample: SampleText, stream: AsyncIterator[RequestProgress]) -> None:
        try:
            async for item in _one(replica, sample, stream):
                await queue.put(item)
        except Exception as error:  # raised again in the consumer
            await queue.put(error)

    tasks = [asyncio.create_task(pump(sample, stream)) for sample, stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= item[1].finish_reason is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability at one position, as vLLM names it."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One sample: its text and how it ended."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None
    error: str | None = None
    timing: RequestTiming | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the chosen tokens' log-probabilities, or None when they were not asked for."""
        if self.logprobs is None:
            return None
        return sum(at[token].logprob for at, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(slots=True)
class RequestOutput:
    """All samples of one prompt."""

    request_id: str
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first token
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class OutputBuilder:
    """Gathers the deltas of one prompt into a RequestOutput."""

    def __init__(self, tokenizer: Tokenizer, requests: Sequence[RequestSpec], prompt: str | None) -> None:
        first = requests[0]
        self._tokenizer = tokenizer
        self._texts = {request.request_id: SampleText(tokenizer, request) for request in requests}
        self.output = RequestOutput(
            request_id=first.prompt_id,
            prompt=prompt,
            prompt_token_ids=list(first.prompt_token_ids),
            outputs=[CompletionOutput(index=request.sample_index) for request in requests],
            prompt_logprobs=[None] if first.sampling.prompt_logprobs is not None else None,
        )
        for completion in self.output.outputs:
            completion.logprobs = [] if first.sampling.logprobs is not None else None

    def push(self, progress: RequestProgress) -> bool:
        """Take one request's progress; True when a stop string was found and the request must be ended."""
        sample = self._texts[progress.request_id]
        if sample.stopped:
            return False
        delta = sample.push(progress)
        self._add(delta)
        return isinstance(delta.stop_reason, str) and progress.finish_reason is None

    def complete(self, progress: RequestProgress) -> None:
        """Keep what only the last progress says, of a request that a stop string had ended."""
        index = self._texts[progress.request_id].index
        self.output.outputs[index].timing = progress.timing
        if index == 0 and progress.charges is not None:
            self.output.num_cached_tokens = progress.charges.num_cached_tokens

    def _add(self, delta: TextDelta) -> None:
        completion = self.output.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids.extend(delta.token_ids)
        if completion.logprobs is not None and delta.logprobs is not None:
            completion.logprobs.extend(named_logprobs(self._tokenizer, at) for at in delta.logprobs)
        if self.output.prompt_logprobs is not None and delta.prompt_logprobs is not None and delta.index == 0:
            self.output.prompt_logprobs.extend(named_logprobs(self._tokenizer, at) for at in delta.prompt_logprobs)
        if delta.index == 0 and delta.charges is not None:
            self.output.num_cached_tokens = delta.charges.num_cached_tokens
        if delta.finish_reason is not None:
            completion.finish_reason = delta.finish_reason.value
            completion.stop_reason, completion.error, completion.timing = delta.stop_reason, delta.error, delta.timing


def named_logprobs(tokenizer: Tokenizer, at: TokenLogprobs) -> dict[int, Logprob]:
    """Token id -> Logprob at one position; the chosen token comes first."""
    return {
        token: Logprob(logprob=value, rank=rank, decoded_token=tokenizer.token_text(token))
        for token, value, rank in zip(at.token_ids, at.logprobs, at.ranks, strict=True)
    }
