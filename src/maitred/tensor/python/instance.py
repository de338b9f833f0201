"""Instances of Python models: each a process of its own, begun again when it dies or hangs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping

import numpy as np

from maitred.errors import CheckpointError, InstanceLost, InvalidRequest, KernelError
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, TensorSpec, complete, inputs_of, outputs_of, parameters_of
from maitred.tensor.config_checks import ENTRY_POINT, NO_CODE
from maitred.tensor.instance import NUMPY_TYPES, Arrays
from maitred.tensor.python.frames import Failed, Load, Ran, Ready, Run, SharedArrays, decode_answer, receive, send
from maitred.tensor.repository_files import ModelFolder, ModelVersion
from maitred.tensor.served_models import LoadedVersion, Opener, warm

TIMEOUT = "execution_timeout_ms"  # a key of a config's parameters
TIMEOUT_S = 60.0  # of a batch, where the config does not say
LOAD_TIMEOUT_S = 600.0
LEAST_BACK_OFF_S, MOST_BACK_OFF_S = 0.1, 5.0  # between two starts; doubled by each death without an answer
COMMAND = (sys.executable, "-P", "-m", "maitred.tensor.python.process")


def python_opener(*, allow_code: bool) -> Opener:
    """Opens models of the backend python; code that lies in the repository only where that is allowed."""

    def open_python(model: ModelFolder, version: ModelVersion) -> LoadedVersion:
        entry_point = parameters_of(model.config).get(ENTRY_POINT, "")
        if not entry_point and not allow_code:
            raise CheckpointError(NO_CODE)
        instances: list[PythonInstance] = []
        try:
            for group in model.config.instance_group:
                for number in range(group.count):
                    instances.append(PythonInstance(model.config, version, f"{group.name}_{number}", entry_point))
                    warm(instances[-1], model)
        except BaseException:
            for each in instances:
                each.close()
            raise
        return LoadedVersion(model.name, version.number, model.config, tuple(instances))

    return open_python


class PythonInstance:
    """One process. It is asked by one thread at a time, whatever thread that is."""

    providers = ("python",)

    def __init__(self, config: ANY_MESSAGE, version: ModelVersion, name: str, entry_point: str) -> None:
        """Loaded when it returns. Raises CheckpointError."""
        self._name, parameters = name, parameters_of(config)
        self._inputs, self._outputs = inputs_of(config), outputs_of(config)
        self._batched = config.max_batch_size > 0
        self._timeout_s = int(parameters[TIMEOUT]) / 1e3 if TIMEOUT in parameters else TIMEOUT_S
        self._load = Load(
            folder=str(version.path.parent),
            file="" if entry_point else str(version.path),
            entry_point=entry_point,
            config=complete(config),
            parameters=parameters,
            instance=name,
            version=version.number,
        )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._num_deaths = 0  # since it answered
        self._start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def run(self, inputs: Arrays, wanted: Collection[str] = ()) -> dict[str, np.ndarray]:
        """As an ONNX instance. Raises InstanceLost when the process died or did not answer in its time."""
        with self._lock:
            self._check_inputs(inputs)
            if self._process is None:
                self._restart()
            try:
                answer = self._asked(inputs, tuple(wanted))
            except (OSError, EOFError) as error:
                raise self._lost(error) from None
            self._num_deaths = 0
            if isinstance(answer, Failed):
                raise (InvalidRequest if answer.by_client else KernelError)(f"model {self._name}: {answer.reason}")
            found = self._results.get(answer.outputs, answer.num_bytes)
            return {name: array.copy() for name, array in self._checked(found, inputs, wanted).items()}

    def close(self) -> None:
        """The process ends, also in the middle of a batch."""
        self._closed = True
        self._end()

    # -- the process

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._given = SharedArrays(os.memfd_create("maitred-inputs"))
        self._results = SharedArrays(os.memfd_create("maitred-outputs"))
        engine, self._alive = os.pipe()  # its other end is ours alone, and ends with us
        files = (theirs.fileno(), self._given.file, self._results.file, engine)
        with theirs:
            self._process = subprocess.Popen([*COMMAND, *map(str, files)], pass_fds=files, stdin=subprocess.DEVNULL)
        os.close(engine)
        self._connection = ours
        try:
            ours.settimeout(LOAD_TIMEOUT_S)
            send(ours, self._load)
            answer = decode_answer(receive(ours))
        except (OSError, EOFError):
            self._end()
            raise CheckpointError(f"the process of {self._name} ended before it was loaded") from None
        if not isinstance(answer, Ready):
            self._end()
            raise CheckpointError(f"{self._load.file or self._load.entry_point}: {getattr(answer, 'reason', answer)}")
        ours.settimeout(self._timeout_s)

    def _restart(self) -> None:
        if self._closed:
            raise InstanceLost(f"instance {self._name} is closed")
        time.sleep(min(LEAST_BACK_OFF_S * 2 ** min(self._num_deaths - 1, 10), MOST_BACK_OFF_S))
        try:
            self._start()
        except CheckpointError as error:
            self._num_deaths += 1
            raise InstanceLost(str(error)) from None

    def _asked(self, inputs: Arrays, wanted: tuple[str, ...]) -> Ran | Failed:
        placed, num_bytes = self._given.put(inputs)
        send(self._connection, Run(placed, num_bytes, wanted))
        answer = decode_answer(receive(self._connection))
        assert not isinstance(answer, Ready)
        return answer

    def _lost(self, error: Exception) -> InstanceLost:
        self._num_deaths += 1
        hung = isinstance(error, TimeoutError)
        what = f"did not answer in {self._timeout_s:g} s ({TIMEOUT})" if hung else "ended"
        self._end()
        return InstanceLost(f"the process of instance {self._name} {what}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._connection.close()
        process.kill()
        process.wait()
        for file in (self._given.file, self._results.file, self._alive):
            os.close(file)

    # -- what goes in and comes out

    def _check_inputs(self, inputs: Arrays) -> None:
        known = {spec.name: spec for spec in self._inputs}
        for name, array in inputs.items():
            if name not in known:
                raise InvalidRequest(f"{name!r} is no input of the model, which has {', '.join(known)}")
            asked = NUMPY_TYPES[known[name].data_type]
            if array.dtype != asked:
                raise InvalidRequest(f"input {name!r} is an array of {array.dtype}, and must be of {asked}")
        absent = {spec.name for spec in self._inputs if not spec.optional} - {*inputs}
        if absent:
            raise InvalidRequest(f"input {min(absent)!r} is missing")

    def _checked(
        self, outputs: Mapping[str, np.ndarray], inputs: Arrays, wanted: Collection[str]
    ) -> dict[str, np.ndarray]:
        """Those that are wanted, each as the config says. Raises KernelError, with both sides."""
        rows = next((array.shape[:1] for array in inputs.values()), ()) if self._batched else ()
        told = {}
        for spec in self._outputs:
            if wanted and spec.name not in wanted:
                continue
            if spec.name not in outputs:
                raise KernelError(f"model {self._name} gave no output {spec.name!r}, but {sorted(outputs)}")
            told[spec.name] = _conforming(self._name, spec, outputs[spec.name], rows)
        return told


def _conforming(model: str, spec: TensorSpec, array: np.ndarray, rows: tuple[int, ...]) -> np.ndarray:
    kind, dims = NUMPY_TYPES[spec.data_type], (*rows, *spec.dims)
    fits = array.ndim == len(dims) and all(dim in (WILDCARD, size) for dim, size in zip(dims, array.shape, strict=True))
    if array.dtype != kind or not fits:
        raise KernelError(
            f"model {model} gave output {spec.name!r} of {array.dtype} and shape {list(array.shape)}; "
            f"the config says {kind} and {list(dims)}"
        )
    return array
