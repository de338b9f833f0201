"""Makes the peers' environments and models in a work folder: what `cpu_peers.py --setup` runs. Idempotent; minutes.

Everything comes from the Python package index. Versions are those whose figures docs/experiments/peers.md gives. A
peer that cannot be set up leaves a file that says why, and the others go on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from peers.shapes import SHAPES, make_checkpoint

TORCH = "torch==2.13.0"
OPENVINO = (
    "openvino-genai==2026.4.1.0",
    "openvino-tokenizers==2026.4.1.0",
    "nncf==3.4.0",
    "optimum-intel[openvino]==2.2.0",
)
ONNXRUNTIME = ("onnxruntime-genai==0.18.0", "onnxruntime", "onnx", "onnx-ir", "transformers>=5.0")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # pulled in, and built for another PyTorch than the CPU's
LLAMACPP = "llama-cpp-python==0.3.36"
LLAMACPP_TOOLS = (
    *("scikit-build-core", "numpy", "typing-extensions", "diskcache", "jinja2"),
    *("transformers>=5.0", "sentencepiece"),
)
LLAMACPP_TARGETS = ("llama", "llama-server", "llama-quantize")
LLAMACPP_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    f"-DCMAKE_CXX_FLAGS=-include {Path(__file__).with_name('tile_config.h')}",
)
INT4_OPTIONS = ("--sym", "--group-size", "128", "--ratio", "1.0")
XLLAMACPP = "xllamacpp==2026.10.11549"
GGUF_TYPES = ("bf16", "q8_0", "q4_0")


def set_up(work: Path, model: str) -> None:
    """Everything that the cells of `model` need."""
    is_gguf = model not in SHAPES
    checkpoint = work if is_gguf else make_checkpoint(model, work)
    for name, peer in GGUF_PEERS.items() if is_gguf else PEERS.items():
        reason = why_not(work, name)
        reason.unlink(missing_ok=True)
        try:
            peer(work, model, checkpoint)
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


def _onnxruntime(work: Path, model: str, checkpoint: Path) -> None:
    programs = _environment(work / "venv-onnxruntime", ONNXRUNTIME)
    target = work / f"onnxruntime-{model}-int4"
    if not (target / "genai_config.json").exists():
        builder = [str(programs / "python"), "-m", "onnxruntime_genai.models.builder"]
        _run([*builder, "-i", str(checkpoint), "-o", str(target), "-p", "int4", "-e", "cpu", "-c", str(work / "cache")])


def llamacpp_source(home: Path, programs: Path) -> Path:
    """The sources in its Python package, fetched by the `pip` of an environment that has scikit-build-core."""
    source = home / "source"
    if not source.exists():
        pip = [str(programs / "pip"), "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        _run([*pip, "--dest", str(home), LLAMACPP])
        (archive,) = home.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(home, filter="data")
        source.symlink_to(archive.name.removesuffix(".tar.gz"))
    return source


def _llamacpp(work: Path, model: str, checkpoint: Path) -> None:
    """The library, its server and its quantiser from the sources in its Python package, for this processor."""
    home = work / "venv-llamacpp"
    programs = _environment(home, LLAMACPP_TOOLS)
    source = llamacpp_source(home, programs)
    vendored, build = source / "vendor/llama.cpp", home / "build"
    if not (build / "bin/llama-server").exists():
        _run(["cmake", "-S", str(vendored), "-B", str(build), *LLAMACPP_FLAGS])
        _run(["cmake", "--build", str(build), "--parallel", "2", "--target", *LLAMACPP_TARGETS])
    if not any(home.glob("lib/python3.*/site-packages/llama_cpp")):
        pip = [str(programs / "pip"), "install", "--quiet", "--no-deps", "--no-build-isolation", str(source)]
        _run(pip, CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF")
    for kind in GGUF_TYPES:
        target = gguf(work, model, kind)
        if target.exists():
            continue
        if kind == "bf16":
            converter = [str(programs / "python"), str(Path(__file__).with_name("convert_gguf.py")), str(vendored)]
            _run([*converter, str(checkpoint), "--outtype", kind, "--outfile", str(target)])
        else:
            _run([str(build / "bin/llama-quantize"), str(gguf(work, model, "bf16")), str(target), kind.upper(), "2"])


def _xllamacpp(work: Path, model: str, checkpoint: Path) -> None:
    """llama.cpp's server prebuilt: with AVX2, as the package index has it."""
    folder = work / "venv-xllamacpp"
    if not (folder / "bin/python").exists():
        _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(folder / "bin/pip"), "install", "--quiet", "--disable-pip-version-check", XLLAMACPP])


def gguf(work: Path, model: str, kind: str) -> Path:
    """llama.cpp's model file."""
    return work / f"llamacpp-{model}-{kind}.gguf"


PEERS: dict[str, Callable[[Path, str, Path], None]] = {
    "openvino": _openvino,
    "onnxruntime": _onnxruntime,
    "llamacpp": _llamacpp,
}
GGUF_PEERS: dict[str, Callable[[Path, str, Path], None]] = {"xllamacpp": _xllamacpp}


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
