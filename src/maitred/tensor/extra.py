"""The extra `tensor`: what to say where one of its packages is not installed."""

from __future__ import annotations

from maitred.core.errors import ConfigError


def missing(package: str) -> ConfigError:
    """Return the error to be raised in place of the ImportError of `package`."""
    return ConfigError(f"tensor models need the package {package}; install it with: pip install 'maitred[tensor]'")
