"""Normalizes turns and tools to the keys and roles of chat templates.

A tool is ``{"type": "function", "function": {"name", "description", "parameters"}}``; a call is ``{"type": "function",
"function": {"name", "arguments": dict}}``. Arguments are objects, not JSON text: templates render them with ``tojson``,
which would quote text again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from isthmus.errors import DataError

Message = dict[str, Any]
"""``role`` and ``content``; optional ``tool_calls``, ``reasoning_content``, ``name``, ``tool_call_id``, and ``weight``,
which is 0 for a turn without loss.
"""
Messages = Sequence[Message]
Tools = Sequence[dict[str, Any]] | None
_NAMES_OF_ROLES = {
    "user": "user human prompter",
    "assistant": "assistant gpt model chatgpt bot chatbot ai",
    "system": "system developer",
    "tool": "tool function observation function_response tool_response tool_result tool_output environment ipython",
    "function_call": "function_call tool_call",
}
_ROLES = {name: role for role, names in _NAMES_OF_ROLES.items() for name in names.split()}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_THOUGHT_PARTS = ("reasoning", "thinking")
_CALL_PARTS = ("tool_call", "function_call")
_WEIGHTS = ("weight", "train", "training", "loss")  # 0 or false: the turn has no loss


def turns(entries: list[Any], where: str) -> list[Message]:
    """Messages from turns with role/content or from/value keys."""
    messages: list[Message] = []
    for number, turn in enumerate(entries, start=1):
        if not isinstance(turn, dict):
            raise DataError(f"{where}: turn {number} must be an object, got {type(turn).__name__}.")
        messages.append(_message_of(turn, number, where))
    return messages


def _message_of(turn: dict[str, Any], number: int, where: str) -> Message:
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(name) or _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise DataError(f"{where}: turn {number} has the unknown role {name!r}. Expected one of: {', '.join(_ROLES)}.")
    content = turn.get("content", turn.get("value"))
    if role == "function_call":
        calls = _json(text(content, f"turn {number}", where), "the function_call turn", where)
        calls = normal_calls(calls if isinstance(calls, list) else [calls], where)
        result: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    else:
        if isinstance(content, list):  # in a field of a record, several texts may be alternatives
            content = [{"text": part} if isinstance(part, str) else part for part in content]
        result = message(role, "" if content is None and turn.get("tool_calls") else content, where)
        if turn.get("tool_calls"):
            result["tool_calls"] = normal_calls(turn["tool_calls"], where)
    if len(turn) > 2:
        result |= _extras(turn, role, number, where)
    return result


def _extras(turn: dict[str, Any], role: str, number: int, where: str) -> Message:
    extras: Message = {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key) is not None}
    for key in _REASONING if role == "assistant" else ():
        if turn.get(key):
            extras["reasoning_content"] = check_characters(text(turn[key], f"turn {number}'s {key}", where), where)
            break
    for key in _WEIGHTS:
        weight = turn.get(key)
        if weight is not None and (not isinstance(weight, int | float) or weight not in (0, 1)):
            raise DataError(f"{where}: turn {number} has {key} {weight!r:.40}. Expected 0 or 1, or false or true.")
        if weight == 0:
            extras["weight"] = 0
    return extras


def message(role: str, content: Any, where: str) -> Message:
    """One turn; ``content`` is a text, a part, or a list of parts, of which those of reasoning and calls have keys."""
    if isinstance(content, dict):
        content = [content]
    extras: Message = {}
    if isinstance(content, list):
        kinds = [part.get("type") if role == "assistant" and isinstance(part, dict) else None for part in content]
        parts = list(zip(kinds, content, strict=True))
        thoughts = [_part_text(part, where) for kind, part in parts if kind in _THOUGHT_PARTS]
        calls = [_call_part(part, where) for kind, part in parts if kind in _CALL_PARTS]
        rest = [part for kind, part in parts if kind not in (*_THOUGHT_PARTS, *_CALL_PARTS)]
        content = "".join(_text_part(part, where) for part in rest)
        extras |= {"reasoning_content": check_characters("\n".join(thoughts), where)} if any(thoughts) else {}
        extras |= {"tool_calls": normal_calls(calls, where)} if calls else {}
    return {
        "role": role,
        "content": check_characters(text(content, f"the {role} turn's content", where), where),
        **extras,
    }


def side(value: Any, role: str, name: str, where: str) -> list[Message]:
    """The turns of a prompt or an answer: a text of ``role``, a turn, or several turns; turns also as JSON text."""
    value = turns_in_text(value)
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        return turns(value, where)
    return [message(role, text(value, name, where), where)]


def listed(value: Any, name: str, where: str) -> list[Any] | None:
    """A list, also as JSON text (as in table cells), else None; DataError if the text is not JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            hint = " A Python literal is not JSON; json.dumps writes JSON." if "'" in value[:80] else ""
            raise DataError(f"{where}: {name} begins like a list but is not JSON: {error}.{hint}") from error
    return value if isinstance(value, list) else None


def turns_in_text(value: Any) -> Any:
    """The turns of a JSON text, as tables have them; other values are unchanged."""
    if not (isinstance(value, str) and value.lstrip()[:1] in ("[", "{")):
        return value
    try:
        inner = json.loads(value)
    except (ValueError, RecursionError):
        return value  # a text that only begins like JSON
    entries = inner if isinstance(inner, list) else [inner]
    is_turns = all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in entries)
    return entries if entries and is_turns else value


def _text_part(part: Any, where: str) -> str:
    """The text of ``{"type": "text", "text": ...}``, also with ``value`` or ``content``, or without ``type``."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and kind in _TEXT_PARTS:
        return _part_text(part, where)
    turns = "of an assistant turn " if kind in (*_THOUGHT_PARTS, *_CALL_PARTS) else ""
    raise DataError(
        f"{where}: a content part {turns and 'outside '}{turns}of type {kind!r}. Language models are trained on text: "
        'expected {"type": "text", "text": ...}. data.on_error=skip leaves such records out.'
    )


def _part_text(part: dict[str, Any], where: str) -> str:
    for key in ("text", "value", "content", "thinking", "reasoning"):
        if isinstance(part.get(key), str):
            return str(part[key])
    raise DataError(f"{where}: a content part without text; it has the keys {', '.join(map(str, part))}.")


def _call_part(part: dict[str, Any], where: str) -> Any:
    """The call of ``{"type": "tool_call", "value": ...}``: an object, or its JSON text."""
    value = next((part[key] for key in ("value", "tool_call", "content", "text") if key in part), part)
    return _json(value, "a tool_call part", where) if isinstance(value, str) else value


def text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} must be text, got {type(value).__name__}.")
    return value


def optional_text(value: dict[str, Any], key: str, where: str) -> str:
    """The text at ``key``, empty if missing."""
    return "" if value.get(key) is None else text(value[key], key, where)


def check_characters(string: str, where: str) -> str:
    """Raises DataError for a lone surrogate, which JSON allows and tokenizers do not."""
    try:
        string.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the text contains the lone surrogate U+{ord(string[error.start]):04X}.") from error
    return string


def normal_tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    """The tools of a list, or of its JSON text; None if empty."""
    if isinstance(tools, str):
        tools = _json(tools, "tools", where) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise DataError(f"{where}: tools must be a list, got {type(tools).__name__}.")
    functions = [_function(tool, "a tool", where) for tool in tools]
    return [
        tool if "function" in tool else {"type": "function", "function": function}
        for tool, function in zip(tools, functions, strict=True)
    ]


def normal_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The ``tool_calls`` of one turn."""
    if not isinstance(calls, list):
        raise DataError(f"{where}: tool_calls must be a list, got {type(calls).__name__}.")
    normal = []
    for call in calls:
        function = _function(call, "a tool call", where)
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _json(arguments, f"the arguments of the call to {function['name']}", where)
        entry: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(call.get("id"), str):
            entry["id"] = call["id"]
        normal.append(entry)
    return normal


def _function(value: Any, what: str, where: str) -> dict[str, Any]:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: {what} must be an object with a name, got {value!r:.60}.")
    return function


def _json(text: str, name: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {name} is not JSON: {error}.") from error
