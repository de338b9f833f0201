"""`maitred profile --model-repository`: batch times of tensor models, measured and written."""

from __future__ import annotations

from pathlib import Path

from maitred.cli.console import inert, note
from maitred.cli.profile.options import ProfileOptions
from maitred.cli.simulate.table import aligned, seconds_text
from maitred.cli.simulate.tensors import tensor_profile_path
from maitred.sim.tensor_profile import TensorProfile, encode_tensor_profile
from maitred.tensor.profiling import measured_profile
from maitred.tensor.python.instance import all_openers


def run_tensor_profile(asked: ProfileOptions, repository: str, name: str | None) -> int:
    openers = all_openers(allow_code=asked.allow_repository_code)
    profile = measured_profile(Path(repository), name, note, openers=openers)
    path = Path(asked.output) if asked.output is not None else tensor_profile_path(repository)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_tensor_profile(profile))
    print(inert(describe(profile)))
    note(f"profile: {path}")
    return 0


def describe(profile: TensorProfile) -> str:
    """A row for each shape."""
    rows = [["model", "version", "length", "rows: median"]]
    for times in profile.models:
        for shape in times.shapes:
            told = (f"{rows}: {seconds_text(seconds)}" for rows, seconds in zip(shape.rows, shape.seconds, strict=True))
            rows.append([times.model, str(times.version), str(shape.length or "-"), "  ".join(told)])
    host = profile.host
    besides = f"besides, each request costs {seconds_text(host.request_s)}, each batch {seconds_text(host.batch_s)}"
    return f"{aligned(rows)}\n{besides}"
