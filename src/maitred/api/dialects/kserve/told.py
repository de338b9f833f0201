"""KServe v2's metadata, readiness, index and statistics of a server and its models, as Triton's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import maitred
from maitred.api.dialects.kserve.generate import EXCLUDE, SAMPLING, STREAM, TEXT_INPUT, TEXT_OUTPUT
from maitred.api.http.app import App
from maitred.api.tensor.extensions import NAMES
from maitred.api.tensor.lease import tensors_of
from maitred.core.errors import InvalidRequest, ModelNotFound
from maitred.core.tensor_request import DURATIONS, IndexEntry, ModelState, ModelStatistics
from maitred.engine.tensors import TensorModels
from maitred.tenancy.caller import Caller
from maitred.tensor.arrays import datatype_of
from maitred.tensor.config import ANY_MESSAGE, DATA_TYPES, WILDCARD, DeclaredTensor, ModelConfig, inputs_of, outputs_of

_FIELDS = {TEXT_INPUT: "TYPE_STRING", STREAM: "TYPE_BOOL", SAMPLING: "TYPE_STRING", EXCLUDE: "TYPE_BOOL"}  # generate's


@dataclass(frozen=True, slots=True)
class Models:
    """The models of the repository, and the language model beside them, described by what `generate` takes."""

    app: App
    caller: Caller

    def has_language_model(self, name: str) -> bool:
        """Whether `/v1/completions` knows a model by this name, adapters of the caller's too."""
        return bool(self.app.model.names) and (
            self.app.is_model(name) or self.app.adapter(name, self.caller) is not None
        )

    def check_tensors(self, name: str) -> None:
        """Raises InvalidRequest for the language model, which takes no tensors."""
        if self.has_language_model(name):
            raise InvalidRequest(
                f"{name!r} is a language model; post to /v2/models/{name}/generate or /generate_stream, or ask "
                "/v1/completions",
                param="model",
            )

    def config(self, model: str, version: int = 0, label: str = "") -> ANY_MESSAGE:
        if not self.has_language_model(model):
            return tensors_of(self.app).config(model, version, label)
        self.app.model.check_version(version)
        config = ModelConfig(name=model, backend="maitred")
        for each, kind in _FIELDS.items():
            config.input.add(name=each, data_type=DATA_TYPES[kind], dims=[1], optional=each != TEXT_INPUT)
        config.output.add(name=TEXT_OUTPUT, data_type=DATA_TYPES["TYPE_STRING"], dims=[WILDCARD])
        config.model_transaction_policy.decoupled = True
        return config

    def versions(self, model: str) -> Sequence[int]:
        if self.has_language_model(model):
            return (self.app.model.version,) if self.app.ready else ()
        return tensors_of(self.app).versions(model)

    def index(self, *, ready_only: bool) -> Sequence[IndexEntry]:
        """The language model by its names, without adapters, then the repository's."""
        model, ready, tensors = self.app.model, self.app.ready, tensors_of(self.app)
        state = ModelState.READY if ready else ModelState.UNAVAILABLE
        own = [IndexEntry(name, model.version, state) for name in model.names if ready or not ready_only]
        return [*own, *tensors.index(ready_only=ready_only)]


def server_metadata(server_id: str) -> dict[str, Any]:
    return {"name": server_id, "version": maitred.__version__, "extensions": NAMES}


def is_ready(models: Models, model: str, version: int) -> bool:
    """Whether the model answers, in `version` unless that is 0."""
    versions = models.versions(model)
    return version in versions if version else bool(versions)


def model_metadata(models: Models, model: str, version: int) -> dict[str, Any]:
    """Raises ModelNotFound."""
    config = models.config(model, version)
    batched = config.max_batch_size > 0
    return {
        "name": model,
        "versions": [str(each) for each in ((version,) if version else models.versions(model))],
        "platform": config.platform or config.backend,
        "inputs": [tensor(each, batched=batched) for each in inputs_of(config)],
        "outputs": [tensor(each, batched=batched) for each in outputs_of(config)],
    }


def tensor(spec: DeclaredTensor, *, batched: bool) -> dict[str, Any]:
    """Metadata of a tensor; if `batched`, its shape begins with the rows of a batch."""
    shape = (WILDCARD, *spec.dims) if batched else spec.dims
    return {"name": spec.name, "datatype": datatype_of(spec.data_type), "shape": shape}


def statistics(tensors: TensorModels, model: str = "", version: int = 0) -> dict[str, Any]:
    """Statistics of `model`, or of all models. Raises InvalidRequest for one that is not served: Triton answers 400."""
    try:
        found = tensors.statistics(model, version)
    except ModelNotFound as error:
        raise InvalidRequest(str(error), param="model") from None
    return {"model_stats": [_statistics(each) for each in found]}


def _statistics(of: ModelStatistics) -> dict[str, Any]:
    return {
        "name": of.model,
        "version": str(of.version),
        "last_inference": of.last_inference_ms,
        "inference_count": of.inference_count,
        "execution_count": of.execution_count,
        "inference_stats": {name: _duration(*getattr(of, name)) for name in DURATIONS},
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": _duration(count, 0),  # part of the inference here
                "compute_infer": _duration(count, ns),
                "compute_output": _duration(count, 0),
            }
            for rows, count, ns in of.batches
        ],
        "memory_usage": [],
    }


def _duration(count: int, ns: int) -> Mapping[str, int]:
    return {"count": count, "ns": ns}


def index(entries: Iterable[IndexEntry]) -> Sequence[Mapping[str, str]]:
    """Keys that have nothing to tell are left out, as Triton does."""
    return [
        {
            "name": entry.name,
            **({} if entry.version is None else {"version": str(entry.version)}),
            **({} if entry.state is None else {"state": entry.state.value}),
            **({"reason": entry.reason} if entry.reason else {}),
        }
        for entry in entries
    ]
