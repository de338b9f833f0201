"""Loaded models of a repository: all at the start, by polls, or as an administrator asks.

These are Triton's control modes none, poll and explicit. The owner of the clock calls `poll`, in the thread that loads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from maitred.core.errors import CheckpointError, InvalidRequest, ModelNotFound, Unavailable
from maitred.core.tensor_request import ModelChange
from maitred.tensor.config import ANY_MESSAGE, config_from_json
from maitred.tensor.ensembles import steps_of
from maitred.tensor.repository import RepositoryChanges, Scan, settled_changes
from maitred.tensor.repository_files import read_config, read_model, scan
from maitred.tensor.served_models import ServedModels, fault_of

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
