"""The offline API: `LLM(model).generate(prompts)` runs the server's own scheduler in the calling thread."""

from __future__ import annotations

import inspect
import itertools
import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from numbers import Number
from typing import TYPE_CHECKING, Any, Never, TypeVar, cast, get_args, get_type_hints

from maitred.config import PARTS, CacheConfig, EngineConfig, LoraConfig, SchedulerConfig, SpeculativeConfig, TiersConfig
from maitred.core.clock import WallClock
from maitred.core.errors import CheckpointError, ConfigError, EngineDead, GenerationFailed, InvalidRequest, did_you_mean
from maitred.core.request import FinishReason, RequestSpec, SamplingParams, Terms
from maitred.core.step import RequestProgress
from maitred.core.structured_outputs import StructuredOutputsParams
from maitred.engine.build import EngineParts, build_parts
from maitred.engine.grammar_check import GrammarChecker
from maitred.engine.intake import ServedModel, make_pooled, make_requests
from maitred.engine.memory import MemoryPlan
from maitred.engine.model_facts import AdapterFacts
from maitred.engine.output import OutputBuilder, RequestOutput
from maitred.text.answer_format import AnswerFormat
from maitred.text.schema import source_of
from maitred.text.shape import compose
from maitred.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from _typeshed import DataclassInstance
    from numpy.typing import NDArray


Prompt = str | Sequence[int]
Message = Mapping[str, Any]
T = TypeVar("T")

logger = logging.getLogger(__name__)
_Config = TypeVar("_Config", bound="DataclassInstance")
_HOLDER = "llm"  # of the adapter that a call to generate uses, so that it stays

# for their defaults
_SCHEDULER, _CACHE, _TIERS = SchedulerConfig(), CacheConfig(), TiersConfig()
_SPECULATIVE, _LORA = SpeculativeConfig(), LoraConfig()


class LLM:
    """A model and a scheduler for scripts.

    Arguments are the fields of ModelConfig, CacheConfig, SchedulerConfig, SpeculativeConfig and TiersConfig, see there;
    `model=None` is what `maitred serve` takes without a model. Use as a context manager, or call close(), to give back
    memory at once; dropping the last reference does so too. Not for use from two threads at once.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        executor: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        lm_head_dtype: str = "auto",
        revision: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = _SCHEDULER.max_num_seqs,
        max_num_batched_tokens: int | None = None,
        block_size: int = _CACHE.block_size,
        kv_cache_memory_bytes: int | None = None,
        swap_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        kv_host_bytes: int = 0,
        kv_disk: str | None = None,
        kv_disk_max_bytes: int = _TIERS.kv_disk_max_bytes,
        kv_redis: str | None = None,
        kv_redis_max_block_bytes: int = _TIERS.kv_redis_max_block_bytes,
        kv_staging_bytes: int = _TIERS.kv_staging_bytes,
        policy: str = "fcfs",
        num_threads: int | None = None,
        tensor_parallel: int = 1,
        weight_cache: str = "auto",
        lora: Mapping[str, str] | None = None,
        max_lora_rank: int = _LORA.max_lora_rank,
        lora_memory_bytes: int = _LORA.lora_memory_bytes,
        speculative: str = "auto",
        speculative_model: str | None = None,
        num_speculative_tokens: int = _SPECULATIVE.num_speculative_tokens,
        chat_template: str | None = None,
        allow_special_tokens_in_content: bool = False,
        generation_config: Mapping[str, float | int | None] | None = None,
        decision_log: str | None = None,
        **unknown: Never,
    ) -> None:
        given = locals()  # before any other name is there
        if unknown:
            raise TypeError(_unknown_argument(next(iter(unknown))))
        parts: dict[str, Any] = {name: _filled(part, given) for name, part in PARTS.items()}
        config = EngineConfig(**parts, decision_log=decision_log)
        self._clock = WallClock()
        self._woken = threading.Event()  # KV that requests wait for has come, or an adapter was read
        self._parts: EngineParts | None = build_parts(config, clock=self._clock, wake=self._woken.set)
        if warning := self._parts.model.warning:  # reads the text: what is wrong with it is told now
            logger.warning(warning)
        self._ids = itertools.count()
        self._checker = GrammarChecker()

    @property
    def model(self) -> ServedModel:
        """Names, tokenizer, chat template and limits."""
        return self._open().model

    @property
    def memory_plan(self) -> MemoryPlan:
        return self._open().memory_plan

    @property
    def parts(self) -> EngineParts:
        """The wired engine, for what measures it between two calls of `generate`."""
        return self._open()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: `encode`, `decode`."""
        return self.model.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """Sampling parameters that the model's generation_config.json recommends."""
        return SamplingParams(**cast(dict[str, Any], dict(self.model.generation_defaults)))

    def generate(
        self,
        prompts: Prompt | Mapping[str, Any] | Sequence[Prompt | Mapping[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | int = 0,
        add_special_tokens: bool = True,
        use_tqdm: bool = False,
        lora: str | None = None,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the order of the prompts. `use_tqdm` counts them on stderr.
        `lora` names the adapter, one of `LLM(lora=)`.

        A prompt is text or token ids. `sampling_params` is one for all, or one each; None takes the model's own
        defaults. Raises RequestError before anything runs when a prompt or a parameter cannot work.
        """
        for name in unknown:
            raise TypeError(_unknown_of_generate(name))
        listed = as_prompts(prompts)
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        sampling = one_each(sampling_params, len(listed), "sampling_params")
        priorities = one_each(priority, len(listed), "priority")
        parts = self._open()
        now = self._clock.now()
        adapter = self._adapter(parts, lora)
        grammars = self._grammars(listed, sampling, is_chat=not add_special_tokens)
        batches = [
            make_requests(
                parts.model,
                prompt,
                params,
                request_id=self._new_id(),
                now=now,
                terms=Terms(priority=urgency),
                add_special_tokens=add_special_tokens,
                grammar=grammar,
                adapter=adapter,
            )
            for prompt, params, urgency, grammar in zip(listed, sampling, priorities, grammars, strict=True)
        ]
        builders: dict[str, OutputBuilder] = {}
        outputs: list[RequestOutput] = []
        for prompt, requests in zip(listed, batches, strict=True):
            builder = OutputBuilder(parts.model.tokenizer, requests, prompt if isinstance(prompt, str) else None)
            outputs.append(builder.output)
            builders.update(dict.fromkeys((request.request_id for request in requests), builder))
        with self.holding(lora):
            try:
                for request in itertools.chain.from_iterable(batches):
                    parts.core.add(request)
                self._run(parts, builders, _Count(len(listed)) if use_tqdm else None)
            finally:
                for request_id in builders:  # nothing stays behind when interrupted
                    parts.core.finish(request_id, FinishReason.ABORT)
        return outputs

    @contextmanager
    def holding(self, lora: str | None) -> Iterator[AdapterFacts | None]:
        """Keep this adapter in memory meanwhile. Raises InvalidRequest for one that is not there, CheckpointError."""
        parts = self._open()
        adapter = self._adapter(parts, lora)
        try:
            if adapter is not None:
                self._acquire(parts, adapter)
            yield adapter
        finally:
            if parts.adapters is not None:
                parts.adapters.release(_HOLDER)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
        lora: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; needs a model with a chat template."""
        template = self.model.chat_template
        if template is None:
            raise InvalidRequest("this model has no chat template; give LLM(chat_template=FILE), or use generate()")
        conversations = as_conversations(messages)
        prompts = [
            template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, add_special_tokens=False, use_tqdm=use_tqdm, lora=lora)

    def embed(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> NDArray[np.float32]:
        """Return the vectors of texts, float32 [texts, width], each of length 1 where the model wants that.

        `prompt_name` is one of the model's own, put before each text; `dimensions` keeps the first so many values;
        `truncate` cuts texts that are too long. Raises RequestError before anything runs.
        """
        import numpy as np  # noqa: PLC0415  of no use to what generates

        from maitred.engine.vectors import embedding  # noqa: PLC0415

        cut_to = -1 if truncate else None
        texts, make = as_prompts(prompts), self._to_pool
        wanted = embedding(self.model, texts, make, prompt_name=prompt_name, dimensions=dimensions, cut_to=cut_to)
        return np.stack(wanted.finished(self._pooled(wanted.requests)))

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> list[float]:
        """Return how well each document answers its query; one query is that of all documents.

        A cross-encoder or a causal reranker gives the share of yes, another model the cosine of vectors.
        """
        from maitred.engine.vectors import scoring  # noqa: PLC0415  numpy

        documents = [documents] if isinstance(documents, str) else list(documents)
        asked = [queries] * len(documents) if isinstance(queries, str) else list(queries)
        if len(asked) != len(documents):
            raise InvalidRequest(f"{len(asked)} queries for {len(documents)} documents", param="queries")
        pairs = list(zip(asked, documents, strict=True))
        wanted = scoring(self.model, pairs, self._to_pool, instruction=instruction, cut_to=-1 if truncate else None)
        return wanted.finished(self._pooled(wanted.requests))

    def _to_pool(self, prompt: Prompt, task: str, **options: Any) -> RequestSpec:
        return make_pooled(self.model, prompt, task, request_id=self._new_id(), now=self._clock.now(), **options)

    def _new_id(self) -> str:
        return f"llm-{next(self._ids)}"

    def _pooled(self, requests: Sequence[RequestSpec]) -> list[bytes]:
        """Answers of requests that pool. Raises GenerationFailed."""
        parts, answers = self._open(), dict[str, RequestProgress]()
        try:
            for request in requests:
                parts.core.add(request)
            while parts.core.has_work:
                answers |= {each.request_id: each for each in self._step(parts)}
        finally:
            for request in requests:  # nothing stays behind when interrupted
                parts.core.finish(request.request_id, FinishReason.ABORT)
        if failed := [each.error for each in answers.values() if each.error]:
            raise GenerationFailed(failed[0])
        return [answers[request.request_id].vector for request in requests]

    def _adapter(self, parts: EngineParts, name: str | None) -> AdapterFacts | None:
        """Raises InvalidRequest for one that is not there."""
        if name is None:
            return None
        named = {facts.name: facts for facts in parts.facts.adapters}
        if name not in named:
            hint = did_you_mean(name, named) or "; give LLM(lora={NAME: DIR})"
            raise InvalidRequest(f"lora is {name!r}, which is not loaded{hint}", param="lora")
        return named[name]

    def _grammars(self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], *, is_chat: bool) -> list[str]:
        """The grammar of each answer; a chat's may begin with thoughts. Raises InvalidRequest."""
        shapes = [params.structured_outputs for params in sampling]
        return [
            "" if shape is None else self._grammar(prompt, shape, is_chat=is_chat)
            for prompt, shape in zip(prompts, shapes, strict=True)
        ]

    def _grammar(self, prompt: Prompt, shape: StructuredOutputsParams, *, is_chat: bool) -> str:
        source = source_of(shape, "structured_outputs")
        checked = self._checker.checked(source)
        if checked.ignored:
            logger.warning("structured_outputs: not enforced, and ignored: %s", ", ".join(checked.ignored))
        if not shape.binds_content:
            return checked.grammar
        format = self.model.answer_format if is_chat else AnswerFormat("none")
        reasoning = format.reasoning
        in_thoughts = reasoning is not None and isinstance(prompt, str) and reasoning.opened_by(prompt)
        return compose(format, content=checked.source, in_thoughts=in_thoughts)

    def close(self) -> None:
        """Give back memory and threads; the object is not used again."""
        if self._parts is not None:
            parts, self._parts = self._parts, None
            parts.close()
            self._checker.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_parts", None) is not None:
            self.close()

    def _open(self) -> EngineParts:
        if self._parts is None:
            raise EngineDead("this LLM was closed; make a new one")
        return self._parts

    def _acquire(self, parts: EngineParts, adapter: AdapterFacts) -> None:
        """Returns when it is in memory. Raises CheckpointError for files that have changed."""
        assert parts.adapters is not None
        problems: list[str] = []
        parts.adapters.acquire(_HOLDER, adapter.key, problems.append)
        while not problems:
            self._woken.wait()
            self._woken.clear()
            parts.core.run_called()
        if problems[0]:
            raise CheckpointError(problems[0])

    def _run(self, parts: EngineParts, builders: Mapping[str, OutputBuilder], count: _Count | None) -> None:
        while parts.core.has_work:
            for progress in self._step(parts):
                builder = builders[progress.request_id]
                if builder.push(progress):
                    ended = parts.core.finish(progress.request_id, FinishReason.STOP)
                    if ended is not None:
                        builder.complete(ended)
                if count is not None and all(sample.finish_reason for sample in builder.output.outputs):
                    count.add(builder.output)

    def _step(self, parts: EngineParts) -> list[RequestProgress]:
        if not parts.core.can_step:
            self._woken.wait()  # no request has a deadline here
            self._woken.clear()
        parts.core.run_called()
        return parts.core.step()


class _Count:
    """Count of the prompts that are done, on one line of stderr."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done: set[str] = set()

    def add(self, output: RequestOutput) -> None:
        if output.request_id in self._done:  # a stop string had ended it
            return
        self._done.add(output.request_id)
        end = "\n" if len(self._done) == self._total else ""
        sys.stderr.write(f"\r{len(self._done)}/{self._total} prompts{end}")
        sys.stderr.flush()


def _filled(kind: type[_Config], given: Mapping[str, Any]) -> _Config:
    """A config with its fields that were given; None leaves the default."""
    values = {each.name: given[each.name] for each in fields(kind) if given.get(each.name) is not None}
    hints = get_type_hints(kind)
    for name, value in values.items():
        if not {int, float}.isdisjoint((hints[name], *get_args(hints[name]))) and not isinstance(value, Number):
            raise ConfigError(f"{name} is {value!r}; it must be a number")
    return kind(**values)


def _unknown_of_generate(name: str) -> str:
    if name == "use_cache":
        return "generate has no argument 'use_cache'; leave it out: keys and values are always cached"
    return f"generate has no argument {name!r}; SamplingParams(...) has what is sampled; help(LLM.generate) tells"


def _unknown_argument(name: str) -> str:
    """The name here of another library's argument, or which of ours was meant."""
    from maitred.engine.foreign import flag_named  # noqa: PLC0415  only a slip of the pen pays for it

    own = inspect.signature(LLM).parameters
    near = did_you_mean(name, own, cutoff=0.8)
    told = flag_named(name)
    if told is None:
        return f"LLM has no argument {name!r}{near}; help(LLM) lists them"

    def as_argument(flag: re.Match[str]) -> str:
        field = flag[1].replace("-", "_")
        return f"{field}=" if field in own else flag[0]

    return f"LLM has no argument {name!r}; {re.sub('--([a-z0-9-]+)', as_argument, told)}"


def as_prompts(prompts: Any) -> list[Prompt]:
    """One text, one list of token ids, or a list of either, as a list of prompts.

    A prompt may stand in a mapping too, by `prompt` or `prompt_token_ids`, as vLLM's do.
    """
    if isinstance(prompts, (str, Mapping)):
        prompts = [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"prompts is {type(prompts).__name__}; give a string, a list of token ids, or a list of either",
            param="prompts",
        )
    listed = [
        item.get("prompt_token_ids", item.get("prompt")) if isinstance(item, Mapping) else item for item in prompts
    ]
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    for position, item in enumerate(listed):
        if not isinstance(item, (str, Sequence)):
            raise InvalidRequest(
                f"prompts[{position}] is {type(item).__name__}; a prompt is a string or a list of token ids",
                param="prompts",
            )
    return listed


def as_conversations(messages: Any) -> list[Sequence[Message]]:
    """One list of messages, or a list of such lists, as a list of conversations."""
    if not messages or isinstance(messages, (str, Mapping)) or not isinstance(messages[0], (Mapping, Sequence)):
        raise InvalidRequest("messages is a list of {role, content}, or a list of such lists", param="messages")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def one_each(value: T | Sequence[T], count: int, name: str) -> list[T]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts; give one, or one each", param=name)
    return list(value)
