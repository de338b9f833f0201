"""maitred: an LLM serving system. `from maitred import LLM, SamplingParams`."""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and "maitred" in sys.orig_argv:
    del sys.path[0]  # `python -m maitred` in a model's folder: what lies there is not to be imported, as with -P

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maitred.core.request import SamplingParams as SamplingParams
    from maitred.core.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from maitred.engine.llm import LLM as LLM
    from maitred.engine.output import CompletionOutput as CompletionOutput
    from maitred.engine.output import Logprob as Logprob
    from maitred.engine.output import RequestOutput as RequestOutput

__version__ = "0.1.0"

# Names load on first use: `import maitred` costs nothing and never imports torch.
_HOME = {
    "LLM": "maitred.engine.llm",
    "CompletionOutput": "maitred.engine.output",
    "Logprob": "maitred.engine.output",
    "RequestOutput": "maitred.engine.output",
    "SamplingParams": "maitred.core.request",
    "StructuredOutputsParams": "maitred.core.structured_outputs",
}
__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'maitred' has no attribute {name!r}")
