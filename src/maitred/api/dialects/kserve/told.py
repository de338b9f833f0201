"""What KServe v2 tells of a server and its models, as Triton's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import maitred
from maitred.api.tensor.extensions import NAMES
from maitred.errors import InvalidRequest, ModelNotFound
from maitred.tensor.arrays import datatype_of
from maitred.tensor.config import WILDCARD, TensorSpec, inputs_of, outputs_of
from maitred.tensor.repository import IndexEntry
from maitred.tensor.service import DURATIONS, ModelStatistics, ModelTable, TensorService


def server_metadata(server_id: str) -> dict[str, Any]:
    return {"name": server_id, "version": maitred.__version__, "extensions": NAMES}


def is_ready(models: ModelTable, model: str, version: int) -> bool:
    """Whether it answers, in that version where one is named."""
    versions = models.versions(model)
    return version in versions if version else bool(versions)


def model_metadata(models: ModelTable, model: str, version: int) -> dict[str, Any]:
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


def tensor(spec: TensorSpec, *, batched: bool) -> dict[str, Any]:
    """With the rows of a batch first."""
    shape = (WILDCARD, *spec.dims) if batched else spec.dims
    return {"name": spec.name, "datatype": datatype_of(spec.data_type), "shape": shape}


def statistics(tensors: TensorService, model: str = "", version: int = 0) -> dict[str, Any]:
    """Of all models without one. Raises InvalidRequest for one that is not served: Triton answers 400 here."""
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
