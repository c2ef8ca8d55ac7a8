"""Runs chat templates, which come with models: Jinja without a way to Python's internals, and with bounds.

A render ends after MAX_STEPS loop rounds and calls, or once a text or list is larger than MAX_SIZE; the ways to make a
huge one at one stroke (products, widths, replace, join) are refused beforehand. What a template may use is what
transformers offers: loop controls, `raise_exception`, `strftime_now`, `tojson` that leaves <, > and & as they are, and
the `generation` tag, which marks text for training and does nothing here.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 500_000
MAX_SIZE = 2**25  # characters of a text, items of a list
MAX_WIDTH = 10_000  # of a padded text, of an indent, of a row of items

_STEPS = " steps"  # a variable that no template can name
_WIDENING = ("center", "ljust", "rjust", "zfill", "indent", "tojson", "batch", "slice")
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")  # a width of five digits, or one given as an argument
_WIDE_STR_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(\{|\d{5})")


class TemplateRefusal(TemplateError):
    """The template called raise_exception."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters["counted"], self.filters["concatenated"] = _counted, _concatenated
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_template(self, tree: nodes.Template) -> Template:
        """A template whose loops count their rounds."""
        code = self.compile(_CountLoops().visit(tree))
        return self.template_class.from_code(self, code, self.make_globals(None))

    def run(self, template: Template, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in template.generate({**variables, _STEPS: _Steps()}):
            size += len(part)
            _check_size(size)
            parts.append(part)
        return "".join(parts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _steps(__context).spend(1)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        _check_arguments(name, (owner, *args) if isinstance(owner, str) else args, kwargs)
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_size(_size(left) * right if isinstance(right, int) else 0)
            _check_size(_size(right) * left if isinstance(left, int) else 0)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length())
        if operator == "%" and isinstance(left, str):
            _check_format(_WIDE_FORMAT, left)
        return _checked(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in ("translate", "expandtabs"):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        function = super().wrap_str_format(value)
        if function is not None:
            _check_format(_WIDE_STR_FORMAT, value.__self__)
        return function

    @staticmethod
    def concat(parts: Iterable[str]) -> str:  # what blocks and macros collect their output with
        text: str = _checked("".join(parts))
        return text


class GenerationTag(Extension):
    """{% generation %} … {% endgeneration %}: the body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Steps:
    def __init__(self) -> None:
        self.left = MAX_STEPS

    def spend(self, number: int) -> None:
        self.left -= number
        if self.left < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")


def _steps(context: Context) -> _Steps:
    steps = context.resolve_or_missing(_STEPS)
    assert isinstance(steps, _Steps)
    return steps


class _CountLoops(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        node = self.generic_visit(node)  # type: ignore[assignment]
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        node = self.generic_visit(node)  # type: ignore[assignment]
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "concatenated", [], [], None, None, lineno=node.lineno)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    steps = _steps(context)
    if not hasattr(items, "__len__"):
        items = list(itertools.islice(items, steps.left + 1))
    steps.spend(len(items))  # type: ignore[arg-type]
    return items


@pass_context
def _concatenated(context: Context, parts: list[Any]) -> str:
    return TemplateSandbox.concat(map(str, parts))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    is_passed = hasattr(function, "jinja_pass_arg")  # its first argument is Jinja's own

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(name, args[is_passed:], kwargs)
        return _checked(function(*args, **kwargs))

    return bounded


def _check_arguments(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse what would make a text much larger than its parts."""
    if name in _WIDENING and any(isinstance(arg, int) and arg > MAX_WIDTH for arg in (*args, *kwargs.values())):
        raise SecurityError(f"an argument of {name} is larger than {MAX_WIDTH}")
    if name == "format" and args and isinstance(args[0], str):
        _check_format(_WIDE_FORMAT, args[0])
    if name == "replace" and len(args) >= 3 and all(isinstance(arg, str) for arg in args[:3]):
        text, old, new = args[:3]
        _check_size(len(text) + text.count(old) * len(new))
    if name == "join" and len(args) >= 2:
        separator, items = (args[0], args[1]) if isinstance(args[0], str) else (args[1], args[0])
        if isinstance(items, list | tuple):
            _check_size(sum(_size(item) for item in items) + _size(separator) * len(items))


def _check_format(wide: re.Pattern[str], text: str) -> None:
    if wide.search(text):
        raise SecurityError(f"a width in the format {text[:50]!r} is larger than {MAX_WIDTH} or not fixed")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"a text or list of it is larger than {MAX_SIZE}")


def _checked(value: Any) -> Any:
    _check_size(_size(value))
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
