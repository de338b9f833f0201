"""The native library's checks, built for 64-bit Arm and run under an emulator, where both tools are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_checks_of_arm_kernels_fit_the_library() -> None:
    """They are built nowhere else but in the test below, which takes minutes."""
    for check in sorted((ROOT / "tests" / "kernels").glob("*_check.cpp")):
        words = ["g++", "-std=c++17", "-fsyntax-only", "-I", str(ROOT / "src/maitred/kernels/csrc"), str(check)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None
    or (shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")) is None,
    reason="needs g++-aarch64-linux-gnu and qemu-user",
)
def test_arm_kernels_agree_with_the_plain_ones() -> None:
    done = subprocess.run([str(ROOT / "scripts" / "test-neon")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "linear: neon checked" in done.stdout
    assert "low rank: neon checked" in done.stdout
    assert "attention: neon checked" in done.stdout
    assert "recurrent: neon checked" in done.stdout
