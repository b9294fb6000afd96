"""Parses records to conversations; their keys determine the format.

===========================  ==========================================================
format                       keys
===========================  ==========================================================
messages (OpenAI)            ``messages`` of ``role``/``content``; ``tools``, ``tool_calls``
sharegpt                     ``conversations`` of ``from``/``value``; ``system``, ``tools``
alpaca                       ``instruction``, ``output``; ``input``, ``system``, ``history``
prompt and completion        ``prompt``, ``completion`` (or ``response``): text or messages
text                         ``text``
===========================  ==========================================================

Preference pairs and labelled answers: ``isthmus.data.chat.preference_records``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from isthmus.data.chat.message_normalization import Message as Message
from isthmus.data.chat.message_normalization import (
    check_characters,
    listed,
    message,
    normal_tools,
    optional_text,
    side,
    text,
    turns,
)  # fmt: skip
from isthmus.data.readers.chunks import Record
from isthmus.errors import DataError

Kind = Literal["text", "chat", "preference", "unpaired"]
RECIPES: dict[Kind, str] = {"text": "pretrain", "chat": "sft", "preference": "dpo", "unpaired": "kto"}
"""The recipe for each kind."""
FIELDS = (
    "text", "messages", "conversations", "instruction", "input", "output", "history", "system", "tools",
    "prompt", "completion", "response", "chosen", "rejected", "label", "margin",
)  # fmt: skip
"""All known keys of a record."""
_FORMATS = "messages, conversations (from/value), instruction+output, prompt+completion, text"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns with the keys of chat templates (``role``, ``content``, ``tool_calls``)."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    where: str
    """``file:line`` of the record."""


@dataclass(frozen=True, slots=True)
class PreferenceRecord:
    prompt: list[Message]
    chosen: list[Message]
    """Turns after the prompt, with at least one assistant turn."""
    rejected: list[Message]
    tools: list[dict[str, Any]] | None
    where: str
    margin: float = 0.0
    """By how much the chosen answer is better."""


@dataclass(frozen=True, slots=True)
class LabelledRecord:
    prompt: list[Message]
    answers: list[tuple[list[Message], bool]]
    """Turns after the prompt, and whether they are desirable; both answers of a preference pair."""
    tools: list[dict[str, Any]] | None
    where: str


def kinds_of(record: Record) -> list[Kind]:
    """The possible kinds of a record, the most likely first; empty for an unknown record."""
    value = present(record)
    found: list[Kind] = ["preference"] if "chosen" in value and "rejected" in value else []
    pairs = (("instruction", "output"), ("prompt", "completion"), ("prompt", "response"))
    if any(first in value and second in value for first, second in pairs):
        found.append("chat")
    elif any(value.get(name) for name in ("messages", "conversations")):
        found.append("chat")
    if isinstance(value.get("text"), str):
        found.append("text")
    labelled = "label" in value and "chat" in found
    return [*found, "unpaired"] if labelled or "preference" in found else found


def parse_document(record: Record) -> str:
    """The ``text`` of a record, which may have other keys."""
    value, where = present(record), record.where
    if not isinstance(value.get("text"), str):
        raise _unknown(value, where)
    return check_characters(value["text"], where)


def parse_record(record: Record) -> Conversation | str:
    """Parse a record that is not a preference pair; ``text`` is used only without turns.

    Raises DataError for an unknown format, a wrong type, or a conversation without an assistant turn.
    """
    value, where = present(record), record.where
    is_pair = "chosen" in value and "rejected" in value
    if is_pair and not {"chat", "text"} & {*kinds_of(record)}:
        raise _preference_error(where)
    if (given := given_turns(value, where)) is not None:
        messages = turns(given, where)
    elif "instruction" in value and "output" in value:
        messages = [*question(value, where), message("assistant", value["output"], where)]
    elif "prompt" in value and ("completion" in value or "response" in value):
        answer = value["completion"] if "completion" in value else value["response"]
        messages = side(value["prompt"], "user", "prompt", where) + side(answer, "assistant", "completion", where)
    elif isinstance(value.get("text"), str):
        return parse_document(record)
    else:
        raise _unknown(value, where)
    messages = with_system(messages, value, where)
    if is_pair and messages[-1]["role"] != "assistant":
        raise _preference_error(where)
    if not any(turn["role"] == "assistant" for turn in messages):
        raise DataError(f"{where}: no assistant turn, so this record has no loss tokens.")
    return Conversation(messages, normal_tools(value.get("tools"), where), where)


def _unknown(value: dict[str, Any], where: str) -> DataError:
    keys = ", ".join(sorted(map(str, value))) or "none"
    return DataError(
        f"{where}: unknown record with the keys {keys}. Expected one of: {_FORMATS}; data.columns maps other names."
    )


def _preference_error(where: str) -> DataError:
    return DataError(f"{where}: a preference pair (chosen/rejected) is not a chat record. Expected one of: {_FORMATS}.")


def present(record: Record) -> dict[str, Any]:
    """The fields that are not null: rows of a table have the fields of all its rows."""
    return {name: cell for name, cell in record.value.items() if cell is not None}


def given_turns(value: dict[str, Any], where: str) -> list[Any] | None:
    """The turns under ``messages`` or ``conversations``, if any."""
    for name in ("messages", "conversations"):
        if (found := listed(value.get(name), name, where)) is not None:
            return found
    return None


def question(value: dict[str, Any], where: str) -> list[Message]:
    """The turns before the answer in an Alpaca record."""
    messages: list[Message] = []
    for pair in listed(value.get("history"), "history", where) or []:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise DataError(f"{where}: history must be a list of [question, answer] pairs, got {pair!r:.60}.")
        messages += [message("user", pair[0], where), message("assistant", pair[1], where)]
    asked = text(value["instruction"], "instruction", where)
    extra = optional_text(value, "input", where)
    asked = f"{asked}\n{extra}" if asked and extra else asked or extra
    return [*messages, message("user", asked, where)]


def with_system(messages: list[Message], value: dict[str, Any], where: str) -> list[Message]:
    """The turns after the record's ``system`` text, unless they have a system turn."""
    system = optional_text(value, "system", where)
    if not system or any(turn["role"] == "system" for turn in messages):
        return messages
    return [{"role": "system", "content": check_characters(system, where)}, *messages]
