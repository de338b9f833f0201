"""Makes the peers' environments and models in a work folder: what `cpu_peers.py --setup` runs. Idempotent; minutes.

Everything comes from the Python package index. Versions are those whose figures docs/experiments/peers.md gives. A
peer that cannot be set up leaves a file that says why, and the others go on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from peers.shapes import SHAPES, make_checkpoint

TORCH = "torch==2.13.0"
OPENVINO = (
    "openvino-genai==2026.4.1.0",
    "openvino-tokenizers==2026.4.1.0",
    "nncf==3.4.0",
    "optimum-intel[openvino]==2.2.0",
)
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # pulled in, and built for another PyTorch than the CPU's
INT4_OPTIONS = ("--sym", "--group-size", "128", "--ratio", "1.0")
XLLAMACPP = "xllamacpp==2026.10.11549"


def set_up(work: Path, model: str) -> None:
    """Everything that the cells of `model` need."""
    is_gguf = model not in SHAPES
    name = "xllamacpp" if is_gguf else "openvino"
    reason = why_not(work, name)
    reason.unlink(missing_ok=True)
    try:
        _xllamacpp(work) if is_gguf else _openvino(work, model, make_checkpoint(model, work))
    except (subprocess.CalledProcessError, OSError) as error:
        reason.write_text(f"{error}\n")
        print(f"{name} could not be set up: {error}", file=sys.stderr)


def why_not(work: Path, peer: str) -> Path:
    """Where the reason stands if the peer could not be set up."""
    return work / f"{peer}.failed"


def _openvino(work: Path, model: str, checkpoint: Path) -> None:
    programs = _environment(work / "venv-openvino", OPENVINO)
    for weights in ("fp16", "int8", "int4"):
        target = work / f"openvino-{model}-{weights}"
        if not (target / "openvino_model.bin").exists():
            options = INT4_OPTIONS if weights == "int4" else ()
            export = [str(programs / "optimum-cli"), "export", "openvino", "--model", str(checkpoint)]
            task = ["--task", "text-generation-with-past"]
            _run([*export, *task, "--weight-format", weights, *options, str(target)])


def _xllamacpp(work: Path) -> None:
    """llama.cpp's server prebuilt: with AVX2, as the package index has it."""
    folder = work / "venv-xllamacpp"
    if not (folder / "bin/python").exists():
        _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(folder / "bin/pip"), "install", "--quiet", "--disable-pip-version-check", XLLAMACPP])


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
        _run([str(folder / "bin/pip"), "uninstall", "--quiet", "--yes", *UNWANTED])
        done.touch()
    return folder / "bin"


def _run(command: list[str], **environment: str) -> None:
    print("+", " ".join(command), file=sys.stderr, flush=True)
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    subprocess.run(command, check=True, env=variables, stdout=sys.stderr)
