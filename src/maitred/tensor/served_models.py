"""Loaded models, by name and version: a new copy is loaded and warmed before it replaces the old one, which drains.

A running batch holds a lease on a version; a replaced version is closed when its last lease ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from maitred.core.errors import CheckpointError, InvalidRequest, MaitredError, ModelNotFound, Unavailable
from maitred.core.tensor_request import IndexEntry, ModelChange, Tensor, unknown_model
from maitred.tensor.arrays import initial_states, warmup_batches
from maitred.tensor.config import ANY_MESSAGE, MOST_OF_REASON, SCHEMA, config_from_json
from maitred.tensor.config_checks import ENSEMBLE
from maitred.tensor.encoder_config import encoder_of, is_encoder
from maitred.tensor.ensembles import EnsemblePlan, plan_of, steps_of
from maitred.tensor.instance import ModelInstance, SessionInstance, available_providers, open_session, settings_for
from maitred.tensor.quantized import served_file
from maitred.tensor.repository import RepositoryChanges, RepositoryIndex, Scan, settled_changes
from maitred.tensor.repository_files import ModelFolder, ModelVersion, files_print, read_config, read_model, scan

_GPU = SCHEMA.enums["ModelInstanceGroup.Kind"]["KIND_GPU"]


@dataclass(slots=True)
class LoadedVersion:
    """A version with its instances. Those of one group on one device share a session, and with it the weights."""

    name: str
    number: int
    config: ANY_MESSAGE
    instances: tuple[ModelInstance, ...]  # none of an ensemble
    fell_back: tuple[str, ...] = ()  # accelerators that are not here
    plan: EnsemblePlan | None = None  # of an ensemble
    states: Mapping[str, Tensor] = field(default_factory=dict)  # with which a sequence begins
    files_print: bytes = b""  # of config and files, where answers are cached
    leases: int = 0
    replaced: bool = False
    is_closed: bool = False


Opener = Callable[[ModelFolder, ModelVersion], LoadedVersion]


def open_onnx(model: ModelFolder, version: ModelVersion) -> LoadedVersion:
    """An ONNX model, loaded and warmed. Raises CheckpointError."""
    instances: list[SessionInstance] = []
    fell_back: list[str] = []
    path = served_file(model, version)
    if is_encoder(model.config):
        _check_tokenizer(encoder_of(model.config).tokenizer)
    for group in model.config.instance_group:
        for gpu in group.gpus if group.kind == _GPU and group.gpus else (None,):
            settings = settings_for(model.config, group, gpu, available_providers())
            instance = SessionInstance(open_session(path, settings), model.config)
            warm(instance, model)
            instances += [instance] * group.count
            fell_back += settings.fell_back
    return LoadedVersion(model.name, version.number, model.config, tuple(instances), tuple(dict.fromkeys(fell_back)))


def _check_tokenizer(folder: Path) -> None:
    """The server reads it when texts come; a broken one is refused here. Raises CheckpointError."""
    from maitred.text.tokenizer import Tokenizer  # noqa: PLC0415  other models need none of it

    Tokenizer.from_folder(folder)


OPENERS: Mapping[str, Opener] = {"onnxruntime": open_onnx}  # by backend; an ensemble's is its platform


def warm(instance: ModelInstance, model: ModelFolder) -> None:
    """Runs the batches of `model_warmup`. Raises CheckpointError."""
    for name, count, batch in warmup_batches(model.config, model.folder):
        try:
            for _ in range(count):
                instance.run(batch)
        except MaitredError as error:
            raise CheckpointError(f"warm-up {name!r} failed: {error}") from None


def fault_of(error: Exception) -> str:
    """Why a model is not served, in one line."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_OF_REASON]}"


@dataclass(slots=True)
class _Model:
    versions: dict[int, LoadedVersion] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)


class ServedModels:
    """Models that answer now, and their index. One thread at a time calls `take` and `drop`; any calls the rest."""

    def __init__(self, openers: Mapping[str, Opener] = OPENERS) -> None:
        self._index, self._openers = RepositoryIndex(), {ENSEMBLE: self._open_ensemble, **openers}
        self._models: dict[str, _Model] = {}
        self._lock = threading.Lock()

    def index(self, *, ready_only: bool = False) -> list[IndexEntry]:
        with self._lock:
            return self._index.entries(ready_only=ready_only)

    def found(self, names: Iterable[str]) -> None:
        """Models with folders."""
        with self._lock:
            self._index.found(names)

    def failed(self, name: str, reason: str, version: int | None = None) -> None:
        """A load of the whole model, or of one version, failed; what serves goes on."""
        with self._lock:
            self._index.failed(name, reason, version)

    def take(self, model: ModelFolder) -> bool:
        """Loads each version, then replaces the old ones. A version that fails leaves its old one; whether none did."""
        opened = [each for version in model.versions if (each := self._opened(model, version)) is not None]
        if not opened:
            return False
        wanted = {version.number for version in model.versions}
        with self._lock:
            served = self._models.setdefault(model.name, _Model())
            new = {each.number: each for each in opened}
            old = [each for number, each in served.versions.items() if number in new or number not in wanted]
            served.versions = {number: each for number, each in served.versions.items() if number in wanted} | new
            served.labels = {label: number for label, number in model.labels.items() if number in served.versions}
            for each in opened:
                self._index.loaded(model.name, each.number)
            self._retire(old)
        return len(opened) == len(model.versions)

    def drop(self, name: str) -> None:
        """Unloads every version; those with leases drain."""
        with self._lock:
            model = self._models.pop(name, None)
            if model is not None:
                self._retire(list(model.versions.values()))

    @contextmanager
    def lease(self, name: str, version: int | None = None, label: str | None = None) -> Iterator[LoadedVersion]:
        """The version, that of a label, or the highest; it stays open until the lease ends. Raises ModelNotFound."""
        with self._lock:
            loaded = self._find(name, version, label)
            loaded.leases += 1
        try:
            yield loaded
        finally:
            with self._lock:
                loaded.leases -= 1
                self._close_if_left(loaded)

    def labels(self, name: str) -> Mapping[str, int]:
        """Labels of versions that answer now."""
        with self._lock:
            return dict(self._models[name].labels) if name in self._models else {}

    def versions(self, name: str) -> Sequence[int]:
        with self._lock:
            return sorted(self._models[name].versions) if name in self._models else ()

    def _find(self, name: str, version: int | None, label: str | None) -> LoadedVersion:
        model = self._models.get(name)
        if model is None:
            raise unknown_model(name)
        if label is not None and label not in model.labels:
            raise unknown_model(name, label=label, served=tuple(model.versions))
        if label is not None:
            version = model.labels[label]
        number = max(model.versions) if version is None else version
        if number not in model.versions:
            raise unknown_model(name, number, served=tuple(model.versions))
        return model.versions[number]

    def _opened(self, model: ModelFolder, version: ModelVersion) -> LoadedVersion | None:
        with self._lock:
            self._index.loading(model.name, version.number)
        backend = model.config.backend or model.config.platform
        try:
            if version.fault or backend not in self._openers:
                raise CheckpointError(version.fault or f"nothing here runs models of {backend!r}")
            loaded = self._openers[backend](model, version)
            loaded.states = initial_states(loaded.config, model.folder)
            loaded.files_print = files_print(model)
            return loaded
        except Exception as error:  # whatever one model does to numpy or the runtime, the others start
            self.failed(model.name, fault_of(error), version.number)
            return None

    def _open_ensemble(self, model: ModelFolder, version: ModelVersion) -> LoadedVersion:
        plan = plan_of(model.config, self._config_of)
        return LoadedVersion(model.name, version.number, model.config, (), plan=plan)

    def _config_of(self, name: str, version: int) -> ANY_MESSAGE | None:
        with self._lock:
            try:
                return self._find(name, version or None, None).config
            except ModelNotFound:
                return None

    def _retire(self, old: Sequence[LoadedVersion]) -> None:
        for each in old:
            each.replaced = True
            model = self._models.get(each.name)
            if model is None or each.number not in model.versions:
                self._index.unloading(each.name, each.number)
            self._close_if_left(each)

    def _close_if_left(self, loaded: LoadedVersion) -> None:
        """Close a replaced version without leases, and give back what it holds."""
        if not loaded.replaced or loaded.leases or loaded.is_closed:
            return
        for instance in loaded.instances:
            instance.close()
        loaded.instances, loaded.is_closed = (), True
        model = self._models.get(loaded.name)
        if model is None or loaded.number not in model.versions:
            self._index.unloaded(loaded.name, loaded.number)


# ---- control modes: all models at the start, by polls, or as an administrator asks


EVERY = "*"  # in the list of models to load at the start


def _as_written(name: str, config: ANY_MESSAGE) -> ANY_MESSAGE:
    return config


class ControlMode(Enum):
    """When models come and go."""

    NONE = "none"  # what is there at the start, for good
    POLL = "poll"  # and what changes later
    EXPLICIT = "explicit"  # what is asked for


@dataclass(slots=True)
class ModelControl:
    """Loads and unloads; failures stand in the index of `models`."""

    repository: Path
    mode: ControlMode
    models: ServedModels
    gpus: Sequence[int] = ()
    rewrite: Callable[[str, ANY_MESSAGE], ANY_MESSAGE] = _as_written  # a model's config as it is to be served
    _taken: Scan = field(default_factory=dict)  # as the folders were when they were loaded, or failed to be
    _last: Scan = field(default_factory=dict)
    _steps: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of ensembles, also those that failed
    _loading: set[str] = field(default_factory=set)  # ensembles whose steps are being loaded

    def start(self, load: Collection[str] = ()) -> None:
        """Raises CheckpointError for a repository that cannot be read, and for a model of `load` that is not there."""
        self._last = now = scan(self.repository)
        self.models.found(now)
        absent = sorted({*load} - {EVERY, *now})
        if absent:
            raise CheckpointError(f"--load-model {absent[0]}: no such folder in {self.repository}")
        everything = self.mode is not ControlMode.EXPLICIT or EVERY in load
        for name in now if everything else load:
            if name not in self._taken:  # as a step of one before it
                self._take(name, now)

    def poll(self) -> RepositoryChanges:
        """Load and unload what changed, and return it. A repository that cannot be read for now changes nothing."""
        try:
            now = scan(self.repository)
        except CheckpointError:
            return RepositoryChanges((), ())
        changes, self._last = settled_changes(self._taken, self._last, now), now
        for name in changes.unload:
            self._drop(name)
        for name in changes.load:
            if self._taken.get(name) != now[name]:
                self._take(name, now)
        for name in self._ensembles_over({*changes.unload, *changes.load}):
            if name in now:
                self._take(name, now)
        self.models.found(now)
        return changes

    def change(self, change: ModelChange) -> None:
        if change.loads:
            self.load(change.model, change.config)
        else:
            self.unload(change.model)

    def load(self, name: str, config: str | None = None) -> None:
        """Load a model as its folder is now; `config`, a ModelConfig as JSON, stands in for its own."""
        self._must_be_explicit()
        now = scan(self.repository)
        if name not in now:
            raise ModelNotFound(f"no folder {name!r} is in the model repository")
        reason = self._take(name, now, config)
        for ensemble in self._ensembles_over({name}):
            if ensemble in now and self.models.versions(ensemble):
                self._take(ensemble, now)
        if reason:
            raise InvalidRequest(f"failed to load {name!r}: {reason}")

    def unload(self, name: str) -> None:
        """Unload a model; one that is not served stays so. Raises Unavailable outside of explicit mode."""
        self._must_be_explicit()
        if self.models.versions(name):
            self._drop(name)

    def _must_be_explicit(self) -> None:
        if self.mode is not ControlMode.EXPLICIT:
            raise Unavailable(f"models are loaded by mode {self.mode.value}; serve with --model-control-mode explicit")

    def _ensembles_over(self, changed: set[str]) -> list[str]:
        """Ensembles that must fit what changed; those within others first."""
        over: dict[str, None] = {}
        while found := [
            name for name, steps in self._steps.items() if name not in over and not changed.isdisjoint(steps)
        ]:
            over |= dict.fromkeys(found)
            changed = {*found}
        return list(over)

    def _take(self, name: str, now: Scan, config: str | None = None) -> str:
        """Why it failed, or nothing. The models of an ensemble's steps are loaded with it where they are not yet."""
        self._taken = {**self._taken, name: now[name]}
        try:
            folder = self.repository / name
            written = read_config(folder) if config is None else config_from_json(config, name)
            model = read_model(folder, self.rewrite(name, written), self.gpus)
            self._steps[name] = tuple(step for step, _ in steps_of(model.config))
            self._loading.add(name)
            for step in self._steps[name]:
                if step in now and step not in self._loading and not self.models.versions(step):
                    self._take(step, now)
        except Exception as error:  # whatever one folder holds, the others are loaded
            self.models.failed(name, fault_of(error))
            return fault_of(error)
        finally:
            self._loading.discard(name)
        if self.models.take(model):
            return ""
        return "; ".join(each.reason for each in self.models.index() if each.name == name and each.reason)

    def _drop(self, name: str) -> None:
        self._taken = {each: print_ for each, print_ in self._taken.items() if each != name}
        self._steps.pop(name, None)
        self.models.drop(name)
