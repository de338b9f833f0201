"""`maitred models check`: whether Triton's models would be served here, and why not, without loading any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from maitred.cli.command import Command, Options
from maitred.cli.flags import option

if TYPE_CHECKING:
    from maitred.tensor.check import Checked


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsCheckOptions:
    """What is checked"""

    paths: tuple[str, ...] = option(metavar="PATH", name="--path")
    """A model repository, a model's folder, a config.pbtxt or an .onnx file; may be given several times."""
    allow_repository_code: bool = False
    """Count models of the Python backend as served: their model.py would run."""
    json: bool = False
    """Print a list of objects with path, parsed, served, reason, and config as it is written."""


def _run(options: Options) -> int:
    from pathlib import Path

    from maitred.tensor.check import check

    asked = options[ModelsCheckOptions]
    found = [each for path in asked.paths for each in check(Path(path), allow_code=asked.allow_repository_code)]
    if asked.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print("\n".join(map(line, found)))
    return 0 if all(each.served for each in found) else 1


def line(checked: Checked) -> str:
    """One model, in words."""
    from maitred.cli.console import inert

    verdict = "served" if checked.served else "not served" if checked.parsed else "not read"
    return inert(f"{checked.path}: {verdict}{'; ' if checked.reason else ''}{checked.reason}")


COMMAND = Command(
    path="models check",
    summary="Tell whether models of a Triton repository would be served, and why not, without loading them.",
    run=_run,
    parts=(ModelsCheckOptions,),
    positional="paths",
    examples=("maitred models check ./repository", "maitred models check resnet/config.pbtxt model.onnx --json"),
)
