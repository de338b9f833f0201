"""What an install asks for, and what an import does not pull in."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parent.parent


def asked_for(distribution: PathDistribution, extra: str = "") -> list[Requirement]:
    """What installing it with this extra asks for here."""
    requirements = (Requirement(line) for line in distribution.requires or ())
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})]


def closure(name: str) -> set[str]:
    """Every distribution that an install of `name`, without extras, brings along."""
    found: set[str] = set()
    waiting = [Requirement(name)]
    while waiting:
        requirement = waiting.pop()
        if canonicalize_name(requirement.name) in found:
            continue
        found.add(canonicalize_name(requirement.name))
        for extra in ("", *requirement.extras):
            waiting += asked_for(distribution(requirement.name), extra)
    return found


def test_the_wheel_asks_for_neither_torch_nor_transformers(tmp_path: Path):
    pytest.importorskip("scikit_build_core", reason="the build's tools are not installed here (make dev has them)")
    code = f"from scikit_build_core.build import *; print(prepare_metadata_for_build_wheel({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    (folder,) = tmp_path.glob("*.dist-info")
    names = {canonicalize_name(requirement.name) for requirement in asked_for(PathDistribution(folder))}
    assert "numpy" in names
    assert not {"torch", "transformers"} & names


def test_what_the_core_depends_on_brings_neither_torch_nor_transformers():
    names = closure("maitred")
    assert {"numpy", "tokenizers"} <= names
    assert not {"torch", "transformers"} & names


def modules_after(statement: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter after `statement`."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import maitred", "from maitred import SamplingParams"])
def test_importing_maitred_imports_neither_torch_nor_numpy(statement: str):
    assert not {"torch", "numpy", "transformers", "starlette", "google", "onnxruntime"} & modules_after(statement)


def test_the_offline_class_can_be_imported_without_torch():
    assert not {"torch", "transformers", "starlette"} & modules_after("from maitred import LLM")


@pytest.mark.parametrize(
    "module", ["maitred.scheduler.scheduler", "maitred.scheduler.engine_core", "maitred.decisions.log"]
)
def test_deciding_code_needs_no_tensors(module: str):
    assert not {"torch", "numpy", "starlette", "asyncio"} & modules_after(f"import {module}")


def test_an_unknown_name_is_an_attribute_error():
    import maitred

    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = maitred.Engine


def test_the_names_of_the_package_are_listed_before_they_are_loaded():
    import maitred

    assert dir(maitred) == sorted(maitred.__all__)


def test_the_servers_process_loads_no_arrays():
    """Its engine is another process; numpy would cost a tenth of a second, and extras may not be installed."""
    loaded = modules_after("import maitred.cli.serve, maitred.engine.starting, maitred.api.serving")
    assert not {"torch", "numpy", "transformers", "google", "onnxruntime", "grpc"} & loaded


def test_a_request_served_by_the_native_executor_leaves_torch_out():
    code = """
from maitred import LLM, SamplingParams
with LLM(executor="native") as llm:
    (output,) = llm.generate(["Hello"], SamplingParams(temperature=0.7, seed=1, max_tokens=4, logprobs=2))
    assert len(output.outputs[0].token_ids) == 4
"""
    loaded = modules_after(code)
    assert "numpy" in loaded
    assert not {"torch", "transformers"} & loaded
