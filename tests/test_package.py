"""What an import costs and does not pull in."""

from __future__ import annotations

import subprocess
import sys

import pytest


def modules_after(statement: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter after `statement`."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import maitred", "from maitred import SamplingParams"])
def test_importing_maitred_imports_neither_torch_nor_numpy(statement: str):
    assert not {"torch", "numpy", "transformers", "starlette"} & modules_after(statement)


def test_the_offline_class_can_be_imported_without_torch():
    assert not {"torch", "transformers", "starlette"} & modules_after("from maitred import LLM")


@pytest.mark.parametrize(
    "module", ["maitred.scheduler.scheduler", "maitred.engine.core", "maitred.scheduler.decision_log"]
)
def test_deciding_code_needs_no_tensors(module: str):
    assert not {"torch", "numpy", "starlette", "asyncio"} & modules_after(f"import {module}")


def test_an_unknown_name_is_an_attribute_error():
    import maitred

    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = maitred.Engine
