"""`maitred models`: models that come as packages; `models check`: would Triton's be served here? `maitred explain`: how
a model would be run, without running it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.cli.local import ENGINE_PARTS, engine_config

if TYPE_CHECKING:
    from maitred.config import EngineConfig
    from maitred.engine.executors import ExecutorPlan
    from maitred.model.spec import DecoderSpec
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
            print("\n".join([f"fell back {reason}", *_techniques(config, spec, plan)]))
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
            _techniques(config, spec, plan),
        )
        print("\n".join(line for section in sections for line in section))
    return 0


def _techniques(config: EngineConfig, spec: DecoderSpec, plan: ExecutorPlan) -> list[str]:
    """Techniques of model, engine and serving: on, off or why not, and the measured effect as docs/claims.md has it."""
    windows, native = sum(layer.window is not None for layer in spec.layers), plan.name == "native"
    shares = spec.num_kv_heads < spec.num_heads
    drafts, prefixes = config.speculative.speculative, config.cache.enable_prefix_caching
    by_torch = "" if native else "the PyTorch executor has none"
    here = {
        "gqa": f"on, {spec.num_heads} heads share {spec.num_kv_heads}" if shares else "off, each head has its own keys",
        "windows": f"on, {windows} of {spec.num_layers} layers" if windows else "off, no layer has one",
        "kv-int8": _format(plan.kv_dtype_name, "8", "--kv-dtype"),
        "int8": _format(plan.dtype_name, "8", "--dtype"),
        "int4": _format(plan.dtype_name, "4", "--dtype"),
        "mtp": f"on, {spec.num_mtp_layers}" if spec.num_mtp_layers else "off, the checkpoint has none",
        "fusion": f"off, {by_torch}" if by_torch else "on",
        "chunked": f"on, steps of at most {config.scheduler.settled(plan.token_budget).token_budget} tokens",
        "prefix": "on" if prefixes else "off, --no-enable-prefix-caching",
        "speculation": f"off, {by_torch or '--speculative off'}" if by_torch or drafts == "off" else f"on, {drafts}",
    }
    rows = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))
    told = []
    for level in ("model", "engine", "serving"):
        for name, row in rows.items():
            if row.get("level") == level:
                told += [f"{level:<9} {row['technique']}: {here.get(name) or row['state']}"]
                told += [f"{'':<11} {row['here'].format(**row['figures'])}"]
    return told


def _format(held: str, bits: str, flag: str) -> str:
    """Whether numbers are held in so many bits, or in a file's own format of as many."""
    return f"on, {held}" if held.startswith((f"int{bits}", f"q{bits}")) else f"off, {held}, unless {flag} int{bits}"


def _is_tensor_model(path: Path) -> bool:
    """Whether it is a tensor model, by its files, so that other models do not need the extra."""
    return path.suffix == ".onnx" or (path / "config.pbtxt").is_file() or any(path.glob("[1-9]*/model.onnx"))


EXPLAIN = Command(
    path="explain",
    summary="Tell how a model would be run: what is fused, which kernels run it, formats, buffers, techniques.",
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
