"""The tools that change a model, each gated, `maitred evaluate`, captured traffic, which they learn from, and
versions on a shelf, for servers that follow it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from maitred.cli.command import Command, Options
from maitred.cli.console import columns, inert, note
from maitred.cli.flags import UsageError, option
from maitred.config.optimize import (
    DistillConfig,
    DraftConfig,
    EvaluateConfig,
    FederateConfig,
    FinetuneConfig,
    JoinConfig,
    PruneConfig,
    QuantizeConfig,
    ToolConfig,
)
from maitred.core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from maitred.optimize.data import Progress as OnProgress

EXIT_GATE = 3
NUM_OWN = 32
DEFAULT_DROP = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOption:
    """The report"""

    json: bool = False
    """Print the report as JSON."""


def tool_command(path: str, own: type, module: str, summary: str, examples: tuple[str, ...]) -> Command:
    """A command whose flags are `own` and ToolConfig, and whose tool is `TOOL` in maitred.optimize.MODULE."""
    return Command(
        path=path,
        summary=summary,
        run=lambda options: _run(module, own, options),
        parts=(own, ToolConfig, JsonOption),
        positional="model",
        first=("model", "out", *(each.name for each in fields(own)[:3]), "data", "held_out", "tasks", "gate"),
        examples=examples,
    )


def _run(module: str, own: type, options: Options) -> int:
    need_torch()
    from maitred.optimize.job import run_tool

    tool = import_module(f"maitred.optimize.{module}").TOOL
    config = options[ToolConfig]
    with bar(tool.name) as progress:
        report = run_tool(tool, config, options[own], progress)
    _print(report.fields, options)
    if not report.passed:
        note(f"the gate refused it; nothing is at {config.out}, the report is {config.out}.rejected.json")
        return EXIT_GATE
    note(f"written: {config.out}")
    return 0


def _evaluate(options: Options) -> int:
    from maitred.model.checkpoint import open_checkpoint
    from maitred.optimize.data import OWN_JUDGES, Reader, own_documents, read_tasks
    from maitred.optimize.evaluate import cascade, evaluate
    from maitred.optimize.gate import gate_fields, judge, read_rules

    asked = options[EvaluateConfig]
    rules, served = read_rules("evaluate", asked.gate), {"dtype": asked.dtype, "kv_dtype": asked.kv_dtype}
    tasks = read_tasks(asked.tasks) if asked.tasks is not None else ()
    with ExitStack() as stack:
        progress = stack.enter_context(bar("evaluate"))
        model = stack.enter_context(open_checkpoint(asked.model))
        parent = stack.enter_context(open_checkpoint(asked.against)) if asked.against is not None else None
        if asked.held_out is not None:
            documents = Reader(parent or model).read(asked.held_out)
        else:
            folder = stack.enter_context(TemporaryDirectory(prefix="maitred-"))
            own = Path(folder) / "own.jsonl"
            documents = own_documents(parent or model, own, seed=asked.seed, progress=progress, count=NUM_OWN)
        how: dict[str, Any] = {"tasks": tasks, "seed": asked.seed, "served": served, "progress": progress}
        found = evaluate(
            str(model.path), against=parent, documents=documents, draft=asked.draft, gain=asked.gain, **how
        )
        escalating = {}
        if asked.escalate_to is not None:
            large = stack.enter_context(open_checkpoint(asked.escalate_to))
            most = rules.limits.get("max_task_drop", DEFAULT_DROP)
            steps = cascade(str(model.path), str(large.path), **how)
            passing = [at for at, step in steps.items() if step["drop"].high <= most]
            cascades = {f"{at:g}": {name: asdict(each) for name, each in step.items()} for at, step in steps.items()}
            escalating = {"cascade": cascades, "escalate_below": min(passing, default=None)}
    failures = judge(rules, found)
    data = {"data": {"judges": OWN_JUDGES}} if asked.held_out is None else {}
    told = {**asdict(found), **data, **escalating, "gate": gate_fields(rules, failures), "passed": not failures}
    _print(told, options)
    return EXIT_GATE if failures else 0


def _print(fields: Mapping[str, Any], options: Options) -> None:
    print(json.dumps(fields, indent=2) if options[JsonOption].json else inert(report_text(fields)))


def need_torch() -> None:
    """Raises ConfigError where PyTorch is not installed, which the tools alone need."""
    if find_spec("torch") is None:
        raise ConfigError("this tool needs PyTorch; install it with: pip install 'maitred[optimize]'")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on a busy machine, spinning threads take four times as long


@contextmanager
def bar(name: str) -> Iterator[OnProgress]:
    """A bar with rate and time left on a terminal's stderr, else a line for each part of the work."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console, last = Console(stderr=True), [""]
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%{task.fields[rate]}")]
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task(name, total=None, rate="")

        def progress(done: float, total: float, words: str) -> None:
            if words != last[0]:
                last[0] = words
                shown.reset(task, total=total, description=f"{name}: {words}")
                if not console.is_terminal:
                    note(f"{name}  {words}")
            speed = shown.tasks[0].speed
            shown.update(task, completed=done, total=total, rate=f"  {speed:.3g}/s" if speed else "")

        yield progress


def report_text(fields: Mapping[str, Any]) -> str:
    """Figures with their intervals, scores by category, the tool's notes, and what the gate said."""
    rows = [(name, figure) for name, figure in fields["figures"].items()]
    for category, scores in fields["tasks"].items():
        rows += [(f"{name} of {category}", figure) for name, figure in scores.items()]
    lines = [f"{name:28} {each['value']:<10.4g} {each['low']:.4g} to {each['high']:.4g}" for name, each in rows]
    for name, value in fields[fields["tool"]].items() if "tool" in fields else ():
        if isinstance(value, (str, int, float)):
            lines.append(f"{name:28} {value}")
    lines += [f"{'judged':28} {fields['data']['judges']}"] if "data" in fields else []
    for at, step in fields.get("cascade", {}).items():
        chosen = ", the least that passes" if float(at) == fields["escalate_below"] else ""
        told = ", ".join(f"{name} {each['value']:.4g}" for name, each in step.items())
        lines.append(f"{f'escalate_below {at}':28} {told} (at most {step['drop']['high']:.4g}){chosen}")
    lines += [f"{'refused':28} {failure['words']}" for failure in fields["gate"]["failures"]]
    return "\n".join(lines)


PRUNE = tool_command(
    "prune",
    PruneConfig,
    "prune",
    "Take neurons, attention heads or layers out of a model, fit and train what is left to the parent, measure it on "
    "the executor that serves it, and keep it if the gate lets it through.",
    (
        "maitred prune --out mini-small --neurons 0.25 --minutes 3 --data chats.jsonl --tasks questions.jsonl",
        "maitred prune smollm2 --out smol-28 --layers 2",
    ),
)

EVALUATE = Command(
    path="evaluate",
    summary="Measure a model in the format that is served: perplexity, KL to its parent, flipped tokens, scores of "
    "tasks, a draft's acceptance; each with a 95% interval.",
    run=_evaluate,
    parts=(EvaluateConfig, JsonOption),
    positional="model",
    examples=(
        "maitred evaluate smollm2 --against smollm2 --kv-dtype int8",
        "maitred evaluate ./mine --against ./parent --held-out others.jsonl --tasks questions.jsonl --gate rules.yaml",
        "maitred evaluate ./small --escalate-to ./large --held-out others.jsonl --tasks questions.jsonl",
    ),
)

DISTILL = tool_command(
    "distill",
    DistillConfig,
    "distill",
    "Train a smaller model on a larger one's distributions, starting from a cut of its weights, and keep the student "
    "if the gate lets it through.",
    (
        "maitred distill --out mini-quarter --student 1/4 --data chats.jsonl --tasks questions.jsonl --minutes 25",
        "maitred distill ./mine --out small --student layers=12,hidden=384 --data chats.jsonl --steps 2000 --sweep",
    ),
)

FINETUNE = tool_command(
    "finetune",
    FinetuneConfig,
    "finetune",
    "Teach a model your documents: an adapter (LoRA) that serve and PEFT load, or a model with --full or --merge.",
    (
        "maitred finetune --data chats.jsonl --out ./mine   # then: maitred serve --lora mine=./mine",
        "maitred finetune smollm2 --data chats.jsonl --out ./mine --merge --minutes 20",
    ),
)

DRAFT = tool_command(
    "train-draft",
    DraftConfig,
    "draft",
    "Train a draft model or a head (EAGLE-3) for speculative decoding, and keep it if enough drafts are accepted.",
    (
        "maitred train-draft smollm2 --kind mtp --out ./smollm2-mtp --data ./captured --minutes 30",
        "maitred train-draft ./mine --kind draft --student 1/9 --out ./mine-draft",
    ),
)

QUANTIZE = tool_command(
    "quantize",
    QuantizeConfig,
    "quantize",
    "Store the matrices of a model's layers in 4 or 8 bits, measure what that costs on the executor that serves it, "
    "and keep the result if the gate lets it through.",
    (
        "maitred quantize --out mini-int4",
        "maitred quantize ./model --out model-int4 --data chats.jsonl --held-out others.jsonl",
        "maitred quantize smollm2 --out smol-q8 --scheme int8 --to gguf",
    ),
)


def _join(options: Options) -> int:
    need_torch()
    from maitred.optimize.federated import join

    with bar("federate join") as progress:
        told = join(options[JoinConfig], progress)
    print(
        json.dumps(told) if options[JsonOption].json else "\n".join(f"{name:28} {each}" for name, each in told.items())
    )
    return 0


FEDERATE = tool_command(
    "federate serve",
    FederateConfig,
    "federated",
    "Average the adapters that clients train on data that stays with them, round by round, into one that is measured.",
    (
        "maitred federate serve smollm2 --out ./ours --rounds 10 --min-clients 3 --held-out public.jsonl",
        "maitred federate serve --out ./ours --host 0.0.0.0 --tenants tenants.yaml --noise 1 --clip 1",
    ),
)

JOIN = Command(
    path="federate join",
    summary="Train a federation's adapter on data that stays here; only clipped updates of the adapter are sent.",
    run=_join,
    parts=(JoinConfig, JsonOption),
    positional="url",
    examples=("maitred federate join http://10.0.0.5:8100 --model smollm2 --data chats.jsonl --local-steps 20",),
)


# ---- captured traffic, which the tools learn from


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Captured traffic"""

    folder: str = option(metavar="DIR")
    """The folder of serve --capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EraseOptions:
    """What is erased"""

    tenant: str = option(metavar="NAME")
    """All of this tenant, also what a running server has not written yet."""


def _list_captured(options: Options) -> int:
    from maitred.storage.capture import captured

    rows = [("TENANT", "MODEL", "ANSWERS", "TOKENS", "FROM", "TO")]
    for (tenant, model), held in sorted(captured(Path(options[CaptureOptions].folder)).items()):
        first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (held.first_at, held.last_at))
        rows.append((inert(tenant), inert(model), f"{held.num_answers:,}", f"{held.num_tokens:,}", first, last))
    print("\n".join(columns(rows, gap="  ")))
    return 0


def _erase_captured(options: Options) -> int:
    from maitred.storage.capture import erase

    folder, tenant = options[CaptureOptions].folder, options[EraseOptions].tenant
    num_erased = erase(Path(folder), tenant, now=time.time())
    note(f"{num_erased:,} answers of {inert(tenant)} are gone from {folder}; to keep no more, say capture: never in "
         "the tenants file")  # fmt: skip
    return 0


CAPTURE_LIST = Command(
    path="capture list",
    summary="List what serve --capture has kept, by tenant and model.",
    run=_list_captured,
    parts=(CaptureOptions,),
    positional="folder",
    examples=("maitred capture list ./captured",),
)
CAPTURE_ERASE = Command(
    path="capture erase",
    summary="Erase all that was captured of a tenant, file by file, beside running servers.",
    run=_erase_captured,
    parts=(CaptureOptions, EraseOptions),
    positional="folder",
    examples=("maitred capture erase ./captured --tenant shop",),
)


# ---- versions on a shelf


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
        marks = (release.tool, "current" if release.version == current else None, "signed" if is_signed else None)
        published = time.strftime("%Y-%m-%d %H:%M", time.localtime(release.published_at))
        told = ", ".join([release.name, *filter(None, marks)])
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
