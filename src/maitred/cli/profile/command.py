"""`maitred profile`: measure this machine for `maitred simulate`."""

from __future__ import annotations

from maitred.cli.command import Command, Options
from maitred.cli.local import ENGINE_PARTS, engine_config
from maitred.cli.profile.options import ProfileOptions
from maitred.config import ModelConfig


def _run(options: Options) -> int:
    asked = options[ProfileOptions]
    if asked.model_repository is not None:
        from maitred.cli.profile.tensors import run_tensor_profile

        name = options[ModelConfig].model if options.was_given("model") else None
        return run_tensor_profile(asked, asked.model_repository, name)
    from maitred.cli.profile.measure import run_profile

    return run_profile(asked, engine_config(options))


COMMAND = Command(
    path="profile",
    summary="Measure a model on this machine, its steps and the way to them over HTTP, for simulate.",
    run=_run,
    parts=(ProfileOptions, *ENGINE_PARTS),
    positional="model",
    first=("model", "output", "seconds", "clock", "dtype", "kv_dtype", "max_model_len", "max_num_seqs", "num_threads"),
    examples=(
        "maitred profile",
        "maitred profile ./Llama-3.2-1B -o llama.json",
        "maitred profile --seconds 120",
        "maitred profile --model-repository ./repository --model resnet -o resnet.json",
    ),
)
