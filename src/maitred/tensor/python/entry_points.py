"""Installed Python models: entry points, of which each names a class.

It has load(folder, parameters), both of texts, and predict(inputs) -> outputs: arrays by name, of a whole batch.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "maitred.models"


def installed(name: str) -> EntryPoint | None:
    """Found in what packages tell of themselves: none of their code is run."""
    return next(iter(entry_points(group=GROUP, name=name)), None)


def not_installed(name: str) -> str:
    known = ", ".join(sorted(entry.name for entry in entry_points(group=GROUP))) or "none"
    return f"no installed package has {name!r} in the group {GROUP!r} of entry points; there are: {known}"
