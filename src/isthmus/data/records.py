"""Records to conversations: the kinds of chat data found in the field, told apart by their keys.

===========================  ==========================================================
kind                         keys
===========================  ==========================================================
messages (OpenAI)            ``messages`` of ``role``/``content``; ``tools``, ``tool_calls``
sharegpt                     ``conversations`` of ``from``/``value``; ``system``, ``tools``
alpaca                       ``instruction``, ``output``; ``input``, ``system``, ``history``
prompt and completion        ``prompt``, ``completion`` (or ``response``): text or messages
text                         ``text``
===========================  ==========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isthmus.data.formats import Record
from isthmus.data.toolcalls import call_from_text, normal_calls, normal_tools
from isthmus.errors import DataError

Message = dict[str, Any]
_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
    "tool_call": "function_call",
}
_KINDS = (
    "messages, conversations (from/value), instruction+output, prompt+completion, text"  # what an error message offers
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in the order they were spoken, in the words of chat templates (``role``, ``content``, ``tool_calls``)."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    where: str
    """``file:line`` of the record it came from."""


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text to be learned as it stands."""

    text: str
    where: str


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one conversation, the better one and the worse one."""

    prompt: list[Message]
    """Turns before the answers."""
    chosen: list[Message]
    """Turns that follow the prompt; at least one is the assistant's."""
    rejected: list[Message]
    """Likewise."""
    tools: list[dict[str, Any]] | None
    where: str


def parse_record(record: Record) -> Conversation | Document:
    """Tell what kind of record this is and bring it into one form.

    Raises:
        DataError: no known kind, a field of the wrong type, or a conversation without an assistant turn.
    """
    value, where = record.value, record.where
    if "chosen" in value and "rejected" in value:
        raise DataError(f"{where}: a preference pair (chosen/rejected) is no chat record. Wanted one of: {_KINDS}.")
    system = _optional_text(value, "system", where)
    if isinstance(value.get("messages"), list):
        messages = _turns(value["messages"], where)
    elif isinstance(value.get("conversations"), list):
        messages = _turns(value["conversations"], where)
    elif "instruction" in value and "output" in value:
        messages = _alpaca(value, where)
    elif "prompt" in value and ("completion" in value or "response" in value):
        answer = value["completion"] if "completion" in value else value["response"]
        messages = _side(value["prompt"], "user", "prompt", where) + _side(answer, "assistant", "completion", where)
    elif isinstance(value.get("text"), str):
        return Document(_sound(value["text"], where), where)
    else:
        keys = ", ".join(sorted(map(str, value))) or "none"
        raise DataError(f"{where}: unknown kind of record with the keys {keys}. Wanted one of: {_KINDS}.")
    if system and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": _sound(system, where)})
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no assistant turn, so there is nothing to learn from this record.")
    return Conversation(messages, normal_tools(value.get("tools"), where), where)


def _alpaca(value: dict[str, Any], where: str) -> list[Message]:
    messages: list[Message] = []
    for pair in value.get("history") or []:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise DataError(f"{where}: history must be a list of [question, answer] pairs, got {pair!r:.60}.")
        messages += [_message("user", pair[0], where), _message("assistant", pair[1], where)]
    question = _text(value["instruction"], "instruction", where)
    extra = _optional_text(value, "input", where)
    question = f"{question}\n{extra}" if question and extra else question or extra
    return [*messages, _message("user", question, where), _message("assistant", value["output"], where)]


def _side(value: Any, role: str, name: str, where: str) -> list[Message]:
    """One side of a prompt/completion pair: a string, or turns of its own."""
    if isinstance(value, list):
        return _turns(value, where)
    return [_message(role, _text(value, name, where), where)]


def _turns(turns: list[Any], where: str) -> list[Message]:
    """Turns with role/content or from/value keys, mixed if need be."""
    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise DataError(f"{where}: turn {number} must be an object, got {type(turn).__name__}.")
        name = turn.get("role", turn.get("from"))
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise DataError(
                f"{where}: turn {number} has the unknown role {name!r}. Wanted one of: {', '.join(_ROLES)}."
            )
        content = turn.get("content", turn.get("value"))
        if role == "function_call":
            calls = call_from_text(_text(content, f"turn {number}", where), where)
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            continue
        message = _message(role, "" if content is None and turn.get("tool_calls") else content, where)
        if turn.get("tool_calls"):
            message["tool_calls"] = normal_calls(turn["tool_calls"], where)
        for key in ("reasoning_content", "name", "tool_call_id", "weight"):
            if turn.get(key) is not None:
                message[key] = turn[key]
        messages.append(message)
    return messages


def _message(role: str, content: Any, where: str) -> Message:
    if isinstance(content, list):
        content = "".join(_text_part(part, where) for part in content)
    return {"role": role, "content": _sound(_text(content, f"the {role} turn's content", where), where)}


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise DataError(f"{where}: a content part of type {kind!r}. Only text parts can be learned.")


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} must be text, got {type(value).__name__}.")
    return value


def _optional_text(value: dict[str, Any], key: str, where: str) -> str:
    return "" if value.get(key) is None else _text(value[key], key, where)


def _sound(text: str, where: str) -> str:
    """Refuse lone surrogates here, where the line is known: JSON may hold them, no tokenizer takes them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the text holds the lone surrogate U+{ord(text[error.start]):04X}.") from error
    return text
