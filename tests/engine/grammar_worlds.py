"""Requests with grammars for the built-in model, and an engine that serves them a step at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from maitred.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from maitred.core.clock import ManualClock
from maitred.core.request import FinishReason, RequestSpec, SamplingParams
from maitred.engine.build import EngineParts, build_parts
from maitred.executor.grammar import Grammars
from maitred.kv.prefix_cache import TokenHasher
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.text.tokenizer import Tokenizer
from tests.engine.worlds import with_blocks

BLOCK_SIZE = 16
SPACED = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


def json_grammar(schema: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": SPACED}}]})


ORDER = json_grammar(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "price": {"type": "integer", "minimum": 0, "maximum": 999},
            "size": {"enum": ["small", "smaller", "large"]},
        },
        "required": ["name", "price", "size"],
        "additionalProperties": False,
    }
)
WORD = "start: /[a-f]{2,7}/"
LONG = 'start: "The number of the order that you asked for is " /[0-9]{3}/ ", and its table is " /[a-c]/ "."'
HOPELESS = "start: /a/ nobody"
GRAMMARS = (ORDER, WORD, LONG, "")


class Served(NamedTuple):
    token_ids: list[int]
    finish_reason: FinishReason | None
    error: str | None

    @property
    def text(self) -> str:
        return tokenizer().decode(self.token_ids)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(BUILTIN_FOLDER)


def ask(
    request_id: str, grammar: str, *, prompt: str = "One order, please.", seed: int = 0, **fields: Any
) -> RequestSpec:
    """`fields` of SamplingParams, and of the spec."""
    of_spec = {name: fields.pop(name) for name in list(fields) if name in RequestSpec.__struct_fields__}
    max_tokens = of_spec.setdefault("max_tokens", 60)
    token_ids, eos = tokenizer().encode(prompt), tokenizer().eos_token_id
    assert eos is not None
    spec: dict[str, Any] = {
        "request_id": request_id,
        "arrived_at": 0.0,
        "num_prompt_tokens": len(token_ids),
        "prompt_token_ids": token_ids,
        "sampling": SamplingParams(max_tokens=max_tokens, **fields),
        "block_hashes": TokenHasher(BLOCK_SIZE, "model").hash_prompt(token_ids, ""),
        "seed": seed,
        "grammar": grammar,
        "eos_token_ids": (eos,),
    }
    return RequestSpec(**spec | of_spec)


def samples(parent_id: str, count: int, grammar: str, **fields: Any) -> list[RequestSpec]:
    """Samples of one prompt."""
    return [ask(f"{parent_id}-{i}", grammar, sample_index=i, parent_id=parent_id, **fields) for i in range(count)]


@contextmanager
def engine(
    *, forced_tokens: bool = True, num_blocks: int | None = None, executor: str = "auto", **scheduler: Any
) -> Iterator[EngineParts]:
    """The built-in model."""
    config = EngineConfig(
        model=ModelConfig(forced_tokens=forced_tokens, executor=executor, num_threads=1, max_model_len=128),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(**scheduler),
    )
    if num_blocks is not None:
        config = with_blocks(config, num_blocks)
    parts = build_parts(config, clock=ManualClock())
    try:
        yield parts
    finally:
        parts.close()


def grammars_of(parts: EngineParts) -> Grammars:
    executor: Any = parts.core._executor
    grammars: Grammars = executor.grammars
    return grammars


def serve(
    parts: EngineParts, specs: Sequence[RequestSpec], before_step: Callable[[int], None] = lambda number: None
) -> dict[str, Served]:
    """All at once. `before_step` is told the number of the step that comes."""
    for spec in specs:
        parts.core.add(spec)
    tokens: dict[str, list[int]] = {spec.request_id: [] for spec in specs}
    served: dict[str, Served] = {}
    number = 0
    while parts.core.has_work:
        before_step(number)
        number += 1
        for progress in parts.core.step():
            tokens[progress.request_id] += progress.new_token_ids
            if progress.finish_reason is not None:
                served[progress.request_id] = Served(
                    tokens[progress.request_id], progress.finish_reason, progress.error
                )
    return served
