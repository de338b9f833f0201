"""Requests from a prompt and sampling parameters: tokenise, check against the context, resolve, fan out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from maitred.config import NO_MODEL
from maitred.core.errors import InvalidRequest, ModelNotFound, PromptTooLong, TooManyTokens, UnsupportedParameter
from maitred.core.request import (
    DEFAULT_SAMPLING,
    MAX_SEED,
    NO_TERMS,
    Pooling,
    PoolingFacts,
    RequestSpec,
    SamplingParams,
    Terms,
    ThinkingLimit,
    check_sampling_tokens,
)
from maitred.engine.model_facts import AdapterFacts, Footprint, ModelFacts
from maitred.kv.prefix_cache import hash_blocks, root_hash
from maitred.policy.predictor import prompt_features
from maitred.text.parts import FolderText

if TYPE_CHECKING:
    from maitred.text.answer_format import AnswerFormat
    from maitred.text.chat_template import ChatTemplate
    from maitred.text.parts import Text
    from maitred.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as the edge knows it: names, text, and the limits a request is checked against."""

    names: tuple[str, ...]  # the first is canonical, the others are aliases; none where there is no language model
    text: Text
    max_model_len: int  # tokens, prompt and output
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    created: int = 0  # unix s
    root: str = ""  # model path or hub id
    revision: str = ""  # identity of the weights; part of every block hash
    block_size: int = 16  # tokens
    max_num_seqs: int = 0  # requests in one step; 0 where it is not known
    footprint: Footprint | None = None  # None where it is not known
    pooling: PoolingFacts | None = None  # None where it is not known
    version: int = 1  # on its shelf, where it comes from one

    @classmethod
    def of(cls, facts: ModelFacts, read_tokenizer: Callable[[Path], Tokenizer] | None = None) -> ServedModel:
        """The model as the engine tells it. Its text is read when it is first asked for; the weights stay there."""
        text = FolderText(
            Path(facts.tokenizer_folder),
            facts.chat_template,
            read_tokenizer,
            allow_special_tokens_in_content=facts.allow_special_tokens_in_content,
            tool_format=facts.tool_format,
            num_rows=facts.vocab_size,
        )
        shared = {each.name: getattr(facts, each.name) for each in fields(cls) if each.name not in ("text", "version")}
        return cls(text=text, **shared)

    @property
    def name(self) -> str:
        """The canonical one."""
        return self.names[0] if self.names else NO_MODEL

    @property
    def uses(self) -> tuple[str, ...]:
        """What the model was made for, in Ollama's words: completion, embedding, both."""
        facts = self.pooling
        if facts is None or not (facts.is_declared or facts.is_encoder):
            return ("completion",)
        vectors = ("embedding",) if facts.has_vectors else ()
        return ("completion", *vectors) if facts.generates else vectors

    @property
    def pools(self) -> PoolingFacts:
        """How it makes vectors. Raises UnsupportedParameter where no engine has told."""
        if self.pooling is None:
            raise UnsupportedParameter(f"{self.name} makes no vectors; serve a language model, or an encoder")
        return self.pooling

    def check_generates(self) -> None:
        """Raises InvalidRequest for an encoder, and for a model with labels in place of an output matrix."""
        if self.pooling is not None and not self.pooling.generates:
            routes = (
                "/v1/embeddings, /v1/rerank or /v1/score" if self.pooling.has_vectors else "/v1/rerank or /v1/score"
            )
            kind = "an encoder" if self.pooling.is_encoder else "a model of scores"
            told = f"{self.name} is {kind}, which generates nothing; POST texts to {routes}"
            raise InvalidRequest(f"{told}, or serve a causal model", param="model")

    def check_version(self, asked: int) -> None:
        """Raises ModelNotFound for another version than this one; 0 is any."""
        if asked not in (0, self.version):
            raise ModelNotFound(f"the language model has version {self.version}, not {asked}", param="model")

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.text.chat_template

    @property
    def answer_format(self) -> AnswerFormat:
        return self.text.answer_format

    @property
    def warning(self) -> str | None:
        """Warning at the start about tokens that the model cannot read."""
        if not (missing := self.tokenizer.without_row):
            return None
        named = ", ".join(map(repr, list(missing.values())[:4]))
        return (
            f"{len(missing):,} tokens of the tokenizer have no row in the model's embedding of {self.vocab_size:,} rows"
            f", {named} among them; a text that holds one is refused"
        )


def random_seed() -> int:
    """A seed for a request that brought none."""
    return secrets.randbelow(MAX_SEED)


def make_requests(
    model: ServedModel,
    prompt: str | Sequence[int],
    sampling: SamplingParams,
    *,
    request_id: str,
    now: float,
    terms: Terms = NO_TERMS,
    cache_salt: str = "",
    add_special_tokens: bool = True,
    new_seed: Callable[[], int] = random_seed,
    grammar: str = "",
    thinking: ThinkingLimit | None = None,
    adapter: AdapterFacts | None = None,
    prediction: str = "",
    cuts_max_tokens: bool = False,
) -> list[RequestSpec]:
    """One RequestSpec for each of `sampling.n` samples, sample 0 first, checked and ready for the queue.

    `grammar` and `thinking` bind them, `prediction` is what they may be like. With `cuts_max_tokens` more tokens may be
    asked for than the context has room for. Tokenises and hashes, so call it off the event loop. Raises PromptTooLong
    with both numbers (before tokenising when the text's length alone proves it) and InvalidRequest for tokens that the
    vocabulary does not have.
    """
    if adapter is not None:  # so that no block is shared with what other bytes computed
        cache_salt = f"{cache_salt}\0lora:{adapter.digest}"
    model.check_generates()
    check_sampling_tokens(sampling, model.vocab_size)
    token_ids = _prompt_tokens(model, prompt, add_special_tokens)
    max_tokens = _resolve_max_tokens(model, len(token_ids), sampling, is_cut=cuts_max_tokens)
    seed = new_seed() if sampling.seed is None else sampling.seed & MAX_SEED
    features = prompt_features(prompt)
    hashes = hash_blocks(token_ids, model.block_size, root_hash(model.revision, cache_salt))
    bad_words = _bad_word_tokens(model, sampling.bad_words)
    _check_can_sample(model, sampling, bad_words)
    predicted = _prediction_tokens(model, prediction)
    if sampling.structured_outputs is not None:
        sampling = replace(sampling, structured_outputs=None)  # `grammar` is what became of it
    many = sampling.n > 1
    return [
        RequestSpec(
            request_id=f"{request_id}-{index}" if many else request_id,
            parent_id=request_id if many else None,
            sample_index=index,
            prompt_token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            arrived_at=now,
            max_tokens=max_tokens,
            seed=seed,
            terms=terms,
            cache_salt=cache_salt,
            eos_token_ids=model.eos_token_ids,
            bad_word_token_ids=bad_words,
            block_hashes=list(hashes),
            features=features,
            grammar=grammar,
            thinking=thinking,
            adapter=adapter.key if adapter is not None else "",
            prediction_token_ids=predicted,
        )
        for index in range(sampling.n)
    ]


def make_pooled(
    model: ServedModel,
    prompt: str | Sequence[int],
    task: str,
    *,
    request_id: str,
    now: float,
    second: str | None = None,
    cut_to: int | None = None,
    terms: Terms = NO_TERMS,
    cache_salt: str = "",
    add_special_tokens: bool = True,
    score_tokens: Sequence[int] | None = None,
    at: str = "prompt",
) -> RequestSpec:
    """Request whose answer is a vector of its prompt, or numbers that `task` names (`Pooling`); `second` is the other
    text of a pair, `score_tokens` those whose logits are asked for. `cut_to` cuts a longer text at its
    end, to so many tokens; -1 is as many as the model takes. `at` names the text in errors.

    Raises PromptTooLong with both numbers, InvalidRequest, and UnsupportedParameter where nothing makes vectors.
    """
    facts, most, cuts = model.pools, model.max_model_len, cut_to is not None
    if cut_to is not None and cut_to != -1:
        most = min(most, cut_to)
    token_ids, second_from = tokens_to_pool(
        model.tokenizer,
        prompt,
        second,
        most=most,
        vocab_size=model.vocab_size,
        at=at,
        cuts=cuts,
        add_special_tokens=add_special_tokens,
    )
    pooling = Pooling(task=task, all_tokens=facts.all_tokens, whole=facts.whole, second_from=second_from)
    return RequestSpec(
        request_id=request_id,
        prompt_token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=DEFAULT_SAMPLING if score_tokens is None else SamplingParams(allowed_token_ids=tuple(score_tokens)),
        arrived_at=now,
        max_tokens=0,
        terms=terms,
        predicted_output_tokens=0.0,
        cache_salt=cache_salt,
        block_hashes=list(hash_blocks(token_ids, model.block_size, root_hash(model.revision, cache_salt))),
        pooling=pooling,
    )


def tokens_to_pool(
    tokenizer: Tokenizer,
    text: str | Sequence[int],
    second: str | None = None,
    *,
    most: int,
    vocab_size: int,
    at: str,
    cuts: bool = False,
    add_special_tokens: bool = True,
) -> tuple[Sequence[int], int]:
    """Tokens of a text, or of two, that become numbers, and the first of the second type (0: none); `at` is the field.

    Raises PromptTooLong with both numbers unless it `cuts`, and InvalidRequest for no tokens, and for unknown ones.
    """
    second_from = 0
    try:
        if isinstance(text, str):
            token_ids, second_from = tokenizer.encode_whole(
                text, second, most=most, cuts=cuts, add_special_tokens=add_special_tokens
            )
        else:
            _check_token_ids(text, vocab_size)
            token_ids = list(text[:most] if cuts else text)
            if len(token_ids) > most:
                raise TooManyTokens(len(token_ids), most)
        if not token_ids:
            raise InvalidRequest(f"{at} has no tokens; send at least one")
    except TooManyTokens as error:
        told = f"{at} has {error.num_tokens} tokens, and this model takes {most}"
        raise PromptTooLong(f"{told}; send a shorter text, or truncate_prompt_tokens: -1", param=at) from None
    except InvalidRequest as error:
        error.param = at
        raise
    return token_ids, second_from


def _prompt_tokens(model: ServedModel, prompt: str | Sequence[int], add_special_tokens: bool) -> tuple[int, ...]:
    limit = model.max_model_len - 1  # at least one token must be left to generate
    if isinstance(prompt, str):
        least = model.tokenizer.min_tokens(prompt)
        if least > limit:
            raise PromptTooLong(_too_long(f"at least {least}", model, f" ({len(prompt)} characters)"), param="prompt")
        try:
            token_ids = _encoded(model, prompt, "prompt", add_special_tokens=add_special_tokens, most=limit)
        except TooManyTokens as error:
            raise PromptTooLong(_too_long(str(error.num_tokens), model), param="prompt") from None
    else:
        token_ids = tuple(prompt)
        _check_token_ids(token_ids, model.vocab_size)
    if not token_ids:
        raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
    if len(token_ids) > limit:
        raise PromptTooLong(_too_long(str(len(token_ids)), model), param="prompt")
    return token_ids


def _prediction_tokens(model: ServedModel, text: str) -> tuple[int, ...]:
    """No answer is longer than the context, so no prediction need be."""
    if not text:
        return ()
    try:
        return _encoded(model, text, "prediction", most=model.max_model_len)
    except TooManyTokens as error:
        raise InvalidRequest(
            f"the prediction has {error.num_tokens} tokens; at most {model.max_model_len}, this model's maximum "
            "context length",
            param="prediction",
        ) from None


def _encoded(
    model: ServedModel, text: str, param: str, *, add_special_tokens: bool = False, most: int | None = None
) -> tuple[int, ...]:
    """Raises InvalidRequest, which names `param`, and TooManyTokens."""
    try:
        return tuple(model.tokenizer.encode(text, add_special_tokens=add_special_tokens, most=most))
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=param) from None


def _too_long(num_tokens: str, model: ServedModel, detail: str = "") -> str:
    return (
        f"the prompt has {num_tokens} tokens{detail}, but this model's maximum context length is "
        f"{model.max_model_len} tokens, of which one must be left for the answer; shorten the prompt, "
        "or serve with a larger --max-model-len"
    )


def _check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    for position, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequest(f"prompt token {position} is {token!r}, not an integer", param="prompt")
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"prompt token {position} is {token}; the vocabulary has ids 0 to {vocab_size - 1}", param="prompt"
            )


def _resolve_max_tokens(model: ServedModel, num_prompt_tokens: int, sampling: SamplingParams, *, is_cut: bool) -> int:
    room = model.max_model_len - num_prompt_tokens
    if sampling.max_tokens is None:
        if sampling.min_tokens > room:
            raise PromptTooLong(
                f"min_tokens ({sampling.min_tokens}) and the prompt ({num_prompt_tokens} tokens) exceed this model's "
                f"maximum context length of {model.max_model_len} tokens",
                param="min_tokens",
            )
        return room
    if sampling.max_tokens > room and is_cut:
        return room
    if sampling.max_tokens > room:
        raise PromptTooLong(
            f"the prompt ({num_prompt_tokens} tokens) and max_tokens ({sampling.max_tokens}) add up to "
            f"{num_prompt_tokens + sampling.max_tokens} tokens, but this model's maximum context length is "
            f"{model.max_model_len} tokens; ask for at most {room}, or leave max_tokens out to fill the context",
            param="max_tokens",
        )
    return sampling.max_tokens


def _check_can_sample(model: ServedModel, sampling: SamplingParams, bad_words: Sequence[Sequence[int]]) -> None:
    """Raise InvalidRequest where the first step would have no token left, whatever the model computes."""
    banned = {word[0] for word in bad_words if len(word) == 1}
    if sampling.min_tokens > 0:
        banned.update(model.eos_token_ids, sampling.stop_token_ids)
    allowed = sampling.allowed_token_ids or range(model.vocab_size)
    if all(token in banned for token in allowed):
        ends = f", or ends the text, which min_tokens ({sampling.min_tokens}) forbids" if sampling.min_tokens else ""
        raise InvalidRequest(
            f"each of the {len(allowed)} tokens that may be sampled is a bad word{ends}; allow another one",
            param="allowed_token_ids",
        )


def _bad_word_tokens(model: ServedModel, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenised at the start of a text and after a space, without repeats."""
    forms: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()) if word.strip() else (word,):
            token_ids = _encoded(model, text, "bad_words")
            if token_ids:
                forms[token_ids] = None
    return tuple(forms)
