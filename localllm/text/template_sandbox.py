"""Run chat templates in jinja2's immutable sandbox, with limits of time and size.

A template is a program by a stranger. A well-meant one gets what transformers' apply_chat_template gives it, except
that `tools|string` is JSON, as huggingface.js has it: Python's repr is not a format to describe tools in.

Every value that a template makes is counted, and what could become much larger than its parts (a product, a padding, a
replacement) is refused before it is made. Each loop, call, filter and literal looks at the clock, which works in any
thread and needs no signal. Knows nothing about messages or tokens.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer
from markupsafe import escape

TIME_LIMIT_S = 2.0  # of the processor, for one rendering: a thread that waits for a busy machine has used none of it
MAX_CHARS = 8 << 20  # of one value, or of the whole output; 2 M tokens are about as long
MAX_TOTAL_CHARS = 96 << 20  # of all values together that one rendering makes
MAX_ITEMS = 100_000  # of one list, which is jinja2's limit of a range; also of a width or a count
MAX_DEPTH = 100  # of lists and mappings within one another
MAX_INT_BITS = 1 << 16
_ITEM_CHARS = 8  # the cost of a value beside its characters
_MAX_NEEDLE = 100  # characters to strip or to search for from behind: CPython takes the product of both lengths

_TEXT_METHODS = """capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit
    islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind
    rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"""
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    range: frozenset({"count", "index"}),
    **dict.fromkeys((bool, int, float, bytes, type(None)), frozenset()),
}
_ITEM_FILTERS = """batch dictsort groupby join list map max min reject rejectattr reverse select selectattr slice sort
    sum title unique"""  # they take a text apart
_FILTERS = f"""{_ITEM_FILTERS} abs capitalize center count d default e escape first float forceescape format indent int
    items last length lower replace round safe string tojson trim truncate upper"""
_NEEDLES = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"})
_ITERATED: tuple[type[Any], ...] = (Iterator, type({}.keys()), type({}.values()), type({}.items()))
_FORBIDDEN_NODES = (
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.EvalContextModifier,
    nodes.ScopedEvalContextModifier,
)
# Widths of more than three digits or from outside, in "%...d" (also behind a key with parentheses in it) and "{:...}".
_WIDE_PERCENT = re.compile(r"%\([^)]*\(|%(?:\([^)]*\))?[^a-zA-Z%]*?(?:\d{4}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\d{4}|\{)")
_WIDE_DATE = re.compile(r"%[^a-zA-Z%]*\d")


class LimitError(jinja2.TemplateRuntimeError):
    """The template asks for more than a rendering may use."""


class RefusalError(jinja2.TemplateError):
    """The template itself called raise_exception."""


class Budget:
    """The time and the characters that one rendering has left. Belongs to the thread that renders."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._used_up_at = time.thread_time() + time_limit_s
        self._look_at = time.monotonic() + time_limit_s  # not before: a thread has no more of the processor than passes
        self._left = MAX_TOTAL_CHARS
        # Keeps alive what was weighed, so that an id stays one object's. Values never change in the sandbox.
        self._weighed: dict[int, tuple[Any, int, int]] = {}

    def tick(self) -> None:
        """Count one step of the template. Raises LimitError once the processor time is used up."""
        self.charge(_ITEM_CHARS)
        if time.monotonic() > self._look_at:
            left_s = self._used_up_at - time.thread_time()  # a system call, which takes much longer than to look above
            if left_s <= 0:
                raise LimitError(f"it ran longer than {self._time_limit_s:g} s")
            self._look_at = time.monotonic() + left_s

    def charge(self, num_chars: int) -> None:
        """Pay for characters that are going to be made."""
        if num_chars > MAX_CHARS:
            raise LimitError(f"a value of {num_chars} characters; at most {MAX_CHARS}")
        self._left -= num_chars
        if self._left < 0:
            raise LimitError(f"more than {MAX_TOTAL_CHARS} characters made on the way")

    def made(self, value: Any) -> Any:
        """Pay for a value that the template has made, and return it; an iterator or a view as a list."""
        self.tick()
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise LimitError(f"a number of {value.bit_length()} bits; at most {MAX_INT_BITS}")
        elif isinstance(value, (list, tuple, dict)):
            if len(value) > MAX_ITEMS:
                raise LimitError(f"a list of {len(value)} items; at most {MAX_ITEMS}")
            self.charge(3 * _ITEM_CHARS * len(value))  # an item can be a small object of its own
            self.weigh(value)
        elif isinstance(value, _ITERATED):
            return self.made(self.listed(value))
        return value

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """Return all of an iterator, unless it is too long."""
        items: list[Any] = []
        for value in values:
            self.tick()
            items.append(value)
            if len(items) > MAX_ITEMS:
                raise LimitError(f"a list of more than {MAX_ITEMS} items")
        return items

    def joined(self, pieces: Iterable[str]) -> str:
        """Join pieces, unless they are too long together."""
        parts, size = [], 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_CHARS:
                raise LimitError(f"a value of more than {MAX_CHARS} characters")
            parts.append(piece)
        self.charge(size)
        return "".join(parts)

    def weigh(self, value: Any) -> tuple[int, int]:
        """Return (characters, depth) of a value written in full, where shared parts count each time they appear."""
        if isinstance(value, str):
            return len(value) + _ITEM_CHARS, 0
        if not isinstance(value, (list, tuple, dict)):
            return _ITEM_CHARS, 0
        if known := self._weighed.get(id(value)):
            return known[1], known[2]
        size, depth = _ITEM_CHARS, 0
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            part_size, part_depth = self.weigh(part)
            size, depth = size + part_size, max(depth, part_depth)
            if size > MAX_CHARS:
                raise LimitError(f"a value of more than {MAX_CHARS} characters")
        if depth >= MAX_DEPTH:
            raise LimitError(f"values more than {MAX_DEPTH} deep in one another")
        self._weighed[id(value)] = (value, size, depth + 1)
        return size, depth + 1

    def charge_operation(self, operator: str, left: Any, right: Any) -> None:
        """Pay for an operation whose result can be much larger than its operands."""
        bits = [number.bit_length() for number in (left, right) if isinstance(number, int)]
        if operator == "%" and isinstance(left, str):
            self.charge_format(left, "%", _WIDE_PERCENT, right)
        elif operator == "*" and len(bits) == 1:
            repeated, count = (right, left) if isinstance(left, int) else (left, right)
            self.charge(self.weigh(repeated)[0] * max(count, 0) if isinstance(repeated, (str, list, tuple)) else 0)
        elif len(bits) == 2 and (bits[0] * abs(right) if operator == "**" else sum(bits)) > MAX_INT_BITS:
            raise LimitError(f"a number of more than {MAX_INT_BITS} bits")

    def charge_format(self, text: str, sign: str, wide: re.Pattern[str], values: Any) -> None:
        """Pay for formatting `values` into `text`, which has a place for one at each `sign`."""
        if wide.search(text):
            raise LimitError("a format with a width of more than 999, or with a width from outside")
        padding = 1000 if any(map(str.isdigit, text)) else 0
        self.charge(len(text) + text.count(sign) * (self.weigh(values)[0] + padding))

    def charge_call(self, name: str, value: Any, args: list[Any]) -> None:
        """Pay for a filter or a method of a text with arguments that could make much of it."""
        if isinstance(value, str) and len(value) > MAX_ITEMS and name in _ITEM_FILTERS.split() and name != "join":
            raise LimitError(f"{name!r} of a text of {len(value)} characters; at most {MAX_ITEMS}")
        for arg in args:
            if isinstance(arg, int) and abs(arg) > MAX_ITEMS:
                raise LimitError(f"a width or count of {arg}; at most {MAX_ITEMS}")
            if isinstance(arg, str) and len(arg) > _MAX_NEEDLE and name in _NEEDLES:
                raise LimitError(f"{name!r} with {len(arg)} characters; at most {_MAX_NEEDLE}")
            if isinstance(arg, (list, tuple)) and name == "sum":
                raise LimitError("'sum' of lists")


class TemplateNamespace(Namespace):
    """The `namespace()` of templates: refuse names that begin with an underscore, and write it as one word."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates. `budget` is that of the rendering under way: one at a time.

    now: the clock of `strftime_now`.
    literal: changes each text that a template itself writes.
    """

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
        self._now, self._literal = now, literal
        own: dict[str, Callable[..., Any]] = {"safe": str, "string": self._string, "tojson": self._tojson}
        own |= {"format": self._format, "indent": self._indent, "join": self._join, "replace": self._replace}
        own |= dict.fromkeys(("e", "escape", "forceescape"), _escape)
        self.filters = {name: self._guarded(name, own.get(name) or FILTERS[name]) for name in _FILTERS.split()}
        self.filters |= {_MADE: lambda value: self.budget.made(value), _LOOPED: self._looped, _SLICED: self._sliced}
        self.filters[_CONCATENATED] = lambda values: self.budget.joined(map(str, values))
        self.tests = {name: self._guarded(name, test) for name, test in dict[str, Any](self.tests).items()}
        self.globals = {
            "range": self.globals["range"],
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
        }

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a macro, a {% set %} block or the whole template has written."""
        return self.budget.joined(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ARG002
        self.budget.charge_operation(operator, left, right)
        return self.budget.made(self.binop_table[operator](left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, BuiltinMethodType) and isinstance(obj.__self__, str):
            self.budget.charge_call(obj.__name__, obj.__self__, [*args, *kwargs.values()])
            if obj.__name__ == "replace":
                self._charge_replace(obj.__self__, *args)
            elif obj.__name__ == "join":
                self._charge_join(obj.__self__, *args)
        return self.budget.made(super().call(context, obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = _METHODS.get(type(obj))
        return super().is_safe_attribute(obj, attr, value) if allowed is None else attr in allowed

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"a template may not read {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None or value.__name__ == "format_map":
            return None

        def priced(*args: Any, **kwargs: Any) -> str:
            self.budget.charge_format(value.__self__, "{", _WIDE_BRACES, [args, kwargs])
            return wrapped(*args, **kwargs)

        return priced

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(_FORBIDDEN_NODES):
            raise jinja2.TemplateSyntaxError(f"a chat template may not use {type(node).__name__}", node.lineno)
        for text in tree.find_all(nodes.TemplateData):
            text.data = self._literal(text.data)
        for constant in tree.find_all(nodes.Const):
            if isinstance(constant.value, str):
                constant.value = self._literal(constant.value)
        guarded: nodes.Template = _Guards().visit(tree)
        guarded.set_environment(self)
        return guarded

    @pass_context
    def _finalize_output(self, context: Context, value: Any) -> Any:  # noqa: ARG002
        self.budget.charge(self.budget.weigh(value)[0])
        return value

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter or a test that is paid for before and after it runs."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja2 puts a context or the like in front

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.charge_call(name, args[first], [*args[first + 1 :], *kwargs.values()])
            return self.budget.made(function(*args, **kwargs))

        return guarded

    def _looped(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.budget.tick()
            yield value

    def _sliced(self, value: Any, *bounds: Any) -> Any:
        return self.budget.made(value[slice(*bounds)])

    def _charge_replace(self, text: str, old: Any = "", new: Any = "", *_: Any) -> None:
        old, new = str(old), str(new)
        self.budget.charge(len(text) + text.count(old) * max(0, len(new) - len(old)))

    def _charge_join(self, separator: str, pieces: Any = ()) -> None:
        self.budget.charge(self.budget.weigh(pieces)[0] + len(pieces) * len(separator))

    def _replace(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        self._charge_replace(str(s), old, new)
        return str(s).replace(str(old), str(new), -1 if count is None else count)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        self.budget.charge_format(str(value), "%", _WIDE_PERCENT, [args, kwargs])
        return str(FILTERS["format"](value, *args, **kwargs))

    def _indent(self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        step = len(width) if isinstance(width, str) else max(width, 0)
        self.budget.charge(len(str(s)) + (1 + len(str(s).splitlines())) * step)
        return do_indent(str(s), width, first, blank)

    def _join(self, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = self.budget.listed(map(make_attrgetter(self, attribute), value))
        self._charge_join(str(d), value)
        return str(d).join(map(str, value))

    @pass_context
    def _string(self, context: Context, value: Any) -> str:
        return self._tojson(value) if value and value is context.get("tools") else str(value)

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
        self.budget.charge(size + size // _ITEM_CHARS * (depth * step + sum(map(len, separators or ()))))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def _strftime_now(self, pattern: str) -> str:
        if len(pattern) > 200 or _WIDE_DATE.search(pattern):
            raise LimitError("a date with a width")
        return self._now().strftime(pattern)


# Filters that no template can name.
_MADE, _LOOPED, _SLICED, _CONCATENATED = "made ", "looped ", "sliced ", "concatenated "


class _Guards(NodeTransformer):
    """Puts a filter around what the sandbox leaves to Python: literals, comparisons, slices, `~` and loops."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        node = super().generic_visit(node, *args, **kwargs)
        match node:
            case nodes.List() | nodes.Dict() | nodes.Compare() | nodes.Tuple(ctx="load"):
                return _filtered(node, _MADE)
            case nodes.Concat():
                return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCATENATED)
            case nodes.Getitem(arg=nodes.Slice() as part):
                bounds = [bound or nodes.Const(None) for bound in (part.start, part.stop, part.step)]
                return _filtered(node.node, _SLICED, bounds)
            case nodes.For():
                node.iter = _filtered(node.iter, _LOOPED)
        return node


def _filtered(node: Any, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(node, name, args or [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks what the assistant wrote, for training. Here it is a plain scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: object) -> None:
    raise RefusalError(str(message)[:2000])


def _escape(value: Any) -> str:
    return str(escape(str(value)))
