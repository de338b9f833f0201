"""An engine whose model says what the test wrote: the built-in tokenizer, a real scheduler, a scripted executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from maitred.config import EngineConfig, LoraConfig, ProcessConfig
from maitred.core.clock import Clock, WallClock
from maitred.core.request import RequestSpec, SamplingParams
from maitred.engine.adapters import AdapterCache
from maitred.engine.client import EngineClient
from maitred.engine.engine_thread import in_thread
from maitred.engine.intake import ServedModel, make_requests
from maitred.engine.loop import LoadedEngine, Prepare
from maitred.engine.memory import MemoryPlan
from maitred.engine.model_facts import ModelFacts
from maitred.engine.planning import plan_engine
from maitred.engine.supervisor import Start
from maitred.model.checkpoint import BUILTIN_FOLDER, open_checkpoint
from maitred.scheduler.engine_core import EngineCore, StepListener
from maitred.text.folder import read_chat_template
from maitred.text.tokenizer import Tokenizer
from tests.fakes import MODEL, FakeExecutor, make_scheduler

BLOCK_SIZE = 4


def with_blocks(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """`config` with KV memory for exactly `num_blocks`, or pages, in the format of its executor on this processor."""
    with ExitStack() as files:
        checkpoint = files.enter_context(open_checkpoint(config.model.model, config.model.revision))
        memory = plan_engine(config, checkpoint, lambda line: None, files).memory
    kv_bytes = num_blocks * (memory.kv_bytes // memory.num_pages)
    return replace(config, cache=replace(config.cache, kv_cache_memory_bytes=kv_bytes))


def model_facts(max_model_len: int = 256) -> ModelFacts:
    tokenizer = Tokenizer.from_folder(BUILTIN_FOLDER)
    assert tokenizer.eos_token_id is not None
    return ModelFacts(
        tokenizer_folder=str(BUILTIN_FOLDER),
        chat_template=read_chat_template(BUILTIN_FOLDER),
        names=("demo",),
        max_model_len=max_model_len,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=(tokenizer.eos_token_id,),
        generation_defaults={},
        created=0,
        root="",
        revision=MODEL,
        block_size=BLOCK_SIZE,
        footprint=None,
    )


def served_model(max_model_len: int = 256) -> ServedModel:
    return ServedModel.of(model_facts(max_model_len))


def scripted_executor(model: ServedModel, answer: str | Sequence[int], num_prompt_tokens: int) -> FakeExecutor:
    """Says `answer`, then end-of-sequence for ever, after a prompt of so many tokens."""
    tokens = model.tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else list(answer)
    tokens.append(model.eos_token_ids[0])
    return FakeExecutor(lambda request_id, position: tokens[min(position - num_prompt_tokens, len(tokens) - 1)])


class Wake:
    """The `wake` of a core that is made before its loop is; `client_of` connects them."""

    def __init__(self) -> None:
        self.loop: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        self.loop()


def scripted_core(
    model: ServedModel, answer: str | Sequence[int], num_prompt_tokens: int, *listeners: StepListener
) -> EngineCore:
    scheduler = make_scheduler(num_blocks=256, block_size=BLOCK_SIZE)
    executor = scripted_executor(model, answer, num_prompt_tokens)
    return EngineCore(scheduler, executor, WallClock(), *listeners, wake=Wake())


def scripted_engine(
    answer: str | Sequence[int],
    sampling: SamplingParams,
    *,
    wrap: Callable[[FakeExecutor], FakeExecutor] = lambda executor: executor,
    prompt: str = "Hello there",
    **process: Any,
) -> tuple[EngineClient, ServedModel, list[RequestSpec]]:
    """A running engine, and the requests of one prompt that it has not been given yet."""
    model = served_model()
    requests = make_requests(model, prompt, sampling, request_id="r", now=WallClock().now())
    executor = wrap(scripted_executor(model, answer, requests[0].num_prompt_tokens))
    core = EngineCore(make_scheduler(num_blocks=256, block_size=BLOCK_SIZE), executor, WallClock())
    return client_of(core, **process), model, requests


def client_of(
    core: EngineCore,
    *,
    facts: ModelFacts | None = None,
    clock: Clock | None = None,
    prepare: Prepare | None = None,
    adapters: AdapterCache | None = None,
    lora_dir: str | None = None,
    **process: Any,
) -> EngineClient:
    """A client of `core`, which runs in a thread; ready."""
    plan = MemoryPlan(
        available_bytes=1,
        weights_bytes=0,
        bytes_per_block=1,
        block_size=BLOCK_SIZE,
        num_blocks=core.scheduler.kv_cache.num_blocks,
        max_model_len=256,
        model_context=256,
        longest_context=256,
    )
    loaded = LoadedEngine(
        core, facts or model_facts(), plan, deterministic=True, close=core.close, prepare=prepare, adapters=adapters
    )

    def build(config: EngineConfig, names: tuple[str, ...], tell: object, wake: Callable[[], None]) -> LoadedEngine:
        if isinstance(core._wake, Wake):
            core._wake.loop = wake
        return loaded

    start = Start(
        config=EngineConfig(lora=LoraConfig(lora_dir=lora_dir)),
        process=ProcessConfig(**process),
        open=in_thread(build),
    )
    client = EngineClient(start, clock or WallClock())
    client.start()
    return client
