"""Where chat templates run: jinja2's immutable sandbox, narrowed to what templates use, with a price on all of it.

A template is a program by a stranger. One that means well gets what transformers' apply_chat_template gives it, but for
`|string` of a list or mapping, which is JSON here: Python's repr is no format that a model should be asked to read.

Owns what a template may call; template_limits.py owns what that may cost. Every operation that could make something
large is priced before it runs, and every block, call and operator looks at the clock: that works in any thread and
needs no signal. Nothing is computed while compiling. Knows nothing about messages or tokens.
"""

# ruff: noqa: N802 (visit_Node is jinja2's naming)
from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, pass_context
from markupsafe import escape

from localllm.text.template_limits import ITEM, MAX_ITEMS, Budget, LimitError, format_specs, percent_specs


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FORBIDDEN_NODES = (
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.EvalContextModifier,
    nodes.ScopedEvalContextModifier,
)
_METHODS: Mapping[type, frozenset[str]] = {
    str: _words(
        "capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit islower"
        " isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind"
        " rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
    ),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    range: frozenset({"count", "index"}),
}
_SEQUENCE_FILTERS = _words(
    "batch dictsort groupby join list map max min reject rejectattr reverse select selectattr slice sort sum unique"
)
_SIZED_FILTERS = _words("batch center indent round slice truncate")  # their arguments are widths and counts
_FILTERS = (_SEQUENCE_FILTERS | _SIZED_FILTERS) | _words(
    "abs capitalize count d default e escape first float forceescape format int items last length lower replace safe"
    " string title tojson trim upper"
)
_LINEAR_REVERSE_SEARCH = 1 << 28  # haystack x needle; reverse searches are quadratic in CPython
_WIDTH_IN_STRFTIME = re.compile(r"%[^a-zA-Z%]*\d")


class _Generator(CodeGenerator):
    """Compiles what the sandbox of jinja2 leaves to Python: literals, slices, `~`, and steps without a call."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.environment.budget.tick()  # type: ignore[attr-defined]
        return super().visit(node, *args, **kwargs)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.budget.tick()")
        super().blockvisit(nodes, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.budget.made(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.budget.made(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.budget.made(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.budget.tick() or ")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        self.write("environment.getitem(")
        self.visit(node.node, frame)
        self.write(", ")
        self.visit(node.arg, frame)
        self.write(")")

    def visit_Slice(self, node: nodes.Slice, frame: Frame) -> None:
        self.write("slice(")
        for bound in (node.start, node.stop, node.step):
            if bound is None:
                self.write("None, ")
            else:
                self.visit(bound, frame)
                self.write(", ")
        self.write(")")


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks what the assistant said, for training. Here it is a plain scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateNamespace(Namespace):
    """`namespace()`: names that begin with an underscore are refused, and it is written as one word."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _require_public(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


class _TextFormat:
    """`'...'.format` of one text."""

    def __init__(self, environment: TemplateEnvironment, text: str) -> None:
        self._environment = environment
        self._text = text

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self._environment.budget.price_format(self._text, format_specs(self._text), [args, kwargs])
        return SandboxedFormatter(self._environment).vformat(self._text, args, kwargs)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates. `budget` is the account of the rendering under way: one at a time.

    now: the clock of `strftime_now`. literal: what to make of each text that a template itself writes.
    """

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, now: Callable[[], datetime] = datetime.now, literal: Callable[[str], str] = str) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._finalize_output,  # takes the context, so nothing is computed while compiling
            cache_size=0,
        )
        self.budget = Budget()
        self._literal = literal
        own: dict[str, Callable[..., Any]] = {"safe": _text, "string": self._string, "tojson": self._tojson}
        own |= {"indent": self._indent, "join": self._join, "replace": self._replace}
        own |= dict.fromkeys(("e", "escape", "forceescape"), _escape)
        self.filters = {name: self._priced_filter(name, own.get(name) or FILTERS[name]) for name in sorted(_FILTERS)}
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: self._priced_test(test) for name, test in tests.items()}
        self.globals = {
            "range": self.globals["range"],
            "dict": _dict,
            "namespace": TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _clock(now),
        }
        self._callables = tuple(self.globals.values())

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a macro, a {% set %} block, `~` or the whole template has written."""
        parts = list(pieces)
        self.budget.charge(sum(map(len, parts)))
        return "".join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ARG002
        return self.budget.operate(operator, self.binop_table[operator], left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.tick()
        if isinstance(obj, BuiltinMethodType):
            self._price_method(obj.__self__, obj.__name__, [*args, *kwargs.values()])
        elif not self._may_call(obj):
            raise SecurityError(f"a template may not call {_name_of(obj)}")
        return self.budget.made(context.call(obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, slice):
            return self.budget.made(obj[argument])
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"a template may not read {attribute!r} of {_name_of(obj)}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if isinstance(value, BuiltinMethodType) and isinstance(value.__self__, str) and value.__name__ == "format":
            return _TextFormat(self, value.__self__)
        return None

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(_FORBIDDEN_NODES):
            raise jinja2.TemplateSyntaxError(f"a chat template may not use {type(node).__name__}", node.lineno)
        for text in tree.find_all(nodes.TemplateData):
            text.data = self._literal(text.data)
        for constant in tree.find_all(nodes.Const):
            if isinstance(constant.value, str):
                constant.value = self._literal(constant.value)
        return tree

    @pass_context
    def _finalize_output(self, context: Context, value: Any) -> Any:  # noqa: ARG002
        self.budget.charge(self.budget.weigh(value)[0])
        return value

    def _may_call(self, obj: Any) -> bool:
        if isinstance(obj, MethodType):
            return isinstance(obj.__self__, LoopContext) and obj.__name__ in ("cycle", "changed")
        known = isinstance(obj, (Macro, LoopContext, BlockReference, Undefined, _TextFormat))
        return known or any(obj is function for function in self._callables)

    def _price_method(self, owner: Any, name: str, args: list[Any]) -> None:
        if name not in _METHODS.get(type(owner), ()):
            raise SecurityError(f"a template may not call {name!r} of {_name_of(owner)}")
        if not isinstance(owner, str):
            return
        if name in ("center", "ljust", "rjust", "zfill"):
            self._require_small(args, MAX_ITEMS)
        elif name == "replace":
            self._price_replace(owner, *args)
        elif name == "join" and args:
            self._price_join(owner, args[0])
        elif name in ("strip", "lstrip", "rstrip"):
            self._require_short(args)
        elif name in ("rfind", "rindex", "rsplit", "rpartition"):
            for needle in args:
                if isinstance(needle, str) and len(owner) * len(needle) > _LINEAR_REVERSE_SEARCH:
                    raise LimitError(f"{name!r} of a long text in a longer one")

    def _priced_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja2 puts a context or the like in front

        @functools.wraps(function)
        def priced(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            self._price_filter(name, args[first], [*args[first + 1 :], *kwargs.values()])
            result = function(*args, **kwargs)
            return self.budget.made(self.budget.listed(result) if isinstance(result, Iterator) else result)

        return priced

    def _price_filter(self, name: str, value: Any, args: list[Any]) -> None:
        if name in _SEQUENCE_FILTERS and isinstance(value, str):
            self.budget.require_items(len(value))
        if name in _SIZED_FILTERS:
            self._require_small(args, 300 if name == "round" else MAX_ITEMS)
        if name == "trim":
            self._require_short(args)
        elif name == "title":  # makes a list of its words
            self.budget.charge(ITEM * len(str(value)))
        elif name == "sum" and any(isinstance(arg, (list, tuple)) for arg in args):
            raise LimitError("'sum' of lists")
        elif name == "format":
            self.budget.price_format(str(value), percent_specs(str(value)), args)

    def _priced_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def priced(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            return function(*args, **kwargs)

        return priced

    def _price_replace(self, text: str, old: Any = "", new: Any = "", *_: Any) -> None:
        old, new = str(old), str(new)
        self.budget.charge(len(text) + text.count(old) * max(0, len(new) - len(old)))

    def _price_join(self, separator: str, pieces: Any) -> None:
        count = len(pieces) if hasattr(pieces, "__len__") else MAX_ITEMS
        self.budget.charge(self.budget.weigh(pieces)[0] + count * len(separator))

    def _require_small(self, args: Iterable[Any], limit: int) -> None:
        for number in args:
            if isinstance(number, int) and abs(number) > limit:
                raise LimitError(f"a width or count of {number}; at most {limit}")

    def _require_short(self, args: Iterable[Any]) -> None:
        for chars in args:
            if isinstance(chars, str) and len(chars) > 100:
                raise LimitError(f"{len(chars)} characters to strip; at most 100")

    def _replace(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        self._price_replace(str(s), old, new)
        return str(s).replace(str(old), str(new), -1 if count is None else count)

    def _indent(self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        step = len(width) if isinstance(width, str) else max(width, 0)
        self.budget.charge(len(str(s)) + (1 + len(str(s).splitlines())) * step)
        return do_indent(str(s), width, first, blank)

    def _join(self, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = self.budget.listed(map(make_attrgetter(self, attribute), value))
        self._price_join(str(d), value)
        return str(d).join(map(str, value))

    def _string(self, value: Any) -> str:
        return self._tojson(value) if isinstance(value, (list, dict)) else str(value)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        size, depth = self.budget.weigh(value)
        step = len(indent) if isinstance(indent, str) else max(indent or 0, 0)
        self._require_small([step, *map(len, separators or ())], 100)
        self.budget.charge(size + size // ITEM * (depth * step + sum(map(len, separators or ()))))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class RefusalError(jinja2.TemplateError):
    """The template itself called raise_exception."""


def _raise_exception(message: object) -> None:
    raise RefusalError(str(message)[:2000])


def _clock(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(pattern: str) -> str:
        if len(pattern) > 200 or _WIDTH_IN_STRFTIME.search(pattern):
            raise LimitError("a date with a width")
        return now().strftime(pattern)

    return strftime_now


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _text(value: Any) -> str:
    return str(value)


def _escape(value: Any) -> str:
    return str(escape(str(value)))


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _name_of(obj: object) -> str:
    return f"a {type(obj).__name__}"
