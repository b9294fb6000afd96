"""Renders a chat template turn by turn, if its syntax shows that it writes one turn after the other.

In general, the assistant's text is found by rendering k and k + 1 turns and comparing. A template of this form needs
only one rendering::

    A {% for message in messages %} B {% endfor %} {% if add_generation_prompt %} C {% endif %}

where B uses its own turn, the first turn and the number of earlier turns, A only the first turn, and C no turn. The
text of k turns is then a prefix of the text of more turns, and C is the generation prompt. Other templates are rendered
by comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes

from isthmus.hf.tokenizer.bounded_template import bounded_template, restart_meter
from isthmus.hf.tokenizer.template_meter import TemplateLimit

_MARK = "\ue002"  # from the private use area; a text that contains it is rendered by comparison
_LOOP_ATTRIBUTES = {"first", "index", "index0"}
_FILTERS = {"trim", "string", "upper", "lower", "length", "tojson", "replace", "default", "d", "capitalize", "title"}
_STATEMENTS = (nodes.Output, nodes.If, nodes.Assign)
_VALUES = (
    *(nodes.TemplateData, nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem, nodes.Concat, nodes.BinExpr),
    *(nodes.UnaryExpr, nodes.Compare, nodes.Operand, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call),
    *(nodes.Slice, nodes.Tuple, nodes.List, nodes.Keyword),
)
_METHODS = {"strip", "lstrip", "rstrip", "split", "startswith", "endswith", "upper", "lower", "replace"}


@dataclass(frozen=True, slots=True)
class TurnTemplate:
    """A chat template of that form."""

    opening: str
    """The generation prompt."""
    _marked: jinja2.Template
    _known: Mapping[str, Any]
    """All variables of the template but the turns."""

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> list[str] | None:
        """The text of each turn, which concatenate to the conversation; None if it must be rendered by comparison.

        Turns must have exactly the keys ``role`` and ``content``, both strings, which transformers passes unchanged.
        """
        for message in messages:
            if len(message) != 2 or type(message.get("role")) is not str or type(message.get("content")) is not str:
                return None
        try:
            # Like Template.render, without its copy of all variables for each conversation: half of the time.
            context = self._marked.new_context({**self._known, "messages": messages}, shared=True)
            restart_meter()
            text = self._marked.environment.concat(self._marked.root_render_func(context))
        except TemplateLimit:
            raise
        except Exception:  # the rendering by comparison reports what is wrong
            return None
        turns = text.split(_MARK)
        return turns[:-1] if len(turns) == len(messages) + 1 and not turns[-1] else None


@lru_cache(maxsize=8)
def _recognised(source: str, tokens: tuple[tuple[str, str], ...]) -> TurnTemplate | None:
    environment = bounded_template(source).environment
    tree = environment.parse(source)
    # A special token that the tokenizer lacks is undefined at every turn.
    form = _form(tree, {name for name, _ in tokens} | {"bos_token", "eos_token", "pad_token", "unk_token"})
    if form is None:
        return None
    loop, opening = form
    loop.body.append(nodes.Output([nodes.TemplateData(_MARK)], lineno=loop.lineno))
    alone = nodes.Template(opening.body if opening is not None else [], lineno=1)
    for tree_or_part in (tree, alone):
        tree_or_part.set_environment(environment)
    marked = environment.from_string(tree)
    known = {**marked.globals, **dict(tokens), "tools": None, "add_generation_prompt": False}
    return TurnTemplate(environment.from_string(alone).render(**dict(tokens)), marked, known)


def turn_template(source: str, special_tokens: Mapping[str, Any]) -> TurnTemplate | None:
    """Compile a template of that form, with ``special_tokens`` as its other variables; None for another form."""
    tokens = tuple(sorted((name, token) for name, token in special_tokens.items() if isinstance(token, str)))
    try:
        return _recognised(source, tokens) if len(tokens) == len(special_tokens) else None
    except (jinja2.TemplateError, AttributeError):
        return None


def _form(tree: nodes.Template, variables: set[str]) -> tuple[nodes.For, nodes.If | None] | None:
    """The loop over the turns and the generation prompt."""
    places = [place for place, node in enumerate(tree.body) if isinstance(node, nodes.For)]
    if len(places) != 1:
        return None
    before, loop, after = tree.body[: places[0]], tree.body[places[0]], tree.body[places[0] + 1 :]
    assert isinstance(loop, nodes.For)
    if not (_is_name(loop.iter, "messages") and isinstance(loop.target, nodes.Name)):
        return None
    if loop.test is not None or loop.else_ or loop.recursive or len(after) > 1:
        return None
    opening = after[0] if after else None
    if opening is not None and not (
        isinstance(opening, nodes.If)
        and _is_name(opening.test, "add_generation_prompt")
        and not opening.elif_
        and not opening.else_
        and all(_sound(node, variables) for node in opening.body)
    ):
        return None
    known = variables | {"tools", "raise_exception"}
    # A variable set before the loop is visible in it; one set in the loop ends with the turn.
    set_before = _set(before)
    if any(name in {"messages", "loop", "add_generation_prompt", *known} for name in set_before | _set(loop.body)):
        return None
    if not all(_sound(node, known | set_before, first=True) for node in before):
        return None
    inside = known | set_before | _set(loop.body) | {loop.target.name}
    if not all(_sound(node, inside, first=True, in_loop=True) for node in loop.body):
        return None
    return loop, opening  # type: ignore[return-value]


def _sound(node: nodes.Node, names: set[str], *, first: bool = False, in_loop: bool = False) -> bool:
    """Whether a node uses only these names, the first turn (``first``) and the loop counters (``in_loop``)."""
    if in_loop and isinstance(node, nodes.Getattr) and _is_name(node.node, "loop"):
        return node.attr in _LOOP_ATTRIBUTES
    if first and isinstance(node, nodes.Getitem) and _is_name(node.node, "messages"):
        return isinstance(node.arg, nodes.Const) and node.arg.value == 0
    if isinstance(node, nodes.Name):
        return node.name in names or node.ctx == "store"
    if isinstance(node, nodes.Assign) and not isinstance(node.target, nodes.Name):
        return False
    if isinstance(node, nodes.Filter) and node.name not in _FILTERS:
        return False
    if isinstance(node, nodes.Call) and not (
        _is_name(node.node, "raise_exception") or (isinstance(node.node, nodes.Getattr) and node.node.attr in _METHODS)
    ):
        return False
    if not isinstance(node, _STATEMENTS + _VALUES):
        return False
    return all(_sound(child, names, first=first, in_loop=in_loop) for child in node.iter_child_nodes())


def _set(parts: Iterable[nodes.Node]) -> set[str]:
    return {name.name for part in parts for name in _names(part) if name.ctx == "store"}


def _names(part: nodes.Node) -> Iterable[nodes.Name]:
    return [part] if isinstance(part, nodes.Name) else part.find_all(nodes.Name)


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name
