"""The native library, as the type checker sees it: its callers state the types."""

from typing import Any

def __getattr__(name: str) -> Any: ...
