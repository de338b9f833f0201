"""Tensor models in an engine: what the server asks of them, their lanes, and loads in a thread of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from maitred.config import MachineShare, TensorConfig
from maitred.core.clock import Clock, WallClock
from maitred.core.errors import CheckpointError, ConfigError, MaitredError, RequestTooLarge
from maitred.core.request import FinishReason
from maitred.core.tensor_request import BatchTimes, InferResponse
from maitred.engine.frames import OfTensors, Report, encode
from maitred.fleet.result_cache import ResultCache
from maitred.scheduler.engine_core import EngineCore
from maitred.tensor.control import ControlMode, ModelControl
from maitred.tensor.crossing import EngineMemory
from maitred.tensor.flows import add_flows
from maitred.tensor.frames import (
    Cancel,
    Changed,
    Ended,
    Free,
    Infer,
    Keep,
    Load,
    Looked,
    Models,
    News,
    Ran,
    StepEnded,
    Unload,
    decode_command,
    problem_of,
)
from maitred.tensor.frames import ServedVersion as Told
from maitred.tensor.python.instance import all_openers
from maitred.tensor.repository_files import model_of_file
from maitred.tensor.runner import Answer, TensorRunner
from maitred.tensor.served_models import ServedModels
from maitred.tensor.shared import Place
from maitred.tensor.tfs_config import open_repository


class TensorHost:
    """Tensor models of an EngineLoop beside its language model; all but the loads is in the engine's thread."""

    def __init__(self, config: TensorConfig, share: MachineShare, clock: Clock | None = None) -> None:
        """Loads what is to be served at the start. Raises CheckpointError where the repository cannot be read."""
        self._config, self._clock = config, clock or WallClock()
        self.models = ServedModels(all_openers(allow_code=config.allow_repository_code))
        self._repository = open_repository(config)
        self._control = ModelControl(
            self._repository.folder,
            ControlMode(config.model_control_mode),
            self.models,
            rewrite=self._repository.rewrite,
        )
        self._start(self._repository.folder)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="maitred-models")
        self._done: deque[Changed | None] = deque()  # changes of models, from the thread that loads
        self._news: list[News] = []
        self._closing = threading.Event()
        self._cache = ResultCache(share.result_cache_bytes, share.result_cache_ttl_s)
        self._memory = EngineMemory(share.tensor_memory)

    def _start(self, repository: Path) -> None:
        if not repository.is_file():
            self._control.start(self._config.load_model)
        elif self._control.mode is not ControlMode.NONE:
            raise ConfigError(f"{repository} is a file; model_control_mode {self._control.mode.value} is of a folder")
        elif not self.models.take(model_of_file(repository)):
            raise CheckpointError("; ".join(entry.reason for entry in self.models.index()))

    def begin(self, core: EngineCore, send: Callable[[Report], None], wake: Callable[[], None]) -> None:
        """Begin before the engine says that it is ready; the server hears first which models there are."""
        self._send_frame, self._wake, self._lanes = send, wake, core.tensor_lanes
        self.runner = TensorRunner(
            core.tensor_lanes,
            self.models,
            self._clock,
            wake=wake,
            on_batch=self._ran,
            s_per_token=lambda: core.prefill_s_per_token,
        )
        add_flows(self.runner, self._clock, self._cache, self._looked, self._step_ended)
        self._models_changed()
        self._send_news()
        if self._control.mode is ControlMode.POLL:
            threading.Thread(target=self._poll, name="maitred-poll", daemon=True).start()

    # -- what the loop asks

    def obey(self, message: msgspec.Raw) -> None:
        """Raises msgspec.DecodeError for what is no command."""
        match decode_command(message):
            case Infer() as sent:
                self._infer(sent)
            case Cancel(request_id, reason):
                self.runner.cancel(request_id, reason)
            case Load(number, model, config):
                self._loader.submit(self._change, number, partial(self._control.load, model, config))
            case Unload(number, model):
                self._loader.submit(self._change, number, partial(self._control.unload, model))
            case Free() | Keep() as command:
                self._memory.obey(command)

    def turn(self) -> None:
        """Take a turn, after every event and when `wake_in_s` is over."""
        if self._done:
            self._models_changed()
            while self._done:
                changed = self._done.popleft()
                self._news += [changed] if changed is not None else []
        self.runner.turn()
        self._send_news()

    @property
    def wake_in_s(self) -> float | None:
        return self.runner.wake_in_s

    @property
    def busy(self) -> bool:
        return len(self.runner) > 0

    def close(self) -> None:
        self._closing.set()
        self._loader.shutdown(cancel_futures=True)
        self.runner.close()
        self._lanes.close()
        self._repository.close()

    # -- requests

    def _infer(self, sent: Infer) -> None:
        request_id = sent.request.request_id
        try:
            self.runner.begin(self._memory.opened(sent), partial(self._ended, request_id))
        except MaitredError as error:
            self._news.append(Ended(request_id, None, FinishReason.ERROR, problem_of(error)))

    def _ended(self, request_id: str, answer: Answer) -> None:
        result = answer.result if isinstance(answer.result, InferResponse) else None
        problem = problem_of(answer.result) if isinstance(answer.result, MaitredError) else None
        places: tuple[Place | None, ...] = ()
        if result is not None:
            outputs, places = self._memory.written(result.outputs)
            result = msgspec.structs.replace(result, outputs=outputs)
        told = (request_id, result, answer.finish_reason, problem, answer.charges, answer.timing, places)
        self._news.append(Ended(*told))

    def _ran(self, times: BatchTimes) -> None:
        self._news.append(Ran(times))

    def _looked(self, model: str, version: int, hit: bool, ns: int) -> None:
        self._news.append(Looked(model, version, hit, ns))

    def _step_ended(self, model: str, version: int, answer: Answer) -> None:
        if (timing := answer.timing) is not None:
            total_ns, queue_ns = round(timing.total_s * 1e9), round(timing.queue_s * 1e9)
            succeeded = not isinstance(answer.result, MaitredError)
            self._news.append(StepEnded(model, version, succeeded, total_ns, queue_ns))

    # -- models

    def _change(self, number: int, change: Callable[[], object]) -> None:
        """Change models, in the thread that loads."""
        try:
            change()
            changed = Changed(number)
        except Exception as error:
            changed = Changed(number, problem_of(error))
        self._done.append(changed)
        self._wake()

    def _poll(self) -> None:
        while not self._closing.wait(self._config.repository_poll_s):
            with suppress(RuntimeError):  # it was shut down meanwhile
                self._loader.submit(self._poll_once)

    def _poll_once(self) -> None:
        changes = self._control.poll()
        if changes.load or changes.unload:
            self._done.append(None)
            self._wake()

    def _models_changed(self) -> None:
        self.runner.models_changed()
        ready = self.models.index(ready_only=True)
        served = tuple(self._told(entry.name, entry.version or 0) for entry in ready)
        self._news.append(Models(tuple(self.models.index()), served))

    def _told(self, name: str, number: int) -> Told:
        with self.models.lease(name, number) as loaded:
            labels = self.models.labels(name).items()
            mine = tuple(label for label, version in labels if version == number)
            return Told(name, number, loaded.config.SerializeToString(), mine)

    # -- news

    def _send_news(self) -> None:
        news, self._news = self._news, []
        if not news:
            return
        try:
            self._send(news)
        except RequestTooLarge:
            for each in news:
                self._send_alone(each)

    def _send_alone(self, news: News) -> None:
        try:
            self._send([news])
        except RequestTooLarge as error:
            if isinstance(news, Ended):
                self._send([msgspec.structs.replace(news, result=None, problem=problem_of(error))])

    def _send(self, news: list[News]) -> None:
        self._send_frame(OfTensors(msgspec.Raw(encode(news))))
