"""Fetches into WORK what tests of `make soak` and benchmarks read and is not ours to carry, and prints where it is.

    python benchmarks/fetch_inputs.py templates|vocabularies|clients|planners WORK

`templates` and `vocabularies` lie in llama.cpp's sources: chat templates, and vocabularies with recorded texts and
their token ids. `clients` is the interpreter of an environment of client libraries that speak OpenAI's dialect and want
versions of `openai` and `pydantic` of their own. `planners` are others' simulators and their measurements, with an
environment in which they run (plan_check.py). Where something cannot be fetched, this says why and prints nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

LLAMACPP = "llama-cpp-python==0.3.36"
CLIENTS = [
    "openai-agents==0.24.0",
    "instructor==1.17.0",
    "langchain-anthropic==1.7.7",
    "langchain-ollama==1.1.0",
    "langchain-openai==1.7.3",
    "pydantic-ai-slim[openai]==2.38.0",
]
PLANNERS = ["aiconfigurator==0.12.0", "simpy==4.1.1"]
REPOSITORIES = {
    "LLMServe/DistServe": "82831f1604cc6b10bebd360f6c437a07790dde9f",
    "Mutinifni/splitwise-sim": "8f99e7dc9b407f4ce2488d03dd44c0b8b946dab0",
}


def pip(home: Path, *words: str) -> None:
    command = [str(home / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, stdout=sys.stderr)


def llamacpp_models(home: Path) -> Path:
    """Out of the sources in its Python package."""
    source = home / "source"
    if not source.exists():
        pip(home, "install", "scikit-build-core")
        pip(home, *f"download --no-deps --no-binary :all: --no-build-isolation --dest {home}".split(), LLAMACPP)
        (archive,) = home.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(home, filter="data")
        source.symlink_to(archive.name.removesuffix(".tar.gz"))
    return (source / "vendor/llama.cpp/models").resolve()


def checked_out(home: Path, name: str, commit: str) -> None:
    folder = home / name.rpartition("/")[2]
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", f"https://github.com/{name}", str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", commit], check=True)


def main() -> None:
    kind, home = sys.argv[1], Path(sys.argv[2])
    try:
        if not (home / "bin/python").exists():
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        if kind == "clients":
            pip(home, "install", *CLIENTS)
            print((home / "bin/python").absolute())
        elif kind == "planners":
            pip(home, "install", *PLANNERS)
            for name, commit in REPOSITORIES.items():
                checked_out(home, name, commit)
            print(home.absolute())
        else:
            models = llamacpp_models(home)
            print(models / "templates" if kind == "templates" else models)
    except (subprocess.CalledProcessError, OSError) as error:
        raise SystemExit(f"{kind} cannot be fetched: {error}") from None


if __name__ == "__main__":
    main()
