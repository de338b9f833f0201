"""Strict validation of custom resources by the schemas in a folder of CRDs, as an API server does it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

VARIABLE = "MAITRED_CRDS"


def check(manifest: dict[str, Any]) -> None:
    """Raises jsonschema's ValidationError; skips, by name, without the folder or the kind's schema in it."""
    jsonschema = pytest.importorskip("jsonschema")
    kind = f"{manifest['apiVersion']} {manifest['kind']}"
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} names no folder with the schema of {kind}")
    schema = _schemas(Path(os.environ[VARIABLE]), manifest["kind"]).get(kind)
    if schema is None:
        pytest.skip(f"{os.environ[VARIABLE]} has no schema of {kind}")
    jsonschema.Draft202012Validator(_strict(schema)).validate(manifest)


@cache
def _schemas(folder: Path, kind: str) -> dict[str, Any]:
    """By `group/version Kind`; of the files that name the kind, for some are a megabyte."""
    found = {}
    for path in sorted(folder.glob("*.y*ml")):
        text = path.read_text()
        for crd in yaml.load_all(text, yaml.CSafeLoader) if f"kind: {kind}\n" in text else ():
            if isinstance(crd, dict) and crd.get("kind") == "CustomResourceDefinition":
                spec = crd["spec"]
                for version in spec["versions"]:
                    name = f"{spec['group']}/{version['name']} {spec['names']['kind']}"
                    found[name] = version["schema"]["openAPIV3Schema"]
    return found


def _strict(schema: Any, *, is_root: bool = True) -> Any:
    """What is not named is refused, but for metadata, which Kubernetes knows without the CRD."""
    if isinstance(schema, list):
        return [_strict(each, is_root=False) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value, is_root=False) for key, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("additionalProperties")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_ended:
        strict["additionalProperties"] = False
    if is_root:
        strict["properties"]["metadata"] = {"type": "object"}
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
    return strict
