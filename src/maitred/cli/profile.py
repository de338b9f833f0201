"""`maitred profile`: measure this machine for `maitred simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.cli.local import ENGINE_PARTS, engine_config
from maitred.config import ModelConfig
from maitred.core.errors import ConfigError

if TYPE_CHECKING:
    from maitred.sim.tensor_profile import TensorProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to record"""

    output: str | None = option(None, metavar="FILE", short="-o")
    """Where the profile goes; None is where simulate looks for this model's ($XDG_CACHE_HOME/maitred/profiles)."""
    seconds: float = option(30.0, metavar="SECONDS")
    """How long to keep a server busy; longer is surer."""

    model_repository: str | None = option(None, metavar="DIR")
    """Measure the batches of this repository's tensor models instead, of all or of --model's; for simulate and tune."""

    allow_repository_code: bool = False
    """Run model.py files of that repository, in processes of their own."""

    def __post_init__(self) -> None:
        if not self.seconds >= 1:
            raise ConfigError(f"seconds is {self.seconds}; it must be at least 1")


def _run(options: Options) -> int:
    asked = options[ProfileOptions]
    if asked.model_repository is not None:
        name = options[ModelConfig].model if options.was_given("model") else None
        return _profile_tensors(asked, asked.model_repository, name)
    from maitred.cli.profiling import run_profile

    return run_profile(engine_config(options), asked.seconds, asked.output)


def _profile_tensors(asked: ProfileOptions, repository: str, name: str | None) -> int:
    """Batch times of tensor models, measured and written."""
    from maitred.cli.console import inert, note
    from maitred.cli.simulate_inputs import tensor_profile_path
    from maitred.cli.tuning import measured_profile
    from maitred.sim.tensor_profile import encode_tensor_profile
    from maitred.tensor.python.instance import all_openers

    openers = all_openers(allow_code=asked.allow_repository_code)
    profile = measured_profile(Path(repository), name, note, openers=openers)
    path = Path(asked.output) if asked.output is not None else tensor_profile_path(repository)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_tensor_profile(profile))
    print(inert(_tensor_lines(profile)))
    note(f"profile: {path}")
    return 0


def _tensor_lines(profile: TensorProfile) -> str:
    """A row for each shape."""
    from maitred.cli.console import aligned, seconds_text

    rows = [["model", "version", "length", "rows: median"]]
    for times in profile.models:
        for shape in times.shapes:
            told = (f"{rows}: {seconds_text(seconds)}" for rows, seconds in zip(shape.rows, shape.seconds, strict=True))
            rows.append([times.model, str(times.version), str(shape.length or "-"), "  ".join(told)])
    host = profile.host
    besides = f"besides, each request costs {seconds_text(host.request_s)}, each batch {seconds_text(host.batch_s)}"
    return f"{aligned(rows)}\n{besides}"


COMMAND = Command(
    path="profile",
    summary="Measure a model on this machine, its steps and the way to them over HTTP, for simulate.",
    run=_run,
    parts=(ProfileOptions, *ENGINE_PARTS),
    positional="model",
    first=("model", "output", "seconds", "dtype", "kv_dtype", "max_model_len", "max_num_seqs", "num_threads"),
    examples=(
        "maitred profile",
        "maitred profile ./Llama-3.2-1B -o llama.json",
        "maitred profile --seconds 120",
        "maitred profile --model-repository ./repository --model resnet -o resnet.json",
    ),
)
