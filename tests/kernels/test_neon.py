"""The native library's checks, built for 64-bit Arm and run under an emulator, where both tools are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
