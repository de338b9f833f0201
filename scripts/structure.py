#!/usr/bin/env python3
"""Circles of imports, and what the code under src/ measures: files, lines, and files that one chat request passes.

    scripts/structure.py           prints figures; fails when one is over its ceiling, when a circle is not known, or
                                   a known one is gone
    scripts/structure.py --files   also names the files that a request passes
    scripts/structure.py --write   also writes the figures to docs/architecture.md

An import inside a function or under TYPE_CHECKING counts: two modules that need each other are one module in two files.
"""

from __future__ import annotations

import ast
import gc
import http.client
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grimp

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "maitred"
PAGE = ROOT / "docs" / "architecture.md"
FIGURES = re.compile(r"(<!-- figures: .*? -->\n).*?(<!-- end -->)", re.DOTALL)

Circle = frozenset[str]

# These are to go; none may come. A circle is known by its modules, without the leading `maitred.`
KNOWN: frozenset[Circle] = frozenset()

ON_A_CHATS_WAY = "files that one streamed chat request passes"
# They go down with the figures; one that is raised says why, on its line.
CEILINGS = {
    # 21 are the tools around the model and what they keep, 4 the planner, 4 the simulator's baselines, the replay of a
    # server's own traffic with its recording, and the demonstration; 30 are three dialects, vectors of models, files
    # and batches, background work, several models and similar prompts
    "files": 432,
    # 6,200 are those tools, for which 3,500 were meant: documents in three forms with what is learnt of each, paired
    # intervals, states that outlive any end, and refusals with their numbers took as many lines as the methods.
    # 4,700 are layers of unlike kinds, for which 2,200 were meant: rows for nine families, pages of windows (480 lines,
    # a class beside the one of whole blocks, which stays as quick as it was) and a reader for each form of the hub's
    # quantised folders took those; latent attention (290), recurrent layers with their snapshots (850), Gemma 4 (330),
    # MTP layers (115), transformers' own module (360), GGUF's new families (270) and windows in tiers, hand-over and
    # swap (230) came after. 2,600 are plans, for which 1,800 were meant: the search (1,400), fleets by slices (70),
    # steps taken many at a time and held requests that go to their prefix (340), baselines and claims (275), the replay
    # of own traffic (210), the demonstration (330). 8,100 are the clients people have, for which 4,000 were meant:
    # Anthropic's dialect (850), Responses (1,560: what is kept, followed and cancelled took 580, custom tools' grammars
    # 130), Ollama's (850), files and batches with their store (1,500), vectors and scores (1,500: encoders, rerankers,
    # folders and GGUF), several models (1,100), background work (440), similar prompts (300).
    "lines": 108_650,
    ON_A_CHATS_WAY: 74,  # the recording that the page replays, and two modules that name what it keeps
    "modules under 100 lines with one importer": 3,
    "names of classes that stand twice": 20,
    "protocols with fewer than two implementations": 0,
    "functions over 80 lines": 0,
    "modules beside the packages": 0,
}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
SHORT, LONG = 100, 80  # lines of a module and of a function

IDLE, REQUESTS = 1, (2, 3, 4)  # phases: nobody asks anything; the same request is answered
IDLE_S = 2.0  # longer than the pauses between what a server does by itself
SETTLE_S = 0.3  # after an answer, for what is written then
START_S = 120
MESSAGE = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, "temperature": 0}


class Call(NamedTuple):
    """A function called another one; each is `file:line`, and "-" is none."""

    caller: str
    callee: str


def main() -> int:
    passed = files_passed()
    measured = {**static_figures(), ON_A_CHATS_WAY: len(passed)}
    found = circles("maitred")
    print(figures := "\n".join(figure_lines(measured, found)))
    if "--files" in sys.argv[1:]:
        print(*sorted(passed), sep="\n")
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_figures(PAGE.read_text(), figures))
    problems = [*complaints(found, KNOWN), *over(measured)]
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def circles(package: str) -> set[Circle]:
    """The sets of a package's modules that import each other, directly or through others."""
    graph = grimp.build_graph(package, cache_dir=None)
    found = {
        frozenset(graph.find_upstream_modules(module) & graph.find_downstream_modules(module) | {module})
        for module in graph.modules
    }
    return {frozenset(name.removeprefix(f"{package}.") for name in circle) for circle in found if len(circle) > 1}


def complaints(found: set[Circle], known: Iterable[Circle]) -> Iterator[str]:
    """What the check fails with."""
    for circle in sorted(map(sorted, found.difference(known))):
        yield f"these modules import each other: {', '.join(circle)}; move what both need into a third one below them"
    for circle in sorted(map(sorted, set(known) - found)):
        yield f"no longer a circle: {', '.join(circle)}; take it from KNOWN in {Path(__file__).name}"


def over(measured: Mapping[str, int]) -> Iterator[str]:
    """What is over its ceiling."""
    for figure, number in measured.items():
        if number > CEILINGS[figure]:
            yield (
                f"{figure}: {number:,}, and the ceiling is {CEILINGS[figure]:,}; take something out, or raise it in "
                f"{Path(__file__).name} with the reason beside it"
            )


def figure_lines(measured: Mapping[str, int], found: set[Circle]) -> Iterator[str]:
    yield "| of Python under `src/` | | at most |"
    yield "|---|--:|--:|"
    for figure, most in CEILINGS.items():
        yield f"| {figure} | {measured[figure]:,} | {most:,} |"
    yield f"| circles of imports | {len(found)} | {len(KNOWN)} |"


def static_figures() -> dict[str, int]:
    """All of CEILINGS but what only a running server shows."""
    texts = {file: file.read_text() for file in sorted(SOURCES.rglob("*.py"))}
    gc.disable()  # which would look again and again through trees that stay
    trees = {file: ast.parse(text) for file, text in texts.items()}
    gc.enable()
    lines = {file: len(text.splitlines()) for file, text in texts.items()}
    tops = [node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    names = Counter(node.name for node in tops if not node.name.startswith("_"))
    functions = [node for tree in trees.values() for node in functions_in(tree)]
    return {
        "files": len(texts),
        "lines": sum(lines.values()),
        "modules under 100 lines with one importer": len(lonely({f: t for f, t in trees.items() if lines[f] < SHORT})),
        "names of classes that stand twice": sum(count > 1 for count in names.values()),
        "protocols with fewer than two implementations": len(lone_protocols(tops)),
        "functions over 80 lines": sum(1 + (node.end_lineno or 0) - node.lineno > LONG for node in functions),
        "modules beside the packages": sum(f.parent == SOURCES and not f.name.startswith("__") for f in texts),
    }


def functions_in(block: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Wherever a statement may stand; expressions have none, and looking into them takes ten times as long."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(block, field, ())
        for node in inner if isinstance(inner, list) else ():
            if isinstance(node, FUNCTIONS):
                yield node
            yield from functions_in(node)


def lonely(files: Iterable[Path]) -> list[str]:
    """The modules of these files that one other module imports."""
    graph = grimp.build_graph("maitred", cache_dir=None)
    inner = [file.relative_to(SOURCES.parent).with_suffix("") for file in files if not file.name.startswith("__")]
    modules = [".".join(path.parts) for path in inner]
    return [module for module in modules if len(graph.find_modules_that_directly_import(module)) == 1]


def lone_protocols(classes: Iterable[ast.ClassDef]) -> list[str]:
    """Protocols whose methods and fields fewer than two other classes have, all of them, by name or by inheritance."""
    has: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    protocols: dict[str, set[str]] = {}
    for node in classes:
        members = {item.name for item in node.body if isinstance(item, FUNCTIONS)}
        members |= {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        constants = (target for item in node.body if isinstance(item, ast.Assign) for target in item.targets)
        members |= {target.id for target in constants if isinstance(target, ast.Name)}
        members |= {
            attribute.attr
            for attribute in ast.walk(node)
            if isinstance(attribute, ast.Attribute) and isinstance(attribute.ctx, ast.Store)
        }
        bases[node.name] = [ast.unparse(base).partition("[")[0] for base in node.bases]
        (protocols if "Protocol" in bases[node.name] else has).setdefault(node.name, set()).update(members)

    def all_of(name: str) -> set[str]:
        return has.get(name, set()).union(*(all_of(base) for base in bases.get(name, ()) if base != name))

    whole = {name: all_of(name) for name in has}
    return [name for name, wanted in protocols.items() if sum(wanted <= members for members in whole.values()) < 2]


def with_figures(page: str, figures: str) -> str:
    """The page with new figures between the two comments that hold them."""
    written, count = FIGURES.subn(lambda found: f"{found[1]}{figures}\n{found[2]}", page)
    assert count == 1, f"{PAGE} has {count} places for figures"
    return written


def files_passed() -> set[str]:
    """Paths below src/maitred whose functions run for one streamed chat request, in the server or in its engine."""
    with tempfile.TemporaryDirectory() as folder:
        log, phase = Path(folder, "calls"), Path(folder, "phase")
        log.touch()
        phase.write_bytes(b"\0")
        with phase.open("r+b") as file, mmap.mmap(file.fileno(), 1) as now, serving(log, phase) as port:
            chat(port)  # what happens once, happens here
            time.sleep(SETTLE_S)
            now[0] = IDLE
            time.sleep(IDLE_S)
            for request in REQUESTS:
                now[0] = request
                chat(port)
                time.sleep(SETTLE_S)
            now[0] = 0
        return passed_by_all(log.read_text().splitlines())


def passed_by_all(calls: Iterable[str]) -> set[str]:
    """The files of the calls that every request made, and that an idle server does not make."""
    made: dict[int, set[Call]] = {phase: set() for phase in (IDLE, *REQUESTS)}
    for line in calls:
        phase, caller, callee = line.split("\t")
        made[int(phase)].add(Call(caller, callee))
    of_all = set.intersection(*(made[request] for request in REQUESTS)) - made[IDLE]
    functions = {function for call in of_all for function in call}
    return {
        function.rpartition(":")[0].removeprefix(f"{SOURCES}/")
        for function in functions
        if function.startswith(str(SOURCES))
    }


@contextmanager
def serving(log: Path, phase: Path) -> Iterator[int]:
    """`maitred serve` with the built-in model, whose calls are written to `log`; gives its port."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parent / 'tracer'}{os.pathsep}{SOURCES.parent}",
        "PYTHONUNBUFFERED": "1",
        "CALLS_FROM": str(SOURCES),
        "CALLS_TO": str(log),
        "CALLS_PHASE": str(phase),
    }
    command = [sys.executable, "-P", "-m", "maitred", "serve", "maitred-mini", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert server.stdout is not None
    try:
        said = ""
        for line in server.stdout:
            said += line
            if found := re.search(r"http://[\w.]+:(\d+)", line):
                yield int(found[1])
                return
        raise RuntimeError(f"the server did not start:\n{said}")
    finally:
        server.terminate()
        server.wait(START_S)
        server.stdout.close()


def chat(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    body = json.dumps({**MESSAGE, "stream": True})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse().read().decode()
    connection.close()
    assert answer.endswith("data: [DONE]\n\n"), answer


if __name__ == "__main__":
    raise SystemExit(main())
