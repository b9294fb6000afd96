"""Chat templates that end: a template comes with a model folder, and may be hostile.

The sandbox of Jinja keeps templates from Python's internals, but allows loops without end, texts that double and
``'a' * 10**10``. Here all that a template can compute passes a meter (:mod:`isthmus.hf.tokenizer.template_meter`), and
filters and methods without a known bound are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, update_wrapper, wraps
from types import FunctionType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import LoopContext
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from isthmus.errors import DataError, UnsafeInput
from isthmus.hf.tokenizer.template_meter import GROWING, TemplateLimit, TemplateMeter

_SOURCE_CHARS = 1 << 17
_FORMAT_CHARS = 1_000
_FILTERS = frozenset(
    "abs attr batch capitalize center count d default dictsort e escape filesizeformat first float forceescape format "
    "groupby indent int items join last length list lower map max min random reject rejectattr replace reverse round "
    "safe select selectattr slice sort string sum title tojson trim truncate unique upper urlencode wordcount".split()
)
_COSTLY_TESTS = frozenset("in eq == equalto ne != lt < lessthan le <= gt > greaterthan ge >= lower upper".split())
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        "capitalize casefold center count endswith expandtabs find index isalnum isalpha isascii isdecimal isdigit "
        "isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition "
        "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith "
        "strip swapcase title upper zfill".split()
    ),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    float: frozenset(("is_integer",)),
    int: frozenset(("is_integer",)),
    bytes: frozenset(),
}

_TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError),
    SyntaxError,
)

_DICT_ATTRIBUTES = frozenset(dir(dict))
_SCOPES = ("_loop_vars", "_block_vars")
"""What compiled templates pass to each call besides its arguments."""


@contextmanager
def template_errors(origin: str) -> Iterator[None]:
    """Errors of a template for the user: UnsafeInput beyond the limits or the sandbox, else DataError."""
    try:
        yield
    except (TemplateLimit, jinja2.exceptions.SecurityError) as error:
        what = f"is refused: it {error}" if isinstance(error, TemplateLimit) else f"violates its sandbox: {error}"
        raise UnsafeInput(f"{origin} {what.rstrip('.')}. Use another template (chat.template).") from error
    except (RecursionError, MemoryError, OverflowError) as error:
        reason = str(error).strip().rstrip(".") or "out of memory"
        raise UnsafeInput(f"{origin} is refused: {reason:.200}. Use another template (chat.template).") from error
    except _TEMPLATE_ERRORS as error:
        reason = str(error).strip() or repr(error)
        raise DataError(f"the chat template rejects these messages: {reason:.2000}") from error


def bounded_template(source: str) -> jinja2.Template:
    """Compile a template with limits, and begin a rendering of it; compiled templates are kept."""
    environment, meter = _environment()
    meter.restart()
    return _compiled(source, environment)


def check_syntax(source: str) -> None:
    """DataError if a template cannot be compiled; its limits are not checked."""
    try:
        _environment()[0].compile(source, raw=True)
    except TemplateLimit:
        pass
    except (*_TEMPLATE_ERRORS, RecursionError) as error:
        where = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise DataError(f"the chat template has an error{where}: {str(error).strip():.200}.") from error


def restart_meter() -> None:
    """Begin a rendering of a compiled template."""
    _environment()[1].restart()


@lru_cache(maxsize=32)
def _compiled(source: str, environment: jinja2.Environment) -> jinja2.Template:
    if len(source) > _SOURCE_CHARS:
        raise TemplateLimit(f"has {len(source):,} characters, more than {_SOURCE_CHARS:,}")
    return environment.from_string(source)


# transformers' function, which calls ours where it compiles the template.
render_jinja_template: Callable[..., Any] = FunctionType(
    chat_template_utils.render_jinja_template.__code__,
    {**vars(chat_template_utils), "_compile_jinja_template": bounded_template},
    argdefs=chat_template_utils.render_jinja_template.__defaults__,
)


@lru_cache(maxsize=1)
def _environment() -> tuple[Any, TemplateMeter]:
    """The environment of transformers, whose templates use a meter; it renders one template at a time."""
    environment: Any = chat_template_utils._compile_jinja_template("{# isthmus #}").environment  # type: ignore[attr-defined]
    meter = TemplateMeter()
    environment.code_generator_class = _BoundedCode
    environment.intercepted_binops = frozenset(("+", "*", "**", "%"))
    environment.call_binop = meter.operate
    environment.concat = meter.joined
    environment.finalize = meter.shown
    environment.call = _bounded_call(environment, meter)
    environment.wrap_str_format = _bounded_format(environment, meter)
    filters = {name: _bounded(name, function, meter) for name, function in environment.filters.items()}
    environment.filters = filters | {
        "_steps": meter.steps,
        "_made": meter.counted,
        "_tick": meter.ticked,
        "_concat": meter.concatenated,
    }
    environment.tests = {
        name: _counted_test(function, meter) if name in _COSTLY_TESTS else function
        for name, function in environment.tests.items()
    }
    names = environment.globals
    del names["lipsum"]  # any amount of text
    # Its parts would be printed without being counted.
    names["namespace"] = type("Namespace", (names["namespace"],), {"__repr__": lambda _: "<Namespace>"})
    environment.getattr = _fast_getattr(environment)
    strftime_now = names["strftime_now"]
    names["strftime_now"] = lambda text: strftime_now(text[:_FORMAT_CHARS])
    return environment, meter


def _bounded(name: str, function: Callable[..., Any], meter: TemplateMeter) -> Any:
    """A filter that counts its result."""
    first = int(hasattr(function, "jinja_pass_arg"))

    def refused(*_: Any, **__: Any) -> Any:
        raise TemplateLimit(f"uses the filter {name}, whose time has no bound")

    def linear(*args: Any, **kwargs: Any) -> Any:
        return meter.counted(function(*args, **kwargs))

    def growing(*args: Any, **kwargs: Any) -> Any:
        meter.check(name, args[first], args[first + 1 :], kwargs)
        return meter.counted(function(*args, **kwargs))

    def join(*args: Any, **kwargs: Any) -> Any:
        separator = sum(len(value) for value in [*args[first + 1 :], *kwargs.values()] if isinstance(value, str))
        parts = meter.listed(args[first], separator)
        return meter.counted(function(*args[:first], parts, *args[first + 1 :], **kwargs))

    def format_(text: Any, *args: Any, **kwargs: Any) -> Any:
        return meter.operate(None, "%", str(text), kwargs or args)

    if name not in _FILTERS:
        return refused
    special = {"join": join, "format": format_}.get(name, growing if name in GROWING else linear)
    return wraps(function)(special)


def _counted_test(test: Callable[..., bool], meter: TemplateMeter) -> Callable[..., bool]:
    @wraps(test)
    def counted(value: Any, *args: Any) -> bool:
        return test(meter.ticked(value), *args)

    return counted


def _bounded_call(environment: Any, meter: TemplateMeter) -> Callable[..., Any]:
    call = environment.call

    def bounded(__context: Any, __called: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__called, "__self__", None)
        allowed = _METHODS.get(type(owner)) or next(
            (_METHODS[kind] for kind in _METHODS if isinstance(owner, kind)), None
        )
        if allowed is None:
            # They become the varargs and kwargs of a macro.
            meter.check_parts([*args, *(value for key, value in kwargs.items() if key not in _SCOPES)])
            if isinstance(__called, LoopContext):
                args = (meter.steps(args[0]), *args[1:])
            meter.spend()
            return meter.counted(call(__context, __called, *args, **kwargs))
        assert owner is not None
        name = __called.__name__
        if name not in allowed:
            raise TemplateLimit(f"calls {name} of {type(owner).__name__}, which is not known to have a bound")
        for scope in _SCOPES:
            kwargs.pop(scope, None)
        if name == "join":
            return meter.counted(__called(*(meter.listed(values, len(owner)) for values in args)))
        if name in GROWING:
            meter.check(name, owner, args, kwargs)
        else:
            meter.ticked(owner)
        return meter.counted(__called(*args, **kwargs))

    return bounded


def _fast_getattr(environment: Any) -> Callable[[Any, str], Any]:
    """The sandbox's attribute access, without its checks where they cannot fail: saves what the meter costs."""
    checked, namespace = environment.getattr, environment.globals["namespace"]

    def attribute(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is dict and name not in _DICT_ATTRIBUTES:
            return value[name] if name in value else environment.undefined(obj=value, name=name)
        if kind is str and name in _METHODS[str]:
            return getattr(value, name)
        if (kind is LoopContext or kind is namespace) and name[0] != "_" and hasattr(value, name):
            return getattr(value, name)
        return checked(value, name)

    return attribute


def _bounded_format(environment: Any, meter: TemplateMeter) -> Callable[[Any], Any]:
    wrap = environment.wrap_str_format

    def bounded(value: Any) -> Any:
        plain = wrap(value)
        return None if plain is None else update_wrapper(meter.formatted(value.__self__, plain), plain)

    return bounded


class _BoundedCode(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        super().visit_Template(_Counted().visit(node), frame)


class _Counted(NodeTransformer):
    """Adds the calls of the meter that an environment cannot add: loops, concatenation, lists, slices, comparisons."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter("_steps", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if any(_may_take_long(node.expr, operand) for operand in node.ops):
            node.expr = _filter("_tick", node.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._literal(node) if node.ctx == "load" else node

    def _literal(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        is_constant = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
        return node if is_constant else _filter("_made", node)


def _filter(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _may_take_long(value: nodes.Node, operand: nodes.Operand) -> bool:
    """False for a comparison with a constant, which is as short as the template."""
    if operand.op in ("in", "notin"):
        return not isinstance(operand.expr, nodes.List | nodes.Tuple | nodes.Const)
    return not isinstance(value, nodes.Const) and not isinstance(operand.expr, nodes.Const)
