"""Makes an environment of client libraries that speak OpenAI's dialect, and prints its interpreter.

    python benchmarks/other_clients.py WORK

tests/api/test_other_clients.py runs them. They want versions of `openai` and `pydantic` of their own, so they stay out
of ours. Where they cannot be installed, this says why and prints nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CLIENTS = (
    "openai-agents==0.24.0",
    "instructor==1.17.0",
    "langchain-openai==1.7.3",
    "pydantic-ai-slim[openai]==2.38.0",
)


def main() -> None:
    home = Path(sys.argv[1])
    python, installed = home / "bin/python", home / ".installed"
    wanted = "\n".join(CLIENTS)
    try:
        if not installed.exists() or installed.read_text() != wanted:
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, *CLIENTS], check=True, stdout=sys.stderr)
            installed.write_text(wanted)
    except (subprocess.CalledProcessError, OSError) as error:
        raise SystemExit(f"the other clients cannot be installed: {error}") from None
    print(python.absolute())


if __name__ == "__main__":
    main()
