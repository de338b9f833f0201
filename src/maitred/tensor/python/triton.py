"""Triton's Python models: a `TritonPythonModel` of a repository's model.py, and the module that such files import.

A batch is one request here, its rows joined. Names and signatures are those that the README of
triton-inference-server/python_backend documents; BLS and decoupled responses are not built.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from maitred.core.errors import InvalidRequest
from maitred.tensor.python.frames import LoadInstance, Model

MODULE = "triton_python_backend_utils"
CLASS = "TritonPythonModel"
NOT_DECOUPLED = "decoupled models are not served: one request has one answer"
# Not `maitred.tensor.instance`'s: each process would import a runtime with it. A type's number is its place, from 1.
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_BOOL": np.bool_, "TYPE_UINT8": np.uint8, "TYPE_UINT16": np.uint16, "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64, "TYPE_INT8": np.int8, "TYPE_INT16": np.int16, "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64, "TYPE_FP16": np.float16, "TYPE_FP32": np.float32, "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}  # fmt: skip
_TYPES = tuple(TRITON_STRING_TO_NUMPY.values())
_logger = logging.getLogger("maitred.python_model")


def load(asked: LoadInstance, module: ModuleType) -> Model:
    """Load its class, initialized, with the config as the class completes it."""
    made = getattr(module, CLASS, None)
    if made is None:
        raise LookupError(f"{asked.file} has no class {CLASS}")
    config = _completed(made, asked.config)
    model = made()
    if hasattr(model, "initialize"):
        model.initialize(_arguments(asked, config))

    def predict(inputs: Mapping[str, np.ndarray], wanted: tuple[str, ...]) -> Mapping[str, np.ndarray]:
        tensors = [Tensor(name, array) for name, array in inputs.items()]
        names = wanted or tuple(each["name"] for each in config["output"])
        request = InferenceRequest(
            inputs=tensors, requested_output_names=list(names), model_name=config["name"], model_version=asked.version
        )
        return _outputs(model.execute([request]))

    return Model(predict, getattr(model, "finalize", lambda: None), config)


def _completed(made: Any, config: dict[str, Any]) -> dict[str, Any]:
    if not hasattr(made, "auto_complete_config"):
        return config
    completed = made.auto_complete_config(ModelConfig(json.dumps(config)))
    if not isinstance(completed, ModelConfig):
        raise TypeError(f"auto_complete_config must return the ModelConfig, not {type(completed).__name__}")
    return completed.as_dict()


def _arguments(asked: LoadInstance, config: dict[str, Any]) -> dict[str, str]:
    return {
        "model_config": json.dumps(config),
        "model_instance_kind": asked.kind,
        "model_instance_name": asked.instance,
        "model_instance_device_id": str(asked.device),
        "model_repository": asked.folder.rpartition("/")[0],
        "model_version": str(asked.version),
        "model_name": config["name"],
    }


def _outputs(responses: Any) -> dict[str, np.ndarray]:
    if not isinstance(responses, list) or len(responses) != 1 or not isinstance(responses[0], InferenceResponse):
        raise TypeError(f"execute must return a list of one InferenceResponse for one request, not {responses!r:.200}")
    (response,) = responses
    error = response.error()
    if error is not None and error.code() == TritonError.INVALID_ARG:
        raise InvalidRequest(error.message())
    if error is not None:
        raise TritonModelException(error.message())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


# ---- what model.py imports


class TritonModelException(Exception):
    """Something of the server's failed."""


class TritonError:
    """An error that an answer has instead of outputs."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG = 0, 1, 2, 3
    UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = 4, 5, 6, 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, np.asarray(array)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    def triton_dtype(self) -> int:
        return numpy_to_triton_type(self._array.dtype.type)

    def shape(self) -> Sequence[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self._array.__dlpack__()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        return Tensor(name, np.from_dlpack(tensor))


class InferenceRequest:
    """Inputs of a whole batch, and what is known of it."""

    def __init__(
        self,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        **others: Any,
    ) -> None:
        self._inputs, self._wanted, self._others = list(inputs), list(requested_output_names), others
        self._model, self._version = model_name, model_version

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return self._wanted

    def model_name(self) -> str:
        return self._model

    def model_version(self) -> int:
        return self._version

    def request_id(self) -> str:
        return str(self._others.get("request_id", ""))

    def correlation_id(self) -> int:
        return int(self._others.get("correlation_id", 0))

    def parameters(self) -> str:
        return "{}"

    def timeout(self) -> int:
        return 0

    def flags(self) -> int:
        return 0

    def is_cancelled(self) -> bool:
        return False

    def exec(self, decoupled: bool = False) -> InferenceResponse:
        raise TritonModelException("a model cannot ask other models here (BLS); make an ensemble of them")

    async_exec = exec

    def get_response_sender(self) -> Any:
        raise TritonModelException(NOT_DECOUPLED)


class InferenceResponse:
    """Outputs, or an error."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self._outputs, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class ModelConfig:
    """A config as Triton's JSON, for `auto_complete_config` to complete. ValueError for what the file gainsays."""

    def __init__(self, model_config: str) -> None:
        self._config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        if self._config["max_batch_size"] > max_batch_size:
            raise ValueError(
                f"max_batch_size is {self._config['max_batch_size']} in the config, {max_batch_size} in the model"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        if "sequence_batching" in self._config:
            raise ValueError("the config has sequence_batching, and the model sets dynamic_batching")
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy: dict[str, Any]) -> None:
        if transaction_policy.get("decoupled"):
            raise ValueError(NOT_DECOUPLED)
        self._config["model_transaction_policy"] = dict(transaction_policy)

    def add_input(self, tensor: dict[str, Any]) -> None:
        self._add("input", tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        self._add("output", tensor)

    def _add(self, side: str, tensor: dict[str, Any]) -> None:
        """Add a tensor; one that the config has stays as it is, and must be the same."""
        absent = {"name", "data_type", "dims"} - {*tensor}
        if absent:
            raise ValueError(f"an {side} that auto_complete_config adds has no {min(absent)}: {tensor}")
        known = next((each for each in self._config[side] if each["name"] == tensor["name"]), None)
        if known is None:
            self._config[side].append(tensor)
            return
        for key in ("data_type", "dims"):
            if known[key] != tensor[key]:
                raise ValueError(
                    f"{side} {tensor['name']!r} has {key} {known[key]} in the config, {tensor[key]} in the model"
                )


class Logger:
    """Logs into the server's log."""

    INFO, WARNING, ERROR, VERBOSE = 0, 1, 2, 3
    _LEVELS: ClassVar = {INFO: logging.INFO, WARNING: logging.WARNING, ERROR: logging.ERROR, VERBOSE: logging.DEBUG}

    @staticmethod
    def log(message: str, level: int = INFO) -> None:
        _logger.log(Logger._LEVELS[level], "%s", message)

    @staticmethod
    def log_info(message: str) -> None:
        _logger.info("%s", message)

    @staticmethod
    def log_warn(message: str) -> None:
        _logger.warning("%s", message)

    @staticmethod
    def log_error(message: str) -> None:
        _logger.error("%s", message)

    @staticmethod
    def log_verbose(message: str) -> None:
        _logger.debug("%s", message)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return next((each for each in inference_request.inputs() if each.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    return next((each for each in inference_response.output_tensors() if each.name() == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((each for each in model_config.get("input", ()) if each["name"] == name), None)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((each for each in model_config.get("output", ()) if each["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """numpy's type of `TYPE_FP32`."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    return _TYPES[data_type - 1]


def numpy_to_triton_type(data_type: Any) -> int:
    kind = np.dtype(data_type)
    return 1 + _TYPES.index(np.object_ if kind.kind in "OSU" else kind.type)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"{MODULE}.{name} is not built here")


sys.modules[MODULE] = sys.modules[__name__]
