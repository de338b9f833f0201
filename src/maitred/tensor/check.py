"""Whether a model would be served, told without loading it: of a repository, a folder, a config, or an ONNX file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from maitred.core.errors import CheckpointError
from maitred.model.shelf import version_of
from maitred.tensor.config import ANY_MESSAGE, hints, written
from maitred.tensor.config_checks import NO_CODE, faults, is_ensemble, runs_code
from maitred.tensor.encoder_config import is_sentence_folder
from maitred.tensor.ensembles import plan_of
from maitred.tensor.fill import filled_from_files, with_defaults
from maitred.tensor.repository_files import (
    CONFIG,
    MODEL_FILE,
    ModelFolder,
    model_of_file,
    read_config,
    read_config_file,
    read_model,
    scan,
)


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """Result for one model. `reason` tells why it is not served, or else which of its settings are ignored."""

    path: str
    parsed: bool
    served: bool
    reason: str = ""
    config: dict[str, Any] | None = None  # as it is written; None where none is, or it cannot be read


def check(path: Path, *, allow_code: bool = False) -> Iterator[CheckedModel]:
    """Check a model, or each model of a repository."""
    if not path.is_dir():
        yield _checked_file(path, allow_code=allow_code)
    elif _is_model(path):
        yield _checked_folder(path, allow_code=allow_code)
    else:
        yield from _checked_repository(path, allow_code=allow_code)


def _is_model(folder: Path) -> bool:
    return (
        (folder / CONFIG).exists()
        or is_sentence_folder(folder)
        or any(version_of(each.name) and each.is_dir() for each in folder.iterdir())
    )


def _checked_repository(path: Path, *, allow_code: bool) -> Iterator[CheckedModel]:
    names = scan(path)
    if not names:
        yield CheckedModel(
            str(path), False, False, "it holds no model: a model is a folder with versions or a config.pbtxt"
        )
    for name in names:
        yield _checked_folder(path / name, allow_code=allow_code)


def _checked_file(path: Path, *, allow_code: bool) -> CheckedModel:
    if path.suffix == ".onnx":
        return _checked_graph(path)
    if path.name == CONFIG and path.exists() and any(version_of(each.name) for each in path.parent.iterdir()):
        return _checked_folder(path.parent, allow_code=allow_code)
    try:
        config = read_config_file(path)
    except CheckpointError as error:
        return CheckedModel(str(path), False, False, str(error))
    filled = with_defaults(filled_from_files(config, path.stem, [MODEL_FILE]))  # as if a version had what is usual
    return _verdict(path, config, _refused(filled, faults(filled), allow_code=allow_code))


def _checked_graph(path: Path) -> CheckedModel:
    try:
        model_of_file(path)
    except CheckpointError as error:
        return CheckedModel(str(path), False, False, str(error))
    return CheckedModel(str(path), True, True)


def _checked_folder(folder: Path, *, allow_code: bool) -> CheckedModel:
    try:
        config = read_config(folder)
    except CheckpointError as error:
        return CheckedModel(str(folder), False, False, str(error))
    try:
        model = read_model(folder, config)
    except CheckpointError as error:
        return _verdict(folder, config, str(error))
    if is_ensemble(model.config):
        return _verdict(folder, config, _ensemble_faults(model))
    return _verdict(folder, config, _refused(model.config, _version_faults(model), allow_code=allow_code), model)


def _ensemble_faults(model: ModelFolder) -> str:
    """Return the faults of an ensemble; its steps' models are looked for beside it."""
    try:
        plan_of(model.config, partial(_config_beside, model.folder))
    except CheckpointError as error:
        return str(error)
    return ""


def _config_beside(folder: Path, name: str, version: int) -> ANY_MESSAGE | None:
    try:
        model = read_model(folder.parent / name)
    except CheckpointError:
        return None
    sound = {each.number for each in model.versions if not each.fault}
    return model.config if version in {0, *sound} else None


def _version_faults(model: ModelFolder) -> tuple[str, ...]:
    return tuple(f"version {version.number}: {version.fault}" for version in model.versions if version.fault)


def _refused(config: ANY_MESSAGE, found: tuple[str, ...], *, allow_code: bool) -> str:
    return "; ".join((*found, NO_CODE) if runs_code(config) and not allow_code else found)


def _verdict(path: Path, config: ANY_MESSAGE, refused: str, model: ModelFolder | None = None) -> CheckedModel:
    """A model of which one version of several cannot be served is served, with the reason."""
    some = model is not None and NO_CODE not in refused and any(not version.fault for version in model.versions)
    ignored = "; ".join(f"ignored: {hint}" for hint in hints(config))
    return CheckedModel(
        str(path), True, some or not refused, refused or ignored, written(config) if config.ListFields() else None
    )
