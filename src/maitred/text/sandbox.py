"""Runs an untrusted Jinja template in Jinja's ImmutableSandboxedEnvironment, with a deadline and a bound of size.

Jinja keeps templates from Python's internals and caps `range` (MAX_RANGE, 100,000). Beyond that, a template may not

- run longer than `time_limit_s`: every turn of a loop, call, filter and operator that is watched counts, and every 16th
  looks at the clock. This needs no signal and no second thread, so it works in any thread; a single step of Python's is
  never interrupted;
- make a text, list or number larger than `max_chars`, in its answer or on the way to it. Only `*` and `**` are refused
  before they are done; one filter or method that is given a huge width makes its text first.
"""

from __future__ import annotations

import functools
import json
import threading
import types
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

_MAX_BITS = 4096
_TICKS_PER_LOOK = 16
_SIZED = (str, bytes, list, tuple, dict)


class LimitReached(Exception):
    """The template ran too long or made too much."""


class TemplateSandbox:
    """Compiles and renders templates within limits. One may be shared by threads, each render has its own budget."""

    def __init__(self, *, time_limit_s: float, max_chars: int, clock: Callable[[], float]) -> None:
        self._time_limit_s = time_limit_s
        self._max_chars = max_chars
        self._clock = clock
        self._environment = _Environment(max_chars, clock)

    def compile(self, source: str) -> jinja2.Template:
        self._environment.start(self._time_limit_s)
        template = self._environment.from_string(source)
        template.globals = dict(
            template.globals
        )  # each render copies them, which takes five times as long of a ChainMap
        return template

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Raises LimitReached, SecurityError, and whatever the template meets or raises."""
        self._environment.start(self._time_limit_s)
        pieces: list[str] = []
        size = 0
        for piece in template.generate(dict(variables)):
            pieces.append(piece)
            size += len(piece)
            if size > self._max_chars:
                raise LimitReached(f"it made more than {self._max_chars} characters")
            self._environment.tick()
        return "".join(pieces)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_chars: int, clock: Callable[[], float]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self._max_chars = max_chars
        self._clock = clock
        self._budget = threading.local()  # a render stays in its thread
        self._time_limit_s = 0.0
        self.filters["tojson"] = _tojson
        self.filters = {name: self._watched(function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _TemplateDict()
        self.globals["namespace"] = _TemplateNamespace

    def start(self, time_limit_s: float) -> None:
        self._time_limit_s = time_limit_s
        self._budget.ends_at = self._clock() + time_limit_s
        self._budget.num_ticks = 0

    def tick(self) -> None:
        self._budget.num_ticks += 1
        if self._budget.num_ticks % _TICKS_PER_LOOK == 0 and self._clock() > self._budget.ends_at:
            raise LimitReached(f"it ran longer than {self._time_limit_s:g} s")

    def joined(self, *values: Any) -> Any:
        """`~`: the values as text."""
        self.tick()
        return self._bounded("".join(map(str, values)))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.tick()
        return __self._bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        return self._bounded(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template: jinja2.nodes.Template = _Watching().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # copies the marks of pass_environment and the like too
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return self._bounded(function(*args, **kwargs))

        return watched

    def _bounded(self, value: Any) -> Any:
        if isinstance(value, _SIZED):
            if len(value) > self._max_chars:
                raise LimitReached(f"it made a {type(value).__name__} of {len(value)} elements")
        elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise LimitReached("it made a huge number")
        return value

    def _check_product(self, left: Any, right: Any) -> None:
        for sequence, times in ((left, right), (right, left)):
            repeats = isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int)
            if repeats and len(sequence) * times > self._max_chars:
                raise LimitReached(f"it repeated something {times} times")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
        raise LimitReached("it raised a number to a huge power")


class _Watching(jinja2.visitor.NodeTransformer):
    """Counts each turn of each loop, and joins text by a function that knows the bound."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802 - named so by jinja2
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_call_of("tick", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call_of("joined", node.nodes, node.lineno)


def _call_of(method: str, arguments: list[jinja2.nodes.Expr], line: int) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(method), arguments, [], None, None, lineno=line)


class _Generation(jinja2.ext.Extension):
    """{% generation %}: marks the assistant's words for training; for rendering, only a scope."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


# What transformers puts into the environment of a chat template (transformers.utils.chat_template_utils).


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, this does not escape HTML; what `map` and its like give is a list."""
    if isinstance(value, types.GeneratorType):
        value = list(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)


class _TemplateDict:
    """`dict(...)` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(jinja2.utils.Namespace):
    """`namespace(...)` that takes no names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, arguments = args[0], args[1:]
        attributes = dict(*arguments, **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no attribute {name!r}")
