"""Modules that need each other are found, however they are imported, and so is what a request passes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.structure import (
    CEILINGS,
    IDLE,
    KNOWN,
    REQUESTS,
    SOURCES,
    circles,
    complaints,
    lone_protocols,
    over,
    passed_by_all,
    static_figures,
    with_figures,
)


def test_no_modules_import_each_other_but_those_that_are_known():
    assert list(complaints(circles("maitred"), KNOWN)) == []


def test_no_figure_is_over_its_ceiling():
    assert list(over(static_figures())) == []


def test_a_figure_over_its_ceiling_is_told_with_both_numbers():
    most = CEILINGS["files"]
    assert list(over({"files": most})) == []
    (told,) = over({"files": most + 1})
    assert told.startswith(f"files: {most + 1}, and the ceiling is {most}; ")


def test_a_protocol_of_one_class_is_found_and_one_of_two_or_of_heirs_is_none():
    source = """
class Alone(Protocol):
    def go(self): ...
class Pair(Protocol):
    here: int
    name: str
    async def stay(self): ...
class First(Base):
    def go(self): ...
class Base:
    name = "base"
    async def stay(self): self.here = 1
"""
    assert lone_protocols(ast.parse(source).body) == ["Alone"]


@pytest.mark.parametrize(
    "imports_it",
    [
        "from roundabout import third",
        "def later():\n    import roundabout.third",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from roundabout.third import name",
    ],
    ids=["plain", "inside a function", "for types alone"],
)
def test_a_circle_is_found_however_the_import_is_written(
    imports_it: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "roundabout"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "first": "from roundabout.second import name",
        "second": imports_it,
        "third": "import roundabout.first\nimport roundabout.leaf",
        "leaf": "",
    }.items():
        (package / f"{name}.py").write_text(text + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert circles("roundabout") == {frozenset({"first", "second", "third"})}


def test_a_new_circle_is_told_and_so_is_a_known_one_that_is_gone():
    new, old, kept = frozenset({"b", "a"}), frozenset({"c", "d"}), frozenset({"e", "f"})
    told = list(complaints({new, kept}, {old, kept}))
    assert told == [
        "these modules import each other: a, b; move what both need into a third one below them",
        "no longer a circle: c, d; take it from KNOWN in structure.py",
    ]


def test_a_request_passes_the_files_of_the_calls_that_each_made_and_an_idle_server_makes_not():
    clock, gate, once, beat = (f"{SOURCES}/{name}.py:1" for name in ("clock", "gate", "once", "beat"))
    foreign = "/usr/lib/json.py:1"
    made = {
        IDLE: [(beat, clock)],
        **{request: [(beat, clock), (foreign, gate), (gate, clock)] for request in REQUESTS},
    }
    made[REQUESTS[0]].append((gate, once))
    calls = [f"{phase}\t{caller}\t{callee}" for phase, of_phase in made.items() for caller, callee in of_phase]
    assert passed_by_all(calls) == {"gate.py", "clock.py"}


def test_figures_are_written_between_their_comments_and_nowhere_else():
    page = "before\n<!-- figures: of a script -->\nold\nolder\n<!-- end -->\nafter\n"
    written = with_figures(page, "new")
    assert written == "before\n<!-- figures: of a script -->\nnew\n<!-- end -->\nafter\n"
    assert with_figures(written, "new") == written
