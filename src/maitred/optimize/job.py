"""The path of every tool: parent and documents -> a model beside DIR -> measured -> gate -> DIR, by one rename.

All of a job lies in DIR.part, so that the same command goes on after any end, and that DIR is whole or not there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

import maitred
from maitred.config.optimize import ToolConfig
from maitred.core.errors import ConfigError, OutOfMemory
from maitred.engine.memory import available_memory_bytes, format_bytes
from maitred.model.checkpoint import NO_ROOM, Checkpoint, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.shelf import CURRENT
from maitred.optimize.data import OWN_FILE, Corpus, Progress, file_hashes, read_corpus
from maitred.optimize.evaluate import Evaluation, evaluate
from maitred.optimize.gate import BrokenRule, Rules, gate_fields, judge, read_rules
from maitred.optimize.write import write_json
from maitred.storage.files import locked, sync

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MEMORY_SHARE = 0.9
_FILES = ("out", "data", "held_out", "tasks", "gate")
"""Flags whose files' hashes tell what is asked, or that change nothing of what is made."""


@dataclass(slots=True)
class Job:
    """What a tool is given, and where it leaves what it makes."""

    name: str
    config: ToolConfig
    own: Any  # the tool's own config
    parent: Checkpoint
    corpus: Corpus
    folder: Path  # of the model that the tool writes; empty at first, or as an ended run of the same command left it
    state: Path  # folder for what the tool goes on from; files in it are the tool's, replaced by renames
    rules: Rules
    progress: Progress
    notes: dict[str, Any] = field(default_factory=dict)  # the tool's section of the report
    served: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine that serves the result, beside the model: kv_dtype and the like."""

    def need_memory(self, num_bytes: int, what: str) -> None:
        """Raises OutOfMemory where so many bytes are not available, before anything is begun."""
        available = int(available_memory_bytes() * MEMORY_SHARE)
        if num_bytes > available:
            raise OutOfMemory(
                f"{self.name} needs {format_bytes(num_bytes)} for {what}, and {format_bytes(available)} are available; "
                f"give it fewer or shorter documents, or a machine with more memory"
            )


@dataclass(frozen=True, slots=True)
class Tool:
    """A way to change a model."""

    name: str
    make: Callable[[Job], None]  # fills `job.folder` with a model folder, or goes on with it
    measure: Callable[[Job], Evaluation] | None = None  # in place of `measured`, for what is no model
    learns: bool = True  # whether it needs documents beside those that are held out


@dataclass(frozen=True, slots=True)
class JobReport:
    """What was asked, made, measured and judged."""

    fields: Mapping[str, Any]
    failures: tuple[BrokenRule, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def run_tool(tool: Tool, config: ToolConfig, own: DataclassInstance, progress: Progress) -> JobReport:
    """Make, measure, judge. DIR is there afterwards exactly if the report passed.

    Raises ConfigError, CheckpointError, OutOfMemory before anything is made; what was made stays in DIR.part then.
    """
    begun, out = time.monotonic(), Path(config.out)
    with open_job(tool.name, config, own, progress, learns=tool.learns) as job:
        spec = spec_from_config(job.parent.config)
        kinds = {
            "recurrent layers": spec.has_state,
            "latent attention": spec.latent is not None,
            "routed experts": spec.is_routed,
            "layers of unlike heads": spec.is_uneven,
        }
        if kind := next((kind for kind, has_it in kinds.items() if has_it), None):
            raise ConfigError(f"{config.model}: {spec.architecture} has {kind}, and {tool.name} takes dense models")
        if tool.measure is None:
            exact_bytes = 4 * spec.num_parameters()
            job.need_memory(exact_bytes + job.parent.weight_bytes, "the result beside its parent in float32")
        tool.make(job)
        evaluation = (tool.measure or measured)(job)
        failures = judge(job.rules, evaluation)
        report = JobReport(_fields(job, evaluation, failures, time.monotonic() - begun), failures)
        if report.passed:
            write_json(job.folder / "report.json", report.fields)
            _appear(job.folder, out)
            _beside(out, "rejected.json").unlink(missing_ok=True)
        else:
            write_json(_beside(out, "rejected.json"), report.fields)
        _remove(out)
    return report


def measured(job: Job, **asked: Any) -> Evaluation:
    """Parent and result on the native executor, on the held-out documents and tasks; an adapter, or a draft, on its
    parent. `asked` takes the place of these arguments of `evaluate`."""
    model = job.parent.path if "lora" in job.served or "draft" in asked else job.folder
    corpus, gain = job.corpus, "min_gain" in job.rules.limits
    given = {"against": job.parent, "documents": corpus.held_out, "tasks": corpus.tasks, "gain": gain, **asked}
    return evaluate(str(model), seed=job.config.seed, served=job.served, progress=job.progress, **given)


@contextmanager
def open_job(
    name: str, config: ToolConfig, own: DataclassInstance, progress: Progress, *, learns: bool = True
) -> Iterator[Job]:
    """The job of this command, begun or gone on with. Raises ConfigError where DIR is there, another command's job
    lies beside it, or another process is at it."""
    rules, out, part = read_rules(name, config.gate), Path(config.out), _beside(Path(config.out), "part")
    with ExitStack() as stack, told_if_full(out):
        parent = stack.enter_context(open_checkpoint(config.model))
        flags = {flag: value for flag, value in (asdict(config) | asdict(own)).items() if flag not in _FILES}
        asked = {"tool": name, "parent": parent.identity, **flags, **file_hashes(config)}
        if any((folder / CURRENT).is_symlink() for folder in out.absolute().parents[:2]):
            raise ConfigError(f"{out} lies in a shelf; name a folder outside, and put it there with maitred publish")
        try:
            (part / "state").mkdir(parents=True, exist_ok=True)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise ConfigError(f"{out} cannot be made: {error.strerror}; name another --out") from None
        busy = f"another process is at work in {part}; wait for it, or name another --out"
        stack.enter_context(locked(part / "lock", busy))
        try:
            if out.exists():
                raise ConfigError(f"{out} is there already; name another --out, or remove it")
            _check_same(part, asked)
            corpus = read_corpus(config, parent, part / "state", progress, learns=learns)
            rules.check_enough(corpus)
            (part / "model").mkdir(exist_ok=True)
            yield Job(name, config, own, parent, corpus, part / "model", part / "state", rules, progress)
        except BaseException as error:
            spare = {OWN_FILE} if isinstance(error, ConfigError) else set()  # which another command writes anew
            if not _kept(part) - spare or (out.exists() and not (part / "model").exists()):
                _remove(out)  # nothing to go on from
            raise


def _kept(part: Path) -> set[str]:
    """What a job has kept to go on from."""
    return {file.name for folder in ("state", "model") for file in (part / folder).glob("*")}


def _check_same(part: Path, asked: Mapping[str, Any]) -> None:
    """Note what is asked, where it is the first time."""
    file, asked = part / "asked.json", json.loads(json.dumps(asked))  # as it is read again
    if not (file.is_file() and _kept(part)):
        write_json(file, asked)
        return
    before = json.loads(file.read_text())
    if names := [name for name in {**before, **asked} if before.get(name) != asked.get(name)]:
        told = ", ".join(f"{name} {before.get(name)!r} there, {asked.get(name)!r} here" for name in names[:3])
        raise ConfigError(
            f"{part} was begun by another command ({told}); give that one again to go on, or remove the folder"
        )


def _remove(out: Path) -> None:
    """DIR.part goes by one rename, so that no half of it is gone on with."""
    gone = _beside(out, "gone")
    shutil.rmtree(gone, ignore_errors=True)
    _beside(out, "part").rename(gone)
    shutil.rmtree(gone)


def _fields(job: Job, evaluation: Evaluation, failures: tuple[BrokenRule, ...], seconds: float) -> dict[str, Any]:
    return {
        "tool": job.name,
        "version": maitred.__version__,
        "parent": {"name": job.parent.name, "identity": job.parent.identity},
        "flags": {**asdict(job.config), **asdict(job.own)},
        "data": job.corpus.described(),
        **asdict(evaluation),
        "gate": gate_fields(job.rules, failures),
        "passed": not failures,
        job.name: job.notes,
        "seconds": round(seconds, 1),
    }


def _beside(out: Path, ending: str) -> Path:
    return out.with_name(f"{out.name}.{ending}")


def _appear(folder: Path, out: Path) -> None:
    """DIR is there after this, with all its bytes on disk before its name."""
    mask = os.umask(0)
    os.umask(mask)
    for file in filter(Path.is_file, folder.rglob("*")):
        file.chmod(0o666 & ~mask)  # safetensors writes files for the owner alone
        sync(file)
    folder.rename(out)


@contextmanager
def told_if_full(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        told = re.search(r"\(os error (\d+)\)", str(error))  # of safetensors' writer
        number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
        if number not in NO_ROOM:
            raise
        raise ConfigError(
            f"{out} could not be written: {os.strerror(number)}; make room, and give the same command again"
        ) from error
