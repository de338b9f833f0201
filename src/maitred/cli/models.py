"""`maitred models`: models that come as packages; `models check`: would Triton's be served here? `maitred explain`: how
a model would be run, without running it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.cli.local import ENGINE_PARTS, engine_config

if TYPE_CHECKING:
    from maitred.tensor.check import CheckedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsCheckOptions:
    """What is checked"""

    paths: tuple[str, ...] = option(metavar="PATH", name="--path")
    """A model repository, a model's folder, a config.pbtxt or an .onnx file; may be given several times."""
    allow_repository_code: bool = False
    """Count models of the Python backend as served: their model.py would run."""
    json: bool = False
    """Print a list of objects with path, parsed, served, reason, and config as it is written."""


def _check(options: Options) -> int:

    from maitred.tensor.check import check

    asked = options[ModelsCheckOptions]
    found = [each for path in asked.paths for each in check(Path(path), allow_code=asked.allow_repository_code)]
    if asked.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print("\n".join(map(line, found)))
    return 0 if all(each.served for each in found) else 1


def line(checked: CheckedModel) -> str:
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
CHECK = Command(
    path="models check",
    summary="Tell whether models of a Triton repository would be served, and why not, without loading them.",
    run=_check,
    parts=(ModelsCheckOptions,),
    positional="paths",
    examples=("maitred models check ./repository", "maitred models check resnet/config.pbtxt model.onnx --json"),
)


def _explain(options: Options) -> int:
    config = engine_config(options)  # looks at the model's file before the imports
    from maitred.engine.executors import plan_executor
    from maitred.engine.planning import described_model
    from maitred.executor.native_plan import NativePlan
    from maitred.model.checkpoint import open_checkpoint
    from maitred.model.program_report import step_bytes, tell_buffers, tell_fusions, tell_linears

    if config.model.model is not None and _is_tensor_model(Path(config.model.model)):
        from maitred.tensor.explain import explained

        for line in explained(Path(config.model.model)):
            print(line)
        return 0
    fallbacks: list[str] = []
    with open_checkpoint(config.model.model, config.model.revision) as checkpoint:
        spec = described_model(checkpoint)
        plan = plan_executor(config, checkpoint, spec, fallbacks.append)
        print(f"model     {checkpoint.name}: {spec.identity()}{spec.way or ', by a native row'}")
        described = " ".join(plan.describe().split())
        print(f"executor  {described}")
        if not isinstance(plan, NativePlan):
            reason = " ".join(fallbacks[0].split()) if fallbacks else "nothing: PyTorch runs every part"
            print(f"fell back {reason}")
            return 0
        kv_bytes = plan.bytes_per_block / config.cache.block_size
        sections = (
            tell_fusions(plan.program),
            tell_linears(plan.program, plan.isa),
            tell_buffers(plan.buffers),
            [
                f"a step    {'of a token ' if spec.is_routed else ''}reads "
                f"{step_bytes(plan.program) / 1e6:,.1f} MB of weights, and {kv_bytes:,.0f} bytes of "
                "keys and values for each token of context of each request",
                *[f"          reads and writes {plan.bytes_per_state_slot / 1e6:,.1f} MB of states of each request"][
                    : spec.has_state
                ],
                f"          and has at most {plan.token_budget} tokens (--max-num-batched-tokens)",
            ],
            ["fell back nothing"],
        )
        print("\n".join(line for section in sections for line in section))
    return 0


def _is_tensor_model(path: Path) -> bool:
    """Whether it is a tensor model, by its files, so that other models do not need the extra."""
    return path.suffix == ".onnx" or (path / "config.pbtxt").is_file() or any(path.glob("[1-9]*/model.onnx"))


EXPLAIN = Command(
    path="explain",
    summary="Tell how a model would be run: what is fused, which kernel or provider runs it, formats, buffers, bytes.",
    run=_explain,
    parts=ENGINE_PARTS,
    positional="model",
    first=("model", "executor", "device", "dtype", "lm_head_dtype", "kv_dtype", "max_model_len", "num_threads"),
    examples=(
        "maitred explain",
        "maitred explain ./Qwen3-0.6B --dtype int8",
        "MAITRED_ISA=avx2 maitred explain",
        "maitred explain ./models/resnet",
    ),
)
