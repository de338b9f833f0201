"""Makes the peers' environments and models in a work folder: what `cpu_peers.py --setup` runs. Idempotent; minutes.

Everything comes from the Python package index. Versions are those whose figures docs/experiments.md gives.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from peers.shapes import make_checkpoint

TORCH = "torch==2.13.0"
OPENVINO = (
    "openvino-genai==2026.4.1.0",
    "openvino-tokenizers==2026.4.1.0",
    "nncf==3.4.0",
    "optimum-intel[openvino]==2.2.0",
)
ONNXRUNTIME = ("onnxruntime-genai==0.18.0", "onnxruntime", "onnx", "onnx-ir", "transformers>=5.0")
INT4_OPTIONS = ("--sym", "--group-size", "128", "--ratio", "1.0")


def set_up(work: Path, model: str) -> None:
    """Everything that the cells of `model` need."""
    checkpoint = make_checkpoint(model, work)
    openvino = _environment(work / "venv-openvino", OPENVINO)
    for weights in ("fp16", "int8", "int4"):
        target = work / f"openvino-{model}-{weights}"
        if not (target / "openvino_model.bin").exists():
            options = INT4_OPTIONS if weights == "int4" else ()
            export = [str(openvino / "optimum-cli"), "export", "openvino", "--model", str(checkpoint)]
            task = ["--task", "text-generation-with-past"]
            _run([*export, *task, "--weight-format", weights, *options, str(target)])
    onnxruntime = _environment(work / "venv-onnxruntime", ONNXRUNTIME)
    target = work / f"onnxruntime-{model}-int4"
    if not (target / "genai_config.json").exists():
        builder = [str(onnxruntime / "python"), "-m", "onnxruntime_genai.models.builder"]
        _run([*builder, "-i", str(checkpoint), "-o", str(target), "-p", "int4", "-e", "cpu", "-c", str(work / "cache")])


def _environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """A virtual environment with a CPU build of PyTorch and `packages`; returns its bin folder."""
    done = folder / ".installed"
    if not done.exists():
        _run([sys.executable, "-m", "venv", str(folder)])
        constraints = folder / "constraints.txt"
        constraints.write_text(f"{TORCH}+cpu\n")  # keeps newer torch, and CUDA, out
        pip = [str(folder / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, TORCH])
        _run([*pip, "-c", str(constraints), *packages])
        done.touch()
    return folder / "bin"


def _run(command: list[str]) -> None:
    print("+", " ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
