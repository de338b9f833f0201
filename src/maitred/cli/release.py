"""`maitred publish` and `maitred releases`: versions on a shelf, for servers that follow it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from maitred.cli.command import Command, Options
from maitred.cli.console import inert, note
from maitred.cli.flags import UsageError, option


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """What is published, and where."""

    places: tuple[str, ...] = option(metavar="PLACE")
    """The model's folder or GGUF file, then the shelf, which is made if it is not there."""
    sign: str | None = option(None, metavar="PEM")
    """Private Ed25519 key in PEM that signs the version, with the program openssl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasesOptions:
    """Versions of a shelf."""

    shelf: str = option(metavar="SHELF")
    """The folder of the versions."""
    use: int | None = option(None, metavar="N")
    """Put this version into service: servers that follow the shelf turn to it."""
    json: bool = False
    """Print a line of JSON for each version, with all that is known of it."""


def _publish(options: Options) -> int:
    from maitred.model.shelf import Shelf
    from maitred.optimize.release import publish

    asked = options[PublishOptions]
    if len(asked.places) != 2:
        raise UsageError(f"publish takes a model and a shelf, and was given {len(asked.places)} places")
    model, root = asked.places
    release = publish(model, Shelf(Path(root)), Path(asked.sign) if asked.sign is not None else None)
    note(f"version {release.version} of {root} is in service; maitred releases {root} lists all")
    return 0


def _releases(options: Options) -> int:
    import msgspec

    from maitred.core.errors import CheckpointError
    from maitred.model.shelf import SIGNATURE, Shelf

    asked, shelf = options[ReleasesOptions], Shelf(Path(options[ReleasesOptions].shelf))
    if asked.use is not None:
        shelf.use(asked.use)
        note(f"version {asked.use} of {asked.shelf} is in service")
        return 0
    current, _ = shelf.current()
    for version in shelf.versions():
        try:
            release = shelf.read(version)
        except CheckpointError as error:  # of others there is more to say
            note(str(error))
            continue
        is_signed = (shelf.folder(release.version) / SIGNATURE).is_file()
        marks = {"current": release.version == current, "signed": is_signed}
        if asked.json:
            print(msgspec.json.encode(msgspec.to_builtins(release) | marks).decode())
            continue
        published = time.strftime("%Y-%m-%d %H:%M", time.localtime(release.published_at))
        told = ", ".join([release.name, *filter(None, [release.tool]), *(mark for mark in marks if marks[mark])])
        print(inert(f"{release.version:>4}  {published}  {told}"))
    return 0


PUBLISH = Command(
    path="publish",
    summary="Publish a model as the next version of a shelf, with golden tokens and sums of its files.",
    run=_publish,
    parts=(PublishOptions,),
    positional="places",
    examples=("maitred publish ./tuned ./shelf", "maitred publish your.gguf ./shelf --sign release.pem"),
)
RELEASES = Command(
    path="releases",
    summary="List the versions of a shelf, or put one of them into service again.",
    run=_releases,
    parts=(ReleasesOptions,),
    positional="shelf",
    examples=("maitred releases ./shelf", "maitred releases ./shelf --use 3"),
)
