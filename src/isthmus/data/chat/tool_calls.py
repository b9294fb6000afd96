"""Tools and tool calls in the format of chat templates.

A tool is ``{"type": "function", "function": {"name", "description", "parameters"}}``; a call is ``{"type": "function",
"function": {"name", "arguments": dict}}``. Arguments are objects, not JSON text: templates render them with ``tojson``,
which would quote text again.
"""

from __future__ import annotations

import json
from typing import Any

from isthmus.errors import DataError


def normal_tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    """The tools of a list, or of its JSON text; None if empty."""
    if isinstance(tools, str):
        tools = _json(tools, "tools", where) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise DataError(f"{where}: tools must be a list, got {type(tools).__name__}.")
    normal = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: a tool must be an object with a name, got {tool!r:.60}.")
        normal.append(tool if "function" in tool else {"type": "function", "function": tool})
    return normal


def normal_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The ``tool_calls`` of one turn."""
    if not isinstance(calls, list):
        raise DataError(f"{where}: tool_calls must be a list, got {type(calls).__name__}.")
    normal = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: a tool call must be an object with a name, got {call!r:.60}.")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _json(arguments, f"the arguments of the call to {function['name']}", where)
        entry: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(call.get("id"), str):
            entry["id"] = call["id"]
        normal.append(entry)
    return normal


def call_from_text(text: str, where: str) -> list[dict[str, Any]]:
    """The calls of a ShareGPT ``function_call`` turn: the JSON text of one call or a list of calls."""
    value = _json(text, "the function_call turn", where)
    return normal_calls(value if isinstance(value, list) else [value], where)


def _json(text: str, name: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {name} is not JSON: {error}.") from error
