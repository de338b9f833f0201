"""Every fact that the built-in model tells of maitred is true of this tree."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from maitred.api.dialects.openai.schemas import ChatCompletionRequest
from maitred.api.routes import make_routes
from maitred.cli.main import COMMANDS, load
from maitred.cli.route import LAUNCHERS
from maitred.model.families import FAMILIES
from maitred.policy.policies import POLICIES
from training.facts import CONCEPTS, DIRECT, FACTS, Fact

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PATHS = {route.path for route in make_routes().routes}
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FIELDS = {field.encode_name for field in msgspec.structs.fields(ChatCompletionRequest)}


def has_field(name: str) -> bool:
    owner, _, field = name.rpartition(".")
    module, _, cls = owner.rpartition(".")
    return field in getattr(import_module(module), cls).__dataclass_fields__


def has_flag(name: str) -> bool:
    path, _, flag = name.rpartition(" ")
    return any(known.name == flag for known in load(path).flags())


def imports(name: str) -> bool:
    importer, _, imported = name.partition(" ")
    spec = find_spec(importer)
    return spec is not None and f"from {imported} import" in Path(str(spec.origin)).read_text()


def is_optional(package: str) -> bool:
    return package in PROJECT["optional-dependencies"] and not any(
        needed.startswith(package) for needed in PROJECT["dependencies"]
    )


KINDS: dict[str, Callable[[str], bool]] = {
    "command": COMMANDS.__contains__,
    "flag": has_flag,
    "route": PATHS.__contains__,
    "asks": FIELDS.__contains__,  # of a chat request
    "policy": POLICIES.__contains__,
    "family": FAMILIES.__contains__,
    "launcher": LAUNCHERS.__contains__,
    "make": TARGETS.__contains__,
    "optional": is_optional,
    "module": lambda name: find_spec(name) is not None,
    "imports": imports,
    "field": has_field,
    "file": lambda name: (ROOT / name).exists(),
}


def references() -> list[str]:
    return sorted({reference for fact in FACTS for reference in fact.shown_by})


@pytest.mark.parametrize("reference", references())
def test_what_a_fact_names_is_in_the_tree(reference: str):
    kind, _, name = reference.partition(":")
    assert KINDS[kind](name), f"{reference}: correct the fact in training/facts.py"


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.questions[0])
def test_commands_flags_and_routes_in_an_answer_exist(fact: Fact):
    """Whatever is named in passing, without a reference."""
    if target := re.match(r"Run make (\w+)", fact.answer):
        assert target[1] in TARGETS
    if words := re.match(r"Run maitred (\w+)( \w+)?", fact.answer):
        assert words[1] in COMMANDS or f"{words[1]}{words[2]}" in COMMANDS
    for flag in re.findall(r"--[a-z-]+", fact.answer):
        assert any(has_flag(f"{path} {flag}") for path in COMMANDS)
    for path in re.findall(r" (/[a-z0-9/_]+)", fact.answer):
        assert path in PATHS


def test_whatever_is_said_of_maitred_has_a_reference():
    bare = [fact.answer for fact in DIRECT if not fact.shown_by]
    bare += [fact.answer for fact in CONCEPTS if "maitred" in fact.answer and not fact.shown_by]
    assert not bare


def test_lists_name_all_policies_and_families_that_are_there():
    policies, families = (
        next(fact for fact in FACTS if sum(ref.startswith(kind) for ref in fact.shown_by) > 5)
        for kind in ("policy:", "family:")
    )
    assert {ref.partition(":")[2] for ref in policies.shown_by} == set(POLICIES)
    assert all(re.search(rf"\b{name}\b", policies.answer) for name in POLICIES)
    told = {ref.partition(":")[2] for ref in families.shown_by}
    assert told <= set(FAMILIES)  # families may come between two trainings of the built-in model, and none may go
    for family in told:
        word = re.match(r"[A-Z][a-z]+", family.replace("SmolLM", "Smol").replace("ForCausalLM", ""))
        assert word is not None
        assert word[0].lower() in families.answer.lower()
