"""`maitred explain`: how a model would be run here, without running it."""

from __future__ import annotations

from pathlib import Path

from maitred.cli.command import Command, Options
from maitred.cli.local import ENGINE_PARTS, engine_config


def _run(options: Options) -> int:
    config = engine_config(options)  # looks at the model's file before the imports
    from maitred.engine.executors import plan_executor
    from maitred.executor.native_plan import NativePlan
    from maitred.model.checkpoint import open_checkpoint
    from maitred.model.families import spec_from_config
    from maitred.model.program_report import step_bytes, tell_buffers, tell_fusions, tell_linears

    if config.model.model is not None and _is_tensor_model(Path(config.model.model)):
        from maitred.tensor.explain import explained

        for line in explained(Path(config.model.model)):
            print(line)
        return 0
    fallbacks: list[str] = []
    with open_checkpoint(config.model.model, config.model.revision) as checkpoint:
        spec = spec_from_config(checkpoint.config)
        plan = plan_executor(config, checkpoint, spec, fallbacks.append)
        print(f"model     {checkpoint.name}: {spec.identity()}")
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
                f"a step    reads {step_bytes(plan.program) / 1e6:,.1f} MB of weights, and {kv_bytes:,.0f} bytes of "
                "keys and values for each token of context of each request",
                f"          and has at most {plan.token_budget} tokens (--max-num-batched-tokens)",
            ],
            ["fell back nothing"],
        )
        print("\n".join(line for section in sections for line in section))
    return 0


def _is_tensor_model(path: Path) -> bool:
    """Whether it is a tensor model, by its files, so that other models do not need the extra."""
    return path.suffix == ".onnx" or (path / "config.pbtxt").is_file() or any(path.glob("[1-9]*/model.onnx"))


COMMAND = Command(
    path="explain",
    summary="Tell how a model would be run: what is fused, which kernel or provider runs it, formats, buffers, bytes.",
    run=_run,
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
