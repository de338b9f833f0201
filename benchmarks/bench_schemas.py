"""Which JSON schemas are accepted, and whether what they bind to is what jsonschema says: MaskBench's data.

    python benchmarks/bench_schemas.py FOLDER [--count 600] [--seed 0] [--show 10]

FOLDER is `maskbench/data` of github.com/guidance-ai/jsonschemabench: a file a schema, with valid and invalid instances.
Schemas drawn by the seed go the way of a request: read, compiled by the checker under its limits, composed into the
grammar of an answer, matched over bytes. An instance is written as json.dumps does, with keys in the schema's order, as
the grammar binds an answer; jsonschema with its format checker judges which are valid. Instances on which jsonschema
and the data disagree are counted apart; so are schemas of which keywords were left out, which a request is told.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import llguidance

from maitred.core.errors import InvalidRequest
from maitred.engine.grammar_check import GrammarChecker
from maitred.text.answer_format import AnswerFormat
from maitred.text.schema import json_source
from maitred.text.shape import compose

_FORMAT = AnswerFormat("none")
_CHOICES = ("anyOf", "oneOf")


class Instance(NamedTuple):
    text: str
    is_valid: bool | None  # None where jsonschema and the data disagree


@dataclass(slots=True)
class Found:
    """Counts and examples over all schemas."""

    counts: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    compile_s: list[float] = field(default_factory=list)


# ---- instances


def instances_of(case: Mapping[str, Any]) -> Iterator[Instance]:
    """Written as the grammar binds an answer, and judged."""
    schema = case["schema"]
    validator_of = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = validator_of(schema, format_checker=validator_of.FORMAT_CHECKER)
    for test in case.get("tests", ()):
        text = json.dumps(in_order(test["data"], [schema], validator), ensure_ascii=False)
        yield Instance(text, _judged(validator, test["data"], bool(test["valid"])))


def _judged(validator: Any, value: Any, told: bool) -> bool | None:
    try:
        return told if validator.is_valid(value) is told else None
    except Exception:  # references to elsewhere, patterns of other languages: whatever jsonschema trips over
        return told


def in_order(value: Any, schemas: Sequence[Any], validator: Any) -> Any:
    """The same value, the keys of its objects in the order in which their schemas name them, others after those."""
    if not isinstance(value, dict | list):
        return value
    known = list(_flat(value, schemas, validator))
    if isinstance(value, list):
        return [in_order(item, list(_items(known, place)), validator) for place, item in enumerate(value)]
    named = dict.fromkeys(key for schema in known for key in schema.get("properties", ()))
    named |= dict.fromkeys(key for schema in known for key in _listed(schema.get("required")))
    keys = [key for key in named if key in value] + [key for key in value if key not in named]
    return {key: in_order(value[key], list(_members(known, key)), validator) for key in keys}


def _flat(value: Any, schemas: Sequence[Any], validator: Any, seen: frozenset[int] = frozenset()) -> Iterator[Any]:
    """The schemas, and those that they name for the same value: as keywords stand there, choices after what is sure."""
    for schema in schemas:
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        names = schema if "properties" in schema else ("properties", *schema)
        for name in sorted(names, key=lambda name: len(_listed(schema.get(name))) > 1 and name in _CHOICES):
            if name == "properties":
                yield schema
            else:
                yield from _flat(value, _named(value, schema, name, validator), validator, seen | {id(schema)})


def _named(value: Any, schema: Mapping[str, Any], name: str, validator: Any) -> list[Any]:
    """What this keyword names for the same value; of alternatives those that it fits."""
    said = schema.get(name)
    if name == "$ref" and isinstance(said, str):
        return [_referred(said, validator.schema)]
    if name in _CHOICES:
        return [part for part in _listed(said) if _judged(validator.evolve(schema=part), value, True)] or _listed(said)
    if name in ("then", "else"):
        return [said]
    return _listed(said) if name == "allOf" else []


def _referred(reference: str, root: Any) -> Any:
    """What a JSON pointer into the document points at; nothing where it points elsewhere."""
    if not reference.startswith("#"):
        return None
    found = root
    for written in filter(None, reference[1:].split("/")):
        step = written.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        else:
            found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _items(schemas: Sequence[Mapping[str, Any]], place: int) -> Iterator[Any]:
    for schema in schemas:
        first = schema.get("prefixItems", schema.get("items"))
        if isinstance(first, list):
            yield first[place] if place < len(first) else schema.get("additionalItems", schema.get("items"))
        else:
            yield first


def _members(schemas: Sequence[Mapping[str, Any]], key: str) -> Iterator[Any]:
    for schema in schemas:
        if key in schema.get("properties", ()):
            yield schema["properties"][key]
        else:
            yield schema.get("additionalProperties")
        for pattern, member in schema.get("patternProperties", {}).items():
            if _matches(pattern, key):
                yield member


def _matches(pattern: str, key: str) -> bool:
    try:
        return re.search(pattern, key) is not None
    except re.error:
        return False


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# ---- matching


class Way:
    """The way of a request: checker, composition, matcher."""

    def __init__(self) -> None:
        self.checker = GrammarChecker()
        self.tokenizer = llguidance.LLTokenizer("byte")

    def compiled(self, schema: Any) -> tuple[llguidance.LLMatcher, tuple[str, ...]]:
        """The matcher of an answer, and what was left out. Raises InvalidRequest."""
        source = json_source(schema, "schema")
        checked = self.checker.checked(source)
        matcher = llguidance.LLMatcher(self.tokenizer, compose(_FORMAT, content=source), log_level=0)
        if matcher.is_error():
            raise InvalidRequest(f"the matcher: {matcher.get_error()}")
        return matcher, checked.ignored

    def accepts(self, matcher: llguidance.LLMatcher, text: str) -> bool:
        """Whether an answer may be this text and end there."""
        matcher.reset()
        tokens = self.tokenizer.tokenize_bytes(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def judge(path: Way, name: str, case: Mapping[str, Any], found: Found) -> None:
    """Of one schema and its instances."""
    found.counts["schemas"] += 1
    began = time.perf_counter()
    try:
        matcher, ignored = path.compiled(case["schema"])
    except InvalidRequest as error:
        found.counts["refused"] += 1
        found.wrong.append(f"{name}: refused: {str(error)[:200]}")
        return
    finally:
        found.compile_s.append(time.perf_counter() - began)
    found.ignored.update(ignored)
    found.counts["whole"] += not ignored
    for instance in instances_of(case):
        _count(found, name, instance, path.accepts(matcher, instance.text), apart="apart " if ignored else "")


def _count(found: Found, name: str, instance: Instance, is_accepted: bool, *, apart: str) -> None:
    if instance.is_valid is None:
        found.counts["undecided"] += 1
        return
    kind = "valid" if instance.is_valid else "invalid"
    found.counts[f"{apart}{kind}"] += 1
    if is_accepted is not instance.is_valid:
        found.counts[f"{apart}{kind} wrong"] += 1
        if not apart:
            verb = "accepted" if is_accepted else "refused"
            found.wrong.append(f"{name}: {kind}, {verb}: {instance.text[:300]}")


def tell(found: Found, show: int) -> None:
    counts = found.counts
    accepted = counts["schemas"] - counts["refused"]
    print(f"{counts['schemas']} schemas: {accepted} accepted ({_share(accepted, counts['schemas'])}),", end=" ")
    print(f"{counts['whole']} with nothing left out ({_share(counts['whole'], counts['schemas'])})")
    for apart, told in (("", "nothing left out"), ("apart ", "keywords left out and told")):
        valid, refused = counts[f"{apart}valid"], counts[f"{apart}valid wrong"]
        invalid, taken = counts[f"{apart}invalid"], counts[f"{apart}invalid wrong"]
        print(f"{told}: {refused} of {valid} valid instances refused ({_share(refused, valid)}),", end=" ")
        print(f"{taken} of {invalid} invalid accepted ({_share(taken, invalid)})")
    print(f"{counts['undecided']} instances that jsonschema and the data judge differently")
    times = sorted(found.compile_s)
    places = {"p50": times[len(times) // 2], "p99": times[int(len(times) * 0.99)], "most": times[-1]}
    print("check and compile:", ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in places.items()))
    print("left out:", dict(found.ignored.most_common(show)))
    print(*found.wrong[:show], sep="\n")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="maskbench/data of github.com/guidance-ai/jsonschemabench")
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=10, help="examples of each kind")
    chosen = parser.parse_args()
    files = sorted(chosen.folder.glob("*.json")) if chosen.folder else []
    if not files:
        print("no schemas: FOLDER is maskbench/data of github.com/guidance-ai/jsonschemabench")
        return
    path, found = Way(), Found()
    for file in random.Random(chosen.seed).sample(files, min(chosen.count, len(files))):
        judge(path, file.stem, json.loads(file.read_text()), found)
    path.checker.close()
    tell(found, chosen.show)


if __name__ == "__main__":
    main()
