"""`maitred models`: which models come as packages. `maitred models check`: would Triton's models be served here?"""

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


def _list(options: Options) -> int:
    from maitred.model.packaged import PACKAGED, default_model

    for model in PACKAGED.values():
        chosen = "; served by default" if model.name == default_model() else ""
        state = "installed" if model.installed() or not model.packages else model.remedy
        size = f", {model.size_bytes / 1e6:,.0f} MB" if model.size_bytes else ""
        print(f"{model.name:<12}  {model.good_for}\n{'':<14}{model.licence}{size}; {state}{chosen}")
        if model.sha256:
            print(f"{'':<14}sha256 {model.sha256}")
    return 0


LIST = Command(
    path="models",
    summary="List the models that come as packages: what each is good for, its licence, and how it is installed.",
    run=_list,
    parts=(),
    examples=("maitred models", "maitred serve smollm2"),
)
COMMAND = Command(
    path="models check",
    summary="Tell whether models of a Triton repository would be served, and why not, without loading them.",
    run=_run,
    parts=(ModelsCheckOptions,),
    positional="paths",
    examples=("maitred models check ./repository", "maitred models check resnet/config.pbtxt model.onnx --json"),
)
