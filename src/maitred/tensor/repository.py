"""A model repository, decided: which versions are served, what changed between two scans, the index that clients read.

Pure: scans come in (`maitred.tensor.repository_files` makes them), and what is to be loaded or unloaded comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from maitred.core.errors import CheckpointError
from maitred.core.tensor_request import IndexEntry, ModelState
from maitred.tensor.config import ANY_MESSAGE, parameters_of

LABEL = "label."  # parameters that begin so name a version: label.stable = "2"

Fingerprint = tuple[tuple[str, int, int, int], ...]  # of each file of a folder: its path there, inode, bytes, mtime_ns
Scan = Mapping[str, Fingerprint]  # by the names of models


@dataclass(frozen=True, slots=True)
class RepositoryChanges:
    """Names of models, in order."""

    load: tuple[str, ...]  # new, or their files changed
    unload: tuple[str, ...]  # their folders are gone


def settled_changes(taken: Scan, last: Scan, now: Scan) -> RepositoryChanges:
    """Return changes against `taken` that stood still between the last two scans: a folder half copied waits.

    A folder that is gone must stay so for a whole poll too: a replacement begins with a removal. `taken` also has what
    was tried and failed, or it would be tried at every poll.
    """
    still = {name for name in {*taken, *now} if last.get(name) == now.get(name)}
    return RepositoryChanges(
        load=tuple(sorted(name for name in still if name in now and now[name] != taken.get(name))),
        unload=tuple(sorted(name for name in still if name not in now)),
    )


# ---- versions


def versions_to_serve(config: ANY_MESSAGE, present: Iterable[int]) -> tuple[int, ...]:
    """Return the versions by policy, ascending; specific ones also where absent. Raises CheckpointError for none."""
    policy, have = config.version_policy, sorted(set(present))
    chosen = policy.WhichOneof("policy_choice")
    if chosen == "specific":
        return tuple(sorted(set(policy.specific.versions)))
    if chosen != "all":
        have = have[-(policy.latest.num_versions or 1) :]
    if not have:
        raise CheckpointError("it has no version: no folder whose name is a number, without a zero before it")
    return tuple(have)


def labels_of(config: ANY_MESSAGE, served: Sequence[int]) -> dict[str, int]:
    """Return the labels of versions of a faultless config. Raises CheckpointError for one of an unserved version."""
    parameters = parameters_of(config).items()
    labels = {key.removeprefix(LABEL): int(value) for key, value in parameters if key.startswith(LABEL)}
    for label, version in labels.items():
        if version not in served:
            told = ", ".join(map(str, served))
            raise CheckpointError(f"parameters {LABEL + label!r} names version {version}, and served are: {told}")
    return labels


# ---- the index


@dataclass(slots=True)
class RepositoryIndex:
    """The states of every model's versions, as what loads them tells them."""

    _models: dict[str, dict[int, IndexEntry]] = field(default_factory=dict)
    _failures: dict[str, str] = field(default_factory=dict)  # of models without a version, or of a whole reload

    def found(self, names: Iterable[str]) -> None:
        """Folders of models. Those that are gone leave the index once none of their versions is ready."""
        here = set(names)
        for name in here:
            self._models.setdefault(name, {})
        for name in [name for name in self._models if name not in here and not self.ready(name)]:
            del self._models[name]
            self._failures.pop(name, None)

    def loading(self, name: str, version: int) -> None:
        """A version that is ready stays so while another copy of it is loaded."""
        entry = self._entry(name, version)
        if entry.state is not ModelState.READY:
            entry.state, entry.reason = ModelState.LOADING, ""

    def loaded(self, name: str, version: int) -> None:
        entry = self._entry(name, version)
        entry.state, entry.reason = ModelState.READY, ""
        self._failures.pop(name, None)

    def failed(self, name: str, reason: str, version: int | None = None) -> None:
        """Note a failure, without a version of the whole model. Ready versions stay so, with the reason."""
        if version is None:
            self._models.setdefault(name, {})
            self._failures[name] = reason
            return
        entry = self._entry(name, version)
        if entry.state is not ModelState.READY:
            entry.state = ModelState.UNAVAILABLE
        entry.reason = reason

    def unloading(self, name: str, version: int) -> None:
        self._entry(name, version).state = ModelState.UNLOADING

    def unloaded(self, name: str, version: int) -> None:
        entry = self._entry(name, version)
        entry.state, entry.reason = ModelState.UNAVAILABLE, "unloaded"

    def ready(self, name: str) -> tuple[int, ...]:
        """Versions that answer, ascending; the last is the one that a request without a version gets."""
        versions = self._models.get(name, {}).values()
        return tuple(sorted(each.version for each in versions if each.version and each.state is ModelState.READY))

    def entries(self, *, ready_only: bool = False) -> list[IndexEntry]:
        """Return the entries by name and version."""
        entries = [entry for name in sorted(self._models) for entry in self._of(name)]
        return [entry for entry in entries if entry.state is ModelState.READY or not ready_only]

    def _of(self, name: str) -> list[IndexEntry]:
        versions, failure = self._models[name], self._failures.get(name, "")
        if not versions:
            return [IndexEntry(name, state=ModelState.UNAVAILABLE if failure else None, reason=failure)]
        told = (versions[version] for version in sorted(versions))
        return [IndexEntry(name, each.version, each.state, each.reason or failure) for each in told]

    def _entry(self, name: str, version: int) -> IndexEntry:
        return self._models.setdefault(name, {}).setdefault(version, IndexEntry(name, version))
