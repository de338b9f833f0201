"""A repository's files: scans of it, and one model's folder read into its config, its versions and their graphs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from maitred.core.errors import CheckpointError
from maitred.model.shelf import version_of
from maitred.tensor.config import ANY_MESSAGE, MOST_BYTES, ModelConfig, hints, parameters_of, parse_config
from maitred.tensor.config_checks import ENTRY_POINT, PYTHON, faults, is_ensemble, runs_code
from maitred.tensor.encoder_config import is_sentence_folder, onnx_folder, with_encoder, with_length_buckets
from maitred.tensor.fill import filled_from_files, filled_from_graph, mismatches, with_defaults
from maitred.tensor.onnx_graph import Graph, read_graph
from maitred.tensor.python.frames import installed, not_installed
from maitred.tensor.repository import Fingerprint, Scan, labels_of, versions_to_serve

CONFIG = "config.pbtxt"
OUTSIDE = "to a file outside of the repository; copy it into the model's folder"
MODEL_FILE = "model.onnx"  # in a folder that a version has in the file's place


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version to be served, or why it is not."""

    number: int
    path: Path  # of the model's file
    graph: Graph | None = None  # of ONNX
    fault: str = ""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model as its folder tells it, gaps filled; nothing is loaded yet."""

    name: str
    folder: Path
    config: ANY_MESSAGE
    versions: tuple[ModelVersion, ...]  # ascending
    labels: dict[str, int]
    hints: tuple[str, ...]  # fields that are ignored


def scan(repository: Path) -> Scan:
    """Every folder of the repository, with what tells whether a file of it changed; a link that leads nowhere, or to
    itself, is one too: its model is named with the reason. Raises CheckpointError.
    """
    try:
        names = [each.name for each in os.scandir(repository) if _is_folder(each) and not each.name.startswith(".")]
    except OSError as error:
        raise CheckpointError(f"cannot read the model repository {repository}: {error.strerror}") from None
    return {name: _fingerprint(repository / name) for name in sorted(names)}


def _is_folder(found: os.DirEntry[str] | Path) -> bool:
    """Whether it is a folder, or a link that leads nowhere."""
    return os.path.isdir(found) or (found.is_symlink() and not os.path.exists(found))


def _fingerprint(folder: Path) -> Fingerprint:
    """A file that goes while it is looked at is left out: the next scan differs."""
    files = []
    for path in _files(folder):
        try:
            status = path.stat()
        except OSError:
            continue
        files.append((str(path.relative_to(folder)), status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(sorted(files))


def _files(folder: Path) -> Iterator[Path]:
    """Links are followed, as those of a mounted volume are; a folder that two of them lead to is walked once."""
    walked: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        walked.add(os.path.realpath(root))
        folders[:] = [name for name in sorted(folders) if os.path.realpath(os.path.join(root, name)) not in walked]
        yield from (Path(root, name) for name in names)


def files_print(model: ModelFolder) -> bytes:
    """16 bytes that tell this model, its config and its files from any other; nothing where answers are not cached."""
    if not model.config.response_cache.enable:
        return b""
    files = (model.name, str(model.folder), _fingerprint(model.folder))
    return sha256(repr(files).encode() + model.config.SerializeToString(deterministic=True)).digest()[:16]


def read_config(folder: Path) -> ANY_MESSAGE:
    """Read the folder's config.pbtxt; empty where there is none. Raises CheckpointError."""
    path = folder / CONFIG
    return read_config_file(path) if os.path.lexists(path) else ModelConfig()


def read_config_file(path: Path) -> ANY_MESSAGE:
    """Raises CheckpointError, also for what is no file: a pipe would be waited for."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} is no file")
            return parse_config(file.read(MOST_BYTES + 1), str(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def read_model(folder: Path, written: ANY_MESSAGE | None = None, gpus: Sequence[int] = ()) -> ModelFolder:
    """A model's folder, checked; `written` stands in for its config. Raises CheckpointError for nothing to serve."""
    written = read_config(folder) if written is None else written
    if written.name and written.name != folder.name:
        raise CheckpointError(
            f"name is {written.name!r} in {CONFIG}, and the folder's is {folder.name!r}; make them equal"
        )
    present = _versions(folder)
    files = next((_names(present[number]) for number in sorted(present, reverse=True) if present[number].is_dir()), [])
    config = _with_entry_point(filled_from_files(written, folder.name, files), files)
    numbers = versions_to_serve(config, present or ([1] if is_ensemble(config) else []))
    places = [present.get(number, folder / str(number)) for number in numbers]
    config = with_encoder(config, folder, places[-1] if places else folder)
    versions = tuple(_version(place, config, number) for number, place in zip(numbers, places, strict=True))
    graph = next((each.graph for each in reversed(versions) if each.graph is not None), None)
    config = with_defaults(config, gpus) if graph is None else filled_from_graph(config, graph, gpus)
    config = with_length_buckets(config)
    _refuse(faults(config))
    _refuse(_absent_files(folder, config))
    versions = tuple(_checked(config, version) for version in versions)
    if versions and all(version.fault for version in versions):
        raise CheckpointError(versions[-1].fault)
    return ModelFolder(folder.name, folder, config, versions, labels_of(config, numbers), hints(written))


def model_of_file(path: Path, gpus: Sequence[int] = ()) -> ModelFolder:
    """A lone ONNX file as version 1 of a model that has the file's name. Raises CheckpointError."""
    graph = read_graph(path)
    config = filled_from_files(ModelConfig(), path.stem, [MODEL_FILE])
    config.default_model_filename = path.name
    config = filled_from_graph(config, graph, gpus)
    _refuse(faults(config))
    return ModelFolder(path.stem, path.parent, config, (ModelVersion(1, path, graph),), {}, ())


def _with_entry_point(config: ANY_MESSAGE, files: Sequence[str]) -> ANY_MESSAGE:
    """The config itself; a Python model without code is the installed class that has its name."""
    if runs_code(config) and config.default_model_filename not in files and installed(config.name):
        config.parameters[ENTRY_POINT].string_value = config.name
    return config


def _refuse(reasons: tuple[str, ...]) -> None:
    if reasons:
        raise CheckpointError("; ".join(reasons))


def _versions(folder: Path) -> dict[int, Path]:
    """The folder of each; what sentence-transformers saved is version 1."""
    found = {version_of(name): folder / name for name in _names(folder) if _is_folder(folder / name)}
    numbered = {version: place for version, place in found.items() if version is not None}
    return numbered or ({1: onnx_folder(folder)} if is_sentence_folder(folder) else {})


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from None


def _version(place: Path, config: ANY_MESSAGE, number: int) -> ModelVersion:
    path = place / config.default_model_filename
    if is_ensemble(config):  # its steps are other models: there is no file, and the folder may be left out
        return ModelVersion(number, path)
    if config.backend == PYTHON and not runs_code(config):
        entry_point = parameters_of(config)[ENTRY_POINT]
        return ModelVersion(number, path, fault="" if installed(entry_point) else not_installed(entry_point))
    if config.backend != "onnxruntime":
        return ModelVersion(number, path, fault="" if path.is_file() else f"{path} is not there")
    path = path / MODEL_FILE if path.is_dir() else path
    try:
        return ModelVersion(number, path, read_graph(path))
    except CheckpointError as error:
        return ModelVersion(number, path, fault=str(error))


def _checked(config: ANY_MESSAGE, version: ModelVersion) -> ModelVersion:
    if version.graph is None:
        return version
    return ModelVersion(version.number, version.path, version.graph, "; ".join(mismatches(config, version.graph)))


def _absent_files(folder: Path, config: ANY_MESSAGE) -> tuple[str, ...]:
    """Files beside the model that the config names: labels, data of warm-up and of initial states."""
    named = [each.label_filename for each in config.output if each.label_filename]
    for warmup in config.model_warmup:
        named += [f"warmup/{each.input_data_file}" for each in warmup.inputs.values() if each.input_data_file]
    for state in config.sequence_batching.state:
        named += [f"initial_state/{each.data_file}" for each in state.initial_state if each.data_file]
    return tuple(
        f"{folder / name} is not there" if not (folder / name).is_file() else f"{folder / name} is a link {OUTSIDE}"
        for name in named
        if not (folder / name).is_file() or leads_out(folder / name, folder)
    )


def leads_out(path: Path, folder: Path) -> bool:
    """Whether links lead from `folder`, a model's, to a file outside of it and of the repository that it is in."""
    homes = (os.path.realpath(folder), os.path.realpath(folder.parent))
    return not os.path.realpath(path).startswith(tuple(os.path.join(home, "") for home in homes))
