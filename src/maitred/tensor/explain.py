"""How an ONNX model is run here: nodes before and after the runtime's optimisation, which provider runs them, what is
quantised and at what error, and how long batches take.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maitred.core.errors import CheckpointError
from maitred.tensor.config import ANY_MESSAGE, parameters_of
from maitred.tensor.instance import SessionSettings, available_providers, one_line, open_session, settings_for
from maitred.tensor.onnx_graph import read_graph
from maitred.tensor.profiling import measured_times
from maitred.tensor.quantized import FLOAT, Measured, made_up, measured_error, served_file
from maitred.tensor.repository_files import ModelFolder, ModelVersion, model_of_file, read_model
from maitred.tensor.served_models import open_onnx

MOST_NAMES = 12  # of operators in a line
_INTEGER = ("Integer", "QLinear", "QuantizeLinear", "DynamicQuantize")  # within the names of quantised operators


def explained(path: Path) -> Iterator[str]:
    """Lines. Raises CheckpointError."""
    model = model_of_file(path) if path.suffix == ".onnx" else read_model(path)
    if model.config.backend != "onnxruntime":
        raise CheckpointError(f"{path} is of {model.config.backend or model.config.platform}; only ONNX is explained")
    version = model.versions[-1]
    if version.fault:
        raise CheckpointError(version.fault)
    file = served_file(model, version)
    settings = settings_for(model.config, model.config.instance_group[0], None, available_providers())
    with tempfile.TemporaryDirectory() as folder:
        optimised, ran = _opened(file, settings, model.config, Path(folder))
    precision = parameters_of(model.config).get("precision", FLOAT)
    yield f"model     {model.name} version {version.number}: {version.path}, {precision}"
    before = read_graph(version.path).operators
    yield from _node_lines(before, optimised, settings)
    yield from _provider_lines(ran, settings)
    yield from _quantised_lines(optimised, measured_error(file) if precision != FLOAT else None)
    yield from _time_lines(model, version)


def _opened(
    file: Path, settings: SessionSettings, config: ANY_MESSAGE, folder: Path
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Operators once the runtime has optimised them, and nodes that ran by provider, where a batch can be made up."""

    def keep(options: Any) -> None:
        options.optimized_model_filepath = str(folder / "optimised.onnx")
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")

    session = open_session(file, settings, keep)
    try:
        session.run(None, dict(made_up(config)))
    except CheckpointError:
        return read_graph(folder / "optimised.onnx").operators, {}
    except Exception as error:  # the runtime's own have no root but this
        raise CheckpointError(f"{file}: onnxruntime cannot run a made-up batch: {one_line(error)}") from None
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = Counter(
        event["args"]["provider"]
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    )
    return read_graph(folder / "optimised.onnx").operators, ran


def _node_lines(before: Mapping[str, int], after: Mapping[str, int], settings: SessionSettings) -> Iterator[str]:
    yield f"nodes     {sum(before.values())} in the file, {sum(after.values())} once optimised ({settings.graph_level})"
    new = {name: count for name, count in after.items() if name not in before}
    gone = {name: count - after.get(name, 0) for name, count in before.items() if count > after.get(name, 0)}
    yield f"fused     {_told(new) or 'nothing: the file has every operator that runs'}"
    if gone:
        yield f"replaced  {_told(gone)}"


def _provider_lines(ran: Mapping[str, int], settings: SessionSettings) -> Iterator[str]:
    told = _told(ran) or f"{settings.providers[0][0]} first; no batch can be made up of texts"
    yield f"providers {told}"
    if settings.fell_back:
        yield f"fell back {', '.join(settings.fell_back)}: not on this machine"


def _quantised_lines(after: Mapping[str, int], measured: Measured | None) -> Iterator[str]:
    integer = {name: count for name, count in after.items() if any(part in name for part in _INTEGER)}
    if integer or measured is not None:
        yield f"quantised {_told(integer) or 'no node'}"
    if measured is not None:
        yield f"          output {measured.output!r} has cosine {measured.cosine:.4f} to the float model's"


def _time_lines(model: ModelFolder, version: ModelVersion) -> Iterator[str]:
    for shape in measured_times(open_onnx(model, version)).shapes:
        told = ", ".join(
            f"{rows}: {seconds * 1e3:.2f}" for rows, seconds in zip(shape.rows, shape.seconds, strict=True)
        )
        yield f"batches   {f'of length {shape.length}, ' if shape.length else ''}ms by rows: {told}"


def _told(operators: Mapping[str, int]) -> str:
    ordered = sorted(operators.items(), key=lambda item: (-item[1], item[0]))
    more = f" and {len(ordered) - MOST_NAMES} more" if len(ordered) > MOST_NAMES else ""
    return ", ".join(f"{name} {count}" for name, count in ordered[:MOST_NAMES]) + more
