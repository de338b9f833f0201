"""Tensor models in an engine: their lanes, loads in a thread of their own; the service over them on an event loop; and
the engine's process with or without a language model, `python -m maitred.tensor.host FOLDER`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from maitred.config import NO_MODEL, EngineConfig, MachineShare, SchedulerConfig, TensorConfig
from maitred.core.clock import WallClock
from maitred.core.errors import CheckpointError, ConfigError, EngineDead, MaitredError, RequestTooLarge
from maitred.core.request import FinishReason
from maitred.core.step import ModelOutput, SchedulerOutput
from maitred.core.tensor_request import InferRequest, InferResponse, ModelChange
from maitred.decisions.codec import Header
from maitred.decisions.files import DecisionLogFile
from maitred.decisions.log import Recorder
from maitred.engine import frames
from maitred.engine.build import load_engine
from maitred.engine.child import build_from_config, main
from maitred.engine.child_process import in_child_process
from maitred.engine.client import Questions
from maitred.engine.engine_thread import in_thread
from maitred.engine.frames import Answer as Answered
from maitred.engine.loop import Builder, LoadedEngine, TensorSide
from maitred.engine.memory import MemoryPlan
from maitred.engine.model_facts import ModelFacts
from maitred.engine.queries import CHANGE_MODEL, Nothing
from maitred.engine.supervisor import Start
from maitred.engine.tensor_memory import EngineMemory
from maitred.engine.tensors import TensorModels
from maitred.scheduler.engine_core import EngineCore, TensorLanes
from maitred.scheduler.scheduler import lone_scheduler
from maitred.storage.result_cache import ResultCache
from maitred.tensor.config import ModelConfig
from maitred.tensor.flows import add_flows
from maitred.tensor.python.instance import all_openers
from maitred.tensor.repository_files import model_of_file
from maitred.tensor.runner import TensorAnswer, TensorRunner
from maitred.tensor.served_models import OPENERS, ControlMode, ModelControl, Opener, ServedModels
from maitred.tensor.tfs_config import open_repository

COMMAND = (sys.executable, "-P", "-m", "maitred.tensor.host")


def serving_tensors(start: Start) -> Start:
    """`start` with engines that serve `start.config.tensors` beside the language model, or alone."""
    alone = in_thread(with_tensors(load_engine))
    opened = alone if start.process.in_process else in_child_process(COMMAND)
    return replace(start, open=opened, read_config=ModelConfig.FromString)


class TensorHost(TensorSide):
    """Tensor models of an EngineLoop beside its language model; all but the loads is in the engine's thread."""

    def __init__(
        self,
        config: TensorConfig,
        share: MachineShare,
        *,
        openers: Mapping[str, Opener] | None = None,
        cache: ResultCache | None = None,
    ) -> None:
        """Loads what is to be served at the start, and what an engine before this one was asked for. Raises
        CheckpointError where the repository cannot be read.
        """
        self._config, self._clock = config, WallClock()
        self.models = ServedModels(all_openers(allow_code=config.allow_repository_code) if openers is None else openers)
        self._repository = open_repository(config)
        mode = ControlMode(config.model_control_mode)
        self._control = ModelControl(self._repository.folder, mode, self.models, rewrite=self._repository.rewrite)
        self._start(self._repository.folder, share.models)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="maitred-models")
        self._done: deque[Answered | frames.Refused | None] = deque()  # changes of models, from the thread that loads
        self._news: list[frames.News] = []
        self._closing = threading.Event()
        share_cache = ResultCache(share.result_cache_bytes, share.result_cache_ttl_s)
        self._memory = EngineMemory(share.tensor_memory)
        self._cache = share_cache if cache is None else cache

    def _start(self, repository: Path, changes: Sequence[ModelChange]) -> None:
        if not repository.is_file():
            self._control.start(self._config.load_model)
            for change in changes:
                with suppress(MaitredError):  # a model that cannot be loaded any more has its reason in the index
                    self._control.change(change)
        elif self._control.mode is not ControlMode.NONE:
            raise ConfigError(f"{repository} is a file; model_control_mode {self._control.mode.value} is of a folder")
        elif not self.models.take(model_of_file(repository)):
            raise CheckpointError("; ".join(entry.reason for entry in self.models.index()))

    def begin(self, core: EngineCore, send: Callable[[frames.Report], None], wake: Callable[[], None]) -> None:
        """Begin before the engine says that it is ready; the server hears first which models there are."""
        self._send, self._wake = send, wake
        self._lanes = TensorLanes(core.scheduler, core.clock, core.moments)
        self.runner = TensorRunner(
            self._lanes,
            self.models,
            self._clock,
            wake=wake,
            tell=self._news.append,
            s_per_token=lambda: core.prefill_s_per_token,
        )
        add_flows(self.runner, self._clock, self._cache, self._news.append)
        self._models_changed()
        self._send_news()
        if self._control.mode is ControlMode.POLL:
            threading.Thread(target=self._poll, name="maitred-poll", daemon=True).start()

    # -- what the loop asks

    def obey(self, command: frames.Command) -> bool:
        match command:
            case frames.Infer():
                self._infer(command)
            case frames.Abort(request_id, reason):
                return self.runner.cancel(request_id, reason)
            case frames.Ask(_, query, _) if query == CHANGE_MODEL.name:
                self._loader.submit(self._change, command)
            case frames.Free(offsets):
                self._memory.free(offsets)
            case frames.Keep(blocks):
                self._memory.keep(blocks)
            case _:
                return False
        return True

    def turn(self) -> None:
        done = [self._done.popleft() for _ in range(len(self._done))]
        if done:
            self._models_changed()
        self.runner.turn()
        self._send_news()
        for answer in done:
            if answer is not None:
                self._send(answer)

    @property
    def wake_in_s(self) -> float | None:
        return self.runner.wake_in_s

    def close(self) -> None:
        self._closing.set()
        self._loader.shutdown(cancel_futures=True)
        self.runner.close()
        self._lanes.close()
        self._repository.close()

    # -- requests

    def _infer(self, sent: frames.Infer) -> None:
        request_id = sent.request.request_id
        try:
            self.runner.begin(self._memory.opened(sent), partial(self._ended, request_id))
        except MaitredError as error:
            self._news.append(frames.Ended(request_id, None, FinishReason.ERROR, type(error).__name__, str(error)))

    def _ended(self, request_id: str, answer: TensorAnswer) -> None:
        result, reason = answer.result, answer.finish_reason
        if isinstance(result, InferResponse):
            outputs, places = self._memory.written(result.outputs)
            told = msgspec.structs.replace(result, outputs=outputs)
            ended = frames.Ended(request_id, told, reason, charges=answer.charges, timing=answer.timing, places=places)
        else:
            error = (type(result).__name__, str(result))
            ended = frames.Ended(request_id, None, reason, *error, charges=answer.charges, timing=answer.timing)
        self._news.append(ended)

    # -- models

    def _change(self, ask: frames.Ask) -> None:
        """Change models, in the thread that loads."""
        try:
            self._control.change(msgspec.msgpack.decode(ask.argument, type=ModelChange))
            self._done.append(Answered(ask.number, msgspec.Raw(frames.encode(Nothing()))))
        except Exception as error:
            self._done.append(frames.Refused(ask.number, type(error).__name__, str(error)))
        self._wake()

    def _poll(self) -> None:
        while not self._closing.wait(self._config.repository_poll_s):
            with suppress(RuntimeError):  # it was shut down meanwhile
                self._loader.submit(self.poll)

    def poll(self) -> None:
        """Load and unload what changed in the repository; in the thread that loads."""
        changes = self._control.poll()
        if changes.load or changes.unload:
            self._done.append(None)
            self._wake()

    def _models_changed(self) -> None:
        self.runner.models_changed()
        ready = self.models.index(ready_only=True)
        served = tuple(self._told(entry.name, entry.version or 0) for entry in ready)
        self._news.append(frames.ModelsTold(tuple(self.models.index()), served))

    def _told(self, name: str, number: int) -> frames.ServedVersion:
        with self.models.lease(name, number) as loaded:
            labels = self.models.labels(name).items()
            mine = tuple(label for label, version in labels if version == number)
            return frames.ServedVersion(name, number, loaded.config.SerializeToString(), mine)

    # -- news

    def _send_news(self) -> None:
        if not self._news:
            return
        news = self._news.copy()
        self._news.clear()  # the very list: runner and flows append to it
        try:
            self._send(frames.TensorsTold(news))
        except RequestTooLarge:
            for each in news:
                self._send_alone(each)

    def _send_alone(self, news: frames.News) -> None:
        try:
            self._send(frames.TensorsTold([news]))
        except RequestTooLarge as error:
            if isinstance(news, frames.Ended):
                told = (type(error).__name__, str(error))
                self._send(
                    frames.TensorsTold([msgspec.structs.replace(news, result=None, kind=told[0], message=told[1])])
                )


# ---- on an event loop


class LocalTensorService(TensorModels):
    """TensorModels of a TensorHost in this process. Make, `start` and `close` it on the event loop that asks it."""

    def __init__(
        self,
        repository: Path,
        mode: ControlMode = ControlMode.NONE,
        *,
        openers: Mapping[str, Opener] = OPENERS,
        cache: ResultCache | None = None,
    ) -> None:
        super().__init__(self._infer_here, self._change_here, self._requests, ModelConfig.FromString)
        self._repository, self._mode, self._openers, self._cache = repository, mode, openers, cache
        self._asked: dict[str, tuple[InferRequest, asyncio.Future[frames.Ended]]] = {}
        self._questions = Questions(self._obey, lambda: EngineDead("the models were closed"))
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, load: Collection[str] = ()) -> None:
        """Raises CheckpointError for a repository that cannot be read."""
        loop = self._loop = asyncio.get_running_loop()
        mode = self._mode.value
        config = TensorConfig(model_repository=str(self._repository), model_control_mode=mode, load_model=tuple(load))
        made = partial(TensorHost, config, MachineShare(), openers=self._openers, cache=self._cache)
        self.host = await asyncio.to_thread(made)

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._turn)

        core = EngineCore(lone_scheduler(SchedulerConfig()), _NoExecutor(), WallClock())
        self.host.begin(core, self._hear, wake)

    @property
    def runner(self) -> TensorRunner:
        return self.host.runner

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self.host.close)
        for name in {entry.name for entry in self.host.models.index()}:
            self.host.models.drop(name)

    async def poll(self) -> None:
        await asyncio.to_thread(self.host.poll)
        self._turn()

    async def _infer_here(self, request: InferRequest) -> InferResponse:
        answer: asyncio.Future[frames.Ended] = self._loop.create_future()
        self._asked[request.request_id] = (request, answer)
        self._obey(frames.Infer(request))
        try:
            ended = await answer
        except asyncio.CancelledError:
            self._obey(frames.Abort(request.request_id, FinishReason.ABORT))
            raise
        if ended.result is None:
            raise frames.error_of(ended.kind, ended.message)
        return ended.result

    async def _change_here(self, change: ModelChange) -> None:
        await self._questions.ask(CHANGE_MODEL, change)

    def _requests(self) -> list[InferRequest]:
        return [request for request, _ in self._asked.values()]

    def _obey(self, command: frames.Command) -> bool:
        self.host.obey(command)
        self._turn()
        return True

    def _hear(self, report: frames.Report) -> None:
        match report:
            case frames.TensorsTold(news):
                for each in news:
                    self._take(each) if isinstance(each, frames.Ended) else self.hear(each)
            case Answered(number, result):
                self._questions.answered(number, result)
            case frames.Refused(number, kind, message):
                self._questions.settle(number, frames.error_of(kind, message))

    def _take(self, ended: frames.Ended) -> None:
        request, answer = self._asked.pop(ended.request_id)
        self.ended(request, ended)
        if not answer.done():
            answer.set_result(ended)

    def _turn(self) -> None:
        """Run a turn, and again when something may be due."""
        self.host.turn()
        if self._timer is not None:
            self._timer.cancel()
        wait_s = self.host.wake_in_s
        self._timer = None if wait_s is None else self._loop.call_later(wait_s, self._turn)


# ---- engines that serve a repository


def with_tensors(build: Builder) -> Builder:
    """A builder of engines that serve a repository too; `build` makes those with a language model."""

    def load(
        config: EngineConfig, names: tuple[str, ...], tell: Callable[[str], None], wake: Callable[[], None]
    ) -> LoadedEngine:
        host = TensorHost(config.tensors, config.share)
        index = host.models.index()
        ready = host.models.index(ready_only=True)
        source = config.tensors.model_repository or config.tensors.tfs_model_config
        tell(f"models  {len(ready)} of {len(index)} versions in {source}")
        for entry in index:
            if entry.reason:
                tell(f"        {entry.name}: {entry.reason}")
        loaded = lone_engine(config, tell) if config.model.model == NO_MODEL else build(config, names, tell, wake)
        return replace(loaded, tensors=host)

    return load


class _NoExecutor:
    """Executor without plans."""

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        raise AssertionError("an engine without a language model has no steps")

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


def lone_engine(config: EngineConfig, tell: Callable[[str], None]) -> LoadedEngine:
    log = _decision_log(config)
    scheduler = lone_scheduler(config.scheduler)
    core = EngineCore(scheduler, _NoExecutor(), WallClock(), *([Recorder(log.write)] if log is not None else []))
    plan = MemoryPlan(
        available_bytes=0,
        weights_bytes=0,
        bytes_per_block=0,
        block_size=1,
        num_blocks=1,
        max_model_len=2,
        model_context=1,
        longest_context=1,
    )
    return LoadedEngine(core, _facts(), plan, deterministic=True, close=log.close if log is not None else core.close)


def _facts() -> ModelFacts:
    return ModelFacts(
        tokenizer_folder="",
        chat_template=None,
        names=(),
        max_model_len=2,
        vocab_size=0,
        eos_token_ids=(),
        generation_defaults={},
        created=int(time.time()),
        root="",
        revision="",
        block_size=1,
        footprint=None,
    )


def _decision_log(config: EngineConfig) -> DecisionLogFile | None:
    if config.decision_log is None:
        return None
    header = Header(config=config.scheduler, num_blocks=1, block_size=1, enable_prefix_caching=False)
    sizes = {"max_bytes": config.decision_log_max_bytes, "max_files": config.decision_log_max_files}
    return DecisionLogFile(Path(config.decision_log), header, **sizes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], with_tensors(build_from_config)))
