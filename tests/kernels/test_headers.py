"""Each header of the native library compiles by itself, so that none leans on what a file includes before it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "src" / "maitred" / "kernels" / "csrc"
HEADERS = sorted(CSRC.glob("*.h"))
X86 = {"avx2": "-march=x86-64-v3", "avx512": "-march=sapphirerapids", "amx": "-march=sapphirerapids"}
ARM_COMPILER = "aarch64-linux-gnu-g++"


def compiler_for(header: Path) -> list[str]:
    """The compiler and flags of the instruction set that a header is named after, else of any; skips without one."""
    on_arm = platform.machine() in {"aarch64", "arm64"}
    words = set(header.stem.split("_"))
    if words & X86.keys() and on_arm:
        pytest.skip("needs an x86 compiler")
    if "neon" in words and not on_arm:
        if shutil.which(ARM_COMPILER) is None:
            pytest.skip(f"needs {ARM_COMPILER}")
        return [ARM_COMPILER]
    native = next(filter(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++")), None)
    assert native is not None, "the native library was built here, but no C++ compiler is to be found"
    return [native, *(X86[word] for word in sorted(words & X86.keys()))]


@pytest.mark.soak  # some forty runs of the compiler
@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.stem)
def test_a_header_compiles_by_itself(header: Path) -> None:
    command = [*compiler_for(header), "-std=c++17", "-Wall", "-Wextra", "-fsyntax-only", "-x", "c++"]
    done = subprocess.run([*command, "-include", str(header), os.devnull], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning:" not in done.stderr, done.stderr


def test_what_is_included_is_a_header() -> None:
    included = {
        line.split('"')[1] for path in CSRC.iterdir() for line in path.read_text().splitlines() if '#include "' in line
    }
    assert included <= {header.name for header in HEADERS}
