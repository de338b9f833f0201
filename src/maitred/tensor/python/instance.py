"""Instances of Python models: each a process of its own, begun again when it dies or hangs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from maitred.core.errors import CheckpointError, InstanceLost, InvalidRequest, KernelError
from maitred.tensor.arrays import kept_specs
from maitred.tensor.config import (
    ANY_MESSAGE,
    SCHEMA,
    WILDCARD,
    DeclaredTensor,
    ModelConfig,
    complete,
    config_from_json,
    inputs_of,
    outputs_of,
    parameters_of,
)
from maitred.tensor.config_checks import ENTRY_POINT, NO_CODE, PYTHON, faults, runs_code
from maitred.tensor.fill import with_defaults
from maitred.tensor.instance import NUMPY_TYPES, Arrays, check_inputs, reshaped
from maitred.tensor.python import frames
from maitred.tensor.repository_files import ModelFolder, ModelVersion
from maitred.tensor.served_models import OPENERS, LoadedVersion, Opener, warm

COMPLETED = ("max_batch_size", "dynamic_batching", "input", "output")  # fields that a model's code may complete
_GPU = SCHEMA.enums["ModelInstanceGroup.Kind"]["KIND_GPU"]
TIMEOUT = "execution_timeout_ms"  # a key of a config's parameters
TIMEOUT_S = 60.0  # of a batch, where the config does not say
LOAD_TIMEOUT_S = 600.0
LEAST_BACK_OFF_S, MOST_BACK_OFF_S = 0.1, 5.0  # between two starts; doubled by each death without an answer
COMMAND = (sys.executable, "-P", "-m", "maitred.tensor.python.process")


def all_openers(*, allow_code: bool) -> dict[str, Opener]:
    """Return the openers of every backend; code in the repository runs only where that is allowed."""
    return {**OPENERS, PYTHON: python_opener(allow_code=allow_code)}


def python_opener(*, allow_code: bool) -> Opener:
    """Opens models of the backend python; code that lies in the repository only where that is allowed."""

    def open_python(model: ModelFolder, version: ModelVersion) -> LoadedVersion:
        if runs_code(model.config) and not allow_code:
            raise CheckpointError(NO_CODE)
        config, instances = model.config, []
        try:
            for place in _places(config):
                instances.append(PythonInstance(config, version, place))
                config = instances[-1].config
                warm(instances[-1], replace(model, config=config))
        except BaseException:
            for each in instances:
                each.close()
            raise
        return LoadedVersion(model.name, version.number, config, tuple(instances))

    return open_python


class Place(NamedTuple):
    """Place of one instance."""

    name: str
    kind: str = "CPU"
    device: int = 0


def _places(config: ANY_MESSAGE) -> Iterator[Place]:
    """Return `count` places on each device of a group."""
    for group in config.instance_group:
        on_gpu = group.kind == _GPU
        for device in group.gpus if on_gpu and group.gpus else (0,):
            for number in range(group.count):
                yield Place(f"{group.name}_{number}", "GPU" if on_gpu else "CPU", device)


class PythonInstance:
    """One process. It is asked by one thread at a time, whatever thread that is."""

    def __init__(self, config: ANY_MESSAGE, version: ModelVersion, place: Place) -> None:
        """Loaded when it returns. Raises CheckpointError."""
        self._name, parameters = place.name, parameters_of(config)
        entry_point = parameters.get(ENTRY_POINT, "")
        self._timeout_s = int(parameters[TIMEOUT]) / 1e3 if TIMEOUT in parameters else TIMEOUT_S
        self._load = frames.LoadInstance(
            folder=str(version.path.parent),
            file="" if entry_point else str(version.path),
            entry_point=entry_point,
            config=complete(config),
            parameters=parameters,
            instance=place.name,
            version=version.number,
            kind=place.kind,
            device=place.device,
        )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._num_deaths = 0  # since it answered
        ready = self._start()
        try:
            self.config = config if ready.config is None else _completed(config, ready.config)
        except CheckpointError:
            self.close()
            raise
        kept_in, kept_out = kept_specs(self.config)
        self._inputs = {spec.name: spec for spec in inputs_of(self.config)}
        self._needed = {spec.name for spec in self._inputs.values() if not spec.optional}
        self._inputs |= kept_in
        self._types = {name: spec.data_type for name, spec in self._inputs.items()}
        self._outputs = {spec.name: spec for spec in outputs_of(self.config)} | kept_out
        self._batched = self.config.max_batch_size > 0

    def prepare(self) -> None:
        """Begins the process again that died or hung, after a pause. Raises InstanceLost where it does not load."""
        with self._lock:
            if self._process is None:
                self._restart()

    def run(self, inputs: Arrays, wanted: Collection[str] = ()) -> dict[str, np.ndarray]:
        """Run as an ONNX instance. Raises InstanceLost when the process died or did not answer in its time."""
        with self._lock:
            given = self._given_to_model(inputs)
            if self._process is None:
                raise InstanceLost(f"the process of instance {self._name} has ended")
            try:
                answer = self._asked(given, tuple(wanted))
            except (OSError, EOFError) as error:
                raise self._lost(error) from None
            self._num_deaths = 0
            if isinstance(answer, frames.InstanceFailed):
                raise (InvalidRequest if answer.by_client else KernelError)(f"model {self._name}: {answer.reason}")
            found = self._results.get(answer.outputs, answer.num_bytes)
            return {name: array.copy() for name, array in self._checked(found, inputs, wanted).items()}

    def close(self) -> None:
        """Have the process finalize its model and end, without a wait."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            self._connection.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=_reap, args=(process, self._files), name="maitred-finalize", daemon=True).start()

    # -- the process

    def _start(self) -> frames.InstanceReady:
        try:
            self._begin()
            self._connection.settimeout(LOAD_TIMEOUT_S)
            frames.send(self._connection, self._load)
            answer = frames.decode_answer(frames.receive(self._connection))
        except (OSError, EOFError) as error:
            self._end()
            told = f": {error}" if str(error) else ""
            raise CheckpointError(f"the process of {self._name} ended before it was loaded{told}") from None
        if not isinstance(answer, frames.InstanceReady):
            self._end()
            raise CheckpointError(f"{self._load.file or self._load.entry_point}: {getattr(answer, 'reason', answer)}")
        self._connection.settimeout(self._timeout_s)
        return answer

    def _begin(self) -> None:
        files = self._files = ExitStack()
        ours, theirs = map(files.enter_context, socket.socketpair())
        self._connection = ours
        self._given, self._results = _shared("maitred-inputs", files), _shared("maitred-outputs", files)
        engine, alive = os.pipe()  # the one end of it is ours alone, and ends with us
        files.callback(os.close, alive)
        passed = (theirs.fileno(), self._given.file, self._results.file, engine)
        try:
            self._process = subprocess.Popen([*COMMAND, *map(str, passed)], pass_fds=passed, stdin=subprocess.DEVNULL)
        finally:
            os.close(engine)
            theirs.close()

    def _restart(self) -> None:
        if self._closed:
            raise InstanceLost(f"instance {self._name} is closed")
        time.sleep(min(LEAST_BACK_OFF_S * 2 ** min(self._num_deaths - 1, 10), MOST_BACK_OFF_S))
        try:
            self._start()
        except CheckpointError as error:
            self._num_deaths += 1
            raise InstanceLost(str(error)) from None

    def _asked(self, inputs: Arrays, wanted: tuple[str, ...]) -> frames.InstanceRan | frames.InstanceFailed:
        placed, num_bytes = self._given.put(inputs)
        frames.send(self._connection, frames.Run(placed, num_bytes, wanted))
        answer = frames.decode_answer(frames.receive(self._connection))
        assert not isinstance(answer, frames.InstanceReady)
        return answer

    def _lost(self, error: Exception) -> InstanceLost:
        self._num_deaths += 1
        hung = isinstance(error, TimeoutError)
        what = f"did not answer in {self._timeout_s:g} s ({TIMEOUT})" if hung else "ended"
        self._end()
        return InstanceLost(f"the process of instance {self._name} {what}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if not self._closed:
            self._files.close()

    # -- what goes in and comes out

    def _given_to_model(self, inputs: Arrays) -> Arrays:
        """Return the arrays in the shapes that the model itself takes."""
        check_inputs(inputs, self._types, self._needed)
        return {name: self._reshaped(array, self._inputs[name], back=False) for name, array in inputs.items()}

    def _reshaped(self, array: np.ndarray, spec: DeclaredTensor, *, back: bool) -> np.ndarray:
        if spec.reshape is None:
            return array
        dims = (spec.reshape, spec.dims) if back else (spec.dims, spec.reshape)
        return array.reshape(reshaped(array.shape, *dims, batched=self._batched))

    def _checked(
        self, outputs: Mapping[str, np.ndarray], inputs: Arrays, wanted: Collection[str]
    ) -> dict[str, np.ndarray]:
        """Return the wanted outputs, each as the config says. Raises KernelError, with both sides."""
        rows = next((array.shape[:1] for array in inputs.values()), ()) if self._batched else ()
        told = {}
        for spec in self._outputs.values():
            if wanted and spec.name not in wanted:
                continue
            if spec.name not in outputs:
                raise KernelError(f"model {self._name} gave no output {spec.name!r}, but {sorted(outputs)}")
            told[spec.name] = self._reshaped(_conforming(self._name, spec, outputs[spec.name], rows), spec, back=True)
        return told


def _shared(name: str, files: ExitStack) -> frames.SharedArrays:
    file = os.memfd_create(name)
    files.callback(os.close, file)
    return frames.SharedArrays(file)


def _reap(process: subprocess.Popen[bytes], files: ExitStack) -> None:
    """Reap the process; its files are ours until it has ended."""
    with files:
        try:
            process.wait(frames.FINALIZE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _completed(config: ANY_MESSAGE, found: Mapping[str, Any]) -> ANY_MESSAGE:
    """Return the config with the model code's additions. Raises CheckpointError for one that cannot be served."""
    told = {name: found[name] for name in COMPLETED if name in found}
    completed = ModelConfig()
    completed.CopyFrom(config)
    for name in COMPLETED:
        completed.ClearField(name)
    completed.MergeFrom(config_from_json(json.dumps(told), config.name))
    reasons = faults(with_defaults(completed))
    if reasons:
        raise CheckpointError("; ".join(reasons))
    return completed


def _conforming(model: str, spec: DeclaredTensor, array: np.ndarray, rows: tuple[int, ...]) -> np.ndarray:
    kind, dims = NUMPY_TYPES[spec.data_type], (*rows, *spec.model_dims)
    fits = array.ndim == len(dims) and all(dim in (WILDCARD, size) for dim, size in zip(dims, array.shape, strict=True))
    if array.dtype != kind or not fits:
        raise KernelError(
            f"model {model} gave output {spec.name!r} of {array.dtype} and shape {list(array.shape)}; "
            f"the config says {kind} and {list(dims)}"
        )
    return array
